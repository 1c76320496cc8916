"""How much communication hides behind computation? A bar for each stage and mesh axis, and the totals.

Each bar is the time in which the rank computes or the axis moves data: computation with nothing of the axis beside it,
both at once, then what is exposed, and what moves while the rank waits for something else. What is hatched costs
nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np

from clustersim.analysis.overlap import Overlap, overlap
from clustersim.answer import Answer
from clustersim.arrays import FloatArray
from clustersim.parallel.mesh import SERVED
from clustersim.report.document import Card, card, prose
from clustersim.report.draw.bars import Drawn, bar, ticks, words_in
from clustersim.report.figure import (
    MUTED,
    SURFACE,
    Figure,
    axis,
    layout,
    legend,
    marker,
    share_words,
    time_scale,
    typed,
)
from clustersim.report.keys import Cells, named, table, unbroken
from clustersim.report.rows import Bars, bars, narrow_height
from clustersim.report.theme import AXIS_LOOKS, Category
from clustersim.report.wording import RowNames, row_names
from clustersim.units import format_seconds

LOOKS: Final = tuple(AXIS_LOOKS[axis] for axis in SERVED)
"""The category of each of `SERVED`."""
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
        """The places in `SERVED` of those that move anything."""
        moving: list[int] = np.flatnonzero(self.overlap.moving.max(axis=0) > 0).tolist()
        return moving

    @property
    def bars(self) -> Bars:
        """Times of every stage, axis and kind: neighbours that are alike share their bars."""
        found = self.overlap
        kinds = np.concatenate((found.alone, found.hidden, found.exposed, found.beside), axis=1)
        return bars(self.names.labels, self.names.short, kinds, found.step)


def overlap_of(result: Answer) -> StageOverlap | None:
    """How communication meets computation on every stage; None where nothing moves."""
    found = overlap(result.rows, result.cost.block, result.breakdown)
    if found.moving.max(initial=0.0) <= 0:
        return None
    kind = result.program.kind[result.rows.ranks]
    mean, total = found.mean(kind, result.rows.weights), found.mean(np.zeros_like(kind), result.rows.weights)
    return StageOverlap(mean, total, row_names(result.scenario, len(mean.alone)))


def overlap_card(stages: StageOverlap) -> Card:
    """The bars, and how much of each axis hides."""
    drawn, word = stages.bars, stages.names.word
    some = f"{len(drawn.labels)} of {drawn.of:,} {word}s are shown, evenly spaced."
    caption, lead = some if len(drawn.labels) < drawn.of else "", prose("overlap", row=word) + drawn.note("the step")
    content = overlap_figure(stages), totals_table(stages)
    return card("Communication and computation", *content, lead=lead, caption=caption, beside=True)


def overlap_figure(stages: StageOverlap) -> Figure:
    """Stacked bars, one for each axis of each stage, or of several that are alike."""
    drawn, axes = stages.bars, stages.axes
    alone, hidden, exposed, beside = np.split(drawn.values, 4, axis=1)
    found, many = Overlap(alone, hidden, exposed, beside, stages.overlap.step), len(drawn.labels)
    reach = float((found.alone + found.moving)[:, axes].max(initial=0.0))
    scale = time_scale(reach)
    each = max(12 * len(axes), min(14 + 12 * len(axes), 1200 // max(1, many)))
    shown = _Shown(found, drawn.labels, axes, scale.size)
    traces, height = [*shown.traces(), shown.names()], 130 + each * many
    rows = ticks(list(range(many)), [escape(label) + "  " for label in drawn.labels], range=[many - 0.5, -0.5])
    return Figure(
        name="overlap",
        traces=traces,
        layout=layout(
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis(f"time [{scale.unit}]", range=[0, 1.04 * reach / scale.size or 1], fixedrange=True),
            yaxis=axis("", fixedrange=True, showgrid=False, **rows),
            dragmode=False,
        ),
        height=height,
        narrow={
            "height": narrow_height(height, sum(trace.get("showlegend", True) for trace in traces)),
            "legend": {"font": {"size": 9}},
            "yaxis": {"ticktext": [f"{words} " for words in drawn.lines]},
        },
    )


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is drawn: times of rows with their labels, of some axes (places in `SERVED`); size: of a unit."""

    found: Overlap
    labels: tuple[str, ...]
    axes: list[int]
    size: float

    def traces(self) -> Iterator[Drawn]:
        """A trace for each axis and kind; computation alone has one legend entry for all axes."""
        found = self.found
        for place in self.axes:
            name, base = SERVED[place].name, np.zeros(len(self.labels))
            for words, kind, look in (
                (_ALONE, found.alone, marker(Category.COMPUTE)),
                (f"{name} hidden", found.hidden, _patterned(LOOKS[place], "/")),
                (f"{name} exposed", found.exposed, marker(LOOKS[place])),
                (f"{name} beside a wait", found.beside, _patterned(LOOKS[place], ".")),
            ):
                seconds = np.where(kind[:, place] > _ROUNDING * found.step, kind[:, place], 0.0)
                if seconds.any():
                    yield self._bars(place, words, look, base, seconds)
                base = base + seconds

    def _bars(self, place: int, words: str, look: Drawn, base: FloatArray, seconds: FloatArray) -> Drawn:
        """One kind of one axis. base: [rows] seconds from where on; seconds: [rows] for how long."""
        hover = [
            f"<b>{escape(label)}</b>, {SERVED[place].name}<br>{words}: {format_seconds(float(each))}"
            for label, each in zip(self.labels, seconds, strict=True)
        ]
        return bar(
            words, typed(self._middle(place)), typed(seconds / self.size), look, base=typed(base / self.size),
            legendgroup=words, showlegend=place == self.axes[0] or words != _ALONE,
            width=0.9 * _BAND / len(self.axes), hovertext=hover, hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip

    def _middle(self, place: int) -> FloatArray:
        """Where the bars of an axis stand: [rows]."""
        rows = np.arange(len(self.labels), dtype=np.float64)
        return rows + _BAND * ((self.axes.index(place) + 0.5) / len(self.axes) - 0.5)

    def names(self) -> Drawn:
        """The name of the axis at the end of each bar."""
        ends = self.found.alone + self.found.moving
        return words_in(
            typed(np.concatenate([ends[:, place] for place in self.axes]) / self.size),
            typed(np.concatenate([self._middle(place) for place in self.axes])),
            [SERVED[place].name for place in self.axes for _ in self.labels],
            textfont={"size": 9, "color": MUTED}, cliponaxis=False, showlegend=False,
        )  # fmt: skip


def totals_table(stages: StageOverlap) -> str:
    """For each axis how long it moves data and how much of that hides, the mean over ranks."""
    heads = ("axis", "moves", "hidden", "exposed", "beside a wait")
    return table(heads, (_total_row(stages.total, place) for place in stages.axes))


def _total_row(total: Overlap, place: int) -> Cells:
    moving = float(total.moving[0, place])
    kinds = (float(kind[0, place]) / moving for kind in (total.hidden, total.exposed, total.beside))
    shares = (share_words(kind if kind > _ROUNDING else 0.0) for kind in kinds)
    return Cells((named(LOOKS[place], SERVED[place].name), unbroken(format_seconds(moving)), *shares))


def _patterned(category: Category, shape: str) -> dict[str, Any]:
    """A category's bars under a pattern that says how it meets computation."""
    pattern = {"shape": shape, "size": 6, "solidity": 0.35, "fgcolor": SURFACE, "bgcolor": category.colour}
    return {**marker(category), "pattern": pattern}
