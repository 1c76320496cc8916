"""What is so alike that one may stand for all of it? Rows that differ by no more than is seen, and values in a row."""

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray


def alike(rows: FloatArray, within: float) -> list[IntArray]:
    """Numbers of rows in groups: in no column two rows of a group differ by more than `within`.

    rows: [rows, columns]; within: in their unit. Each row is in the first group that takes it, so that their first
    rows ascend.

    >>> [each.tolist() for each in alike(np.array([[0.0, 5.0], [0.0, 9.0], [0.1, 5.0], [0.2, 5.0]]), 0.15)]
    [[0, 2], [1], [3]]
    """
    low, high = np.empty((0, rows.shape[1])), np.empty((0, rows.shape[1]))
    groups: list[list[int]] = []
    for number, row in enumerate(rows):
        apart = np.maximum(high, row) - np.minimum(low, row)
        takes = np.flatnonzero(apart.max(axis=1, initial=0.0) <= within)
        if len(takes):
            group = int(takes[0])
            groups[group].append(number)
            low[group], high[group] = np.minimum(low[group], row), np.maximum(high[group], row)
        else:
            groups.append([number])
            low, high = np.vstack((low, row)), np.vstack((high, row))
    return [np.array(group, dtype=np.int64) for group in groups]


def steady(values: FloatArray, within: float) -> FloatArray:
    """The same values, those of each run of neighbours that differ by no more than `within` as their mean: [values].

    Each run is as long as it can be, the first first.

    >>> steady(np.array([0.0, 0.02, 0.5, 0.52]), 0.05).tolist()
    [0.01, 0.01, 0.51, 0.51]
    """
    found: FloatArray = np.array(values, dtype=np.float64)
    first, low, high = 0, np.inf, -np.inf
    for place, value in enumerate([*values.tolist(), np.nan]):
        low, high = min(low, value), max(high, value)
        if not high - low <= within or place == len(values):
            found[first:place] = values[first:place].mean() if place > first else 0.0
            first, low, high = place, value, value
    return found
