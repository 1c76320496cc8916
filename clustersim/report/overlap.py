"""How much communication hides behind computation? A bar for each stage and mesh axis, and the totals.

Each bar is the time in which the rank computes or the axis moves data: computation with nothing of the axis beside it,
both at once, then what is exposed, and what moves while the rank waits for something else. What is hatched costs
nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Final

import numpy as np

from clustersim.analysis.overlap import Overlap
from clustersim.arrays import FloatArray
from clustersim.parallel.mesh import SERVED
from clustersim.report.document import Card, section, slot
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
from clustersim.units import format_seconds

LOOKS: Final = tuple(AXIS_LOOKS[axis] for axis in SERVED)
"""The category of each of `SERVED`."""
_ALONE: Final = "compute only"
_ROUNDING: Final = 1e-9  # of what a time is a part of
_BAND: Final = 0.84  # of a row that its bars fill
_LEAD: Final = (
    "For each {row} a bar for each kind of communication: how long ranks only compute, compute while data moves "
    "(hatched: hidden), and move data that nothing hides. They wait for what is exposed; what moves beside a wait for "
    "something else costs nothing."
)


@dataclass(frozen=True, slots=True)
class StageOverlap:
    """Overlap of stages, the mean over the ranks of each.

    total: [1, axes] the mean over all ranks; labels, short: names of the stages; word: what they are called.
    """

    overlap: Overlap
    total: Overlap
    labels: tuple[str, ...]
    short: tuple[str, ...]
    word: str

    @property
    def axes(self) -> list[int]:
        """The places in `SERVED` of those that move anything."""
        moving: list[int] = np.flatnonzero(self.overlap.moving.max(axis=0) > 0).tolist()
        return moving


def overlap_card(stages: StageOverlap) -> Card:
    """The bars, and how much of each axis hides."""
    drawn = stage_bars(stages)
    figure = overlap_figure(stages)
    body = f'<div class="two wide-left">{slot(figure)}{totals_table(stages)}</div>'
    some = f"{len(drawn.labels)} of {drawn.of:,} {stages.word}s are shown, evenly spaced."
    caption, lead = some if len(drawn.labels) < drawn.of else "", _LEAD.format(row=stages.word) + drawn.note("the step")
    return Card(section("Communication and computation", body, lead=lead, caption=caption), (figure,))


def stage_bars(stages: StageOverlap) -> Bars:
    """Times of every stage, axis and kind: neighbours that are alike share their bars."""
    found = stages.overlap
    kinds = np.concatenate((found.alone, found.hidden, found.exposed, found.beside), axis=1)
    return bars(stages.labels, stages.short, kinds, found.step)


def _drawn(stages: StageOverlap, drawn: Bars) -> StageOverlap:
    """The stages as they are drawn."""
    alone, hidden, exposed, beside = np.split(drawn.values, 4, axis=1)
    found = Overlap(alone, hidden, exposed, beside, stages.overlap.step)
    return replace(stages, overlap=found, labels=drawn.labels, short=drawn.short)


def overlap_figure(every: StageOverlap) -> Figure:
    """Stacked bars, one for each axis of each stage, or of several that are alike."""
    drawn = stage_bars(every)
    stages = _drawn(every, drawn)
    found, many = stages.overlap, len(stages.labels)
    reach = float((found.alone + found.moving)[:, stages.axes].max(initial=0.0))
    scale = time_scale(reach)
    each = max(12 * len(stages.axes), min(14 + 12 * len(stages.axes), 1200 // max(1, many)))
    traces, height = [*_traces(stages, scale.size), _names(stages, scale.size)], 130 + each * many
    return Figure(
        name="overlap",
        traces=traces,
        layout=layout(
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis(f"time [{scale.unit}]", range=[0, 1.04 * reach / scale.size or 1], fixedrange=True),
            yaxis=axis(
                "", range=[many - 0.5, -0.5], tickmode="array", tickvals=list(range(many)), fixedrange=True,
                ticktext=[escape(label) + "  " for label in stages.labels], showgrid=False,
            ),
            dragmode=False,
        ),
        height=height,
        narrow={
            "height": narrow_height(height, sum(trace.get("showlegend", True) for trace in traces)),
            "legend": {"font": {"size": 9}},
            "yaxis": {"ticktext": [f"{words} " for words in drawn.lines]},
        },
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


def _traces(stages: StageOverlap, size: float) -> Iterator[dict[str, Any]]:
    """A trace for each axis and kind; computation alone has one legend entry for all axes."""
    found = stages.overlap
    for place in stages.axes:
        name, base = SERVED[place].name, np.zeros(len(stages.labels))
        for words, kind, look in (
            (_ALONE, found.alone, marker(Category.COMPUTE)),
            (f"{name} hidden", found.hidden, _patterned(LOOKS[place], "/")),
            (f"{name} exposed", found.exposed, marker(LOOKS[place])),
            (f"{name} beside a wait", found.beside, _patterned(LOOKS[place], ".")),
        ):
            seconds = np.where(kind[:, place] > _ROUNDING * found.step, kind[:, place], 0.0)
            if seconds.any():
                yield _bars(stages, place, _Kind(words, look, base, seconds), size)
            base = base + seconds


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all bars of one kind show. base: [stages] seconds from where on; seconds: [stages] for how long."""

    words: str
    look: dict[str, Any]
    base: FloatArray
    seconds: FloatArray


def _bars(stages: StageOverlap, place: int, kind: _Kind, size: float) -> dict[str, Any]:
    """One kind of one axis."""
    words, seconds = kind.words, kind.seconds
    hover = [
        f"<b>{escape(label)}</b>, {SERVED[place].name}<br>{words}: {format_seconds(float(each))}"
        for label, each in zip(stages.labels, seconds, strict=True)
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": words,
        "legendgroup": words,
        "showlegend": place == stages.axes[0] or words != _ALONE,
        "y": typed(_middle(stages, place)),
        "width": 0.9 * _BAND / len(stages.axes),
        "base": typed(kind.base / size),
        "x": typed(seconds / size),
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": kind.look,
    }


def _middle(stages: StageOverlap, place: int) -> FloatArray:
    """Where the bars of an axis stand: [stages]."""
    number, many = stages.axes.index(place), len(stages.axes)
    rows = np.arange(len(stages.labels), dtype=np.float64)
    return rows + _BAND * ((number + 0.5) / many - 0.5)


def _names(stages: StageOverlap, size: float) -> dict[str, Any]:
    """The name of the axis at the end of each bar."""
    ends = stages.overlap.alone + stages.overlap.moving
    return {
        "type": "scatter",
        "mode": "text",
        "x": typed(np.concatenate([ends[:, place] for place in stages.axes]) / size),
        "y": typed(np.concatenate([_middle(stages, place) for place in stages.axes])),
        "text": [SERVED[place].name for place in stages.axes for _ in stages.labels],
        "textposition": "middle right",
        "textfont": {"size": 9, "color": MUTED},
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _patterned(category: Category, shape: str) -> dict[str, Any]:
    """A category's bars under a pattern that says how it meets computation."""
    pattern = {"shape": shape, "size": 6, "solidity": 0.35, "fgcolor": SURFACE, "bgcolor": category.colour}
    return {**marker(category), "pattern": pattern}
