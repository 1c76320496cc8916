"""What does the device do while a part is measured?

It is looked at every few seconds, from another thread, which becomes moments of the session; rows have means of their
own, of what was seen while each was measured. A CPU is looked at when the part is done, since a thread that looks would
take a core from what is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from calibrate.devices.telemetry_sampling import repeated
from calibrate.stages.stage import Bench
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TelemetrySample

_BETWEEN: Final[Seconds] = 2.0  # 600 moments in twenty minutes


@contextmanager
def looked_at(bench: Bench, part: str) -> Iterator[None]:
    """Look at the device while the block runs; the session keeps what was seen, however the block ends."""
    moments: list[TelemetrySample] = []

    def look() -> None:
        moments.append(TelemetrySample(monotonic() - bench.began, part, bench.device.state()))

    end = look if bench.is_cpu else repeated(look, _BETWEEN)
    try:
        yield
    finally:
        end()
        bench.session.seen(moments)
