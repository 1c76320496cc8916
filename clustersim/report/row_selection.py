"""Which rows are drawn of many stages, or of some that are alike, and how high is a figure of them?"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.report.figure import wrapped
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.tolerance_groups import alike

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
MOST_ROWS: Final = 64
_BESIDE: Final = 130  # pixels: an axis and a legend
_ROW: Final = (18, 28)  # pixels of a row at least and at most
_LETTERS: Final = 10  # of a line of a short name
_ENTRY: Final = 19  # pixels of a legend's entry
_ROWS: Final = 1400  # pixels of all rows, if those allow
SAME: Final = 0.01  # of the longest bar: what differs by less in every part is drawn once
TOGETHER: Final = " Those that differ by less than {same:.0%} of {whole} in every part share a bar, their mean."
_MOST_STRAGGLERS: Final = 4
_RANGES: Final = 3  # of numbers, that a label has at most


@dataclass(frozen=True, slots=True)
class Bars:
    """Rows as they are drawn. labels, short: [bars] names; values: [bars, parts], means where a bar stands for several.

    together: whether a bar stands for several rows; of: how many bars there are, drawn or not.
    """

    labels: tuple[str, ...]
    short: tuple[str, ...]
    values: FloatArray
    together: bool
    of: int

    @property
    def lines(self) -> list[str]:
        """Short names for small screens as HTML, in lines of few letters."""
        return [wrapped(item, _LETTERS) for item in self.short]

    def note(self, whole: str) -> str:
        """What must be said where a bar stands for several rows. whole: what the limit is a part of."""
        return TOGETHER.format(same=SAME, whole=whole) if self.together else ""


def bars(labels: Sequence[str], short: Sequence[str], values: FloatArray, whole: float) -> Bars:
    """Rows, those that are alike as one bar; at most `MOST_ROWS` bars.

    labels: [rows] such as "stage 3", short: what they end with where they are numbered, such as "3"; only numbered rows
    share a bar. values: [rows, parts]; whole: of which `SAME` is a part, in their unit.
    """
    groups = _groups(labels, short, values, SAME * whole)
    shown = [groups[place] for place in shown_rows(len(groups))]
    return Bars(
        tuple(_label(labels, short, group) for group in shown),
        tuple(_numbers(short, group) for group in shown),
        np.array([values[group].mean(axis=0) for group in shown]).reshape(len(shown), *values.shape[1:]),
        len(groups) < len(labels),
        len(groups),
    )


def _groups(labels: Sequence[str], short: Sequence[str], values: FloatArray, limit: float) -> list[IntArray]:
    """Rows by bars, in the order of their first; what tells rows without numbers apart is one more value."""
    numbered = [word.isdecimal() and label.endswith(f" {word}") for label, word in zip(labels, short, strict=True)]
    apart = np.where(numbered, 0.0, np.arange(1, len(labels) + 1) * (2.0 * limit + 1.0))
    return alike(np.column_stack((values, apart)), limit)


def _label(labels: Sequence[str], short: Sequence[str], group: IntArray) -> str:
    first = int(group[0])
    if len(group) == 1:
        return labels[first]
    return f"{labels[first].removesuffix(f' {short[first]}')}s {_numbers(short, group)}"


def _numbers(short: Sequence[str], group: IntArray) -> str:
    """The numbers of rows, neighbours as ranges; of many ranges the first."""
    ends = np.flatnonzero(np.diff(group) > 1) + 1
    ranges = [(short[run[0]], short[run[-1]]) for run in np.split(group, ends)]
    words = [first if first == last else f"{first} to {last}" for first, last in ranges]
    return ", ".join(words if len(words) <= _RANGES else [*words[: _RANGES - 1], f"… ({len(group)} in all)"])


def shown_rows(rows: int, most: int = MOST_ROWS) -> IntArray:
    """All rows, or `most` of them spread evenly from the first to the last, ascending.

    >>> shown_rows(3).tolist(), shown_rows(1000, most=3).tolist()
    ([0, 1, 2], [0, 500, 999])
    """
    if rows <= most:
        return np.arange(rows)
    return np.round(np.linspace(0, rows - 1, most)).astype(np.int64)


def shown_ranks(result: SimulationResult) -> list[int]:
    """Simulated ranks that say most: of each pipeline rank one, and stragglers, each beside one that is not.

    Of many pipeline ranks some are shown, evenly spaced. Of a pipeline rank's ranks the one is shown on which the
    critical path is longest, or that stands for most ranks. So the path can be followed, and the rows belong to one
    pipeline where every rank is simulated.
    """
    trace, kind, stands_for = result.trace, result.program.program_index, result.trace.represented_counts
    on_path = np.bincount(
        trace.rank[result.critical_path],
        trace.end[result.critical_path] - trace.start[result.critical_path],
        minlength=result.rank_count,
    )
    order = np.lexsort((np.arange(result.rank_count), -stands_for, -on_path))
    of_kind, first = np.unique(kind[order], return_index=True)
    stages = of_kind < len(result.ledgers)
    leading = order[first[stages]]
    chosen = set(leading[shown_rows(len(leading))].tolist())
    for straggler in result.stragglers.slowest[:_MOST_STRAGGLERS]:
        same = np.where(kind == straggler.kind, stands_for, -1)
        same[trace.representative[list(straggler.ranks)]] = -1
        chosen |= {int(trace.representative[straggler.ranks[0]]), int(same.argmax())}
    return sorted(chosen, key=lambda rank: (int(kind[rank]), rank))


def grouped(each: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Things by their keys, both in the order of the first of each."""
    groups: dict[_Key, list[_Item]] = {}
    for one in each:
        groups.setdefault(key(one), []).append(one)
    return groups


def narrow_height(height: int, entries: int) -> int:
    """Pixels of a figure on a small screen, where its legend is a column. height: on others; entries: of the legend.

    A legend gets half of the figure at most, and scrolls where that is too little.

    >>> narrow_height(300, 10), narrow_height(900, 10)
    (440, 900)
    """
    return max(height, 60 + 2 * _ENTRY * entries)


def height_of(rows: int) -> int:
    """Pixels of a figure with so many rows of bars: the fewer, the higher each.

    >>> height_of(1), height_of(64)
    (158, 1474)
    """
    least, most = _ROW
    return _BESIDE + max(least, min(most, _ROWS // max(1, rows))) * rows
