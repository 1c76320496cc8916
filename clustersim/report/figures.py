"""What are a page's figures outside it? Plotly's own, for notebooks and papers.

They look as on a page in a light scheme. What a page's scripts draw from millions of numbers, as the reader zooms, is
not among them: the timeline, memory over time, all ranks.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import plotly.graph_objects as plotly

from clustersim.answer import Answer
from clustersim.report.document import STYLE
from clustersim.report.figure import Figure
from clustersim.report.page import cards

_VARIABLE: Final = re.compile(r"--([a-z-]+): (#[0-9a-f]{6})")
_HOUSE: Final = {
    "paper_bgcolor": "@surface",
    "plot_bgcolor": "@surface",
    "font": {"size": 12, "color": "@ink"},
}


def figures_of(result: Answer) -> dict[str, plotly.Figure]:
    """Figures by their names, in the page's order."""
    drawn = (figure for card in cards(result) for figure in card.figures if not figure.behaviour)
    return {figure.name: _figure(figure) for figure in drawn}


def _figure(figure: Figure) -> plotly.Figure:
    traces = figure.choices[0][1] if figure.choices else figure.traces
    layout = {**_HOUSE, **figure.layout, "height": figure.height}
    return plotly.Figure(_coloured(traces), _coloured(layout))


def _coloured(value: Any) -> Any:
    """With the colours that names of CSS variables stand for."""
    if isinstance(value, Mapping):
        return {key: _coloured(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_coloured(each) for each in value]
    return _light().get(value[1:], value) if isinstance(value, str) and value.startswith("@") else value


@cache
def _light() -> dict[str, str]:
    """The page's CSS variables in a light scheme, which come first."""
    return dict(reversed(_VARIABLE.findall(STYLE.read_text(encoding="utf-8"))))
