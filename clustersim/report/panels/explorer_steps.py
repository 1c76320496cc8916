"""How does the step time scale? Steps that were simulated beforehand, drawn and listed on the explorer page."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from clustersim.common.units import format_bytes, format_number, format_step_time
from clustersim.report.draw.charts import Drawn, bar, chart, plot
from clustersim.report.figure import Figure, axis, time_scale
from clustersim.results.explorer_tables import Point, Study

_LINES: Final = {"weak": ("#0072B2", "circle", "solid"), "strong": ("#D55E00", "square", "dash")}
_ROOM: Final = 1.6  # for words beside the longest bar


def step_figures(studies: Sequence[Study]) -> dict[str, Figure]:
    """Weak and strong scaling as lines, layouts and ZeRO stages as bars, by their titles; none without studies."""
    if not studies:
        return {}
    scaling = [study for study in studies if study.name in _LINES]
    scale = time_scale(max((point.step_time for study in scaling for point in _simulated(study)), default=1.0))
    rate, time = "Tokens per second and GPU", f"step time [{scale.unit}]"
    others = {f"{rate}, by {study.title}": _bars(study) for study in studies if study.name not in _LINES}
    return {
        rate: _lines("explorer-rates", scaling, "tokens/s/GPU", lambda point: point.tokens_per_gpu),
        "Step time": _lines("explorer-times", scaling, time, lambda point: point.step_time / scale.size),
        **others,
    }


def _simulated(study: Study) -> list[Point]:
    return [point for point in study.points if not point.missing]


def _lines(name: str, studies: Sequence[Study], words: str, value: Callable[[Point], float]) -> Figure:
    sizes = sorted({point.gpus for study in studies for point in _simulated(study)})
    x = axis("GPUs", type="log", fixedrange=True, tickvals=sizes, ticktext=[f"{size:,}" for size in sizes])
    y, narrow = axis(words, rangemode="tozero", fixedrange=True), {"legend": {"font": {"size": 10}}}
    return plot(name, [_line(study, value) for study in studies], x, y, height=300, narrow=narrow, dragmode=False)


def _line(study: Study, value: Callable[[Point], float]) -> Drawn:
    """A study along its GPUs; open crosses are steps that do not fit."""
    colour, symbol, dash = _LINES[study.name]
    points = _simulated(study)
    return {
        "type": "scatter", "mode": "lines+markers+text", "name": study.title,
        "x": [point.gpus for point in points], "y": [value(point) for point in points],
        "text": ["" if point.fits else "does not fit" for point in points], "textposition": "top center",
        "textfont": {"size": 10, "color": "@alarm"}, "cliponaxis": False,
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": 9, "color": colour, "symbol": [symbol if point.fits else "x-open" for point in points]},
        "customdata": [_hover(point) for point in points], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _hover(point: Point) -> str:
    fits = "fits" if point.fits else "does not fit"
    return (
        f"<b>{point.gpus:,} GPUs, {escape(point.label)}</b><br>{format_step_time(point.step_time)} a step, "
        f"{format_number(point.tokens_per_gpu)} tokens/s/GPU<br>{format_bytes(point.peak)}: {fits}"
    )


def _bars(study: Study) -> Figure:
    """Tokens per second and GPU of each point; hatched where it does not fit."""
    points = _simulated(study)
    look = {
        "color": ["#0072B2" if point.fits else "#BFC6CD" for point in points],
        "line": {"width": 1, "color": "@muted"},
        "pattern": {"shape": ["" if point.fits else "/" for point in points], "size": 7, "solidity": 0.2},
    }
    bars = bar(
        "", [escape(point.label) for point in points], [point.tokens_per_gpu for point in points], look,
        text=[_bar_words(point) for point in points], textposition="outside", cliponaxis=False,
        customdata=[_hover(point) for point in points], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    most = max(item.tokens_per_gpu for item in points)
    return chart(
        f"explorer-{study.name}",
        [bars],
        axis("tokens/s/GPU", range=[0, _ROOM * most]),
        height=70 + 28 * max(4, len(points)),
        narrow={"xaxis": {"nticks": 4}, "yaxis": {"tickfont": {"size": 10}}},
        bargap=0.25,
    )


def _bar_words(point: Point) -> str:
    words = (format_number(point.tokens_per_gpu), *["the scenario"] * point.own, *["does not fit"] * (not point.fits))
    return ", ".join(words)
