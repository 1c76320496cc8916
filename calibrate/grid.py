"""Which constants on a grid predict published durations best, and would they predict a row that they have not seen?

The error of a candidate is the mean |log(predicted / measured)|, each row weighted by the square root of its duration:
a step's time lies in its large kernels, but many small ones matter too. Every row's left-out winner is found in the
same pass: its error is the whole sum less the row's own term, so leave-one-out is exact on the grid and costs nothing.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


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
        self._weights = np.sqrt(measured) / np.sqrt(measured).sum()
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


def steps(low: float, high: float, step: float) -> FloatArray:
    """Grid from low to high, both included, free of binary noise so that its values can be written in a file."""
    return np.round(np.arange(low, high + step / 2.0, step), 10)


def combinations(*axes: Iterable[float]) -> list[tuple[float, ...]]:
    """Every combination of the axes' values."""
    return list(itertools.product(*axes))
