"""How is a user told that something takes a while?

By a bar on stderr, only on a terminal and only after two seconds: what is quick or redirected stays silent.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Show a bar while the block runs, if it runs for long on a terminal."""
    with counting(what, None):
        yield


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """The same for so many things; yields what is called with the number that are done."""
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts = [] if total is None else [MofNCompleteColumn()]
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=total)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done: bar.update(task, completed=done)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
