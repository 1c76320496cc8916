"""How is a user told that something takes a while?

By a bar on stderr after two seconds on a terminal, by a line every ten seconds elsewhere: what is quick stays silent.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

Tell = Callable[[str, int, int | None], None]
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
    with following(what, total) as tell:
        yield lambda done: tell(what, done, total)


@contextmanager
def following(what: str, total: int | None = None) -> Iterator[Tell]:
    """The same for what is done in parts; yields what is called with the part, how much of it is done, and of how much.

    what, total: of the first part.
    """
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
        yield lambda part, done, of: bar.update(task, description=part, completed=done, total=of)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


@contextmanager
def _lines(what: str, total: int | None) -> Iterator[Tell]:
    """Say in plain text how far it is, now and then, until it is done."""
    state, over, started = [_Part(what, 0, total)], threading.Event(), monotonic()

    def tell() -> None:
        while not over.wait(EVERY):
            part = state[0]
            count = "" if part.total is None else f", {part.done} of {part.total}"
            print(f"{part.what}{count}, {monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda part, done, of: state.__setitem__(0, _Part(part, done, of))
    finally:
        over.set()
        teller.join()


class _Part(NamedTuple):
    """How far something is."""

    what: str
    done: int
    total: int | None
