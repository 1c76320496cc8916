"""How is a record drawn? Efficiency by time, the device over time, factors of a layer, bandwidth by payload."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from calibrate.report.efficiency import Reached, family_words
from calibrate.report.telemetry import bands, over_time
from calibrate.report.transfers import by_call, call_words
from clustersim.common.units import format_bandwidth, format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, InSituSample, TelemetrySample
from clustersim.model.kernels import KernelKind
from clustersim.report.draw.charts import bar, chart, level, plot
from clustersim.report.export.span_descriptions import shape_words
from clustersim.report.figure import Figure, Scale, Traces, axis, layout, share_words, time_scale

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8D96A0", "#999933")
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "star")
_BANDS: Final = (
    "rgba(0,114,178,0.10)",
    "rgba(213,94,0,0.10)",
    "rgba(0,158,115,0.10)",
    "rgba(204,121,167,0.10)",
    "rgba(230,159,0,0.10)",
)
_GAP: Final = 0.08  # of the height, between drawings above each other
_GROUPS: Final = {
    KernelKind.MATMUL: "matmul",
    KernelKind.ATTENTION_FORWARD: "attention forward",
    KernelKind.ATTENTION_BACKWARD: "attention backward",
}
_OTHERS: Final = "memory-bound: norms, activations, optimizer, ..."


def efficiency_figure(kernels: Sequence[Reached]) -> Figure:
    """A mark for every kernel: how long it takes, and which part of the peak it reaches."""
    groups: dict[str, list[Reached]] = {}
    for kernel in kernels:
        name = _GROUPS.get(kernel.row.kind)
        groups.setdefault(_OTHERS if name is None else f"{name} {kernel.row.dtype.value}", []).append(kernel)
    scale = time_scale(max(reached.seconds for reached in kernels))
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    traces = [_marks(name, found, place, scale) for place, (name, found) in enumerate(ordered)]
    x = axis(f"measured time [{scale.unit}]", type="log", dtick=1, exponentformat="none")
    y = axis("efficiency", ticksuffix=" %", rangemode="tozero")
    return plot("efficiency", traces, x, y, height=440, narrow={"height": 380, "legend": {"font": {"size": 9}}})


def _marks(name: str, found: Sequence[Reached], place: int, scale: Scale) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": escape(name),
        "x": [reached.seconds / scale.size for reached in found], "y": [100.0 * item.share for item in found],
        "text": [_hover(element) for element in found], "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": _COLOURS[place % len(_COLOURS)], "symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 7,
            "opacity": 0.75, "line": {"width": 0.5, "color": "@surface"},
        },
    }  # fmt: skip


def _hover(each: Reached) -> str:
    name = f"<b>{escape(family_words(each.row))}</b>"
    reaches = f"{share_words(each.share)}: {each.rate_words}, {format_seconds(each.seconds)}"
    return "<br>".join((name, escape(shape_words(each.row.shape)), reaches, f"bound by {each.bound.value}"))


def load_figure(record: CalibrationRecord) -> Figure:
    """Clock and power over time, as far as the device says them, with its parts as bands."""
    moments = over_time(record.moments)
    scale = time_scale(moments[-1].seconds)
    told = [item for item in _TOLD if any(map(item.of, moments))]
    drawn = _bands(moments, scale)
    return Figure(
        name="load",
        traces=[_line(element, moments, scale, place) for place, element in enumerate(told)],
        layout=layout(
            margin={"l": 8, "r": 12, "t": 26, "b": 40},
            shapes=[band for band, _ in drawn],
            annotations=[words for _, words in drawn],
            xaxis=axis(
                f"time [{scale.unit}]", range=[0, moments[-1].seconds / scale.size or 1.0], anchor=f"y{len(told)}"
            ),
            **{f"yaxis{place + 1}": _panel(entry, place, len(told)) for place, entry in enumerate(told)},
        ),
        height=120 + 150 * len(told),
        narrow={},
    )


@dataclass(frozen=True, slots=True)
class _Told:
    """What a device says of itself. of: its value at a moment, None where it does not say."""

    name: str
    unit: str
    of: Callable[[TelemetrySample], float | None]


_TOLD: Final = (
    _Told("clock", "MHz", lambda moment: moment.state.sm_clock_mhz or None),
    _Told("power", "W", lambda moment: moment.state.power_w or None),
)


def _panel(told: _Told, place: int, many: int) -> dict[str, Any]:
    """The axis of one of several drawings above each other."""
    bottom, top = 1.0 - (place + 1) / many, 1.0 - place / many
    return axis(f"{told.name} [{told.unit}]", domain=[bottom + _GAP if place + 1 < many else bottom, top], nticks=5)


def _line(told: _Told, moments: Sequence[TelemetrySample], scale: Scale, place: int) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines+markers", "name": told.name, "yaxis": f"y{place + 1}",
        "x": [moment.seconds / scale.size for moment in moments], "y": [told.of(telemetry_sample) for telemetry_sample in moments],
        "text": [_moment_words(item) for item in moments], "marker": {"size": 4}, "line": {"color": _COLOURS[place]},
        "hovertemplate": f"%{{text}}<br>{told.name} %{{y:,.0f}} {told.unit}<extra></extra>",
    }  # fmt: skip


def _moment_words(moment: TelemetrySample) -> str:
    words = f"<b>{escape(moment.part)}</b>, {format_seconds(moment.seconds)}"
    held = ", ".join(moment.state.throttled)
    return f"{words}<br>held down by {escape(held)}" if held else words


def _bands(moments: Sequence[TelemetrySample], scale: Scale) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A rectangle for each part that was run, and its name above it."""
    found = bands(moments)
    ends = [begin for _, begin, _ in found[1:]] + [found[-1][2]]
    parts = list(dict.fromkeys(part for part, *_ in found))
    return [
        (
            {
                "type": "rect", "layer": "below", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0},
                "x0": begin / scale.size, "x1": end / scale.size,
                "fillcolor": _BANDS[parts.index(part) % len(_BANDS)],
            },
            {
                "x": begin / scale.size, "y": 1, "xref": "x", "yref": "paper", "text": escape(part), "showarrow": False,
                "xanchor": "left", "yanchor": "bottom", "font": {"size": 11, "color": "@muted"},
            },
        )
        for (part, begin, _), end in zip(found, ends, strict=True)
    ]  # fmt: skip


