"""Of what does the critical path consist? A bar from 0 to the end, its longest pieces, and its parts by stage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np

from clustersim.analysis.parts import PARTS
from clustersim.analysis.path_pieces import Arrival, Legs, Passes, PathPieces, Piece, path_pieces
from clustersim.answer import Answer
from clustersim.arrays import FloatArray, IntArray
from clustersim.program.action import ActionKind
from clustersim.report.document import Card, card
from clustersim.report.draw.bars import placed, ticks
from clustersim.report.figure import Figure, Traces, axis, layout, marker, time_scale
from clustersim.report.keys import Cells, part_keys, part_name, table, titled, unbroken, wide
from clustersim.report.theme import PART_LOOKS
from clustersim.report.wording import CRITICAL_PATH, RowNames, row_names
from clustersim.units import format_seconds, format_step_time

_MOST_LINES: Final = 12  # of the table of pieces
_MOST_STAGES: Final = 16  # of the table of stages
_BINS: Final = 250  # of the bar of parts: a pixel each on a small screen, as plotly makes no bar thinner
_MOST_LEGS: Final = 1000  # of the bar of stages
_MOST_NAMES: Final = 3  # of what is no pass of a microbatch
_LEAST: Final = 0.01  # of the step: what a piece is at least that has a line of its own
_ROUNDING: Final = 1e-9
_NAMES: Final = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input gradients",
    ActionKind.WEIGHT_GRADIENT: "weight gradients",
}
_HOW: Final = {
    Arrival.BEGINNING: "",
    Arrival.MESSAGE: "after a message from {other}",
    Arrival.GROUP: "after {other}, the last of a collective to come",
    Arrival.BLOCK: "after {other}, whom it met inside a pass",
}


_COUNTS: Final = (
    "Communication on it counts in full, also where kernels run beside it. The bar shows what takes most at a time; "
    "the tables have every part."
)


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """The path of all steps. names: of pipeline ranks, by kind; microbatches: of a step."""

    path: PathPieces
    names: RowNames
    microbatches: int
    steps: int = 1


def critical_path_of(result: Answer) -> CriticalPath | None:
    """The path's pieces and parts; None where nothing takes time."""
    if result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    path = path_pieces(result.rows, result.path, result.cost.block)
    return CriticalPath(path, row_names(scenario, len(path.parts)), scenario.microbatches, scenario.steps)


def critical_path_card(path: CriticalPath) -> Card:
    """The bar, the pieces and the stages."""
    content: list[Figure | str] = [part_keys(np.unique(_parts_in_time(path.path.legs)[0]).tolist()), path_figure(path)]
    if len(path.path.pieces) > 1:
        content.append(titled("Longest pieces, in order of time", pieces_table(path)))
    if len(_stages(path)) > 1:
        title = f"By {path.names.word}{f', the mean of {path.steps} steps' if path.steps > 1 else ''}"
        content.append(titled(title, stages_table(path)))
    return card("Critical path", *content, lead=f"{CRITICAL_PATH} {_COUNTS}")


def path_figure(path: CriticalPath) -> Figure:
    """Two bars from 0 to the end: what takes most, and on which stage."""
    scale, word = time_scale(path.path.seconds), path.names.word
    rows = 2 if len(path.names.labels) > 1 else 1
    words = ticks([0, 1][:rows], ["part ", f"{escape(word)} "][:rows], range=[rows - 0.5, -0.5])
    return Figure(
        name="critical-path",
        traces=[*_part_bars(path, scale.size), *(_stage_bars(path, scale.size) if rows > 1 else [])],
        layout=layout(
            xaxis=axis(f"time [{scale.unit}]", range=[0, path.path.seconds / scale.size], fixedrange=True),
            yaxis=axis("", fixedrange=True, showgrid=False, **words),
            dragmode=False,
            uniformtext={"mode": "hide", "minsize": 9},
        ),
        height=76 + 34 * rows,
        narrow={"yaxis": {"ticktext": ["part ", f"{escape(word.split()[-1])} "][:rows]}},
    )


def pieces_table(path: CriticalPath) -> str:
    """The longest pieces in order of time, those between them together."""
    lines = [_line(path, each) for each in _lines(path.path.pieces)]
    last = Cells(("end", "", "", unbroken(format_step_time(path.path.seconds))), "sum")
    return wide(table(("from", "where", "what", "takes"), [*lines, last], words=(1, 2)))


