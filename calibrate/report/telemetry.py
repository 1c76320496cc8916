"""What did the device do while it was measured? Clocks, power and throttle reasons, by stage and over time.

Telemetry times of a session count from its start. A record that was continued has several sessions: where
times decrease a new one begins, and is drawn after the previous one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median

from calibrate.report.section import ReportSection
from clustersim.common.units import format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, DeviceTelemetry, GpuSample, TelemetrySample
from clustersim.report.figure import format_share


def concatenate_sessions(samples: Sequence[TelemetrySample]) -> list[TelemetrySample]:
    """The telemetry samples of all sessions on one time axis."""
    shifted: list[TelemetrySample] = []
    offset, last = 0.0, 0.0
    for sample in samples:
        if sample.seconds < last:
            offset += last
        last = sample.seconds
        shifted.append(replace(sample, seconds=offset + last))
    return shifted


def telemetry_section(record: CalibrationRecord) -> ReportSection:
    """Telemetry by stage."""
    stage_names = dict.fromkeys(sample.stage for sample in record.telemetry)
    states_by_stage = {
        stage_name: [sample.state for sample in record.telemetry if sample.stage == stage_name]
        for stage_name in stage_names
    }
    states = [kernel_sample.telemetry for kernel_sample in record.kernels if kernel_sample.telemetry is not None]
    states_by_stage |= {"kernel samples": states} if states else {}
    return ReportSection(
        key="telemetry",
        title="Telemetry under load",
        heads=("stage", "samples", "clock", "power", "temperature", "throttled by"),
        rows=tuple(
            (stage_name, f"{len(states):,}", *_telemetry_cells(states))
            for stage_name, states in states_by_stage.items()
        ),
        content=[{"stage": stage_name, **_telemetry_json(states)} for stage_name, states in states_by_stage.items()],
        lead=(
            "Medians, with minimum and maximum in brackets; of a GPU the SM clock. Throttle reasons, with the share of "
            "samples in which each applied."
        ),
        text_columns=(5,),
    )


def _telemetry_cells(states: Sequence[DeviceTelemetry]) -> tuple[str, ...]:
    throttled = ", ".join(f"{name} {format_share(share)}" for name, share in throttle_shares(states).items())
    return (
        _format_range([state.sm_clock_mhz for state in states], "MHz"),
        _format_range([state.power_w for state in states], "W"),
        _format_range([state.temperature_c for state in states], "°C"),
        throttled or "nothing",
    )


def throttle_shares(states: Sequence[DeviceTelemetry]) -> dict[str, float]:
    """Throttle reasons, with the fraction of samples in which each applied."""
    counts = Counter(name for state in states for name in state.throttled)
    return {name: count / len(states) for name, count in counts.most_common()}


def _format_range(values: Sequence[float], unit: str) -> str:
    nonzero = [value for value in values if value]
    if not nonzero:
        return "not reported"
    if max(nonzero) == min(nonzero):
        return f"{nonzero[0]:,.0f} {unit}"
    return f"{median(nonzero):,.0f} {unit} ({min(nonzero):,.0f} to {max(nonzero):,.0f})"


def _telemetry_json(states: Sequence[DeviceTelemetry]) -> dict[str, object]:
    def median_or_none(values: Sequence[float]) -> float | None:
        nonzero = [value for value in values if value]
        return median(nonzero) if nonzero else None

    return {
        "samples": len(states),
        "sm_clock_mhz": median_or_none([state.sm_clock_mhz for state in states]),
        "power_w": median_or_none([state.power_w for state in states]),
        "temperature_c": median_or_none([state.temperature_c for state in states]),
        "throttled_share": throttle_shares(states),
    }


def stage_intervals(samples: Sequence[TelemetrySample]) -> list[tuple[str, float, float]]:
    """Stages with their first and last second, in order of time."""
    stage_runs = [
        (stage_name, list(stage_samples))
        for stage_name, stage_samples in groupby(samples, key=lambda sample: sample.stage)
    ]
    return [
        (stage_name, stage_samples[0].seconds, stage_samples[-1].seconds) for stage_name, stage_samples in stage_runs
    ]


def gpus_section(record: CalibrationRecord) -> ReportSection:
    """How much the GPUs of the node differ."""
    fastest = min(sample.time.seconds for sample in record.gpus)
    return ReportSection(
        key="gpus",
        title="GPUs of this node",
        heads=("GPU", "time of the same matmul", "slowdown to the fastest", "under load"),
        rows=tuple(
            (
                sample.device,
                format_seconds(sample.time.seconds),
                f"{sample.time.seconds / fastest - 1.0:+.1%}",
                _format_telemetry(sample),
            )
            for sample in record.gpus
        ),
        content=[
            {"device": sample.device, "seconds": sample.time.seconds, "slowdown": sample.time.seconds / fastest - 1.0}
            for sample in record.gpus
        ],
        lead="A job that waits for all of them runs at the rate of the slowest.",
        text_columns=(3,),
    )


def _format_telemetry(sample: GpuSample) -> str:
    return (
        ""
        if sample.telemetry is None
        else f"{sample.telemetry.sm_clock_mhz:,.0f} MHz, {sample.telemetry.power_w:,.0f} W"
    )
