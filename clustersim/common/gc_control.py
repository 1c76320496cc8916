"""When does Python look for what refers to itself?

A step makes hundreds of thousands of objects that stay, and its collector would walk them again and again to find none
that may go.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_GC_THRESHOLD: Final = 100_000
"""After Python's own 700 it would walk what is imported 191 times at the start."""


def raise_gc_threshold() -> None:
    """Look for it less often, from now on in this process."""
    gc.set_threshold(_GC_THRESHOLD)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Look for it less often here."""
    before = gc.get_threshold()
    raise_gc_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Do not look for it here: it costs a simulation a third of its time. What there is of it is found right behind."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
