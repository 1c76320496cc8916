"""How much communication hides behind computation? A bar for each stage and mesh axis, and the totals.

Each bar is the time in which the rank computes or the axis moves data: computation with nothing of the axis beside it,
both at once, then what is exposed, and what moves while the rank waits for something else. What is hatched costs
nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import format_seconds
from clustersim.parallel.mesh import COMM_AXES
from clustersim.report.draw.charts import Drawn, bar, plot, ticks, words_in
from clustersim.report.figure import MUTED, SURFACE, Figure, axis, legend, marker, time_scale, typed
from clustersim.report.html_document import Card, drawn
from clustersim.report.labels import RowNames, row_names
from clustersim.report.legend_markup import axis_name, unbroken
from clustersim.report.row_selection import Bars, bars, narrow_height
from clustersim.report.theme import AXIS_LOOKS, Category
from clustersim.results.comm_overlap import Overlap, overlap
from clustersim.results.simulation_result import SimulationResult

_ALONE: Final = "compute only"
_ROUNDING: Final = 1e-9  # of what a time is a part of
_BAND: Final = 0.84  # of a row that its bars fill


@dataclass(frozen=True, slots=True)
class StageOverlap:
    """Overlap of stages, the mean over the ranks of each. total: [1, axes] the mean over all ranks."""

    overlap: Overlap
    total: Overlap
    names: RowNames

    @property
    def axes(self) -> list[int]:
        """The places in `COMM_AXES` of those that move anything."""
        moving: list[int] = np.flatnonzero(self.overlap.moving.max(axis=0) > 0).tolist()
        return moving

    @property
    def bars(self) -> Bars:
        """Times of every stage, axis and kind: neighbours that are alike share their bars."""
        found = self.overlap
        kinds = np.concatenate((found.alone, found.hidden, found.exposed, found.beside), axis=1)
        return bars(self.names.labels, self.names.short, kinds, found.step)


def overlap_of(result: SimulationResult) -> StageOverlap | None:
    """How communication meets computation on every stage; None where nothing moves."""
    found = overlap(result.trace_table, result.cost.time_segment, result.breakdown)
    if found.moving.max(initial=0.0) <= 0:
        return None
    kind = result.program.program_index[result.trace_table.ranks]
    mean, total = (
        found.mean(kind, result.trace_table.weights),
        found.mean(np.zeros_like(kind), result.trace_table.weights),
    )
    return StageOverlap(mean, total, row_names(result.scenario, len(mean.alone)))


def overlap_card(stages: StageOverlap) -> Card:
    """The bars, and for each axis how long it moves data and how much of that hides, the mean over ranks."""
    return drawn(
        "overlap.html",
        figure=overlap_figure(stages),
        stages=stages,
        bars=stages.bars,
        axes=COMM_AXES,
        axis_name=axis_name,
        unbroken=unbroken,
    )


def overlap_figure(stages: StageOverlap) -> Figure:
    """Stacked bars, one for each axis of each stage, or of several that are alike."""
    shown, axes = stages.bars, stages.axes
    many = len(shown.labels)
    kinds = shown.values.reshape(many, 4, -1)[:, :, axes]
    ends = kinds[:, 0] + kinds[:, 1:].sum(axis=1)
    reach = float(ends.max(initial=0.0))
    scale = time_scale(reach)
    kinds = np.where(kinds > _ROUNDING * stages.overlap.step, kinds, 0.0)
    traces = [*_bars(shown.labels, axes, kinds, scale.size), _names(axes, ends / scale.size)]
    each = max(12 * len(axes), min(14 + 12 * len(axes), 1200 // max(1, many)))
    height = 130 + each * many
    rows = ticks(list(range(many)), [escape(label) + "  " for label in shown.labels], range=[many - 0.5, -0.5])
    x = axis(f"time [{scale.unit}]", range=[0, 1.04 * reach / scale.size or 1], fixedrange=True)
    y, named = axis("", fixedrange=True, showgrid=False, **rows), legend(traceorder="normal")
    narrow = {
        "height": narrow_height(height, sum(trace.get("showlegend", True) for trace in traces)),
        "legend": {"font": {"size": 9}},
        "yaxis": {"ticktext": [f"{words} " for words in shown.lines]},
    }
    return plot("overlap", traces, x, y, height=height, narrow=narrow, legend=named, dragmode=False)


def _bars(labels: Sequence[str], axes: list[int], kinds: FloatArray, size: float) -> Iterator[Drawn]:
    """Each axis and kind that lasts. axes: places in `COMM_AXES`; kinds: [rows, kinds, axes] seconds; size: of a unit."""
    begins = np.cumsum(np.insert(kinds, 0, 0.0, axis=1), axis=1)
    for number, place in enumerate(axes):
        for kind, (words, look) in enumerate(_kinds(place)):
            seconds = kinds[:, kind, number]
            hover = [
                f"<b>{escape(label)}</b>, {COMM_AXES[place].name}<br>{words}: {format_seconds(item)}"
                for label, item in zip(labels, seconds.tolist(), strict=True)
            ]
            if seconds.any():
                yield bar(
                    words, typed(_middles(len(labels), axes)[number]), typed(seconds / size), look,
                    base=typed(begins[:, kind, number] / size), legendgroup=words,
                    showlegend=number == 0 or words != _ALONE, width=0.9 * _BAND / len(axes), hovertext=hover,
                    hovertemplate="%{hovertext}<extra></extra>",
                )  # fmt: skip


def _middles(rows: int, axes: list[int]) -> FloatArray:
    """Where the bars of axes stand: [axes, rows]."""
    within: FloatArray = _BAND * ((np.arange(len(axes)) + 0.5) / len(axes) - 0.5)
    return np.arange(rows) + within[:, None]


def _names(axes: list[int], ends: FloatArray) -> Drawn:
    """The name of the axis at the end of each bar."""
    names = [COMM_AXES[place].name for place in axes for _ in ends]
    look = {"textfont": {"size": 9, "color": MUTED}, "cliponaxis": False, "showlegend": False}
    return words_in(typed(ends.T.ravel()), typed(_middles(len(ends), axes).ravel()), names, **look)


def _kinds(place: int) -> Iterator[tuple[str, Drawn]]:
    """Name and look of each kind of time; computation alone has one legend entry for all axes."""
    name, look = COMM_AXES[place].name, AXIS_LOOKS[COMM_AXES[place]]
    yield _ALONE, marker(Category.COMPUTE)
    yield f"{name} hidden", _patterned(look, "/")
    yield f"{name} exposed", marker(look)
    yield f"{name} beside a wait", _patterned(look, ".")


def _patterned(category: Category, shape: str) -> Drawn:
    """A category's bars under a pattern that says how it meets computation."""
    pattern = {"shape": shape, "size": 6, "solidity": 0.35, "fgcolor": SURFACE, "bgcolor": category.colour}
    return {**marker(category), "pattern": pattern}
