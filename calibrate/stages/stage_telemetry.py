"""What does the device do while a stage runs?

It is sampled every few seconds from another thread, for the session's telemetry; samples of kernels have
their own means, of telemetry while each was measured. A CPU is sampled when the stage has finished, since a
sampling thread would take a core away from what is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from calibrate.devices.telemetry_sampling import run_periodically
from calibrate.stages.stage import CalibrationContext
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TelemetrySample

_INTERVAL_SECONDS: Final[Seconds] = 2.0  # 600 samples in twenty minutes


@contextmanager
def record_telemetry(context: CalibrationContext, stage_name: str) -> Iterator[None]:
    """Sample the device's telemetry while the block runs; the session keeps it, however the block ends."""
    samples: list[TelemetrySample] = []

    def take_sample() -> None:
        samples.append(TelemetrySample(monotonic() - context.start_time, stage_name, context.device.telemetry()))

    stop = take_sample if context.is_cpu else run_periodically(take_sample, _INTERVAL_SECONDS)
    try:
        yield
    finally:
        stop()
        context.session.add_telemetry(samples)
