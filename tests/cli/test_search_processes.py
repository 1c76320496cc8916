"""A search in processes of its own: killed and gone on with, with other hashes, with other numbers of workers."""

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
VARY = ("--vary", "layout.tp=1,2,4", "--vary", "layout.pp=1,2", "--vary", "training.microbatch=1,2,4")


def answer(text: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(text).items() if key not in ("wall_s", "layouts_per_s")}


def test_hashes_and_workers_change_nothing(process: Run, plan: Path) -> None:
    given = ("search", plan, *VARY, "--json", "-")
    found = [
        answer(process(*given, "--workers", workers, PYTHONHASHSEED=seed).stdout)
        for workers, seed in (("1", "1"), ("1", "2"), ("2", "3"))
    ]
    assert found[0] == found[1] == found[2]


def test_a_search_that_was_killed_goes_on_and_finds_the_same(process: Run, plan: Path, tmp_path: Path) -> None:
    """It is killed as soon as it has kept a simulated layout, wherever it is then."""
    given = ["search", str(plan), *VARY, "--workers", "1"]
    whole = answer(process(*given, "--json", "-").stdout)
    kept = tmp_path / "found" / "layouts.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-m", "clustersim.cli", *given, "--resume", "found"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    while running.poll() is None and not (kept.exists() and '"layout"' in kept.read_text()):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    lines = kept.read_text().splitlines()
    assert any('"layout"' in line for line in lines)
    again = process(*given, "--resume", "found", "--json", "-")
    assert answer(again.stdout) == whole
    assert kept.read_text().splitlines()[: len(lines) - 1] == lines[:-1]
