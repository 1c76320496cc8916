"""Dense integer labels: relabel values, pairs and matrix rows to 0 ... n-1, with every label in use.

Labels are small, so a table of the used ones relabels an array without sorting: compacting n labels takes
O(n). The labels depend on the input only, never on hash or memory order.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import IntArray

_MAX_SCANNED_VALUES: Final = 16  # distinct values up to which repeated scans replace a sort
_MAX_TABLE_RATIO: Final = 16  # largest label / number of labels that is compacted by a table; sparser labels are sorted


def compact_labels(labels: IntArray) -> IntArray:
    """Relabel nonnegative integers to 0 ... n-1, keeping their order: [n]."""
    bound = int(labels.max(initial=-1)) + 1
    if bound > _MAX_TABLE_RATIO * len(labels):
        return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)
    is_used = np.zeros(bound, dtype=np.bool_)
    is_used[labels] = True
    return (np.cumsum(is_used) - 1)[labels]


def label_values(values: NDArray[Any]) -> IntArray:
    """Labels of arbitrary numbers in ascending order of value: [n]; avoids sorting when few values are distinct."""
    scanned: list[Any] = []
    remaining = values
    while len(remaining) and len(scanned) < _MAX_SCANNED_VALUES:
        scanned.append(remaining[0])
        remaining = remaining[remaining != remaining[0]]
    unique = np.concatenate([np.array(scanned, values.dtype), np.unique(remaining)])
    return np.searchsorted(np.sort(unique), values)


def pair_labels(left: IntArray, right: IntArray) -> IntArray:
    """One label for every pair (left, right) that occurs, collision free: the product of both ranges is below 2^63."""
    return compact_labels(left * (int(right.max()) + 1) + right)


def label_rows(table: IntArray) -> IntArray:
    """Labels of the rows of a label matrix [n, columns]: equal rows get equal labels."""
    row_count, column_count = table.shape
    if row_count < column_count:
        label_cache: dict[bytes, int] = {}
        return np.array([label_cache.setdefault(row.tobytes(), len(label_cache)) for row in table], dtype=np.int64)
    labels = np.zeros(row_count, dtype=np.int64)
    for column in np.ascontiguousarray(table.T):
        labels = pair_labels(labels, column)
    return labels


def unique_by_columns(columns: Sequence[NDArray[Any]]) -> tuple[IntArray, IntArray]:
    """Labels of items [n] such that items equal in all columns share one, and the first item of every label."""
    varying = [column for column in columns if (column != column[0]).any()]
    if not varying:
        return np.zeros(len(columns[0]), dtype=np.int64), np.zeros(1, dtype=np.int64)
    labels = label_rows(np.stack([label_values(column) for column in varying], axis=1))
    return labels, np.unique(labels, return_index=True)[1]
