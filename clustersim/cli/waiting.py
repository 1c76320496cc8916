"""How is a user told that something takes a while?

By a bar on stderr after two seconds on a terminal, by a line every ten seconds elsewhere: what is quick stays silent.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

PATIENCE = 2.0  # seconds
EVERY = 10.0  # seconds between lines where there is no terminal


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Show a bar while the block runs, if it runs for long on a terminal."""
    with counting(what, None):
        yield


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """The same for so many things; yields what is called with the number that are done."""
    if not sys.stderr.isatty():
        with _lines(what, total) as tell:
            yield tell
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


@contextmanager
def _lines(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Say in plain text how far it is, now and then, until it is done."""
    done, over, started = [0], threading.Event(), monotonic()

    def tell() -> None:
        while not over.wait(EVERY):
            count = "" if total is None else f", {done[0]} of {total}"
            print(f"{what}{count}, {monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda number: done.__setitem__(0, number)
    finally:
        over.set()
        teller.join()
