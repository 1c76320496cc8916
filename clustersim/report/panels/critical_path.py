"""Of what does the critical path consist? A bar from 0 to the end, its longest pieces, and its parts by stage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import format_seconds
from clustersim.report import legend_markup
from clustersim.report.draw.charts import placed, plot, ticks
from clustersim.report.figure import Figure, Traces, axis, marker, time_scale
from clustersim.report.html_document import Card, drawn
from clustersim.report.labels import CRITICAL_PATH, RowNames, row_names
from clustersim.report.theme import PART_LOOKS
from clustersim.results.critical_path_segments import PathPieces, Piece, path_pieces
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import PARTS

_MOST_LINES: Final = 12  # of the table of pieces
_MOST_STAGES: Final = 16  # of the table of stages
_BINS: Final = 250  # of the bar of parts: a pixel each on a small screen, as plotly makes no bar thinner
_MOST_LEGS: Final = 1000  # of the bar of stages
_LEAST: Final = 0.01  # of the step: what a piece is at least that has a line of its own
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """The path of all steps. names: of pipeline ranks, by kind; microbatches: of a step."""

    path: PathPieces
    names: RowNames
    microbatches: int
    steps: int = 1


def critical_path_of(result: SimulationResult) -> CriticalPath | None:
    """The path's pieces and parts; None where nothing takes time."""
    if result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    path = path_pieces(result.trace_table, result.critical_path, result.cost.time_segment)
    return CriticalPath(path, row_names(scenario, len(path.parts)), scenario.microbatch_count, scenario.steps)


def critical_path_card(path: CriticalPath) -> Card:
    """The bar, the longest pieces in order of time, and seconds of one step by stage and part."""
    parts = path.path.parts / path.steps
    present = np.flatnonzero(parts.sum(axis=0) > _ROUNDING * parts.sum()).tolist()
    stages = _stages(path, parts)
    return drawn(
        "critical_path.html",
        figure=path_figure(path),
        path=path,
        parts=legend_markup.part_keys(path.path.legs.parts_in_time(_BINS)[0]),
        lines=_lines(path.path.pieces) if len(path.path.pieces) > 1 else (),
        stages=stages if len(stages) > 1 else (),
        whole=parts.sum(axis=0),
        present=present,
        heads=(path.names.word, *(legend_markup.part_name(PARTS[part]) for part in present), "sum"),
        rounding=_ROUNDING,
        critical_path=CRITICAL_PATH,
        keys=legend_markup,
    )


def path_figure(path: CriticalPath) -> Figure:
    """Two bars from 0 to the end: what takes most, and on which stage."""
    scale, word = time_scale(path.path.seconds), path.names.word
    rows = 2 if len(path.names.labels) > 1 else 1
    words = ticks([0, 1][:rows], ["part ", f"{escape(word)} "][:rows], range=[rows - 0.5, -0.5])
    x = axis(f"time [{scale.unit}]", range=[0, path.path.seconds / scale.size], fixedrange=True)
    y = axis("", fixedrange=True, showgrid=False, **words)
    traces = [*_part_bars(path, scale.size), *(_stage_bars(path, scale.size) if rows > 1 else [])]
    narrow = {"yaxis": {"ticktext": ["part ", f"{escape(word.split()[-1])} "][:rows]}}
    plain = {"showlegend": False, "dragmode": False, "uniformtext": {"mode": "hide", "minsize": 9}}
    return plot("critical-path", traces, x, y, height=76 + 34 * rows, narrow=narrow, **plain)


def _stages(path: CriticalPath, parts: FloatArray) -> list[tuple[str, FloatArray]]:
    """Those that the path touches, and seconds of their parts; of many those with most of it, and the rest together."""
    touched = np.flatnonzero(path.path.parts.sum(axis=1) > _ROUNDING * path.path.seconds).tolist()
    shown = sorted(sorted(touched, key=lambda stage: -parts[stage].sum())[:_MOST_STAGES])
    lines = [(path.names.labels[stage], parts[stage]) for stage in shown]
    if rest := sorted(set(touched) - set(shown)):
        lines.append((f"{len(rest):,} more", parts[rest].sum(axis=0)))
    return lines


_Came = tuple[Piece, Piece | None]
"""A piece, and the one from which the path came to it."""


def _lines(pieces: Sequence[Piece]) -> list[tuple[_Came, ...]]:
    """As many of the longest pieces by themselves as leave few enough lines; pieces that take no time are left out."""
    least = _LEAST * pieces[-1].end
    came = [item for item in zip(pieces, (None, *pieces), strict=False) if item[0].seconds > _ROUNDING * pieces[-1].end]
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


def _part_bars(path: CriticalPath, size: float) -> Traces:
    """A trace for each part that takes most of some leg of the time."""
    part, start, end = path.path.legs.parts_in_time(_BINS)
    traces = []
    for item in np.unique(part).tolist():
        chosen, name = np.flatnonzero(part == item), PARTS[item].value
        words = [
            f"<b>mostly {name}</b><br>{format_seconds(first)} to {format_seconds(last)}"
            for first, last in zip(start[chosen].tolist(), end[chosen].tolist(), strict=True)
        ]
        look = {**marker(PART_LOOKS[PARTS[item]]), "line": {"width": 0}}
        traces.append(placed(name, 0.0, start[chosen] / size, end[chosen] / size, look, hovertext=words, width=0.8))
    return traces


def _stage_bars(path: CriticalPath, size: float) -> Traces:
    """Which stage the path is on, its number where there is room."""
    kinds, start, end = path.path.legs.kinds_in_time(_MOST_LEGS)
    look = {"color": "@track", "line": {"width": 0.5, "color": "@muted"}}
    return [
        placed(
            path.names.word, 1.0, start / size, end / size, look, width=0.8,
            text=[escape(path.names.short[kind]) for kind in kinds], textposition="inside", insidetextanchor="middle",
            textangle=0, textfont={"color": "@ink", "size": 11},
            hovertext=[escape(path.names.labels[kind]) for kind in kinds],
        )
    ]  # fmt: skip
