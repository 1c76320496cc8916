"""Does a point lie among others, or beyond them?

Among them is inside their convex hull, which may be flat (all points have one coordinate in common) or a single point.
A point is inside if it is a weighted mean of the others: weights w >= 0 with A w = b, where the columns of A are the
points as seen from this one, each with a 1 below it, and b is zero with a 1 below. Non-negative least squares finds the
weights that come nearest; at most as many of them as A has rows are above zero.

Reference: Lawson, Hanson, "Solving Least Squares Problems", 1974, chapter 23 (algorithm NNLS).
"""

from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray

TOLERANCE: Final = 1e-6
"""How far outside still counts as on the hull, in the coordinates' unit (of logarithms: a millionth)."""
_MAX_ITERATIONS: Final = 200  # rounding could make the last ones repeat each other


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
    """How near the columns come to the target with weights that are not negative."""
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
    """Bring the weights in use to their best values, giving up those that would become negative on the way."""
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
