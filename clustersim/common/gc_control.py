"""Control of Python's cyclic garbage collector.

A simulated step creates hundreds of thousands of long-lived objects, which the collector would traverse
repeatedly without finding anything to free.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_GC_THRESHOLD: Final = 200_000
"""New objects before a collection; Python's default of 700 costs 191 traversals of the imported modules at startup.

Importing what `run` needs makes more than 100,000, and one traversal of them takes 40 ms.
"""


def raise_gc_threshold() -> None:
    """Run the garbage collector less often, from now on in this process."""
    gc.set_threshold(_GC_THRESHOLD)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Run the garbage collector less often inside the block."""
    before = gc.get_threshold()
    raise_gc_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector inside the block (it would take a third of a simulation's time)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
