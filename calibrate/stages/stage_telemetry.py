"""What does the device do while a part is measured?

It is looked at every few seconds, from another thread, which becomes moments of the session; rows have means of their
own, of what was seen while each was measured. A CPU is looked at when the part is done, since a thread that looks would
take a core from what is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from calibrate.devices.telemetry_sampling import run_periodically
from calibrate.stages.stage import CalibrationContext
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TelemetrySample

_INTERVAL_SECONDS: Final[Seconds] = 2.0  # 600 moments in twenty minutes


@contextmanager
def record_telemetry(context: CalibrationContext, stage_name: str) -> Iterator[None]:
    """Look at the device while the block runs; the session keeps what was seen, however the block ends."""
    samples: list[TelemetrySample] = []

    def take_sample() -> None:
        samples.append(TelemetrySample(monotonic() - context.start_time, stage_name, context.device.telemetry()))

    stop = take_sample if context.is_cpu else run_periodically(take_sample, _INTERVAL_SECONDS)
    try:
        yield
    finally:
        stop()
        context.session.add_telemetry(samples)
