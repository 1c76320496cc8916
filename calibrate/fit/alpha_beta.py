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

GroupShapeKey = tuple[CollectiveType, int, int, DType]

MIN_PAYLOADS: Final = 3  # payloads: two constants, and something to judge them by


def fit_collectives(samples: Iterable[CollectiveSample]) -> tuple[CollectiveFit, ...]:
    """A fit for each collective and shape of group, with even parts; none where its rows cannot tell a bandwidth.

    That takes three different payloads, and times that grow with them.
    """
    shapes: dict[GroupShapeKey, list[CollectiveSample]] = {}
    for sample in (candidate for candidate in samples if not candidate.call.shares):
        call = sample.call
        shapes.setdefault((call.collective, call.ranks, call.nodes, call.format), []).append(sample)
    fits = (_fit_shape(shape, group) for shape, group in shapes.items())
    return tuple(fit for fit in fits if fit is not None)


def _fit_shape(shape: GroupShapeKey, samples: Sequence[CollectiveSample]) -> CollectiveFit | None:
    payloads = np.array([sample.call.payload for sample in samples])
    seconds = np.array([sample.time.seconds for sample in samples])
    alpha, inverse_beta = _fit_line(payloads, seconds)
    if len(set(payloads.tolist())) < MIN_PAYLOADS or inverse_beta <= 0.0:
        return None
    error = float(np.mean(np.abs((alpha + inverse_beta * payloads) / seconds - 1.0)))
    residual = FitResidual(len(samples), error, _leave_one_out_error(payloads, seconds))
    collective, ranks, nodes, form = shape
    return CollectiveFit(collective, ranks, nodes, alpha, 1.0 / inverse_beta, residual, form)


def _fit_line(payloads: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Alpha and 1 / beta, neither negative, with the least sum of squared relative errors.

    Where the free optimum has a negative one, the sum being convex, the best has that one at zero.
    """
    design = np.stack([1.0 / seconds, payloads / seconds], axis=1)
    scales = np.linalg.norm(design, axis=0)
    unconstrained = np.linalg.lstsq(design / scales, np.ones(len(seconds)), rcond=None)[0] / scales
    if unconstrained[0] >= 0.0 and unconstrained[1] >= 0.0:
        return float(unconstrained[0]), float(unconstrained[1])
    single_constant = design.sum(axis=0) / scales**2  # the best of each constant without the other
    return (0.0, float(single_constant[1])) if unconstrained[0] < 0.0 else (float(single_constant[0]), 0.0)


def _leave_one_out_error(payloads: FloatArray, seconds: FloatArray) -> float:
    """Mean absolute relative error of each row as the fit to the others has it."""
    errors = []
    for index in range(len(seconds)):
        is_other = np.arange(len(seconds)) != index
        alpha, inverse_beta = _fit_line(payloads[is_other], seconds[is_other])
        errors.append(abs((alpha + inverse_beta * payloads[index]) / seconds[index] - 1.0))
    return float(np.mean(errors))