def chain_figure(rows: Sequence[InSituSample]) -> Figure:
    """A bar for each family: times that it takes what it takes alone."""
    ordered = sorted(rows, key=lambda row: -row.in_chain)
    labels = [escape(row.family.replace("_", " ")) for row in ordered]
    factors = [row.factor for row in ordered]
    words = [f"{format_seconds(row.in_chain)} in the layer, {format_seconds(row.isolated)} alone" for row in ordered]
    bars = bar(
        "", labels, factors, {"color": "#0072B2"}, text=[f"{factor:.2f}" for factor in factors], textposition="outside",
        cliponaxis=False, hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>", customdata=words,
    )  # fmt: skip
    one = level("x", 1, {"width": 1, "color": "@muted"})
    x = axis("in the layer, over alone", range=[0, 1.2 * max(1.0, *factors)])
    height, narrow = 90 + 26 * len(ordered), {"yaxis": {"tickfont": {"size": 9}}}
    return chart("chain", [bars], x, height=height, narrow=narrow, shapes=[one], bargap=0.35)


def collectives_figure(record: CalibrationRecord) -> Figure:
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
    x = axis("payload", type="log", tickvals=sizes, ticktext=[format_bytes(size) for size in sizes])
    y = axis("payload over time [GB/s]", type="log", dtick=1)
    return plot("collectives", traces, x, y, height=460, narrow={"height": 400, "legend": {"font": {"size": 9}}})
