"""How is a record said in a line?"""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Final

from clustersim.common.units import format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, DeviceTelemetry, InSituSample

_APART: Final = 0.1  # half of what lies between p5 and p95, as a part of the median
_REASONS: Final = 5  # why kernels are missing, that are said


def state_words(state: DeviceTelemetry) -> str:
    """A device under load."""
    known = {
        f"clock {state.sm_clock_mhz:,.0f} MHz": state.sm_clock_mhz,
        f"power {state.power_w:,.0f} W": state.power_w,
        f"{state.temperature_c:.0f} °C": state.temperature_c,
    }
    words = [text for text, value in known.items() if value]
    throttled = f"held down by {', '.join(state.throttled)}" if state.throttled else ""
    return ", ".join(filter(None, (*words, throttled))) or "the device does not say its clock"


def outcome_words(record: CalibrationRecord) -> str:
    """Kernels by what became of them."""
    outcomes = Counter(row.outcome for row in record.kernels)
    return ", ".join(f"{many:,} {outcome.value.replace('_', ' ')}" for outcome, many in outcomes.items())


def reason_lines(record: CalibrationRecord) -> list[str]:
    """Why kernels have no time, the most frequent reasons first."""
    reasons = Counter(row.source for row in record.kernels if row.time is None)
    return [f"{many:,} x {reason}" for reason, many in reasons.most_common(_REASONS)]


def chain_factor(rows: tuple[InSituSample, ...]) -> float | None:
    """Times that all kernels of a layer take in it what they take alone; families count by their time."""
    return sum(row.in_chain for row in rows) / sum(row.isolated for row in rows) if rows else None


def steady(record: CalibrationRecord) -> DeviceTelemetry | None:
    """The device at the end of its soak, or as it was seen last."""
    soaked = [moment.state for moment in record.moments if moment.part == "soak"]
    states = soaked or [moment.state for moment in record.moments]
    return states[-1] if states else None


def summary_lines(record: CalibrationRecord) -> Iterator[str]:
    """What a session found, in the order in which it was measured."""
    state, factor = steady(record), chain_factor(record.chain)
    if state is not None:
        yield f"under load: {state_words(state)}"
    yield f"kernels: {outcome_words(record) or 'none'}"
    yield from (f"  {line}" for line in reason_lines(record))
    if factor is not None:
        yield f"in a step kernels take {factor:.3g} times what they take alone ({len(record.chain)} families)"
    for row in record.host:
        forward, backward = format_seconds(row.forward), format_seconds(row.backward)
        yield f"host, {row.state.value.replace('_', ' ')}: {forward} for each launch of forward, {backward} of backward"
    for step in record.steps:
        predicted, measured = format_seconds(step.predicted), format_seconds(step.measured)
        yield f"unseen step, {step.what}: predicted {predicted}, measured {measured} ({step.error:+.1%})"
    yield from _fit(record)
    yield from _doubts(record)


def _fit(record: CalibrationRecord) -> Iterator[str]:
    errors = {} if record.kernel_fit is None else record.kernel_fit.residuals
    rows = sum(error.rows for error in errors.values())
    if rows:
        mean = sum(fit_residual.rows * fit_residual.error for fit_residual in errors.values()) / rows
        yield f"other kernels: a model fitted to {rows:,} of these, which it meets within {mean:.0%}"


def _doubts(record: CalibrationRecord) -> Iterator[str]:
    """What a user should know who trusts the record."""
    times = [row.time.dispersion for row in record.kernels if row.time is not None]
    apart = [time for time in times if time is not None]
    middle = median(apart) if apart else 0.0
    if middle >= _APART:
        yield (
            f"warning: half of the kernels differ by {middle:.0%} or more from run to run: this machine does other "
            "work, or its clock changes; delete the record and measure again when it is quiet"
        )
