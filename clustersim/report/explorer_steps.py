"""How does the step time scale? Steps that were simulated beforehand, drawn and listed on the explorer page."""

from html import escape
from typing import Any, Final

from clustersim.analysis.exploration import Exploration, Point, Study
from clustersim.report.document import Card, section, slot
from clustersim.report.figure import Figure, Traces, axis, layout, legend, time_scale
from clustersim.report.wording import mfu_words
from clustersim.units import format_bytes, format_number, format_step_time

_LINES: Final = {"weak": ("#0072B2", "circle", "solid"), "strong": ("#D55E00", "square", "dash")}
_ROOM: Final = 1.6  # for words beside the longest bar
_HEADS: Final = ("", "GPUs", "step", "tokens/s/GPU", "MFU", "bubble", "exposed", "memory", "")


def steps_card(exploration: Exploration) -> Card:
    """Weak and strong scaling as lines, layouts and ZeRO stages as bars, all as numbers."""
    scaling = [study for study in exploration.studies if study.name in _LINES]
    others = [study for study in exploration.studies if study.name not in _LINES]
    figures = [_rates(scaling), _times(scaling), *map(_bars, others)]
    titles = (
        "Tokens per second and GPU",
        "Step time",
        *(f"Tokens per second and GPU, by {each.title}" for each in others),
    )
    pictures = "".join(
        f"<div><h3>{escape(title)}</h3>{slot(figure)}</div>" for title, figure in zip(titles, figures, strict=True)
    )
    words = " ".join(study.words for study in exploration.studies)
    lead = f"Simulated for this page, whatever the controls say. {words} Steps that do not fit in memory are marked."
    tables = "".join(map(_table, exploration.studies))
    body = f'<div class="pictures">{pictures}</div>{tables}'
    return Card(section("Step time, simulated", body, lead=lead), tuple(figures))


def _simulated(study: Study) -> list[Point]:
    return [point for point in study.points if not point.missing]


def _rates(studies: list[Study]) -> Figure:
    traces: Traces = [_line(study, [point.tokens_per_gpu for point in _simulated(study)]) for study in studies]
    return _figure("explorer-rates", traces, "tokens/s/GPU", studies)


def _times(studies: list[Study]) -> Figure:
    longest = max((point.step_time for study in studies for point in _simulated(study)), default=1.0)
    scale = time_scale(longest)
    traces: Traces = [_line(study, [point.step_time / scale.size for point in _simulated(study)]) for study in studies]
    return _figure("explorer-times", traces, f"step time [{scale.unit}]", studies)


def _figure(name: str, traces: Traces, words: str, studies: list[Study]) -> Figure:
    sizes = sorted({point.gpus for study in studies for point in _simulated(study)})
    ticks = {"tickvals": sizes, "ticktext": [f"{size:,}" for size in sizes]}
    return Figure(
        name=name,
        traces=traces,
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis("GPUs", type="log", fixedrange=True, **ticks),
            yaxis=axis(words, rangemode="tozero", fixedrange=True),
            dragmode=False,
        ),
        height=300,
        narrow={"legend": {"font": {"size": 10}}},
    )


def _line(study: Study, values: list[float]) -> dict[str, Any]:
    """A study along its GPUs; open crosses are steps that do not fit."""
    colour, symbol, dash = _LINES[study.name]
    points = _simulated(study)
    return {
        "type": "scatter", "mode": "lines+markers+text", "name": study.title,
        "x": [point.gpus for point in points], "y": values,
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
    bars = {
        "type": "bar", "orientation": "h", "y": [escape(point.label) for point in points],
        "x": [point.tokens_per_gpu for point in points],
        "text": [_bar_words(point) for point in points], "textposition": "outside", "cliponaxis": False,
        "marker": {
            "color": ["#0072B2" if point.fits else "#BFC6CD" for point in points],
            "line": {"width": 1, "color": "@muted"},
            "pattern": {"shape": ["" if point.fits else "/" for point in points], "size": 7, "solidity": 0.2},
        },
        "customdata": [_hover(point) for point in points], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip
    return Figure(
        name=f"explorer-{study.name}",
        traces=[bars],
        layout=layout(
            xaxis=axis("tokens/s/GPU", fixedrange=True, range=[0, _ROOM * max(each.tokens_per_gpu for each in points)]),
            yaxis=axis("", type="category", autorange="reversed", fixedrange=True, ticksuffix=" "),
            dragmode=False,
            bargap=0.25,
        ),
        height=70 + 28 * max(4, len(points)),
        narrow={"xaxis": {"nticks": 4}, "yaxis": {"tickfont": {"size": 10}}},
    )


def _bar_words(point: Point) -> str:
    words = (format_number(point.tokens_per_gpu), *["the scenario"] * point.own, *["does not fit"] * (not point.fits))
    return ", ".join(words)


def _table(study: Study) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in _HEADS)
    rows = "".join(map(_row, study.points))
    simulated = len(_simulated(study))
    left = len(study.points) - simulated
    missing = f", {left} not" if left else ""
    return (
        f"<details><summary>{escape(study.words)} {simulated} simulated{missing}</summary>"
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _row(point: Point) -> str:
    head = f"<tr><th>{escape(point.label)}</th><td>{point.gpus:,}</td>"
    if point.missing:
        return f'{head}<td class="words" colspan="7">not simulated: {escape(point.missing)}</td></tr>'
    cells = (
        format_step_time(point.step_time), format_number(point.tokens_per_gpu), mfu_words(point.mfu, point.mfu_causal),
        f"{point.bubble:.1%}", f"{point.exposed:.1%}", format_bytes(point.peak),
        "fits" if point.fits else "does not fit",
    )  # fmt: skip
    return head + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
