"""Least-squares fit of alpha (latency) and beta (bandwidth) to measured collectives.

Model: seconds = alpha + payload / beta, for one collective in groups of one shape (ranks, nodes); the model
of Hockney 1994 (The communication challenge for MPP, Parallel Computing 20(3)). The payload is the size that
nccl-tests reports, so 1 / beta includes the algorithm's bus-bandwidth factor. One line covers all sizes:
where a library switches its algorithm or protocol with the size, the residual shows it.

The objective is the sum of (predicted / measured - 1)^2, linear in alpha and 1 / beta; both are constrained
to be nonnegative.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CollectiveFit, CollectiveSample, FitResidual
from clustersim.program.task import CollectiveType

GroupShapeKey = tuple[CollectiveType, int, int, DType]

MIN_PAYLOADS: Final = 3  # two constants, and one residual degree of freedom
"""Minimum number of distinct payloads: two constants and one residual degree of freedom."""


def fit_collectives(samples: Iterable[CollectiveSample]) -> tuple[CollectiveFit, ...]:
    """Fit alpha and beta for each collective, group shape and format among samples with even shares.

    A shape is skipped if it has fewer than three distinct payloads or if its times do not grow with the payload.
    """
    shapes: dict[GroupShapeKey, list[CollectiveSample]] = {}
    for sample in (candidate for candidate in samples if not candidate.call.shares):
        call = sample.call
        shapes.setdefault((call.collective, call.ranks, call.nodes, call.dtype), []).append(sample)
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
    """Alpha and 1 / beta that minimize the sum of squared relative errors, both nonnegative.

    The objective is convex: where the unconstrained optimum has a negative constant, that constant is zero in
    the constrained optimum.
    """
    design = np.stack([1.0 / seconds, payloads / seconds], axis=1)
    scales = np.linalg.norm(design, axis=0)
    unconstrained = np.linalg.lstsq(design / scales, np.ones(len(seconds)), rcond=None)[0] / scales
    if unconstrained[0] >= 0.0 and unconstrained[1] >= 0.0:
        return float(unconstrained[0]), float(unconstrained[1])
    single_constant = design.sum(axis=0) / scales**2  # optimum of each constant with the other fixed at zero
    return (0.0, float(single_constant[1])) if unconstrained[0] < 0.0 else (float(single_constant[0]), 0.0)


def _leave_one_out_error(payloads: FloatArray, seconds: FloatArray) -> float:
    """Mean absolute relative error of each sample under the fit to all other samples (leave-one-out)."""
    errors = []
    for index in range(len(seconds)):
        is_other = np.arange(len(seconds)) != index
        alpha, inverse_beta = _fit_line(payloads[is_other], seconds[is_other])
        errors.append(abs((alpha + inverse_beta * payloads[index]) / seconds[index] - 1.0))
    return float(np.mean(errors))
