"""Runs over weeks in processes of their own: killed and gone on with, with other hashes, with other workers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

pytestmark = pytest.mark.slow
GIVEN = ("--tokens", "1T", "--runs", "12", "--set", "reliability={rates: 20, elastic: shrink-batch}")


def answer(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found | {"wall_s": 0.0}


def test_hashes_and_workers_change_nothing(process: Run, plan: Path) -> None:
    found = [
        answer(process("goodput", plan, *GIVEN, "--json", "-", "--workers", workers, PYTHONHASHSEED=seed).stdout)
        for workers, seed in (("1", "1"), ("1", "2"), ("2", "3"))
    ]
    assert found[0] == found[1] == found[2]


def test_a_calculation_that_was_killed_loses_no_run_that_was_made(process: Run, plan: Path, tmp_path: Path) -> None:
    """It is killed as soon as it has kept three runs, wherever it is then."""
    given = ["goodput", str(plan), *GIVEN, "--workers", "1"]
    whole = answer(process(*given, "--json", "-").stdout)
    kept = tmp_path / "found" / "runs.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-m", "clustersim.cli", *given, "--resume", "found"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    while running.poll() is None and not (kept.exists() and kept.read_text().count('"run"') > 2):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    lines = kept.read_text().splitlines()
    assert len(lines) > 3
    again = process(*given, "--resume", "found", "--json", "-")
    assert answer(again.stdout) == whole
    assert kept.read_text().splitlines()[: len(lines) - 1] == lines[:-1]