def stages_table(path: CriticalPath) -> str:
    """Seconds of one step by stage and part; they sum to the step time. Of many stages those with most of it."""
    parts = path.path.parts / path.steps
    present = np.flatnonzero(parts.sum(axis=0) > _ROUNDING * parts.sum()).tolist()
    stages = _stages(path)
    shown = sorted(sorted(stages, key=lambda stage: -parts[stage].sum())[:_MOST_STAGES])
    lines = [(path.names.labels[stage], parts[stage]) for stage in shown]
    if rest := sorted(set(stages) - set(shown)):
        lines.append((f"{len(rest):,} more", parts[rest].sum(axis=0)))
    heads = (path.names.word, *(part_name(PARTS[part]) for part in present), "sum")
    rows = [_stage_row(name, seconds, present) for name, seconds in lines]
    return wide(table(heads, [*rows, _stage_row("step", parts.sum(axis=0), present, whole=True)]))


def _stages(path: CriticalPath) -> list[int]:
    """Those that the path touches."""
    touched: list[int] = np.flatnonzero(path.path.parts.sum(axis=1) > _ROUNDING * path.path.seconds).tolist()
    return touched


def _stage_row(name: str, seconds: Any, present: list[int], *, whole: bool = False) -> Cells:
    rounding = _ROUNDING * max(float(seconds.sum()), 0.0)
    cells = [format_seconds(float(each)) if each > rounding else "" for each in seconds[present]]
    total = format_step_time(float(seconds.sum())) if whole else format_seconds(float(seconds.sum()))
    return Cells((name, *cells, total), "sum" if whole else "")


_Came = tuple[Piece, Piece | None]
"""A piece, and the one from which the path came to it."""


def _lines(pieces: Sequence[Piece]) -> list[tuple[_Came, ...]]:
    """As many of the longest pieces by themselves as leave few enough lines; pieces that take no time are left out."""
    least = _LEAST * pieces[-1].end
    came = [each for each in zip(pieces, (None, *pieces), strict=False) if each[0].seconds > _ROUNDING * pieces[-1].end]
    long = [place for place, (piece, _) in enumerate(came) if piece.seconds >= least]
    long.sort(key=lambda place: -came[place][0].seconds)
    for alone in range(min(len(long), _MOST_LINES), 0, -1):
        lines = list(_grouped(came, frozenset(long[:alone])))
        if len(lines) <= _MOST_LINES:
            return lines
    return list(_grouped(came, frozenset()))


def _grouped(came: Sequence[_Came], alone: frozenset[int]) -> Iterator[tuple[_Came, ...]]:
    starts = [place for place in range(len(came)) if place == 0 or place in alone or place - 1 in alone]
    for first, after in zip(starts, [*starts[1:], len(came)], strict=True):
        yield tuple(came[first:after])


def _line(path: CriticalPath, line: tuple[_Came, ...]) -> Cells:
    first, last = line[0][0], line[-1][0]
    where, what = _one(path, *line[0]) if len(line) == 1 else _several(path, [piece for piece, _ in line])
    return Cells((format_seconds(first.start), where, what, unbroken(format_seconds(last.end - first.start))))


def _one(path: CriticalPath, piece: Piece, before: Piece | None) -> tuple[str, str]:
    """Where a piece is and what it does."""
    what = [_passes(path, piece.passes)] if piece.passes else []
    more = len(piece.others) - _MOST_NAMES
    what += [*piece.others[:_MOST_NAMES], *([f"{more} more"] if more > 0 else [])]
    how = _HOW[piece.arrival].format(other=_where(path, before)) if before else ""
    return _where(path, piece), "; ".join(filter(None, (", ".join(what) or "waits", how)))


def _several(path: CriticalPath, pieces: Sequence[Piece]) -> tuple[str, str]:
    kinds = [piece.kind for piece in pieces]
    least, most = min(kinds), max(kinds)
    where = (
        f"{path.names.word}s {path.names.short[least]} to {path.names.short[most]}"
        if least != most
        else path.names.labels[least]
    )
    what = f"{len(pieces)} pieces of at most {format_seconds(max(piece.seconds for piece in pieces))}"
    done = _passes(path, _together([each for piece in pieces for each in piece.passes]))
    return where, f"{what}: {done}" if done else what


