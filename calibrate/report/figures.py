"""How is a record drawn? Efficiency by time, telemetry over time, in-situ factors, bandwidth by payload."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from calibrate.report.efficiency import AchievedEfficiency, family_label
from calibrate.report.telemetry import concatenate_sessions, stage_intervals
from calibrate.report.transfers import call_label, samples_by_shape
from clustersim.common.units import format_bandwidth, format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, InSituSample, TelemetrySample
from clustersim.model.kernels import KernelKind, format_kernel_shape
from clustersim.report.draw.charts import bar_figure, bar_trace, reference_line, xy_figure
from clustersim.report.figure import AxisScale, Figure, Traces, axis_layout, base_layout, format_share, time_scale

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8D96A0", "#999933")
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "star")
_STAGE_COLOURS: Final = (
    "rgba(0,114,178,0.10)",
    "rgba(213,94,0,0.10)",
    "rgba(0,158,115,0.10)",
    "rgba(204,121,167,0.10)",
    "rgba(230,159,0,0.10)",
)
_GAP: Final = 0.08  # fraction of the height between stacked panels
_KIND_LABELS: Final = {
    KernelKind.MATMUL: "matmul",
    KernelKind.ATTENTION_FORWARD: "attention forward",
    KernelKind.ATTENTION_BACKWARD: "attention backward",
}
_MEMORY_BOUND_LABEL: Final = "memory-bound: norms, activations, optimizer, ..."


def efficiency_figure(kernels: Sequence[AchievedEfficiency]) -> Figure:
    """A marker for every kernel: its time and its fraction of the peak."""
    groups: dict[str, list[AchievedEfficiency]] = {}
    for achieved in kernels:
        name = _KIND_LABELS.get(achieved.sample.kind)
        groups.setdefault(_MEMORY_BOUND_LABEL if name is None else f"{name} {achieved.sample.dtype.value}", []).append(
            achieved
        )
    scale = time_scale(max(achieved.seconds for achieved in kernels))
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    traces = [_marker_trace(name, members, index, scale) for index, (name, members) in enumerate(ordered)]
    x = axis_layout(f"measured time [{scale.unit}]", type="log", dtick=1, exponentformat="none")
    y = axis_layout("efficiency", ticksuffix=" %", rangemode="tozero")
    return xy_figure("efficiency", traces, x, y, height=440, narrow={"height": 380, "legend": {"font": {"size": 9}}})


def _marker_trace(name: str, members: Sequence[AchievedEfficiency], index: int, scale: AxisScale) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(name),
        "x": [achieved.seconds / scale.unit_size for achieved in members],
        "y": [100.0 * achieved.efficiency for achieved in members],
        "text": [_hover_text(achieved) for achieved in members],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": _COLOURS[index % len(_COLOURS)],
            "symbol": _SYMBOLS[index % len(_SYMBOLS)],
            "size": 7,
            "opacity": 0.75,
            "line": {"width": 0.5, "color": "@surface"},
        },
    }


def _hover_text(achieved: AchievedEfficiency) -> str:
    name = f"<b>{escape(family_label(achieved.sample))}</b>"
    efficiency_text = f"{format_share(achieved.efficiency)}: {achieved.rate_label}, {format_seconds(achieved.seconds)}"
    return "<br>".join(
        (name, escape(format_kernel_shape(achieved.sample.shape)), efficiency_text, f"bound by {achieved.bound.value}")
    )


def telemetry_figure(record: CalibrationRecord) -> Figure:
    """Clock and power over time, as far as reported, with stages as background rectangles."""
    samples = concatenate_sessions(record.telemetry)
    scale = time_scale(samples[-1].seconds)
    reported = [quantity for quantity in _TELEMETRY_QUANTITIES if any(map(quantity.read_value, samples))]
    stage_shapes = _stage_shapes(samples, scale)
    return Figure(
        name="load",
        traces=[_telemetry_trace(quantity, samples, scale, index) for index, quantity in enumerate(reported)],
        layout=base_layout(
            margin={"l": 8, "r": 12, "t": 26, "b": 40},
            shapes=[rectangle for rectangle, _ in stage_shapes],
            annotations=[annotation for _, annotation in stage_shapes],
            xaxis=axis_layout(
                f"time [{scale.unit}]",
                range=[0, samples[-1].seconds / scale.unit_size or 1.0],
                anchor=f"y{len(reported)}",
            ),
            **{
                f"yaxis{index + 1}": _panel_axis(quantity, index, len(reported))
                for index, quantity in enumerate(reported)
            },
        ),
        height=120 + 150 * len(reported),
        narrow={},
    )


@dataclass(frozen=True, slots=True)
class _TelemetryQuantity:
    """A telemetry quantity. read_value: its value in a sample, None where it is not reported."""

    name: str
    unit: str
    read_value: Callable[[TelemetrySample], float | None]


_TELEMETRY_QUANTITIES: Final = (
    _TelemetryQuantity("clock", "MHz", lambda sample: sample.state.sm_clock_mhz or None),
    _TelemetryQuantity("power", "W", lambda sample: sample.state.power_w or None),
)


def _panel_axis(quantity: _TelemetryQuantity, index: int, count: int) -> dict[str, Any]:
    """The axis of one of several stacked panels."""
    bottom, top = 1.0 - (index + 1) / count, 1.0 - index / count
    return axis_layout(
        f"{quantity.name} [{quantity.unit}]", domain=[bottom + _GAP if index + 1 < count else bottom, top], nticks=5
    )


def _telemetry_trace(
    quantity: _TelemetryQuantity, samples: Sequence[TelemetrySample], scale: AxisScale, index: int
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": quantity.name,
        "yaxis": f"y{index + 1}",
        "x": [sample.seconds / scale.unit_size for sample in samples],
        "y": [quantity.read_value(sample) for sample in samples],
        "text": [_sample_hover_text(sample) for sample in samples],
        "marker": {"size": 4},
        "line": {"color": _COLOURS[index]},
        "hovertemplate": f"%{{text}}<br>{quantity.name} %{{y:,.0f}} {quantity.unit}<extra></extra>",
    }


def _sample_hover_text(sample: TelemetrySample) -> str:
    text = f"<b>{escape(sample.stage)}</b>, {format_seconds(sample.seconds)}"
    throttle_text = ", ".join(sample.state.throttled)
    return f"{text}<br>throttled by {escape(throttle_text)}" if throttle_text else text


def _stage_shapes(samples: Sequence[TelemetrySample], scale: AxisScale) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A rectangle for each stage that was run, and its name above it."""
    intervals = stage_intervals(samples)
    ends = [begin for _, begin, _ in intervals[1:]] + [intervals[-1][2]]
    stage_names = list(dict.fromkeys(stage_name for stage_name, *_ in intervals))
    return [
        (
            {
                "type": "rect",
                "layer": "below",
                "xref": "x",
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"width": 0},
                "x0": begin / scale.unit_size,
                "x1": end / scale.unit_size,
                "fillcolor": _STAGE_COLOURS[stage_names.index(stage_name) % len(_STAGE_COLOURS)],
            },
            {
                "x": begin / scale.unit_size,
                "y": 1,
                "xref": "x",
                "yref": "paper",
                "text": escape(stage_name),
                "showarrow": False,
                "xanchor": "left",
                "yanchor": "bottom",
                "font": {"size": 11, "color": "@muted"},
            },
        )
        for (stage_name, begin, _), end in zip(intervals, ends, strict=True)
    ]


