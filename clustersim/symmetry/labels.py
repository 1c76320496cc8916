"""How are things told apart by number? Colours are the numbers 0 ... n-1, each of them in use.

Colours are small numbers, so a table of those in use gives new ones to all without sorting: compacting n colours takes
time proportional to n. Which number stands for what depends on nothing but the input.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import IntArray

_FEW: Final = 16  # more than so many different numbers are sorted
_SPARSE: Final = 16  # numbers up to so many times their count are compacted by a table, others are sorted


def compact(colour: IntArray) -> IntArray:
    """Colours in the order of these numbers, not negative: [n]."""
    bound = int(colour.max(initial=-1)) + 1
    if bound > _SPARSE * len(colour):
        return np.unique(colour, return_inverse=True)[1].reshape(-1).astype(np.int64)
    used = np.zeros(bound, dtype=np.bool_)
    used[colour] = True
    return (np.cumsum(used) - 1)[colour]


def ranked(values: NDArray[Any]) -> IntArray:
    """Colours of any numbers, in their order: [n]; a few different ones are found without sorting."""
    known: list[Any] = []
    left = values
    while len(left) and len(known) < _FEW:
        known.append(left[0])
        left = left[left != left[0]]
    different = np.concatenate([np.array(known, values.dtype), np.unique(left)])
    return np.searchsorted(np.sort(different), values)


def joined(left: IntArray, right: IntArray) -> IntArray:
    """One colour for each pair of numbers that occurs, without collisions: their product stays below 2⁶³."""
    return compact(left * (int(right.max()) + 1) + right)


def rows(table: IntArray) -> IntArray:
    """Colours of rows of colours [n, columns]: equal rows, equal colour."""
    count, columns = table.shape
    if count < columns:
        known: dict[bytes, int] = {}
        return np.array([known.setdefault(row.tobytes(), len(known)) for row in table], dtype=np.int64)
    colour = np.zeros(count, dtype=np.int64)
    for column in np.ascontiguousarray(table.T):
        colour = joined(colour, column)
    return colour


def distinct(columns: Sequence[NDArray[Any]]) -> tuple[IntArray, IntArray]:
    """Colours of things by what columns say of them, [n] each, and the first thing of each colour."""
    telling = [column for column in columns if (column != column[0]).any()]
    if not telling:
        return np.zeros(len(columns[0]), dtype=np.int64), np.zeros(1, dtype=np.int64)
    colour = rows(np.stack([ranked(column) for column in telling], axis=1))
    return colour, np.unique(colour, return_index=True)[1]
