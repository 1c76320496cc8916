"""Grid search for cost-model constants with exact leave-one-out cross-validation.

The error of a candidate is the mean |log(predicted / measured)|, each sample weighted by the square root of
its duration: large kernels dominate a step's time, but many small ones matter too. The leave-one-out optimum
of every sample is found in the same pass, since its error is the total less the sample's own term: exact on
the grid at no extra cost. The same holds for leaving out all samples of a source, which shows how well
constants transfer to another machine and library version.

Few samples may support only a few free constants: `select_supported` takes the simplest optimum whose
out-of-sample error is about as low as that of any more complex one.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray

MAX_ERROR_RATIO: Final = 0.9  # largest ratio of left-out errors at which additional free constants are accepted
MIN_SINGLE_IMPROVEMENT: Final = 0.1  # by which they must lower the error of a single sample


@dataclass(frozen=True, slots=True)
class GridOptimum:
    """Best candidate of a grid search.

    predicted: seconds of every sample; leave_one_out: seconds of each sample by the fit to all others;
    source_held_out: seconds of each sample by the fit to all other sources (None if there is only one source).
    """

    constants: tuple[float, ...]
    predicted: FloatArray
    leave_one_out: FloatArray
    source_held_out: FloatArray | None = None


class GridSearch:
    """Evaluates candidates in batches and keeps the best: overall, per left-out sample, and per held-out source."""

    def __init__(
        self,
        measured: FloatArray,
        sources: Sequence[Hashable] | None = None,
        *,
        equal_source_weights: bool = False,
        fold_keys: Sequence[Hashable] | None = None,
    ) -> None:
        """measured: [samples] seconds; sources: who published each sample, None: one source.

        equal_source_weights: weight sources equally instead of samples; fold_keys: samples with the same key are
        left out together (None: one at a time).
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
        """Evaluate candidates; predicted: [candidates, samples] seconds."""
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
    """Predicts the samples of each fold by the candidate that is best for all other folds."""

    def __init__(self, folds: IntArray) -> None:
        """folds: [samples] fold index of each sample."""
        self._folds, count = folds, int(folds.max(initial=-1)) + 1
        self._members = (folds == np.arange(count)[:, None]).astype(np.float64) if count < folds.size else None
        self._error = np.full(count, np.inf)
        self.predicted = np.zeros(folds.size)

    def evaluate(self, errors: FloatArray, totals: FloatArray, predicted: FloatArray) -> None:
        """Evaluate candidates; errors, predicted: [candidates, samples]; totals: [candidates]."""
        fold_errors = errors if self._members is None else errors @ self._members.T
        remaining_errors = totals[:, None] - fold_errors
        best_candidates = np.argmin(remaining_errors, axis=0)
        error = np.take_along_axis(remaining_errors, best_candidates[None, :], 0)[0]
        better = error < self._error
        self._error[better] = error[better]
        improved = np.flatnonzero(better[self._folds])
        self.predicted[improved] = predicted[best_candidates[self._folds[improved]], improved]


def weighted_log_error(predicted: FloatArray, measured: FloatArray) -> float:
    """Weighted mean |log(predicted / measured)|, the objective of all searches."""
    return float(np.sum(np.abs(np.log(predicted / measured)) * _sample_weights(measured)))


def select_supported(optima: Sequence[GridOptimum], measured: FloatArray) -> GridOptimum:
    """The simplest optimum whose additional free constants pay off out of sample.

    optima: in order of increasing number of free constants. The first has none: its prediction is that of a
    sample without any other sample.
    """
    fixed = selected = optima[0]
    for optimum in optima[1:]:
        if _improves_enough(optimum, selected, measured):
            selected = optimum
    return selected if measured.size > 1 else GridOptimum(selected.constants, selected.predicted, fixed.predicted)


def _improves_enough(richer: GridOptimum, selected: GridOptimum, measured: FloatArray) -> bool:
    """Whether the richer optimum predicts left-out samples better (a single sample: itself, far better)."""
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
    """Arithmetic grid from low to high, both included, rounded so that its values can be written to a file."""
    return np.round(np.arange(low, high + step / 2.0, step), 10)


def geometric_grid(low: float, high: float, ratio: float) -> FloatArray:
    """Geometric grid from low to high, both included, whose neighbours differ by at most this ratio."""
    count = int(np.ceil(np.log(high / low) / np.log(ratio))) + 1
    return np.geomspace(low, high, count)


def combinations(*axes: Iterable[float]) -> list[tuple[float, ...]]:
    """Cartesian product of the axes' values."""
    return list(itertools.product(*axes))


def _to_ids(names: Sequence[Hashable]) -> IntArray:
    """Index of each name, in order of first occurrence."""
    id_of = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return np.array([id_of[name] for name in names], dtype=np.int64)


def _sample_weights(measured: FloatArray) -> FloatArray:
    weights: FloatArray = np.sqrt(measured) / np.sqrt(measured).sum()
    return weights


def _source_weights(measured: FloatArray, sources: IntArray) -> FloatArray:
    """Sample weights with the same sum for each source."""
    sums = np.bincount(sources, weights=np.sqrt(measured))
    weights: FloatArray = np.sqrt(measured) / (sums[sources] * sums.size)
    return weights
