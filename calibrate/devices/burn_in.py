"""When is a device as warm as in a step that runs for hours?

It runs the matmuls of `load_generator` until its SM clock drifts less than 1 % over 10 s (the mean of the
last third of the window over that of the first; single samples differ by one clock step, which is about as
much), or until the given time is up. Where no driver reports the clock, the rate of the matmuls stands for
it: they are bound by the SMs. A GPU starts at its boost clock, reaches its power limit within a second, its
steady temperature in a minute or two. A device without a load generator (a CPU) is sampled once.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

from calibrate.devices.device import TorchDevice
from calibrate.devices.load_generator import LoadGenerator
from clustersim.common.units import Seconds, format_seconds
from clustersim.cost.calibration_record import DeviceTelemetry, TelemetrySample

STAGE_NAME: Final = "burn_in"
_SAMPLE_SECONDS: Final = 0.5  # seconds of load per telemetry sample
_WINDOW_SECONDS: Final = 10.0
_MAX_DRIFT: Final = 0.01

SpeedSample = tuple[Seconds, float]
"""Time and speed: the SM clock, or matmuls per second."""


def burn_in(device: TorchDevice, seconds: Seconds, notify: Callable[[str], None]) -> tuple[TelemetrySample, ...]:
    """Warm a device for at most `seconds`; returns its telemetry meanwhile. notify: gets the outcome as text."""
    start_time, load_generator = perf_counter(), device.load_generator()
    if load_generator is None:
        return (TelemetrySample(0.0, STAGE_NAME, device.telemetry()),)
    samples: list[TelemetrySample] = []
    speeds: list[SpeedSample] = []
    while (drift := _relative_drift(speeds)) is None or abs(drift) >= _MAX_DRIFT:
        if perf_counter() - start_time >= seconds:
            break
        samples.append(_sample_under_load(device, load_generator, start_time))
        speeds.append((samples[-1].seconds, samples[-1].state.sm_clock_mhz or 1.0 / load_generator.matmul_seconds))
    notify(_describe_drift(speeds, drift))
    return tuple(samples)


def _sample_under_load(device: TorchDevice, load_generator: LoadGenerator, start_time: Seconds) -> TelemetrySample:
    """Mean telemetry over some load: longer than a driver's averaging time."""
    with device.sample_telemetry() as log:
        load_generator.run_load(_SAMPLE_SECONDS)
    return TelemetrySample(perf_counter() - start_time, STAGE_NAME, log.mean_telemetry or DeviceTelemetry())


def _relative_drift(speeds: Sequence[SpeedSample]) -> float | None:
    """Relative change of the speed over the window; None before the window is full."""
    if not speeds or speeds[-1][0] - speeds[0][0] < _WINDOW_SECONDS:
        return None
    end = speeds[-1][0]
    window = [(end - time, speed) for time, speed in speeds if end - time <= _WINDOW_SECONDS]
    first = [speed for age, speed in window if age >= _WINDOW_SECONDS * 2 / 3]
    last = [speed for age, speed in window if age <= _WINDOW_SECONDS / 3]
    return (sum(last) / len(last)) / (sum(first) / len(first)) - 1.0


def _describe_drift(speeds: Sequence[SpeedSample], drift: float | None) -> str:
    if not speeds or drift is None:
        return f"too short to tell whether clocks are steady: burn-in takes {format_seconds(_WINDOW_SECONDS)} at least"
    change = speeds[-1][1] / speeds[0][1] - 1.0
    text = f"steady after {format_seconds(round(speeds[-1][0]))}: {change:+.1%} from the first half second"
    return (
        text if abs(drift) < _MAX_DRIFT else f"not steady: {drift:+.1%} over the last {format_seconds(_WINDOW_SECONDS)}"
    )
