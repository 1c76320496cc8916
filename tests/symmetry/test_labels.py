"""Numbers become colours: equal stays equal, different stays different, and none is left out."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.symmetry.labels import compact_labels, label_rows, label_values, pair_labels, unique_by_columns

NUMBERS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**40)), min_size=1, max_size=30)
TABLES = st.tuples(st.integers(1, 8), st.integers(1, 8)).flatmap(
    lambda shape: st.lists(st.lists(st.integers(0, 2), min_size=shape[1], max_size=shape[1]), min_size=shape[0])
)


def same(colour: np.ndarray, keys: list) -> bool:
    """Whether colours are equal exactly where keys are, and are 0 ... n-1."""
    pairs = product(range(len(keys)), repeat=2)
    told = all((colour[a] == colour[b]) == (keys[a] == keys[b]) for a, b in pairs)
    return told and set(colour.tolist()) == set(range(len(set(keys))))


@given(NUMBERS)
def test_compact_colours_keep_the_order_of_numbers(numbers: list[int]) -> None:
    colour = compact_labels(np.array(numbers))
    assert same(colour, numbers)
    assert colour[np.argsort(numbers, kind="stable")].tolist() == sorted(colour.tolist())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_joined_colours_tell_pairs_apart(pairs: list[tuple[int, int]]) -> None:
    left, right = np.array(pairs).T
    assert same(pair_labels(left, right), pairs)


@given(TABLES)
def test_rows_and_columns_tell_things_apart(table: list[list[int]]) -> None:
    keys = [tuple(row) for row in table]
    assert same(label_rows(np.array(table)), keys)
    colour, first = unique_by_columns(list(np.array(table, dtype=float).T))
    assert same(colour, keys)
    assert [keys.index(keys[place]) for place in first.tolist()] == first.tolist()
    assert colour[first].tolist() == list(range(len(first)))


@given(st.lists(st.floats(-1e3, 1e3) | st.sampled_from([0.0, 1.5]), min_size=1, max_size=60))
def test_ranked_colours_keep_the_order_of_any_numbers(values: list[float]) -> None:
    colour = label_values(np.array(values))
    assert same(colour, values)
    assert colour[np.argsort(values, kind="stable")].tolist() == sorted(colour.tolist())
