"""How is a record drawn? Efficiency by time, the device over time, factors of a layer, bandwidth by payload."""

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from calibrate.report.efficiency import Reached
from calibrate.report.load import bands, over_time
from calibrate.report.transfers import by_call, call_words
from clustersim.cost.record import ChainRow, Record, family
from clustersim.report.figure import Figure, Scale, Traces, axis, layout, legend, share_words, time_scale
from clustersim.report.operations import shape_words
from clustersim.units import format_bandwidth, format_bytes, format_seconds
from clustersim.workload.kernels import KernelKind

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8D96A0", "#999933")
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "star")
_BANDS: Final = ("rgba(0,114,178,0.10)", "rgba(213,94,0,0.10)", "rgba(0,158,115,0.10)", "rgba(204,121,167,0.10)")
_GROUPS: Final = {
    KernelKind.MATMUL: "matmul",
    KernelKind.ATTENTION_FORWARD: "attention forward",
    KernelKind.ATTENTION_BACKWARD: "attention backward",
}
_OTHERS: Final = "memory-bound: norms, activations, optimizer, ..."


def efficiency_figure(kernels: Sequence[Reached]) -> Figure:
    """A mark for every kernel: how long it takes, and which part of the peak it reaches."""
    groups: dict[str, list[Reached]] = {}
    for each in kernels:
        name = _GROUPS.get(each.row.kind)
        groups.setdefault(_OTHERS if name is None else f"{name} {each.row.dtype.value}", []).append(each)
    scale = time_scale(max(each.seconds for each in kernels))
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return Figure(
        name="efficiency",
        traces=[_marks(name, found, place, scale) for place, (name, found) in enumerate(ordered)],
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis(f"measured time [{scale.unit}]", type="log", dtick=1, exponentformat="none"),
            yaxis=axis("efficiency", ticksuffix=" %", rangemode="tozero"),
        ),
        height=440,
        narrow={"height": 380, "legend": {"font": {"size": 9}}},
    )


def _marks(name: str, found: Sequence[Reached], place: int, scale: Scale) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": escape(name),
        "x": [each.seconds / scale.size for each in found], "y": [100.0 * each.share for each in found],
        "text": [_hover(each) for each in found], "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": _COLOURS[place % len(_COLOURS)], "symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 7,
            "opacity": 0.75, "line": {"width": 0.5, "color": "@surface"},
        },
    }  # fmt: skip


def _hover(each: Reached) -> str:
    name = f"<b>{escape(family(each.row.signature))}</b>"
    reaches = f"{share_words(each.share)}: {each.rate_words}, {format_seconds(each.seconds)}"
    return "<br>".join((name, escape(shape_words(each.row.shape)), reaches, f"bound by {each.bound.value}"))


def load_figure(record: Record) -> Figure:
    """SM clock and power over time, parts as bands."""
    moments = over_time(record.moments)
    scale = time_scale(moments[-1].seconds)
    times = [moment.seconds / scale.size for moment in moments]
    words = [
        f"<b>{escape(each.part)}</b>, {format_seconds(each.seconds)}"
        f"{'<br>held down by ' + escape(', '.join(each.state.throttled)) if each.state.throttled else ''}"
        for each in moments
    ]
    clock = _line("SM clock", times, [each.state.sm_clock_mhz or None for each in moments], words, "MHz")
    power = _line("power", times, [each.state.power_w or None for each in moments], words, "W")
    return Figure(
        name="load",
        traces=[{**clock, "line": {"color": _COLOURS[0]}}, {**power, "line": {"color": _COLOURS[1]}, "yaxis": "y2"}],
        layout=layout(
            shapes=[band for band, _ in _bands(record, scale)],
            annotations=[words for _, words in _bands(record, scale)],
            xaxis=axis(f"time [{scale.unit}]", range=[0, times[-1] or 1.0]),
            yaxis=axis("SM clock [MHz]", domain=[0.55, 1.0], nticks=5),
            yaxis2=axis("power [W]", domain=[0.0, 0.45], nticks=5),
            hovermode="closest",
        ),
        height=420,
        narrow={"height": 380},
    )


