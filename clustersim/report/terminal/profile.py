"""How is a measured step compared with its prediction on the terminal? The error, and where it comes from."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds, format_bytes, format_seconds, format_step_time
from clustersim.report.row_selection import sample_rows
from clustersim.report.terminal.table import build_table, plain_text
from clustersim.report.terminal.what_helps import what_helps_lines
from clustersim.results.profile_difference import ProfileDifference
from clustersim.results.profiled_step import GPU_SPAN_KINDS, STEP_CATEGORIES

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from clustersim.report.terminal.table import Cell
    from clustersim.results.what_if import WhatIfReport

    TableRows = Iterator[Sequence[Cell]]

_MAX_MATMULS: Final = 8
_MAX_STREAMS: Final = 6
_MAX_RANKS: Final = 16


def render_profile(difference: ProfileDifference, what_ifs: "WhatIfReport | None") -> "Group":
    """Rich renderable: coloured on a terminal, plain elsewhere. what_ifs: simulated changes of B."""
    from rich.console import Group

    renderables: list[RenderableType] = [
        plain_text(profile_headline(difference), "bold"),
        *(plain_text(f"{name}: {title}") for name, title in zip("AB", difference.titles, strict=True)),
    ]
    for title, headers, rows in _TABLES:
        if table_rows := list(rows(difference)):
            renderables += [
                plain_text(""),
                plain_text(title),
                build_table(headers, table_rows, right_aligned=range(1, len(headers))),
            ]
    renderables += [plain_text(""), *what_helps_lines(what_ifs, "B")]
    renderables += [plain_text(f"note: {note}", "yellow") for note in difference.notes]
    return Group(*renderables)


def profile_headline(difference: ProfileDifference) -> str:
    """The step time error in one sentence."""
    measured, predicted = difference.step_times
    sentence = f"measured {format_step_time(measured)}, predicted {format_step_time(predicted)}"
    if not difference.is_significant(predicted - measured):
        return f"{sentence}: the same"
    return f"{sentence}: {predicted / measured - 1.0:+.1%}"


def _category_rows(difference: ProfileDifference) -> "TableRows":
    for category, pair in zip(STEP_CATEGORIES, difference.category_seconds.T.tolist(), strict=True):
        yield from _category_row(difference, category.value, *pair)
    measured, predicted = difference.step_times
    times = format_step_time(measured), format_step_time(predicted)
    yield [plain_text(cell, "bold") for cell in ("step", *times, difference.format_difference(predicted - measured))]
    yield from _category_row(difference, "hidden communication", *(cell.hidden_seconds for cell in difference.steps))


def _category_row(difference: ProfileDifference, name: str, first: Seconds, second: Seconds) -> "TableRows":
    if difference.is_significant(first) or difference.is_significant(second):
        yield name, _format_time(first), _format_time(second), difference.format_difference(second - first)


def _kernel_kind_rows(difference: ProfileDifference) -> "TableRows":
    for kind, pair in zip(GPU_SPAN_KINDS, difference.kind_totals, strict=True):
        if pair.any():
            yield kind.value, *_count_and_time_cells(difference, pair)


def _matmul_rows(difference: ProfileDifference) -> "TableRows":
    for (m, n, k, batch), pair in list(difference.matmul_totals.items())[:_MAX_MATMULS]:
        yield f"{m} × {n} × {k}{f', {batch} of them' if batch > 1 else ''}", *_count_and_time_cells(difference, pair)


def _count_and_time_cells(difference: ProfileDifference, pair: FloatArray) -> "Iterator[str]":
    """Counts and times of both, and the time difference of B."""
    yield from map(_format_count, pair[:, 0].tolist())
    yield from map(_format_time, pair[:, 1].tolist())
    yield difference.format_difference(float(pair[1, 1] - pair[0, 1]))


def _collective_rows(difference: ProfileDifference) -> "TableRows":
    for (name, ranks), sums in difference.totals_by_collective.items():
        counts, seconds, payloads = sums.T.tolist()
        sizes = (format_bytes(payload) if payload else "" for payload in payloads)
        yield name, str(ranks) if ranks else "", *map(_format_count, counts), *sizes, *map(_format_time, seconds)


def _stream_rows(difference: ProfileDifference) -> "TableRows":
    for name, step in zip("AB", difference.steps, strict=True):
        busiest = sorted(step.stream_seconds().items(), key=lambda stream: stream[1][3])[:_MAX_STREAMS]
        for stream_id, seconds in busiest:
            yield name, str(stream_id), *map(_format_time, seconds.tolist())


def _rank_rows(difference: ProfileDifference) -> "TableRows":
    ranks = list(difference.rank_category_seconds.items())
    for index in sample_rows(len(ranks), _MAX_RANKS).tolist() if len(ranks) > 1 else ():
        rank, seconds = ranks[index]
        deltas = (seconds[1] - seconds[0]).tolist()
        yield str(rank), *(difference.format_difference(delta) for delta in (*deltas, sum(deltas)))


def _format_time(seconds: Seconds) -> str:
    return format_seconds(seconds) if seconds > 0.0 else ""


def _format_count(count: float) -> str:
    """A count; the mean if ranks differ."""
    return "" if count == 0 else f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


_TIME_HEADERS: Final = ("A", "B", "B - A")
_COUNT_HEADERS: Final = ("", "count", "count", *_TIME_HEADERS)
_TABLES: Final[Sequence[tuple[str, Sequence[str], "Callable[[ProfileDifference], TableRows]"]]] = (
    ("step time breakdown, mean over these ranks", ("", *_TIME_HEADERS), _category_rows),
    ("kernels, all streams", _COUNT_HEADERS, _kernel_kind_rows),
    ("collectives by name and ranks", ("", "ranks", *2 * ("count",), *2 * ("payload",), "A", "B"), _collective_rows),
    ("longest matmuls", _COUNT_HEADERS, _matmul_rows),
    ("streams", ("", "stream", "compute", "communication", "copies", "idle"), _stream_rows),
    ("B - A by rank", ("rank", *(category.value for category in STEP_CATEGORIES), "step"), _rank_rows),
)
"""Title, headers and row function of each table."""
