"""How is a search looked at? The layout to take, the best ones, what they trade, how degrees matter, why, and how sure.

Times are those of simulations; where a cell or a line was not simulated it says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.common.units import format_step_time
from clustersim.report.draw.charts import Drawn, lines, plot, points, words_in
from clustersim.report.figure import Figure, Traces, axis, time_scale
from clustersim.report.html_document import document, drawn
from clustersim.report.panels.difference_bars import changed_parts
from clustersim.report.row_selection import grouped
from clustersim.report.terminal import search as said
from clustersim.report.terminal.search import bare, pair_words, short, shown_keys
from clustersim.report.theme import SERIES
from clustersim.results.search_result import Bounded, Found, Layout
from clustersim.results.time_categories import PARTS

_ASKED: Final = (
    "layout.tp", "layout.pp", "schedule", "layout.data", "training.microbatch", "layout.ep", "layout.cp",
    "training.recompute",
)  # fmt: skip
_MOST_AXES: Final = 6  # of which pairs are drawn
_SHADES: Final = ("#00415F", "#0072B2", "#4A9CCB", "#8FC1DE", "#C3CCD4", "#DDE2E6")  # of lines, fastest first
_MOST_LINES: Final = 400


def search_page(found: Found, file: Path) -> str:
    """The page as HTML text."""
    rivals = {"the next": found.runner_up, "the file's own layout": found.first} if found.simulated else {}
    others = {name: other for name, other in rivals.items() if other is not None}
    figures = {**(_figures(found) if found.simulated else {}), "why": why_figure(found, others) if others else None}
    content = drawn("search.html", said=said, found=found, file=file, others=others, **figures)
    return document(f"Best layouts of {file.name}", [content])


def _figures(found: Found) -> dict[str, Figure | None]:
    """Those of all that was looked at; None where layouts differ in too little."""
    every: list[Layout | Bounded] = [*found.simulated, *found.bounded]
    here = [item for item in every if item.job == found.choice.job]
    shown = found.simulated[:_MOST_LINES]
    pairs, keys = _axes(found, here), _axes(found, shown)
    return {
        "pareto": pareto_figure(found),
        "heat": heat_figure(found, pairs) if len(pairs) > 1 else None,
        "lines": lines_figure(found, shown, keys) if len(keys) > 1 else None,
    }


def _axes(found: Found, layouts: Sequence[Layout | Bounded]) -> dict[str, list[str]]:
    """Keys in which layouts differ, with their values in order; first those that people ask for first."""
    values: dict[str, set[str]] = {}
    for layout in layouts:
        for key, value in shown_keys(layout, found).items():
            values.setdefault(key, set()).add(value)
    asked = [*(key for key in _ASKED if key in values), *sorted(values.keys() - {*_ASKED})]
    return {key: sorted(values[key], key=_order) for key in asked if len(values[key]) > 1}


def _order(value: str) -> tuple[int, float, str]:
    """Numbers first, as numbers."""
    return (0, float(value), "") if value.isdecimal() else (1, 0.0, value)


def pareto_figure(found: Found) -> Figure:
    """Step time against memory that is left, a trace for each number of GPUs, and the line of what nothing beats."""
    scale = time_scale(max(layout.step_time for layout in found.simulated))
    every, fronts = (grouped(some, lambda each: (each.gpus, each.cluster)) for some in (found.simulated, found.pareto))
    traces: Traces = []
    for place, ((gpus, cluster), there) in enumerate(sorted(every.items(), key=lambda job: job[0])):
        front = fronts.get((gpus, cluster), [])
        traces += [
            _dots(found, there, f"{gpus:,} GPUs of {cluster}", SERIES[place % len(SERIES)], scale.size),
            lines(*_places(front, scale.size), {"color": "@muted", "width": 1, "dash": "dot"}),
        ]
    taken = _dots(found, [found.choice], "to take", "@ink", scale.size)
    taken["marker"] |= {"symbol": "star", "size": 14}
    x, y = axis(f"step time [{scale.unit}]"), axis("memory left on the fullest GPU [GiB]", rangemode="tozero")
    return plot("pareto", [*traces, taken], x, y, height=380, narrow={"legend": {"font": {"size": 9}}})


def _dots(found: Found, layouts: Sequence[Layout], name: str, colour: str, size: float) -> Drawn:
    return points(
        name, *_places(layouts, size), {"color": colour, "size": 8, "opacity": 0.75},
        customdata=[[escape(short(layout, found)), format_step_time(layout.step_time)] for layout in layouts],
        hovertemplate="<b>%{customdata[1]}</b>, %{y:.1f} GiB left<br>%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _places(layouts: Sequence[Layout], size: float) -> tuple[list[float], list[float]]:
    """Step times and what is left of the memory."""
    return [layout.step_time / size for layout in layouts], [item.headroom / 2**30 for item in layouts]


def heat_figure(found: Found, axes: Mapping[str, list[str]]) -> Figure:
    """The fastest step for each pair of values of two keys; a choice for each pair of keys."""
    keys = [*axes][:_MOST_AXES]
    choices = tuple((f"{_word(one)} and {_word(two)}", [_heat(found, one, two)]) for one, two in combinations(keys, 2))
    most = max(len(axes[key]) for key in keys)
    x, y = axis("", type="category", fixedrange=True), axis("", type="category", fixedrange=True, ticksuffix="  ")
    plain = {"showlegend": False, "dragmode": False}
    figure = plot("heat", [], x, y, height=110 + 34 * most, narrow={"font": {"size": 9}}, **plain)
    return replace(figure, choices=choices)


def _heat(found: Found, one: str, two: str) -> Drawn:
    """Of the job of the layout to take: for each pair of values whether it is only a bound, and the least score."""
    least: dict[tuple[str, str], tuple[bool, float]] = {}
    scores: list[tuple[Layout | Bounded, tuple[bool, float]]]
    scores = [(layout, (False, layout.score)) for layout in found.simulated]
    for item, score in (*scores, *((bounded, (True, bounded.bound)) for bounded in found.bounded)):
        keys = shown_keys(item, found)
        if item.job == found.choice.job and one in keys and two in keys:
            pair = keys[one], keys[two]
            least[pair] = min(least.get(pair, score), score)
    rows, columns = (sorted({pair[place] for pair in least}, key=_order) for place in (0, 1))
    cells = [[least.get((row, column)) for column in columns] for row in rows]
    sign = "≤ " if found.more_is_better else "≥ "
    return {
        "type": "heatmap", "x": [pair_words(two, column) for column in columns],
        "y": [pair_words(one, row) for row in rows], "z": [[cell and cell[1] for cell in row] for row in cells],
        "text": [[f"{sign * cell[0]}{found.score_words(cell[1])}" if cell else "" for cell in row] for row in cells],
        "texttemplate": "%{text}", "hovertemplate": "%{y}, %{x}: %{text}<extra></extra>",
        "colorscale": [[0, "#8FC1DE"], [1, "#EEF3F8"]], "showscale": False, "xgap": 2, "ygap": 2,
    }  # fmt: skip


def _word(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")


def lines_figure(found: Found, layouts: Sequence[Layout], axes: Mapping[str, list[str]]) -> Figure:
    """Parallel coordinates: a place for each key, a line for each layout through its values, the darker the faster."""
    scores = [layout.score for layout in layouts]
    low, span = min(scores), max(scores) - min(scores) or 1.0
    groups = grouped(layouts, lambda each: int((each.score - low) / span * (len(_SHADES) - 1)))
    traces = [_lines(found, groups[shade], shade, axes) for shade in sorted(groups, reverse=True)]
    words, places, height = [*map(_word, axes)], [*range(len(axes))], 160 + 44 * max(map(len, axes.values()))
    x = axis("", tickvals=places, ticktext=words, fixedrange=True, range=[-0.3, len(axes) - 0.5])
    y = axis("", visible=False, fixedrange=True, range=[-0.08, 1.08])
    plain = {"showlegend": False, "dragmode": False}
    return plot("lines", [*traces, _values(axes)], x, y, height=height, narrow={"font": {"size": 9}}, **plain)


def _height(key: str, value: str, axes: Mapping[str, list[str]]) -> float:
    return axes[key].index(value) / (len(axes[key]) - 1)


def _lines(found: Found, layouts: Sequence[Layout], shade: int, axes: Mapping[str, list[str]]) -> Drawn:
    """Layouts of one shade, with gaps between them and where one has no value of a key."""
    places: list[float | None] = []
    heights: list[float | None] = []
    words: list[list[str]] = []
    for layout in layouts:
        keys = shown_keys(layout, found)
        places += [*range(len(axes)), None]
        heights += [_height(key, keys[key], axes) if key in keys else None for key in axes] + [None]
        words += [[format_step_time(layout.step_time), escape(short(layout, found))]] * (len(axes) + 1)
    return {
        "type": "scatter", "mode": "lines+markers", "x": places, "y": heights, "customdata": words,
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
        "line": {"color": _SHADES[shade], "width": 1 if shade else 2.5}, "marker": {"size": 6},
    }  # fmt: skip


def _values(axes: Mapping[str, list[str]]) -> Drawn:
    """The values beside their places."""
    every = [(place, _height(key, value, axes), value) for place, key in enumerate(axes) for value in axes[key]]
    x, y, values = zip(*every, strict=True)
    words = [f" {escape(bare(value))}" for value in values]
    return words_in(list(x), list(y), words, textfont={"color": "@ink", "size": 11}, textposition="top right")


def why_figure(found: Found, others: Mapping[str, Layout]) -> Figure:
    """For each other layout a bar for every part that differs."""
    whys = [found.why(other) for other in others.values()]
    changes = np.array([[why.get(part.value, 0.0) for part in PARTS] for why in whys])
    height, narrow = 110 + 50 * len(others), {"legend": {"font": {"size": 9}}}
    return changed_parts("why", [*others], changes, "longer by", height=height, narrow=narrow)