def _together(passes: Sequence[Passes]) -> list[Passes]:
    """One for each kind of action, over all their microbatches."""
    kinds = dict.fromkeys(each.kind for each in passes)
    same = {kind: [each for each in passes if each.kind is kind] for kind in kinds}
    return [Passes(kind, min(e.first for e in some), max(e.last for e in some)) for kind, some in same.items()]


def _where(path: CriticalPath, piece: Piece) -> str:
    label = path.names.labels[piece.kind]
    return f"{label} (rank {piece.rank})" if len(path.names.labels) > 1 else f"rank {piece.rank}"


def _passes(path: CriticalPath, passes: Sequence[Passes]) -> str:
    """Words for actions, as in "forward of microbatches 3 to 9"."""
    return ", ".join(f"{_NAMES[each.kind]} of {_microbatches(path, each)}" for each in passes)


def _microbatches(path: CriticalPath, passes: Passes) -> str:
    """The first and the last, counted from the beginning of their steps, which are named where there are several."""
    (step, first), (last_step, last) = (divmod(each, path.microbatches) for each in (passes.first, passes.last))
    after, end = (f" (step {each + 1})" if path.steps > 1 else "" for each in (step, last_step))
    if passes.first == passes.last:
        return f"microbatch {first}{end}"
    return f"microbatches {first}{after if step != last_step else ''} to {last}{end}"


def _at_most(legs: Legs, most: int) -> Legs:
    """The legs, or of too many those that are under way in the middle of `most` equal parts of the time."""
    if len(legs.rank) <= most:
        return legs
    whole = float(legs.end[-1])
    edges = np.linspace(0.0, whole, most + 1)
    met = np.minimum(np.searchsorted(legs.end, (edges[1:] + edges[:-1]) / 2), len(legs.rank) - 1)
    first = np.flatnonzero(np.diff(met, prepend=-1))
    at = met[first]
    start = edges[first]
    return Legs(legs.rank[at], legs.kind[at], legs.part[at], start, np.append(start[1:], whole))


def _part_bars(path: CriticalPath, size: float) -> Traces:
    """A trace for each part that takes most of some leg of the time."""
    part, start, end = _parts_in_time(path.path.legs)
    traces = []
    for each in np.unique(part).tolist():
        chosen, name = np.flatnonzero(part == each), PARTS[each].value
        words = [
            f"<b>mostly {name}</b><br>{format_seconds(first)} to {format_seconds(last)}"
            for first, last in zip(start[chosen].tolist(), end[chosen].tolist(), strict=True)
        ]
        look = {**marker(PART_LOOKS[PARTS[each]]), "line": {"width": 0}}
        traces.append(placed(name, 0.0, start[chosen] / size, end[chosen] / size, look, hovertext=words, width=0.8))
    return traces


def _parts_in_time(legs: Legs) -> tuple[IntArray, FloatArray, FloatArray]:
    """The part that takes most of each of `_BINS` equal times, equal neighbours together: place, start, end."""
    present, lasting = np.unique(legs.part), legs.end - legs.start
    edges = np.linspace(0.0, float(legs.end.max(initial=0.0)), _BINS + 1)
    knots = np.append(0.0, legs.end)
    spent = [np.append(0.0, np.cumsum(np.where(legs.part == part, lasting, 0.0))) for part in present]
    most = present[np.array([np.diff(np.interp(edges, knots, each)) for each in spent]).argmax(axis=0)]
    first = np.flatnonzero(np.diff(most, prepend=-1))
    return most[first], edges[first], np.append(edges[first[1:]], edges[-1])


def _stage_bars(path: CriticalPath, size: float) -> Traces:
    """Which stage the path is on, its number where there is room."""
    legs = _at_most(path.path.legs, _MOST_LEGS)
    first = np.flatnonzero(np.diff(legs.kind, prepend=-1))
    start = legs.start[first]
    end = np.append(start[1:], legs.end[-1:]) if len(first) else start
    kinds = legs.kind[first].tolist()
    look = {"color": "@track", "line": {"width": 0.5, "color": "@muted"}}
    return [
        placed(
            path.names.word, 1.0, start / size, end / size, look, width=0.8,
            text=[escape(path.names.short[kind]) for kind in kinds], textposition="inside", insidetextanchor="middle",
            textangle=0, textfont={"color": "@ink", "size": 11},
            hovertext=[escape(path.names.labels[kind]) for kind in kinds],
        )
    ]  # fmt: skip
