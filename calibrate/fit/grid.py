"""Which constants on a grid predict measured durations best, and would they predict a row that they have not seen?

The error of a candidate is the mean |log(predicted / measured)|, each row weighted by the square root of its duration:
a step's time lies in its large kernels, but many small ones matter too. Every row's left-out winner is found in the
same pass: its error is the whole sum less the row's own term, so leave-one-out is exact on the grid and costs nothing.

Where rows are few, a search of fewer constants may be all that they support: `supported` takes the simplest one that
predicts rows that it has not seen as well as any.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.arrays import FloatArray

WORTH: Final = 0.9  # to what part of it free constants must lower the left-out error
WORTH_OF_ONE: Final = 0.1  # by which they must lower the error of the only row there is


@dataclass(frozen=True, slots=True)
class Winner:
    """Best candidate. predicted: seconds of every row; left_out: each row's, from the fit to all the others."""

    constants: tuple[float, ...]
    predicted: FloatArray
    left_out: FloatArray


class GridSearch:
    """Takes candidates batch by batch and keeps the best, for all rows and with each row left out."""

    def __init__(self, measured: FloatArray) -> None:
        """measured: [rows] seconds."""
        self._measured = measured
        self._weights = _weights(measured)
        self._error = np.inf
        self._winner: tuple[tuple[float, ...], FloatArray] | None = None
        self._left_error = np.full(measured.size, np.inf)
        self._left_out = np.zeros(measured.size)

    def offer(self, constants: Sequence[tuple[float, ...]], predicted: FloatArray) -> None:
        """Consider candidates; predicted: [candidates, rows] seconds."""
        errors = np.abs(np.log(predicted / self._measured)) * self._weights
        totals = errors.sum(axis=1)
        best = int(np.argmin(totals))
        if totals[best] < self._error:
            self._error, self._winner = float(totals[best]), (constants[best], predicted[best])
        left = totals[:, None] - errors
        winners = np.argmin(left, axis=0)[None, :]
        left_error = np.take_along_axis(left, winners, 0)[0]
        better = left_error < self._left_error
        self._left_error[better] = left_error[better]
        self._left_out[better] = np.take_along_axis(predicted, winners, 0)[0][better]

    def winner(self) -> Winner:
        """The best candidate so far."""
        if self._winner is None:
            raise ValueError("no candidate was offered")
        return Winner(*self._winner, self._left_out.copy())


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


def _weights(measured: FloatArray) -> FloatArray:
    weights: FloatArray = np.sqrt(measured) / np.sqrt(measured).sum()
    return weights
