"""How is a user told how far measuring is, and how long it will take?

A bar on stderr where that is a terminal, else a line every ten seconds and one at the end. What is counted has a bar of
things done (`shown`), what lasts until its time is up one of time (`lasting`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Final, TextIO

from clustersim.common.units import Seconds, format_seconds

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Advance = Callable[[str], None]
"""Says that one more is done, and what is next."""

Say = Callable[[str], None]
"""Says what goes on."""

_PATIENCE: Final = 10.0  # seconds between lines


@contextmanager
def shown(what: str, total: int, stream: TextIO | None = None) -> Iterator[Advance]:
    """Show how many of so many things are done while the block runs."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        yield _Lines(what, total, out).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=out), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda following: bar.update(task, advance=1, description=f"{what} {following:<32.32}")


@contextmanager
def lasting(what: str, seconds: Seconds, stream: TextIO | None = None) -> Iterator[Say]:
    """Show how much of a time has passed while the block runs, which ends then or before."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        yield _NowAndThen(what, out).say
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), _passed(), TimeElapsedColumn(), TextColumn("of {task.fields[most]}"))
    with Progress(*columns, console=Console(file=out), transient=True) as bar:
        task = bar.add_task(what, total=seconds, most=format_seconds(_rounded(seconds)))
        yield lambda text: bar.update(task, description=f"{what} {text:<32.32}")


def _passed() -> "ProgressColumn":
    """A bar of the time that has passed, drawn again by rich's own thread."""
    from rich.progress import ProgressColumn, Task
    from rich.progress_bar import ProgressBar

    class Passed(ProgressColumn):
        def render(self, task: Task) -> ProgressBar:
            total = task.total or 1.0
            return ProgressBar(total=total, completed=min(total, task.elapsed or 0.0), width=40)

    return Passed()


class _NowAndThen:
    """A line every few seconds."""

    def __init__(self, what: str, out: TextIO) -> None:
        self._what, self._out, self._said = what, out, monotonic()

    def say(self, text: str) -> None:
        """Say it, if nothing was said for a while."""
        if monotonic() - self._said < _PATIENCE:
            return
        self._said = monotonic()
        print(f"{self._what}: {text}", file=self._out, flush=True)


class _Lines:
    """Plain lines."""

    def __init__(self, what: str, total: int, out: TextIO) -> None:
        self._what, self._total, self._out = what, total, out
        self._done = 0
        self._began = self._said = monotonic()

    def advance(self, following: str) -> None:
        """One more is done; say so if nothing was said for a while, or if it was the last."""
        self._done += 1
        now = monotonic()
        if self._done < self._total and now - self._said < _PATIENCE:
            return
        self._said = now
        left = (now - self._began) / self._done * (self._total - self._done)
        rest = f", about {format_seconds(_rounded(left))} left, next {following}" if self._done < self._total else ""
        print(f"{self._what}: {self._done} of {self._total}{rest}", file=self._out, flush=True)


def _rounded(seconds: Seconds) -> Seconds:
    return float(round(seconds))
