"""Progress messages of the command line."""

import io
import re
import sys
import threading

import pytest

from clustersim.cli import progress


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