def in_situ_figure(samples: Sequence[InSituSample]) -> Figure:
    """A bar for each family: in-situ time over isolated time."""
    by_time = sorted(samples, key=lambda sample: -sample.in_situ)
    labels = [escape(sample.family.replace("_", " ")) for sample in by_time]
    factors = [sample.factor for sample in by_time]
    hover_texts = [
        f"{format_seconds(sample.in_situ)} in situ, {format_seconds(sample.isolated)} isolated" for sample in by_time
    ]
    bars = bar_trace(
        "", labels, factors, {"color": "#0072B2"}, text=[f"{factor:.2f}" for factor in factors], textposition="outside",
        cliponaxis=False, hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>", customdata=hover_texts,
    )  # fmt: skip
    unit_line = reference_line("x", 1, {"width": 1, "color": "@muted"})
    x = axis_layout("in situ over isolated", range=[0, 1.2 * max(1.0, *factors)])
    height, narrow = 90 + 26 * len(by_time), {"yaxis": {"tickfont": {"size": 9}}}
    return bar_figure("in_situ", [bars], x, height=height, narrow=narrow, shapes=[unit_line], bargap=0.35)


def collectives_figure(record: CalibrationRecord) -> Figure:
    """A line for each collective and group shape: bytes over seconds, by payload."""
    groups = list(samples_by_shape(record).values())
    traces: Traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": escape(call_label(samples[0].call)),
            "x": [sample.call.payload for sample in samples],
            "y": [sample.call.payload / sample.time.seconds / 1e9 for sample in samples],
            "text": [
                f"{format_bytes(sample.call.payload)} in {format_seconds(sample.time.seconds)}: "
                f"{format_bandwidth(sample.call.payload / sample.time.seconds)}"
                for sample in samples
            ],
            "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
            "line": {"color": _COLOURS[index % len(_COLOURS)]},
            "marker": {"symbol": _SYMBOLS[index % len(_SYMBOLS)]},
        }
        for index, samples in enumerate(groups)
    ]
    sizes = [2.0**power for power in range(0, 41, 10)]
    x = axis_layout("payload", type="log", tickvals=sizes, ticktext=[format_bytes(size) for size in sizes])
    y = axis_layout("payload over time [GB/s]", type="log", dtick=1)
    return xy_figure("collectives", traces, x, y, height=460, narrow={"height": 400, "legend": {"font": {"size": 9}}})
