"""Nobody looks for cycles while something runs, and behind it they are found as ever."""

import gc
from collections.abc import Iterator

import pytest

from clustersim.common.gc_control import gc_disabled, raise_gc_threshold
from clustersim.common.processes import worker_pool

ALIVE: set[int] = set()
"""Circles that are still there."""


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self
        ALIVE.add(id(self))

    def __del__(self) -> None:
        ALIVE.discard(id(self))


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The collector is left as it was found."""
    threshold = gc.get_threshold()
    ALIVE.clear()
    yield
    gc.enable()
    gc.set_threshold(*threshold)


def test_nobody_looks_meanwhile() -> None:
    gc.set_threshold(700)
    with gc_disabled():
        for _ in range(5_000):
            Circle()
        assert len(ALIVE) == 5_000
    assert gc.isenabled()


def test_cycles_do_not_pile_up_over_many_runs() -> None:
    """Though nobody asks the collector to look, and most is made while it must not."""
    gc.set_threshold(700)
    most = 0
    for _ in range(50):
        with gc_disabled():
            for _ in range(1_000):
                Circle()
        most = max(most, len(ALIVE))
    assert most <= 10_000


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    with gc_disabled():
        pass
    assert not gc.isenabled()


def test_errors_leave_it_on() -> None:
    with pytest.raises(ValueError, match="wrong"), gc_disabled():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_it_looks_less_often() -> None:
    gc.set_threshold(700)
    raise_gc_threshold()
    assert gc.get_threshold()[0] > 700


def test_work_in_this_process_is_seldom_looked_through() -> None:
    gc.set_threshold(700)
    with worker_pool(1) as executor:
        assert executor.submit(gc.get_threshold).result()[0] > 10_000
    assert gc.get_threshold()[0] == 700
