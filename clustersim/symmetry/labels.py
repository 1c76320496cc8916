"""How are things told apart by number? Colours are the numbers 0 ... n-1, each of them in use.

Colours are small numbers, so a table of those in use gives new ones to all without sorting: compacting n colours takes
time proportional to n. Which number stands for what depends on nothing but the input.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import IntArray

_MAX_SCANNED_VALUES: Final = 16  # more than so many different numbers are sorted
_MAX_TABLE_RATIO: Final = 16  # numbers up to so many times their count are compacted by a table, others are sorted


def compact_labels(labels: IntArray) -> IntArray:
    """Colours in the order of these numbers, not negative: [n]."""
    bound = int(labels.max(initial=-1)) + 1
    if bound > _MAX_TABLE_RATIO * len(labels):
        return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)
    is_used = np.zeros(bound, dtype=np.bool_)
    is_used[labels] = True
    return (np.cumsum(is_used) - 1)[labels]


def label_values(values: NDArray[Any]) -> IntArray:
    """Colours of any numbers, in their order: [n]; a few different ones are found without sorting."""
    scanned: list[Any] = []
    remaining = values
    while len(remaining) and len(scanned) < _MAX_SCANNED_VALUES:
        scanned.append(remaining[0])
        remaining = remaining[remaining != remaining[0]]
    unique = np.concatenate([np.array(scanned, values.dtype), np.unique(remaining)])
    return np.searchsorted(np.sort(unique), values)


def pair_labels(left: IntArray, right: IntArray) -> IntArray:
    """One colour for each pair of numbers that occurs, without collisions: their product stays below 2⁶³."""
    return compact_labels(left * (int(right.max()) + 1) + right)


def label_rows(table: IntArray) -> IntArray:
    """Colours of rows of colours [n, columns]: equal rows, equal colour."""
    row_count, column_count = table.shape
    if row_count < column_count:
        label_cache: dict[bytes, int] = {}
        return np.array([label_cache.setdefault(row.tobytes(), len(label_cache)) for row in table], dtype=np.int64)
    labels = np.zeros(row_count, dtype=np.int64)
    for column in np.ascontiguousarray(table.T):
        labels = pair_labels(labels, column)
    return labels


def unique_by_columns(columns: Sequence[NDArray[Any]]) -> tuple[IntArray, IntArray]:
    """Colours of things by what columns say of them, [n] each, and the first thing of each colour."""
    varying = [column for column in columns if (column != column[0]).any()]
    if not varying:
        return np.zeros(len(columns[0]), dtype=np.int64), np.zeros(1, dtype=np.int64)
    labels = label_rows(np.stack([label_values(column) for column in varying], axis=1))
    return labels, np.unique(labels, return_index=True)[1]
