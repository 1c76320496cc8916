"""Progress messages of the command line."""

import io
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clustersim import simulation
from clustersim.cli import progress
from clustersim.cli.outputs import Outputs
from clustersim.cli.run import run_scenario
from clustersim.cli.terminal import with_escaped_streams
from clustersim.common import memory_limit
from clustersim.engine.task_progress import TaskProgress


class WatchedStream(io.StringIO):
    """A stream that signals when an expected text has been written."""

    def __init__(self, expected: str) -> None:
        super().__init__()
        self._expected, self._written = expected, threading.Event()

    def write(self, text: str) -> int:
        length = super().write(text)
        if self._expected in self.getvalue():
            self._written.set()
        return length

    def wait(self) -> bool:
        return self._written.wait(60)


def test_progress_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = WatchedStream("12 of 40")
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.count_progress("simulating variants", 40) as report_progress:
        report_progress(12)
        assert stream.wait()
    lines = stream.getvalue().splitlines()
    assert all(re.fullmatch(r"simulating variants, (0|12) of 40, \d+ s", line) for line in lines)


def test_short_operations_print_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_activity("simulating"):
        pass
    assert capsys.readouterr() == ("", "")


def test_simulations_show_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = WatchedStream("3 of 5")
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(progress, "ASK_SECONDS", 0.001)
    monkeypatch.setattr(sys, "stderr", stream)
    first, second = bytearray(b"\1\0"), [True, True, False]
    with progress.simulation_progress("simulating a step of 8 GPUs") as watch:
        watch(TaskProgress((bytearray(9),)))
        watch(TaskProgress((first, second)))
        assert stream.wait()
    lines = stream.getvalue().splitlines()
    shown = r"simulating a step of 8 GPUs(: tasks, (0 of 9|3 of 5))?, \d+ s"
    assert all(re.fullmatch(shown, line) for line in lines)


def test_run_shows_what_it_simulates_and_how_far_it_is(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is held until its progress is shown, as one is that takes long."""
    stream, simulate = WatchedStream("tasks, "), simulation.simulate
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(progress, "ASK_SECONDS", 0.001)
    monkeypatch.setattr(sys, "stderr", stream)

    def simulate_and_wait(*arguments: Any) -> Any:
        result = simulate(*arguments)
        assert stream.wait()
        return result

    monkeypatch.setattr(simulation, "simulate", simulate_and_wait)
    run_scenario(plan, [], Outputs(table=False))
    shown = r"simulating a step of 8 GPUs(: tasks, \d+ of [1-9]\d*)?, \d+ s|writing results, \d+ s"
    assert all(re.fullmatch(shown, line) for line in stream.getvalue().splitlines())


def test_a_command_warns_of_its_memory_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = WatchedStream("warning: ")
    monkeypatch.setattr(memory_limit, "_WATCH_SECONDS", 0.001)
    monkeypatch.setattr(memory_limit, "memory_capacity", lambda: 1e6)
    monkeypatch.setattr(sys, "stderr", stream)
    assert with_escaped_streams(stream.wait)()
    assert re.fullmatch(r"warning: .* of memory are taken, .* of the 976.6 KiB that .*\n", stream.getvalue())
