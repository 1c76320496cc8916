"""Labels of equal values: equal stays equal, different stays different, and labels are 0 ... n-1."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.symmetry.labels import compact_labels, label_rows, label_values, pair_labels, unique_by_columns

INTEGERS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**40)), min_size=1, max_size=30)
TABLES = st.tuples(st.integers(1, 8), st.integers(1, 8)).flatmap(
    lambda shape: st.lists(st.lists(st.integers(0, 2), min_size=shape[1], max_size=shape[1]), min_size=shape[0])
)


def same_partition(labels: np.ndarray, keys: list) -> bool:
    """Whether labels are equal exactly where keys are, and are 0 ... n-1."""
    pairs = product(range(len(keys)), repeat=2)
    equal = all((labels[a] == labels[b]) == (keys[a] == keys[b]) for a, b in pairs)
    return equal and set(labels.tolist()) == set(range(len(set(keys))))


@given(INTEGERS)
def test_compact_labels_keep_the_order_of_integers(integers: list[int]) -> None:
    labels = compact_labels(np.array(integers))
    assert same_partition(labels, integers)
    assert labels[np.argsort(integers, kind="stable")].tolist() == sorted(labels.tolist())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_joined_labels_distinguish_pairs(pairs: list[tuple[int, int]]) -> None:
    left, right = np.array(pairs).T
    assert same_partition(pair_labels(left, right), pairs)


@given(TABLES)
def test_labels_distinguish_rows_and_columns(table: list[list[int]]) -> None:
    keys = [tuple(row) for row in table]
    assert same_partition(label_rows(np.array(table)), keys)
    labels, first_index = unique_by_columns(list(np.array(table, dtype=float).T))
    assert same_partition(labels, keys)
    assert [keys.index(keys[index]) for index in first_index.tolist()] == first_index.tolist()
    assert labels[first_index].tolist() == list(range(len(first_index)))


@given(st.lists(st.floats(-1e3, 1e3) | st.sampled_from([0.0, 1.5]), min_size=1, max_size=60))
def test_ranked_labels_keep_the_order_of_floats(values: list[float]) -> None:
    labels = label_values(np.array(values))
    assert same_partition(labels, values)
    assert labels[np.argsort(values, kind="stable")].tolist() == sorted(labels.tolist())
