"""How the command line tells that something takes a while."""

import time

import pytest

from clustersim.cli import waiting


def test_without_a_terminal_a_line_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "EVERY", 0.05)
    with waiting.counting("simulating variants", 40) as tell:
        tell(12)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("simulating variants, 12 of 40, ") for line in lines)


def test_what_is_quick_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting.waiting_for("simulating"):
        pass
    assert capsys.readouterr() == ("", "")
