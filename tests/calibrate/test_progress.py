"""Progress output while measuring."""

import io
from typing import Final

import pytest

from calibrate.kernels import progress

STEP_COUNT: Final = 4


class _FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_redirected_progress_prints_occasional_lines_and_a_final_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines every 10 s: after the second of four steps of 6 s each, then after the last."""
    times = iter([0.0, 6.0, 12.0, 18.0, 24.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(times))
    out = io.StringIO()
    with progress.count_progress("kernels", STEP_COUNT, out) as advance:
        for name in ("a", "b", "c", "d"):
            advance(name)
    assert out.getvalue().splitlines() == ["kernels: 2 of 4, about 12 s left, next b", "kernels: 4 of 4"]


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = _FakeTerminal()
    with progress.count_progress("kernels", STEP_COUNT, out) as advance:
        advance("matmul")
    assert "kernels" in out.getvalue()
