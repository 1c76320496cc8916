"""Is a point inside the convex hull of others?

The hull may be flat (all points share a coordinate) or a single point. A point is inside if it is a
weighted mean of the others: weights w >= 0 with A w = b, where the columns of A are the points relative to
this one, each with a 1 appended, and b is zero with a 1 appended. Non-negative least squares finds the
nearest weights; at most as many of them as A has rows are above zero.

Reference: Lawson, Hanson, "Solving Least Squares Problems", 1974, chapter 23 (algorithm NNLS).
"""

from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray

TOLERANCE: Final = 1e-6
"""Distance from the hull that still counts as inside, in the coordinates' unit (of logarithms: 1e-6)."""
_MAX_ITERATIONS: Final = 200  # bounds the loop where rounding makes iterations cycle


def is_in_convex_hull(points: FloatArray, point: FloatArray) -> bool:
    """Whether a point [dimensions] lies in the convex hull of points [points, dimensions]."""
    if not len(points):
        return False
    lower, upper = points.min(axis=0) - TOLERANCE, points.max(axis=0) + TOLERANCE
    if ((point < lower) | (point > upper)).any():
        return False
    matrix = np.vstack([(points - point).T, np.ones(len(points))])
    target = np.append(np.zeros(len(point)), 1.0)
    return _nnls_distance(matrix, target) <= TOLERANCE


def _nnls_distance(matrix: FloatArray, target: FloatArray) -> float:
    """Distance of the target from the cone of the columns (non-negative least squares)."""
    weights = np.zeros(matrix.shape[1])
    active = np.zeros(matrix.shape[1], dtype=np.bool_)
    residual = target
    for _ in range(_MAX_ITERATIONS):
        gain = np.where(active, -np.inf, residual @ matrix)
        best = int(gain.argmax())
        if np.linalg.norm(residual) <= TOLERANCE or gain[best] <= 1e-12:
            break
        active[best] = True
        _solve_active_set(matrix, target, weights, active)
        residual = target - matrix @ weights
    return float(np.linalg.norm(residual))


def _solve_active_set(matrix: FloatArray, target: FloatArray, weights: FloatArray, active: BoolArray) -> None:
    """Solve for the active weights in place, dropping those that would become negative on the way."""
    while True:
        solution = np.zeros_like(weights)
        solution[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        negative = active & (solution <= 0.0)
        if not negative.any():
            weights[:] = solution
            return
        step = (weights[negative] / (weights[negative] - solution[negative])).min()
        weights += step * (solution - weights)
        active &= weights > 1e-14
        weights[~active] = 0.0
