"""The cyclic garbage collector does not run during a simulation, and finds cycles afterwards."""

import gc
from collections.abc import Iterator

import pytest

from clustersim.common.gc_control import gc_disabled, raise_gc_threshold
from clustersim.common.processes import worker_pool

LIVE_IDS: set[int] = set()
"""Ids of the objects that are not collected yet."""


class SelfReference:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.reference = self
        LIVE_IDS.add(id(self))

    def __del__(self) -> None:
        LIVE_IDS.discard(id(self))


@pytest.fixture(autouse=True)
def restore_collector() -> Iterator[None]:
    """Restore the state of the collector after a test."""
    threshold = gc.get_threshold()
    LIVE_IDS.clear()
    yield
    gc.enable()
    gc.set_threshold(*threshold)


def test_the_collector_does_not_run_while_disabled() -> None:
    gc.set_threshold(700)
    with gc_disabled():
        for _ in range(5_000):
            SelfReference()
        assert len(LIVE_IDS) == 5_000
    assert gc.isenabled()


def test_cycles_do_not_accumulate_over_many_runs() -> None:
    """Though nothing triggers a collection, and most allocations are made while the collector is disabled."""
    gc.set_threshold(700)
    max_alive = 0
    for _ in range(50):
        with gc_disabled():
            for _ in range(1_000):
                SelfReference()
        max_alive = max(max_alive, len(LIVE_IDS))
    assert max_alive <= 10_000


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    with gc_disabled():
        pass
    assert not gc.isenabled()


def test_the_collector_is_enabled_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="wrong"), gc_disabled():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_the_threshold_is_raised() -> None:
    gc.set_threshold(700)
    raise_gc_threshold()
    assert gc.get_threshold()[0] > 700


def test_the_in_process_pool_raises_the_threshold_while_open() -> None:
    gc.set_threshold(700)
    with worker_pool(1) as executor:
        assert executor.submit(gc.get_threshold).result()[0] > 10_000
    assert gc.get_threshold()[0] == 700
