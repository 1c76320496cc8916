"""Which constants on a grid predict measured durations best, and would they predict a row that they have not seen?

The error of a candidate is the mean |log(predicted / measured)|, each row weighted by the square root of its duration:
a step's time lies in its large kernels, but many small ones matter too. Every row's left-out winner is found in the
same pass: its error is the whole sum less the row's own term, so leave-one-out is exact on the grid and costs nothing.
So is leaving out all rows of a source, which says how constants travel to another machine and version of a library.

Where rows are few, a search of fewer constants may be all that they support: `supported` takes the simplest one that
predicts rows that it has not seen as well as any.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray

WORTH: Final = 0.9  # to what part of it free constants must lower the left-out error
WORTH_OF_ONE: Final = 0.1  # by which they must lower the error of the only row there is


@dataclass(frozen=True, slots=True)
class Winner:
    """Best candidate.

    predicted: seconds of every row; left_out: each row's, from the fit to all the others; unseen: each row's, from the
    fit to the rows of all other sources (None: there is one source).
    """

    constants: tuple[float, ...]
    predicted: FloatArray
    left_out: FloatArray
    unseen: FloatArray | None = None


class GridSearch:
    """Takes candidates batch by batch and keeps the best, for all rows and with each row and each source left out."""

    def __init__(
        self,
        measured: FloatArray,
        sources: Sequence[Hashable] | None = None,
        *,
        even: bool = False,
        alike: Sequence[Hashable] | None = None,
    ) -> None:
        """measured: [rows] seconds; sources: who published each row, one if left out; even: sources count alike;

        alike: what rows have in common that are left out together (None: each is left out by itself).
        """
        self._measured = measured
        self._sources = _numbered(sources or [None] * measured.size)
        self._weights = _even_weights(measured, self._sources) if even else _weights(measured)
        self._error = np.inf
        self._winner: tuple[tuple[float, ...], FloatArray] | None = None
        self._rows = _LeftOut(np.arange(measured.size) if alike is None else _numbered(alike))
        self._others = _LeftOut(self._sources)

    def offer(self, constants: Sequence[tuple[float, ...]], predicted: FloatArray) -> None:
        """Consider candidates; predicted: [candidates, rows] seconds."""
        errors = np.abs(np.log(predicted / self._measured)) * self._weights
        totals = errors.sum(axis=1)
        best = int(np.argmin(totals))
        if totals[best] < self._error:
            self._error, self._winner = float(totals[best]), (constants[best], predicted[best])
        self._rows.offer(errors, totals, predicted)
        self._others.offer(errors, totals, predicted)

    def winner(self) -> Winner:
        """The best candidate so far."""
        if self._winner is None:
            raise ValueError("no candidate was offered")
        several = self._sources.max() > 0
        return Winner(*self._winner, self._rows.predicted.copy(), self._others.predicted.copy() if several else None)


class _LeftOut:
    """Predicts the rows of each fold by the candidate that is best for the rows of all others."""

    def __init__(self, folds: IntArray) -> None:
        """folds: [rows] the number of each row's fold."""
        self._folds, count = folds, int(folds.max(initial=-1)) + 1
        self._members = (folds == np.arange(count)[:, None]).astype(np.float64) if count < folds.size else None
        self._error = np.full(count, np.inf)
        self.predicted = np.zeros(folds.size)

    def offer(self, errors: FloatArray, totals: FloatArray, predicted: FloatArray) -> None:
        """Consider candidates; errors, predicted: [candidates, rows], totals: [candidates]."""
        own = errors if self._members is None else errors @ self._members.T
        left = totals[:, None] - own
        winners = np.argmin(left, axis=0)
        error = np.take_along_axis(left, winners[None, :], 0)[0]
        better = error < self._error
        self._error[better] = error[better]
        rows = np.flatnonzero(better[self._folds])
        self.predicted[rows] = predicted[winners[self._folds[rows]], rows]


def misfit(predicted: FloatArray, measured: FloatArray) -> float:
    """Weighted mean |log(predicted / measured)|, which searches minimise."""
    return float(np.sum(np.abs(np.log(predicted / measured)) * _weights(measured)))


def supported(winners: Sequence[Winner], measured: FloatArray) -> Winner:
    """The simplest winner that is worth its free constants; winners: from the one with the fewest on.

    The first has none: its prediction is what is known of a row without any other row.
    """
    own = kept = winners[0]
    for winner in winners[1:]:
        if _worth(winner, kept, measured):
            kept = winner
    return kept if measured.size > 1 else Winner(kept.constants, kept.predicted, own.predicted)


def _worth(richer: Winner, kept: Winner, measured: FloatArray) -> bool:
    """Whether the richer one predicts unseen rows better; of a single row, itself far better."""
    if measured.size == 1:
        return misfit(richer.predicted, measured) < misfit(kept.predicted, measured) - WORTH_OF_ONE
    return misfit(richer.left_out, measured) < misfit(kept.left_out, measured) * WORTH


def steps(low: float, high: float, step: float) -> FloatArray:
    """Grid from low to high, both included, free of binary noise so that its values can be written in a file."""
    return np.round(np.arange(low, high + step / 2.0, step), 10)


def factors(low: float, high: float, ratio: float) -> FloatArray:
    """Grid from low to high, both included, whose neighbours have at most this ratio."""
    count = int(np.ceil(np.log(high / low) / np.log(ratio))) + 1
    return np.geomspace(low, high, count)


def combinations(*axes: Iterable[float]) -> list[tuple[float, ...]]:
    """Every combination of the axes' values."""
    return list(itertools.product(*axes))


def _numbered(names: Sequence[Hashable]) -> IntArray:
    """The number of each name, in the order in which they first come."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int64)


def _weights(measured: FloatArray) -> FloatArray:
    weights: FloatArray = np.sqrt(measured) / np.sqrt(measured).sum()
    return weights


def _even_weights(measured: FloatArray, sources: IntArray) -> FloatArray:
    """Those of each source sum to the same."""
    sums = np.bincount(sources, weights=np.sqrt(measured))
    weights: FloatArray = np.sqrt(measured) / (sums[sources] * sums.size)
    return weights
