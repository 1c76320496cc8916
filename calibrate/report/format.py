"""How is a record described in a line of text?"""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Final

from clustersim.common.units import format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, DeviceTelemetry, InSituSample

_NOISY_DISPERSION: Final = 0.1  # half of the range from p5 to p95, relative to the median
_MAX_REASONS: Final = 5  # printed reasons for missing kernels


def describe_telemetry(state: DeviceTelemetry) -> str:
    """A device under load."""
    value_by_text = {
        f"clock {state.sm_clock_mhz:,.0f} MHz": state.sm_clock_mhz,
        f"power {state.power_w:,.0f} W": state.power_w,
        f"{state.temperature_c:.0f} °C": state.temperature_c,
    }
    labels = [text for text, value in value_by_text.items() if value]
    throttled = f"throttled by {', '.join(state.throttled)}" if state.throttled else ""
    return ", ".join(filter(None, (*labels, throttled))) or "the device does not report its clock"


def describe_outcomes(record: CalibrationRecord) -> str:
    """Numbers of kernels by outcome."""
    outcomes = Counter(sample.outcome for sample in record.kernels)
    return ", ".join(f"{count:,} {outcome.value.replace('_', ' ')}" for outcome, count in outcomes.items())


def failure_reason_lines(record: CalibrationRecord) -> list[str]:
    """Why kernels have no time, the most frequent reasons first."""
    reasons = Counter(sample.source for sample in record.kernels if sample.time is None)
    return [f"{count:,} x {reason}" for reason, count in reasons.most_common(_MAX_REASONS)]


def in_situ_factor(samples: tuple[InSituSample, ...]) -> float | None:
    """In-situ time of all kernels of a layer over their isolated time; families are weighted by time."""
    return sum(sample.in_situ for sample in samples) / sum(sample.isolated for sample in samples) if samples else None


def steady_telemetry(record: CalibrationRecord) -> DeviceTelemetry | None:
    """Telemetry at the end of the burn-in, or else the last sample."""
    burn_in_states = [sample.state for sample in record.telemetry if sample.stage == "burn_in"]
    states = burn_in_states or [sample.state for sample in record.telemetry]
    return states[-1] if states else None


def summary_lines(record: CalibrationRecord) -> Iterator[str]:
    """Results of a session, in the order in which they were measured."""
    state, factor = steady_telemetry(record), in_situ_factor(record.in_situ)
    if state is not None:
        yield f"under load: {describe_telemetry(state)}"
    yield f"kernels: {describe_outcomes(record) or 'none'}"
    yield from (f"  {line}" for line in failure_reason_lines(record))
    if factor is not None:
        yield f"in situ kernels take {factor:.3g} times as long as isolated ({len(record.in_situ)} families)"
    for sample in record.host_launches:
        forward, backward = format_seconds(sample.forward), format_seconds(sample.backward)
        yield (
            f"host, {sample.mode.value.replace('_', ' ')}: {forward} for each launch of forward, {backward} of backward"
        )
    for step in record.holdout_steps:
        predicted, measured = format_seconds(step.predicted), format_seconds(step.measured)
        yield f"holdout step, {step.description}: predicted {predicted}, measured {measured} ({step.error:+.1%})"
    yield from _fit_lines(record)
    yield from _warning_lines(record)


def _fit_lines(record: CalibrationRecord) -> Iterator[str]:
    residuals = {} if record.kernel_fit is None else record.kernel_fit.residuals
    sample_count = sum(residual.samples for residual in residuals.values())
    if sample_count:
        mean = sum(residual.samples * residual.error for residual in residuals.values()) / sample_count
        yield f"other kernels: a model fitted to {sample_count:,} of these, which it meets within {mean:.0%}"


def _warning_lines(record: CalibrationRecord) -> Iterator[str]:
    """Warnings for users of the record."""
    all_dispersions = [sample.time.dispersion for sample in record.kernels if sample.time is not None]
    dispersions = [dispersion for dispersion in all_dispersions if dispersion is not None]
    median_dispersion = median(dispersions) if dispersions else 0.0
    if median_dispersion >= _NOISY_DISPERSION:
        yield (
            f"warning: half of the kernels differ by {median_dispersion:.0%} or more from run to run: this machine "
            "does other "
            "work, or its clock changes; delete the record and measure again when it is quiet"
        )
