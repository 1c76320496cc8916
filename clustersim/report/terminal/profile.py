"""What does the terminal say of a measured step beside its prediction? How far off it is, and where."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds, format_bytes, format_seconds, format_step_time
from clustersim.report.row_selection import shown_rows
from clustersim.report.terminal.table import grid, text
from clustersim.results.profile_difference import ProfileDifference
from clustersim.results.profiled_step import SPAN_KINDS, SPAN_PARTS

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from clustersim.report.terminal.table import Cell

    Rows = Iterator[Sequence[Cell]]

_MOST_PRODUCTS: Final = 8
_MOST_STREAMS: Final = 6
_MOST_RANKS: Final = 16


def render_profile(difference: ProfileDifference) -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group

    shown: list[RenderableType] = [
        text(profile_headline(difference), "bold"),
        *(text(f"{name}: {title}") for name, title in zip("AB", difference.titles, strict=True)),
    ]
    for title, heads, rows in _TABLES:
        if found := list(rows(difference)):
            shown += [text(""), text(title), grid(heads, found, right=range(1, len(heads)))]
    shown += [text(f"note: {note}", "yellow") for note in difference.notes]
    return Group(*shown)


def profile_headline(difference: ProfileDifference) -> str:
    """The answer in a sentence."""
    measured, predicted = difference.step_times
    words = f"measured {format_step_time(measured)}, predicted {format_step_time(predicted)}"
    if not difference.visible(predicted - measured):
        return f"{words}: the same"
    return f"{words}: {predicted / measured - 1.0:+.1%}"


def _parts(difference: ProfileDifference) -> "Rows":
    for part, pair in zip(SPAN_PARTS, difference.parts.T.tolist(), strict=True):
        yield from _part(difference, part.value, *pair)
    measured, predicted = difference.step_times
    times = format_step_time(measured), format_step_time(predicted)
    yield [text(item, "bold") for item in ("step", *times, difference.words(predicted - measured))]
    yield from _part(difference, "hidden communication", *(step.hidden for step in difference.steps))


def _part(difference: ProfileDifference, name: str, first: Seconds, second: Seconds) -> "Rows":
    if difference.visible(first) or difference.visible(second):
        yield name, _time(first), _time(second), difference.words(second - first)


def _kinds(difference: ProfileDifference) -> "Rows":
    for kind, pair in zip(SPAN_KINDS, difference.kinds, strict=True):
        if pair.any():
            yield kind.value, *_cells(difference, pair)


def _products(difference: ProfileDifference) -> "Rows":
    for (m, n, k, batch), pair in list(difference.products.items())[:_MOST_PRODUCTS]:
        yield f"{m} × {n} × {k}{f', {batch} of them' if batch > 1 else ''}", *_cells(difference, pair)


def _cells(difference: ProfileDifference, pair: FloatArray) -> "Iterator[str]":
    """How many there are, how long they take, and how much longer in B."""
    yield from map(_count, pair[:, 0].tolist())
    yield from map(_time, pair[:, 1].tolist())
    yield difference.words(float(pair[1, 1] - pair[0, 1]))


def _collectives(difference: ProfileDifference) -> "Rows":
    for (name, ranks), sums in difference.totals.items():
        counts, seconds, payloads = sums.T.tolist()
        sizes = (format_bytes(payload) if payload else "" for payload in payloads)
        yield name, str(ranks) if ranks else "", *map(_count, counts), *sizes, *map(_time, seconds)


def _streams(difference: ProfileDifference) -> "Rows":
    for name, step in zip("AB", difference.steps, strict=True):
        busiest = sorted(step.streams().items(), key=lambda each: each[1][3])[:_MOST_STREAMS]
        for number, seconds in busiest:
            yield name, str(number), *map(_time, seconds.tolist())


def _ranks(difference: ProfileDifference) -> "Rows":
    ranks = list(difference.rank_parts.items())
    for place in shown_rows(len(ranks), _MOST_RANKS).tolist() if len(ranks) > 1 else ():
        rank, parts = ranks[place]
        more = (parts[1] - parts[0]).tolist()
        yield str(rank), *(difference.words(item) for item in (*more, sum(more)))


def _time(seconds: Seconds) -> str:
    return format_seconds(seconds) if seconds > 0.0 else ""


def _count(many: float) -> str:
    """How many; of ranks that differ the mean."""
    return "" if many == 0 else f"{many:,.0f}" if many == round(many) else f"{many:,.1f}"


_TIMES: Final = ("A", "B", "longer by")
_MANY: Final = ("", "number", "number", *_TIMES)
_TABLES: Final[Sequence[tuple[str, Sequence[str], "Callable[[ProfileDifference], Rows]"]]] = (
    ("where the step goes, the mean over these ranks", ("", *_TIMES), _parts),
    ("kernels, all streams together", _MANY, _kinds),
    ("collectives by name and ranks", ("", "ranks", *2 * ("number",), *2 * ("payload",), "A", "B"), _collectives),
    ("matrix products that take longest", _MANY, _products),
    ("streams", ("", "stream", "compute", "communication", "copies", "idle"), _streams),
    ("by how much longer in B, rank by rank", ("rank", *(part.value for part in SPAN_PARTS), "step"), _ranks),
)
"""Titles, heads and rows."""
