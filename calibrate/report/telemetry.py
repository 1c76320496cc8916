"""What did the device do while it was measured? Clocks, power and what kept them down, by part and over time.

Moments of a session count from its beginning. A record that was gone on with has several sessions, one after the other:
where seconds go back a new one begins, and is drawn after the one before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median

from calibrate.report.section import Section
from clustersim.common.units import format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, DeviceTelemetry, GpuSample, TelemetrySample
from clustersim.report.figure import share_words


def over_time(moments: Sequence[TelemetrySample]) -> list[TelemetrySample]:
    """Moments of all sessions, one after the other."""
    found: list[TelemetrySample] = []
    base, last = 0.0, 0.0
    for moment in moments:
        if moment.seconds < last:
            base += last
        last = moment.seconds
        found.append(replace(moment, seconds=base + last))
    return found


def load_section(record: CalibrationRecord) -> Section:
    """The device by part."""
    parts = dict.fromkeys(moment.part for moment in record.moments)
    groups = {
        part: [telemetry_sample.state for telemetry_sample in record.moments if telemetry_sample.part == part]
        for part in parts
    }
    states = [row.under for row in record.kernels if row.under is not None]
    groups |= {"kernels' rows": states} if states else {}
    return Section(
        key="under_load",
        title="The device under load",
        heads=("part", "looks", "clock", "power", "temperature", "held down by"),
        rows=tuple((part, f"{len(states):,}", *_state(states)) for part, states in groups.items()),
        content=[{"part": part, **_content(states)} for part, states in groups.items()],
        lead=(
            "Medians, and from least to most in brackets; of a GPU the SM clock. What kept it down, with the share of "
            "looks in which it did."
        ),
        words=(5,),
    )


def _state(states: Sequence[DeviceTelemetry]) -> tuple[str, ...]:
    throttled = ", ".join(f"{name} {share_words(share)}" for name, share in throttles(states).items())
    return (
        _spread([state.sm_clock_mhz for state in states], "MHz"),
        _spread([device_telemetry.power_w for device_telemetry in states], "W"),
        _spread([item.temperature_c for item in states], "°C"),
        throttled or "nothing",
    )


def throttles(states: Sequence[DeviceTelemetry]) -> dict[str, float]:
    """What kept clocks down, by the share of looks in which it did."""
    counted = Counter(name for state in states for name in state.throttled)
    return {name: many / len(states) for name, many in counted.most_common()}


def _spread(values: Sequence[float], unit: str) -> str:
    known = [value for value in values if value]
    if not known:
        return "not said"
    if max(known) == min(known):
        return f"{known[0]:,.0f} {unit}"
    return f"{median(known):,.0f} {unit} ({min(known):,.0f} to {max(known):,.0f})"


def _content(states: Sequence[DeviceTelemetry]) -> dict[str, object]:
    def middle(values: Sequence[float]) -> float | None:
        known = [value for value in values if value]
        return median(known) if known else None

    return {
        "looks": len(states),
        "sm_clock_mhz": middle([state.sm_clock_mhz for state in states]),
        "power_w": middle([device_telemetry.power_w for device_telemetry in states]),
        "temperature_c": middle([item.temperature_c for item in states]),
        "throttled_share": throttles(states),
    }


def bands(moments: Sequence[TelemetrySample]) -> list[tuple[str, float, float]]:
    """Parts with their first and last second, in order of time."""
    runs = [(part, list(run)) for part, run in groupby(moments, key=lambda each: each.part)]
    return [(part, run[0].seconds, run[-1].seconds) for part, run in runs]


def gpus_section(record: CalibrationRecord) -> Section:
    """How far the GPUs of the node differ."""
    fastest = min(row.time.seconds for row in record.gpus)
    return Section(
        key="gpus",
        title="GPUs of this node",
        heads=("GPU", "time of the same product", "longer than the fastest", "under load"),
        rows=tuple(
            (row.place, format_seconds(row.time.seconds), f"{row.time.seconds / fastest - 1.0:+.1%}", _under(row))
            for row in record.gpus
        ),
        content=[
            {"place": row.place, "seconds": row.time.seconds, "longer": row.time.seconds / fastest - 1.0}
            for row in record.gpus
        ],
        lead="A job that waits for all of them runs at the pace of the slowest.",
        words=(3,),
    )


def _under(row: GpuSample) -> str:
    return "" if row.under is None else f"{row.under.sm_clock_mhz:,.0f} MHz, {row.under.power_w:,.0f} W"
