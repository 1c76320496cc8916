"""Search in subprocesses: resume after a kill, hash seeds and worker counts."""

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
SPACE_OPTIONS = ("--vary", "layout.tp=1,2,4", "--vary", "layout.pp=1,2", "--vary", "training.microbatch=1,2,4")


def search_json(text: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(text).items() if key not in ("wall_s", "layouts_per_s")}


def test_search_does_not_depend_on_hash_seed_and_workers(process: CommandRunner, plan: Path) -> None:
    arguments = ("search", plan, *SPACE_OPTIONS, "--json", "-")
    outputs = [
        search_json(process(*arguments, "--workers", workers, PYTHONHASHSEED=seed).stdout)
        for workers, seed in (("1", "1"), ("1", "2"), ("2", "3"))
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_killed_search_resumes_with_the_same_result(process: CommandRunner, plan: Path, tmp_path: Path) -> None:
    """The process is killed as soon as its journal has a simulated layout."""
    arguments = ["search", str(plan), *SPACE_OPTIONS, "--workers", "1"]
    reference = search_json(process(*arguments, "--json", "-").stdout)
    journal = tmp_path / "found" / "layouts.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-m", "clustersim.cli", *arguments, "--resume", "found"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    while running.poll() is None and not (journal.exists() and '"layout"' in journal.read_text()):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    lines = journal.read_text().splitlines()
    assert any('"layout"' in line for line in lines)
    resumed = process(*arguments, "--resume", "found", "--json", "-")
    assert search_json(resumed.stdout) == reference
    assert journal.read_text().splitlines()[: len(lines) - 1] == lines[:-1]
