"""What does the terminal say of a measured step beside its prediction? How far off it is, and where."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from clustersim.analysis.profiled import SPAN_KINDS, SPAN_PARTS
from clustersim.report.keys import signed
from clustersim.report.profile_difference import Pair, ProfileDifference, profile_headline
from clustersim.report.rows import shown_rows
from clustersim.units import Seconds, format_bytes, format_seconds, format_step_time

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_MOST_PRODUCTS: Final = 8
_MOST_STREAMS: Final = 6
_MOST_RANKS: Final = 16
_HEADS: Final = ("A", "B", "longer by")


def render_profile(difference: ProfileDifference) -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = [
        Text(profile_headline(difference), style="bold"),
        *(Text(f"{name}: {title}") for name, title in zip("AB", difference.titles, strict=True)),
    ]
    for title, table in (
        ("where the step goes, the mean over these ranks", _parts(difference)),
        ("kernels, all streams together", _kinds(difference)),
        ("collectives by name and ranks", _collectives(difference)),
        ("matrix products that take longest", _products(difference)),
        ("streams", _streams(difference)),
        ("by how much longer in B, rank by rank", _ranks(difference)),
    ):
        shown += [Text(), Text(title), table] if table.row_count > 1 else []
    shown += [Text(f"note: {note}", style="yellow") for note in difference.notes]
    return Group(*shown)


def _parts(difference: ProfileDifference) -> "Table":
    rows = [(part.value, *difference.parts[:, place].tolist()) for place, part in enumerate(SPAN_PARTS)]
    hidden = [each.hidden for each in difference.steps]
    table = _grid(("", *_HEADS))
    for name, first, second in rows:
        _add(table, difference, name, first, second)
    measured, predicted = difference.step_times
    times = format_step_time(measured), format_step_time(predicted)
    table.add_row("step", *times, _longer(difference, predicted - measured), style="bold")
    _add(table, difference, "hidden communication", *hidden)
    return table


def _add(table: "Table", difference: ProfileDifference, name: str, first: Seconds, second: Seconds) -> None:
    if difference.visible(first) or difference.visible(second):
        table.add_row(name, _time(first), _time(second), _longer(difference, second - first))


def _kinds(difference: ProfileDifference) -> "Table":
    pairs = zip(SPAN_KINDS, difference.kinds, strict=True)
    return _compared(difference, ((kind.value, pair) for kind, pair in pairs), "number")


def _products(difference: ProfileDifference) -> "Table":
    longest = list(difference.products.items())[:_MOST_PRODUCTS]
    rows = ((f"{m} × {n} × {k}{f', {batch} of them' if batch > 1 else ''}", pair) for (m, n, k, batch), pair in longest)
    return _compared(difference, rows, "number")


def _compared(difference: ProfileDifference, rows: Iterable[tuple[str, Pair]], counted: str) -> "Table":
    table = _grid(("", counted, counted, *_HEADS))
    for name, pair in rows:
        if any(pair.counts) or any(pair.seconds):
            counts, seconds = map(_count, pair.counts), map(_time, pair.seconds)
            table.add_row(name, *counts, *seconds, _longer(difference, pair.longer))
    return table


def _collectives(difference: ProfileDifference) -> "Table":
    table = _grid(("", "ranks", "number", "number", "payload", "payload", *_HEADS[:2]))
    for (name, ranks), (pair, payloads) in difference.totals.items():
        sizes = (format_bytes(each) if each else "" for each in payloads)
        counts, seconds = map(_count, pair.counts), map(_time, pair.seconds)
        table.add_row(name, str(ranks) if ranks else "", *counts, *sizes, *seconds)
    return table


def _streams(difference: ProfileDifference) -> "Table":
    table = _grid(("", "stream", "compute", "communication", "copies", "idle"))
    for name, step in zip("AB", difference.steps, strict=True):
        busiest = sorted(step.streams().items(), key=lambda each: each[1][3])[:_MOST_STREAMS]
        for number, seconds in busiest:
            table.add_row(name, str(number), *map(_time, seconds.tolist()))
    return table


def _ranks(difference: ProfileDifference) -> "Table":
    table = _grid(("rank", *(part.value for part in SPAN_PARTS), "step"))
    ranks = list(difference.rank_parts.items())
    for place in shown_rows(len(ranks), _MOST_RANKS).tolist() if len(ranks) > 1 else ():
        rank, parts = ranks[place]
        more = (parts[1] - parts[0]).tolist()
        table.add_row(str(rank), *(_longer(difference, each) for each in (*more, sum(more))))
    return table


def _time(seconds: Seconds) -> str:
    return format_seconds(seconds) if seconds > 0.0 else ""


def _count(many: float) -> str:
    """How many; of ranks that differ the mean."""
    return "" if many == 0 else f"{many:,.0f}" if many == round(many) else f"{many:,.1f}"


def _longer(difference: ProfileDifference, seconds: Seconds) -> str:
    return signed(seconds) if difference.visible(seconds) else "0 s"


def _grid(heads: tuple[str, ...]) -> "Table":
    """A table of numbers, but for the first column; its heads are its first row."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for place in range(len(heads)):
        table.add_column(justify="right" if place else "left", overflow="fold")
    table.add_row(*(Text(head, style="dim") for head in heads))
    return table
