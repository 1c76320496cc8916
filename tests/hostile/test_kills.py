"""What is left of a process that was ended: nothing that stops the next one, and nothing half written."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow
PLAN = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "layout": {"tp": 4, "pp": 4, "dp": 4},
    "training": {"sequence": 4096, "global_batch": 256},
    "economics": {"tokens": "100B"},
}
LEFTOVER = ".rank-0.json.0123456789abcdef.part"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))

    def run(*arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "clustersim.cli", *arguments],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return run


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60.0
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def children_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_partial_file_remains(start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, number: int) -> None:
    process = start("run", "plan.yaml", "--kineto", "traces", "--ranks", "0:64", "--quiet")
    traces = tmp_path / "traces"
    wait_for(lambda: traces.exists() and any(traces.iterdir()), process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert process.returncode == 0 or not traces.exists()


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (("run", "plan.yaml", "--kineto", "traces", "--quiet"), "traces"),
        (("export", "chakra", "plan.yaml", "--out", "et"), "et"),
    ],
)
def test_a_leftover_of_a_kill_does_not_stop_the_next_run(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, arguments: tuple[str, ...], folder: str
) -> None:
    (tmp_path / folder).mkdir()
    leftover = tmp_path / folder / LEFTOVER
    leftover.write_text("half")
    for age in (0.0, 1e6):
        os.utime(leftover, (time.time() - age,) * 2)
        process = start(*arguments)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert leftover.exists() == (age == 0.0)  # another process may be writing a new one


def test_sigterm_reports_like_an_interrupt(start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path) -> None:
    process = start(
        "goodput", "plan.yaml", "--runs", "100000", "--workers", "1", "--resume", "found", "--json", "out.json"
    )
    journal = tmp_path / "found" / "runs.jsonl"
    wait_for(lambda: journal.exists() and journal.read_text().count('"run"') > 3, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert '"complete": false' in (tmp_path / "out.json").read_text()


@pytest.mark.parametrize(
    "command", [("validate", "steps"), ("search", "plan.yaml"), ("goodput", "plan.yaml", "--runs", "100000")]
)
def test_workers_end_with_their_parent_and_their_death_is_a_sentence(
    start: Callable[..., "subprocess.Popen[str]"], command: tuple[str, ...]
) -> None:
    process = start(*command, "--workers", "2")
    wait_for(lambda: len(children_of(process.pid)) >= 3, process)  # with the tracker of resources
    workers = children_of(process.pid)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20.0
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process = start(*command, "--workers", "2")
    wait_for(lambda: len(children_of(process.pid)) >= 3, process)
    os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "a worker process ended before its work was done" in errors
    assert "Traceback" not in errors
