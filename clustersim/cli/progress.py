"""How does a user see the progress of a long operation?

By a progress bar on stderr after two seconds on a terminal, by a line every ten seconds elsewhere; quick
operations print nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from clustersim.cli.terminal import new_console
from clustersim.engine.task_progress import ProgressWatcher, TaskProgress

ProgressCallback = Callable[[str, int, int | None], None]
BAR_DELAY_SECONDS = 2.0  # seconds
_MIN_PACE_SECONDS = 5.0  # seconds of a stage, before which its pace says little
LINE_INTERVAL_SECONDS = 10.0  # seconds between lines where there is no terminal
ASK_SECONDS = 0.5  # seconds between the questions of how far a simulation is


@contextmanager
def show_activity(label: str) -> Iterator[None]:
    """Show a progress bar while the block runs, if it runs for long on a terminal."""
    with count_progress(label, None):
        yield


@contextmanager
def count_progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """The same for a known number of items; yields a callback that takes the number of items done."""
    with track_progress(label, total) as report_progress:
        yield lambda done: report_progress(label, done, total)


@contextmanager
def simulation_progress(label: str) -> Iterator[ProgressWatcher]:
    """The same for simulations; yields a watcher, and asks each simulation that it is given for the tasks done."""
    watched, ended = list[TaskProgress](), threading.Event()

    def ask_periodically(report_progress: ProgressCallback) -> None:
        while not ended.wait(ASK_SECONDS):
            for simulation in watched[-1:]:
                report_progress(f"{label}: tasks", simulation.done_count, simulation.task_count)

    with track_progress(label, is_counted=True) as report_progress:
        asking = threading.Thread(target=ask_periodically, args=(report_progress,), daemon=True)
        asking.start()
        try:
            yield watched.append
        finally:
            ended.set()
            asking.join()


@contextmanager
def track_progress(
    label: str, total: int | None = None, *, shown: bool = True, is_counted: bool | None = None
) -> Iterator[ProgressCallback]:
    """The same for work in stages; yields a callback that takes the stage's label, its items done and its total.

    label, total: of the first stage; shown: False to show nothing; is_counted: whether items are counted, None: if
    their total is known.
    """
    if not shown:
        yield lambda _stage, _done, _total: None
        return
    if not sys.stderr.isatty():
        with _progress_lines(label, total) as report_progress:
            yield report_progress
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    shows_counts = total is not None if is_counted is None else is_counted
    counts = [MofNCompleteColumn(), TimeRemainingColumn()] if shows_counts else []
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeElapsedColumn())
    bar = Progress(*columns, console=new_console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    timer = threading.Timer(BAR_DELAY_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda stage, done, stage_total: bar.update(task, description=stage, completed=done, total=stage_total)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


@contextmanager
def _progress_lines(label: str, total: int | None) -> Iterator[ProgressCallback]:
    """Print the progress as plain lines at intervals until the block ends."""
    started = monotonic()
    state, stop_event = [_ProgressState(label, 0, total, started)], threading.Event()

    def print_periodically() -> None:
        while not stop_event.wait(LINE_INTERVAL_SECONDS):
            current = state[0]
            seconds = monotonic() - started
            count = "" if current.total is None else f", {current.done} of {current.total}"
            print(f"{current.label}{count}, {seconds:.0f} s{_remaining(current)}", file=sys.stderr, flush=True)

    printer = threading.Thread(target=print_periodically, daemon=True)
    printer.start()
    try:
        yield lambda stage_label, done, stage_total: state.__setitem__(
            0, state[0].advanced(stage_label, done, stage_total)
        )
    finally:
        stop_event.set()
        printer.join()


class _ProgressState(NamedTuple):
    """Progress of the current stage. began: when its first item was reported."""

    label: str
    done: int
    total: int | None
    began: float

    def advanced(self, label: str, done: int, total: int | None) -> "_ProgressState":
        """The state after a report; another total is another stage."""
        return _ProgressState(label, done, total, self.began if total == self.total else monotonic())


def _remaining(state: _ProgressState) -> str:
    """The time that the rest of a stage takes at its pace so far; empty where that is not known."""
    elapsed = monotonic() - state.began
    if not state.total or not 0 < state.done < state.total or elapsed < _MIN_PACE_SECONDS:
        return ""
    seconds = elapsed / state.done * (state.total - state.done)
    return f", about {seconds:.0f} s left"
