"""Grouping of nearly equal data: rows within a tolerance, and runs of nearly equal consecutive values."""

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray


def group_within_tolerance(matrix: FloatArray, tolerance: float) -> list[IntArray]:
    """Row indices in groups: in no column two rows of a group differ by more than `tolerance`.

    matrix: [rows, columns]; tolerance: in its unit. Each row joins the first group that accepts it, so the
    groups' first rows ascend.

    >>> matrix = np.array([[0.0, 5.0], [0.0, 9.0], [0.1, 5.0], [0.2, 5.0]])
    >>> [group.tolist() for group in group_within_tolerance(matrix, 0.15)]
    [[0, 2], [1], [3]]
    """
    low, high = np.empty((0, matrix.shape[1])), np.empty((0, matrix.shape[1]))
    groups: list[list[int]] = []
    for row_index, values in enumerate(matrix):
        ranges = np.maximum(high, values) - np.minimum(low, values)
        matching = np.flatnonzero(ranges.max(axis=1, initial=0.0) <= tolerance)
        if len(matching):
            group = int(matching[0])
            groups[group].append(row_index)
            low[group], high[group] = np.minimum(low[group], values), np.maximum(high[group], values)
        else:
            groups.append([row_index])
            low, high = np.vstack((low, values)), np.vstack((high, values))
    return [np.array(group, dtype=np.int64) for group in groups]


def smooth_runs(values: FloatArray, tolerance: float) -> FloatArray:
    """The values, with each run of neighbours that differ by at most `tolerance` replaced by its mean: [values].

    Runs are formed greedily from the left.

    >>> smooth_runs(np.array([0.0, 0.02, 0.5, 0.52]), 0.05).tolist()
    [0.01, 0.01, 0.51, 0.51]
    """
    smoothed: FloatArray = np.array(values, dtype=np.float64)
    first, low, high = 0, np.inf, -np.inf
    for index, value in enumerate([*values.tolist(), np.nan]):
        low, high = min(low, value), max(high, value)
        if not high - low <= tolerance or index == len(values):
            smoothed[first:index] = values[first:index].mean() if index > first else 0.0
            first, low, high = index, value, value
    return smoothed
