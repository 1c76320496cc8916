"""Which rows of many, or of nearly equal ones, are drawn, and how high is their figure?"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.report.figure import wrap_label
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.tolerance_groups import group_within_tolerance

_ItemT = TypeVar("_ItemT")
_KeyT = TypeVar("_KeyT", bound=Hashable)
MAX_ROWS: Final = 64
_FRAME_PIXELS: Final = 130  # pixels of the axis and the legend
_ROW_PIXEL_RANGE: Final = (18, 28)  # minimum and maximum pixels of a row
_LABEL_LINE_WIDTH: Final = 10  # characters of a line of a short label
_LEGEND_ENTRY_PIXELS: Final = 19  # pixels of a legend entry
_MAX_ROWS_PIXELS: Final = 1400  # pixels of all rows, unless the minimum row height exceeds it
MERGE_TOLERANCE: Final = 0.01  # relative to the reference: rows that differ by less in every column are merged
MERGED_BARS_NOTE: Final = (
    " Those that differ by less than {same:.0%} of {reference} in every part share a bar, their mean."
)
_MAX_STRAGGLERS: Final = 4
_MAX_RANGES: Final = 3  # maximum number of index ranges in a label


@dataclass(frozen=True, slots=True)
class MergedBars:
    """Bars to draw. labels, short: [bars] labels; values: [bars, columns], means where a bar merges several rows.

    has_merged_rows: whether any bar merges several rows; total_count: number of bars, drawn or not.
    """

    labels: tuple[str, ...]
    short: tuple[str, ...]
    values: FloatArray
    has_merged_rows: bool
    total_count: int

    @property
    def wrapped_labels(self) -> list[str]:
        """Short labels as HTML in narrow lines, for small screens."""
        return [wrap_label(label, _LABEL_LINE_WIDTH) for label in self.short]

    def merge_note(self, reference: str) -> str:
        """Note on merged bars; empty without any. reference: name of the quantity that the tolerance is relative to."""
        return MERGED_BARS_NOTE.format(same=MERGE_TOLERANCE, reference=reference) if self.has_merged_rows else ""


def merge_bars(labels: Sequence[str], short: Sequence[str], values: FloatArray, reference: float) -> MergedBars:
    """Merge rows within tolerance into one bar each; at most `MAX_ROWS` bars.

    labels: [rows] such as "stage 3"; short: [rows] their index suffix, such as "3", if they have one; only rows
    with an index are merged. values: [rows, columns]; reference: quantity that `MERGE_TOLERANCE` is relative
    to, in their unit.
    """
    groups = _group_rows(labels, short, values, MERGE_TOLERANCE * reference)
    shown_groups = [groups[index] for index in sample_rows(len(groups))]
    return MergedBars(
        tuple(_group_label(labels, short, group) for group in shown_groups),
        tuple(_format_indices(short, group) for group in shown_groups),
        np.array([values[group].mean(axis=0) for group in shown_groups]).reshape(len(shown_groups), *values.shape[1:]),
        len(groups) < len(labels),
        len(groups),
    )


def _group_rows(labels: Sequence[str], short: Sequence[str], values: FloatArray, tolerance: float) -> list[IntArray]:
    """Row indices of each bar, ordered by first row; an extra column keeps rows without an index separate."""
    is_numbered = [
        short_label.isdecimal() and label.endswith(f" {short_label}")
        for label, short_label in zip(labels, short, strict=True)
    ]
    separation = np.where(is_numbered, 0.0, np.arange(1, len(labels) + 1) * (2.0 * tolerance + 1.0))
    return group_within_tolerance(np.column_stack((values, separation)), tolerance)


def _group_label(labels: Sequence[str], short: Sequence[str], group: IntArray) -> str:
    first = int(group[0])
    if len(group) == 1:
        return labels[first]
    return f"{labels[first].removesuffix(f' {short[first]}')}s {_format_indices(short, group)}"


def _format_indices(short: Sequence[str], group: IntArray) -> str:
    """Indices of rows as ranges; only the first few ranges if there are many."""
    ends = np.flatnonzero(np.diff(group) > 1) + 1
    ranges = [(short[index_run[0]], short[index_run[-1]]) for index_run in np.split(group, ends)]
    range_labels = [first if first == last else f"{first} to {last}" for first, last in ranges]
    return ", ".join(
        range_labels
        if len(range_labels) <= _MAX_RANGES
        else [*range_labels[: _MAX_RANGES - 1], f"… ({len(group)} in all)"]
    )


def sample_rows(row_count: int, max_rows: int = MAX_ROWS) -> IntArray:
    """All row indices, or `max_rows` of them evenly spaced from first to last, ascending.

    >>> sample_rows(3).tolist(), sample_rows(1000, max_rows=3).tolist()
    ([0, 1, 2], [0, 500, 999])
    """
    if row_count <= max_rows:
        return np.arange(row_count)
    return np.round(np.linspace(0, row_count - 1, max_rows)).astype(np.int64)


def select_ranks(result: SimulationResult) -> list[int]:
    """The most informative simulated ranks: one of each pipeline rank, and stragglers, each with a normal peer.

    Of many pipeline ranks an evenly spaced sample is shown. Each is represented by its rank with the longest
    share of the critical path, else by the one that represents most ranks. So the path can be followed, and the
    rows belong to one pipeline if every rank is simulated.
    """
    trace, program_index, represented_counts = (
        result.trace,
        result.program.program_index,
        result.trace.represented_counts,
    )
    path_seconds = np.bincount(
        trace.rank[result.critical_path],
        trace.end[result.critical_path] - trace.start[result.critical_path],
        minlength=result.rank_count,
    )
    order = np.lexsort((np.arange(result.rank_count), -represented_counts, -path_seconds))
    program_ids, first = np.unique(program_index[order], return_index=True)
    has_ledger = program_ids < len(result.ledgers)
    candidates = order[first[has_ledger]]
    chosen = set(candidates[sample_rows(len(candidates))].tolist())
    for straggler in result.stragglers.slowest[:_MAX_STRAGGLERS]:
        peer_weight = np.where(program_index == straggler.program_index, represented_counts, -1)
        peer_weight[trace.representative[list(straggler.ranks)]] = -1
        chosen |= {int(trace.representative[straggler.ranks[0]]), int(peer_weight.argmax())}
    return sorted(chosen, key=lambda rank: (int(program_index[rank]), rank))


def group_by(items: Iterable[_ItemT], key: Callable[[_ItemT], _KeyT]) -> dict[_KeyT, list[_ItemT]]:
    """Items by key; keys and items in order of first occurrence."""
    groups: dict[_KeyT, list[_ItemT]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def narrow_height(height: int, legend_entries: int) -> int:
    """Height in pixels of a figure on a small screen, where its legend is a column. height: on other screens.

    A legend gets at most half of the figure, and scrolls if that is too little.

    >>> narrow_height(300, 10), narrow_height(900, 10)
    (440, 900)
    """
    return max(height, 60 + 2 * _LEGEND_ENTRY_PIXELS * legend_entries)


def bar_chart_height(row_count: int) -> int:
    """Height in pixels of a bar chart: the fewer rows, the taller each row.

    >>> bar_chart_height(1), bar_chart_height(64)
    (158, 1474)
    """
    min_pixels, max_pixels = _ROW_PIXEL_RANGE
    return _FRAME_PIXELS + max(min_pixels, min(max_pixels, _MAX_ROWS_PIXELS // max(1, row_count))) * row_count
