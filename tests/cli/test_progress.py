"""How the command line tells that something takes a while."""

import io
import re
import sys
import threading

import pytest

from clustersim.cli import progress


class Heard(io.StringIO):
    """A stream that tells when some words have been written."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words, self._heard = words, threading.Event()

    def write(self, text: str) -> int:
        length = super().write(text)
        if self._words in self.getvalue():
            self._heard.set()
        return length

    def wait(self) -> bool:
        return self._heard.wait(60)


def test_without_a_terminal_a_line_says_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Heard("12 of 40")
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", said)
    with progress.count_progress("simulating variants", 40) as tell:
        tell(12)
        assert said.wait()
    lines = said.getvalue().splitlines()
    assert all(re.fullmatch(r"simulating variants, (0|12) of 40, \d+ s", line) for line in lines)


def test_what_is_quick_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_activity("simulating"):
        pass
    assert capsys.readouterr() == ("", "")
