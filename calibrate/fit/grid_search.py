"""Which constants on a grid predict measured durations best, and would they predict a row that they have not seen?

The error of a candidate is the mean |log(predicted / measured)|, each row weighted by the square root of its duration:
a step's time lies in its large kernels, but many small ones matter too. Every row's left-out winner is found in the
same pass: its error is the whole sum less the row's own term, so leave-one-out is exact on the grid and costs nothing.
So is leaving out all rows of a source, which says how constants travel to another machine and version of a library.

Where rows are few, a search of fewer constants may be all that they support: `select_supported` takes the simplest one that
predicts rows that it has not seen as well as any.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray

MAX_ERROR_RATIO: Final = 0.9  # to what part of it free constants must lower the left-out error
MIN_SINGLE_IMPROVEMENT: Final = 0.1  # by which they must lower the error of the only row there is


@dataclass(frozen=True, slots=True)
class GridOptimum:
    """Best candidate.

    predicted: seconds of every row; left_out: each row's, from the fit to all the others; unseen: each row's, from the
    fit to the rows of all other sources (None: there is one source).
    """

    constants: tuple[float, ...]
    predicted: FloatArray
    leave_one_out: FloatArray
    source_held_out: FloatArray | None = None


class GridSearch:
    """Takes candidates batch by batch and keeps the best, for all rows and with each row and each source left out."""

    def __init__(
        self,
        measured: FloatArray,
        sources: Sequence[Hashable] | None = None,
        *,
        equal_source_weights: bool = False,
        fold_keys: Sequence[Hashable] | None = None,
    ) -> None:
        """measured: [rows] seconds; sources: who published each row, one if left out; even: sources count alike;

        alike: what rows have in common that are left out together (None: each is left out by itself).
        """
        self._measured = measured
        self._source_ids = _to_ids(sources or [None] * measured.size)
        self._weights = (
            _source_weights(measured, self._source_ids) if equal_source_weights else _sample_weights(measured)
        )
        self._error = np.inf
        self._best: tuple[tuple[float, ...], FloatArray] | None = None
        self._sample_folds = _CrossValidation(np.arange(measured.size) if fold_keys is None else _to_ids(fold_keys))
        self._source_folds = _CrossValidation(self._source_ids)

    def evaluate(self, constants: Sequence[tuple[float, ...]], predicted: FloatArray) -> None:
        """Consider candidates; predicted: [candidates, rows] seconds."""
        errors = np.abs(np.log(predicted / self._measured)) * self._weights
        totals = errors.sum(axis=1)
        best = int(np.argmin(totals))
        if totals[best] < self._error:
            self._error, self._best = float(totals[best]), (constants[best], predicted[best])
        self._sample_folds.evaluate(errors, totals, predicted)
        self._source_folds.evaluate(errors, totals, predicted)

    def optimum(self) -> GridOptimum:
        """The best candidate so far."""
        if self._best is None:
            raise ValueError("no candidate was offered")
        has_several_sources = self._source_ids.max() > 0
        return GridOptimum(
            *self._best,
            self._sample_folds.predicted.copy(),
            self._source_folds.predicted.copy() if has_several_sources else None,
        )


class _CrossValidation:
    """Predicts the rows of each fold by the candidate that is best for the rows of all others."""

    def __init__(self, folds: IntArray) -> None:
        """folds: [rows] the number of each row's fold."""
        self._folds, count = folds, int(folds.max(initial=-1)) + 1
        self._members = (folds == np.arange(count)[:, None]).astype(np.float64) if count < folds.size else None
        self._error = np.full(count, np.inf)
        self.predicted = np.zeros(folds.size)

    def evaluate(self, errors: FloatArray, totals: FloatArray, predicted: FloatArray) -> None:
        """Consider candidates; errors, predicted: [candidates, rows], totals: [candidates]."""
        fold_errors = errors if self._members is None else errors @ self._members.T
        remaining_errors = totals[:, None] - fold_errors
        best_candidates = np.argmin(remaining_errors, axis=0)
        error = np.take_along_axis(remaining_errors, best_candidates[None, :], 0)[0]
        better = error < self._error
        self._error[better] = error[better]
        improved = np.flatnonzero(better[self._folds])
        self.predicted[improved] = predicted[best_candidates[self._folds[improved]], improved]


def weighted_log_error(predicted: FloatArray, measured: FloatArray) -> float:
    """Weighted mean |log(predicted / measured)|, which searches minimise."""
    return float(np.sum(np.abs(np.log(predicted / measured)) * _sample_weights(measured)))


def select_supported(optima: Sequence[GridOptimum], measured: FloatArray) -> GridOptimum:
    """The simplest winner that is worth its free constants; winners: from the one with the fewest on.

    The first has none: its prediction is what is known of a row without any other row.
    """
    fixed = selected = optima[0]
    for optimum in optima[1:]:
        if _improves_enough(optimum, selected, measured):
            selected = optimum
    return selected if measured.size > 1 else GridOptimum(selected.constants, selected.predicted, fixed.predicted)


def _improves_enough(richer: GridOptimum, selected: GridOptimum, measured: FloatArray) -> bool:
    """Whether the richer one predicts unseen rows better; of a single row, itself far better."""
    if measured.size == 1:
        return (
            weighted_log_error(richer.predicted, measured)
            < weighted_log_error(selected.predicted, measured) - MIN_SINGLE_IMPROVEMENT
        )
    return (
        weighted_log_error(richer.leave_one_out, measured)
        < weighted_log_error(selected.leave_one_out, measured) * MAX_ERROR_RATIO
    )


def linear_grid(low: float, high: float, step: float) -> FloatArray:
    """Grid from low to high, both included, free of binary noise so that its values can be written in a file."""
    return np.round(np.arange(low, high + step / 2.0, step), 10)


def geometric_grid(low: float, high: float, ratio: float) -> FloatArray:
    """Grid from low to high, both included, whose neighbours have at most this ratio."""
    count = int(np.ceil(np.log(high / low) / np.log(ratio))) + 1
    return np.geomspace(low, high, count)


def combinations(*axes: Iterable[float]) -> list[tuple[float, ...]]:
    """Every combination of the axes' values."""
    return list(itertools.product(*axes))


def _to_ids(names: Sequence[Hashable]) -> IntArray:
    """The number of each name, in the order in which they first come."""
    id_of = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return np.array([id_of[name] for name in names], dtype=np.int64)


def _sample_weights(measured: FloatArray) -> FloatArray:
    weights: FloatArray = np.sqrt(measured) / np.sqrt(measured).sum()
    return weights


def _source_weights(measured: FloatArray, sources: IntArray) -> FloatArray:
    """Those of each source sum to the same."""
    sums = np.bincount(sources, weights=np.sqrt(measured))
    weights: FloatArray = np.sqrt(measured) / (sums[sources] * sums.size)
    return weights