def _line(name: str, x: list[float], y: list[float | None], words: list[str], unit: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y, "text": words,
        "marker": {"size": 4}, "hovertemplate": f"%{{text}}<br>{name} %{{y:,.0f}} {unit}<extra></extra>",
    }  # fmt: skip


def _bands(record: Record, scale: Scale) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A rectangle for each part that was run, and its name above it."""
    found = bands(over_time(record.moments))
    ends = [begin for _, begin, _ in found[1:]] + [found[-1][2]]
    colours = {
        part: _BANDS[place % len(_BANDS)] for place, part in enumerate(dict.fromkeys(part for part, *_ in found))
    }
    return [
        (
            {
                "type": "rect", "layer": "below", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0},
                "x0": begin / scale.size, "x1": end / scale.size, "fillcolor": colours[part],
            },
            {
                "x": begin / scale.size, "y": 1, "xref": "x", "yref": "paper", "text": escape(part), "showarrow": False,
                "xanchor": "left", "yanchor": "bottom", "font": {"size": 11, "color": "@muted"},
            },
        )
        for (part, begin, _), end in zip(found, ends, strict=True)
    ]  # fmt: skip


def chain_figure(rows: Sequence[ChainRow]) -> Figure:
    """A bar for each family: times that it takes what it takes alone."""
    ordered = sorted(rows, key=lambda row: -row.in_chain)
    labels = [escape(row.family) for row in ordered]
    one = {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": 1,
        "x1": 1,
        "y0": 0,
        "y1": 1,
        "line": {"width": 1, "color": "@muted"},
    }
    bar = {
        "type": "bar", "orientation": "h", "y": labels, "x": [row.factor for row in ordered],
        "text": [f"{row.factor:.2f}" for row in ordered], "textposition": "outside", "cliponaxis": False,
        "marker": {"color": "#0072B2"},
        "hovertemplate": "<b>%{y}</b><br>%{customdata}<extra></extra>",
        "customdata": [
            f"{format_seconds(row.in_chain)} in the layer, {format_seconds(row.isolated)} alone" for row in ordered
        ],
    }  # fmt: skip
    return Figure(
        name="chain",
        traces=[bar],
        layout=layout(
            shapes=[one],
            dragmode=False,
            bargap=0.35,
            xaxis=axis(
                "in the layer, over alone", range=[0, 1.2 * max(1.0, *(row.factor for row in ordered))], fixedrange=True
            ),
            yaxis=axis("", type="category", autorange="reversed", fixedrange=True, ticksuffix="  "),
        ),
        height=90 + 26 * len(ordered),
        narrow={"yaxis": {"tickfont": {"size": 9}}},
    )


def collectives_figure(record: Record) -> Figure:
    """A line for each collective and number of ranks: bytes over seconds, by payload."""
    groups = list(by_call(record).values())
    traces: Traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": escape(call_words(rows[0].call)),
            "x": [row.call.payload for row in rows], "y": [row.call.payload / row.time.seconds / 1e9 for row in rows],
            "text": [
                f"{format_bytes(row.call.payload)} in {format_seconds(row.time.seconds)}: "
                f"{format_bandwidth(row.call.payload / row.time.seconds)}"
                for row in rows
            ],
            "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
            "line": {"color": _COLOURS[place % len(_COLOURS)]}, "marker": {"symbol": _SYMBOLS[place % len(_SYMBOLS)]},
        }
        for place, rows in enumerate(groups)
    ]  # fmt: skip
    sizes = [2.0**power for power in range(0, 41, 10)]
    return Figure(
        name="collectives",
        traces=traces,
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis("payload", type="log", tickvals=sizes, ticktext=[format_bytes(size) for size in sizes]),
            yaxis=axis("payload over time [GB/s]", type="log"),
        ),
        height=460,
        narrow={"height": 400, "legend": {"font": {"size": 9}}},
    )
