"""Which latency and bandwidth do measured collectives have?

Model: seconds = alpha + payload / beta, for one collective in groups of one shape (ranks, nodes); the classic model of
Hockney 1994 (The communication challenge for MPP, Parallel Computing 20(3)), with the payload in nccl-tests' sense, so
1 / beta holds the algorithm's factor. One line for all sizes: where a library changes its algorithm or protocol with
the size, the residual says so.
Fit: least squares of the relative error, sum of (predicted / measured - 1)^2, which is linear in alpha and 1 / beta;
neither may be negative.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CollectiveFit, CollectiveSample, FitResidual
from clustersim.program.task import CollectiveType

Shape = tuple[CollectiveType, int, int, DType]

LEAST: Final = 3  # payloads: two constants, and something to judge them by


def fit_calls(rows: Iterable[CollectiveSample]) -> tuple[CollectiveFit, ...]:
    """A fit for each collective and shape of group, with even parts; none where its rows cannot tell a bandwidth.

    That takes three different payloads, and times that grow with them.
    """
    shapes: dict[Shape, list[CollectiveSample]] = {}
    for row in (collective_sample for collective_sample in rows if not collective_sample.call.shares):
        call = row.call
        shapes.setdefault((call.collective, call.ranks, call.nodes, call.format), []).append(row)
    fits = (_fit(shape, alike) for shape, alike in shapes.items())
    return tuple(fit for fit in fits if fit is not None)


def _fit(shape: Shape, rows: Sequence[CollectiveSample]) -> CollectiveFit | None:
    payloads = np.array([row.call.payload for row in rows])
    seconds = np.array([row.time.seconds for row in rows])
    alpha, pace = _line(payloads, seconds)
    if len(set(payloads.tolist())) < LEAST or pace <= 0.0:
        return None
    error = float(np.mean(np.abs((alpha + pace * payloads) / seconds - 1.0)))
    residual = FitResidual(len(rows), error, _left_out(payloads, seconds))
    collective, ranks, nodes, form = shape
    return CollectiveFit(collective, ranks, nodes, alpha, 1.0 / pace, residual, form)


def _line(payloads: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Alpha and 1 / beta, neither negative, with the least sum of squared relative errors.

    Where the free optimum has a negative one, the sum being convex, the best has that one at zero.
    """
    columns = np.stack([1.0 / seconds, payloads / seconds], axis=1)
    scales = np.linalg.norm(columns, axis=0)
    free = np.linalg.lstsq(columns / scales, np.ones(len(seconds)), rcond=None)[0] / scales
    if free[0] >= 0.0 and free[1] >= 0.0:
        return float(free[0]), float(free[1])
    alone = columns.sum(axis=0) / scales**2  # the best of each constant without the other
    return (0.0, float(alone[1])) if free[0] < 0.0 else (float(alone[0]), 0.0)


def _left_out(payloads: FloatArray, seconds: FloatArray) -> float:
    """Mean absolute relative error of each row as the fit to the others has it."""
    errors = []
    for place in range(len(seconds)):
        others = np.arange(len(seconds)) != place
        alpha, pace = _line(payloads[others], seconds[others])
        errors.append(abs((alpha + pace * payloads[place]) / seconds[place] - 1.0))
    return float(np.mean(errors))
