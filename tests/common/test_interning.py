"""`clustersim.common.interning`: keys of caches that cannot be mistaken for those of other objects."""

import pickle
from dataclasses import dataclass
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.interning import IdentityKey, Interner
from clustersim.common.lru import LruCache, unit_size


@dataclass(frozen=True)
class _Shape:
    rows: int
    columns: int


SHAPES = st.builds(_Shape, st.integers(0, 3), st.integers(0, 3))


@given(st.lists(SHAPES))
def test_integers_are_equal_for_equal_values_and_count_up(shapes: list[_Shape]) -> None:
    interner = Interner[_Shape]()
    indices = [interner.index_of(shape) for shape in shapes]
    assert [interner.values[index] for index in indices] == shapes
    assert list(dict.fromkeys(indices)) == list(range(len(set(shapes))))
    assert interner.values == Interner(shapes).values


def test_values_that_are_gone_are_not_mistaken_for_new_ones() -> None:
    """A new object often has the address of one that is gone."""
    interner = Interner[_Shape]()
    assert [interner.index_of(_Shape(rows, 0)) for rows in range(100)] == list(range(100))


@given(st.lists(SHAPES))
def test_a_pickled_interner_knows_its_values(shapes: list[_Shape]) -> None:
    interner = Interner(shapes)
    loaded: Interner[_Shape] = pickle.loads(pickle.dumps(interner))
    assert loaded.values == interner.values
    assert [loaded.index_of(shape) for shape in shapes] == [interner.index_of(shape) for shape in shapes]


def test_an_identity_key_stands_for_one_object() -> None:
    first, second = [1], [1]
    assert IdentityKey(first) == IdentityKey(first) != IdentityKey(second)
    assert hash(IdentityKey(first)) == hash(IdentityKey(first))
    assert IdentityKey(first) != first


def test_results_for_objects_that_are_gone_are_not_reused() -> None:
    cache = LruCache[int](1000, unit_size)
    for length in range(100):
        values = [0] * length
        assert cache.get_or_compute((IdentityKey(values),), partial(len, values)) == length
