"""Goodput in subprocesses: resume after a kill, hash seeds and worker counts."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandRunner

pytestmark = pytest.mark.slow
OPTIONS = ("--tokens", "1T", "--runs", "12", "--set", "reliability={rates: 20, elastic: shrink-batch}")


def goodput_json(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    return content | {"wall_s": 0.0}


def test_goodput_does_not_depend_on_hash_seed_and_workers(process: CommandRunner, plan: Path) -> None:
    outputs = [
        goodput_json(
            process("goodput", plan, *OPTIONS, "--json", "-", "--workers", workers, PYTHONHASHSEED=seed).stdout
        )
        for workers, seed in (("1", "1"), ("1", "2"), ("2", "3"))
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_killed_calculation_keeps_its_finished_runs(process: CommandRunner, plan: Path, tmp_path: Path) -> None:
    """The process is killed as soon as its journal has three runs."""
    arguments = ["goodput", str(plan), *OPTIONS, "--workers", "1"]
    reference = goodput_json(process(*arguments, "--json", "-").stdout)
    journal = tmp_path / "found" / "runs.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-m", "clustersim.cli", *arguments, "--resume", "found"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    while running.poll() is None and not (journal.exists() and journal.read_text().count('"run"') > 2):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    lines = journal.read_text().splitlines()
    assert len(lines) > 3
    resumed = process(*arguments, "--resume", "found", "--json", "-")
    assert goodput_json(resumed.stdout) == reference
    assert journal.read_text().splitlines()[: len(lines) - 1] == lines[:-1]
