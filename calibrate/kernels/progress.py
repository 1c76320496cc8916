"""Progress display of measurements on stderr.

A progress bar if stderr is a terminal, else a line every ten seconds and one at the end: of finished items
(`count_progress`), or of elapsed time (`time_progress`).
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
"""Called with the name of the next item when one more is done."""

ShowStatus = Callable[[str], None]
"""Called with a status text."""

_LINE_INTERVAL: Final = 10.0  # minimum seconds between lines


@contextmanager
def count_progress(title: str, total: int, stream: TextIO | None = None) -> Iterator[Advance]:
    """Show the number of finished items while the block runs."""
    output = sys.stderr if stream is None else stream
    if not output.isatty():
        yield _ProgressLines(title, total, output).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=output), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda following: bar.update(task, advance=1, description=f"{title} {following:<32.32}")


@contextmanager
def time_progress(title: str, seconds: Seconds) -> Iterator[ShowStatus]:
    """Show elapsed time while the block runs, which ends after `seconds` or earlier."""
    if not sys.stderr.isatty():
        yield _StatusLines(title, sys.stderr).show
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        _elapsed_time_bar(),
        TimeElapsedColumn(),
        TextColumn("of {task.fields[most]}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(title, total=seconds, most=format_seconds(_round_seconds(seconds)))
        yield lambda text: bar.update(task, description=f"{title} {text:<32.32}")


def _elapsed_time_bar() -> "ProgressColumn":
    """A rich column with a bar of elapsed time, redrawn by rich's own thread."""
    from rich.progress import ProgressColumn, Task
    from rich.progress_bar import ProgressBar

    class ElapsedTimeBar(ProgressColumn):
        def render(self, task: Task) -> ProgressBar:
            total = task.total or 1.0
            return ProgressBar(total=total, completed=min(total, task.elapsed or 0.0), width=40)

    return ElapsedTimeBar()


class _StatusLines:
    """Status lines, at most one per interval."""

    def __init__(self, title: str, out: TextIO) -> None:
        self._title, self._output, self._last_printed = title, out, monotonic()

    def show(self, text: str) -> None:
        """Print the text unless a line was printed recently."""
        if monotonic() - self._last_printed < _LINE_INTERVAL:
            return
        self._last_printed = monotonic()
        print(f"{self._title}: {text}", file=self._output, flush=True)


class _ProgressLines:
    """Progress as plain lines."""

    def __init__(self, title: str, total: int, out: TextIO) -> None:
        self._title, self._total, self._output = title, total, out
        self._done = 0
        self._started = self._last_printed = monotonic()

    def advance(self, following: str) -> None:
        """Count one more item; print a line if none was printed recently, or if it was the last item."""
        self._done += 1
        now = monotonic()
        if self._done < self._total and now - self._last_printed < _LINE_INTERVAL:
            return
        self._last_printed = now
        remaining_seconds = (now - self._started) / self._done * (self._total - self._done)
        estimate = (
            f", about {format_seconds(_round_seconds(remaining_seconds))} left, next {following}"
            if self._done < self._total
            else ""
        )
        print(f"{self._title}: {self._done} of {self._total}{estimate}", file=self._output, flush=True)


def _round_seconds(seconds: Seconds) -> Seconds:
    return float(round(seconds))
