"""What is made while nobody looks for cycles is old afterwards, and no cycle is lost."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from clustersim.garbage import look_seldom, uncollected


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The collector is left as it was found."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.enable()
    gc.set_threshold(*threshold)


def ages(thing: object) -> list[int]:
    """The generations that hold a thing."""
    return [age for age in range(3) if any(each is thing for each in gc.get_objects(generation=age))]


def test_what_is_made_is_old_afterwards() -> None:
    with uncollected():
        assert not gc.isenabled()
        made = Circle()
        assert ages(made) == [0]
    assert gc.isenabled()
    assert ages(made) == [2]


def test_a_cycle_is_still_found() -> None:
    with uncollected():
        known = weakref.ref(Circle())
        assert known() is not None
    gc.collect()
    assert known() is None


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncollected():
        made = Circle()
    assert gc.get_freeze_count() >= frozen - 1
    assert ages(made) != [2]


def test_errors_leave_it_on() -> None:
    with pytest.raises(ValueError, match="wrong"), uncollected():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_it_looks_less_often() -> None:
    gc.set_threshold(700)
    look_seldom()
    assert gc.get_threshold()[0] > 700
