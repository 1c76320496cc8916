"""Progress messages of the command line."""

import io
import re
import sys
import threading

import pytest

from clustersim.cli import progress
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
