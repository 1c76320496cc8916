"""How is a device seen while it works? What others do at the same time: look at it, or keep it busy."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from calibrate.devices.stopwatch import Action
from calibrate.devices.telemetry import mean_telemetry
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import DeviceTelemetry

_INTERVAL_SECONDS: Final = 0.05  # seconds; drivers refresh power ten times a second


class TelemetryLog:
    """What was seen so far."""

    def __init__(self) -> None:
        self.samples: list[DeviceTelemetry] = []

    @property
    def mean_telemetry(self) -> DeviceTelemetry | None:
        """The means of it; None where the device tells nothing."""
        return mean_telemetry(self.samples)


@contextmanager
def sample_while_running(read_telemetry: Callable[[], DeviceTelemetry]) -> Iterator[TelemetryLog]:
    """Look at a device again and again while the block runs, and once when it ends before the first look."""
    log = TelemetryLog()
    stop = run_periodically(lambda: log.samples.append(read_telemetry()), _INTERVAL_SECONDS)
    try:
        yield log
    finally:
        stop()
        if not log.samples:
            log.samples.append(read_telemetry())


def run_periodically(action: Action, interval: Seconds) -> Action:
    """Do something in a thread of its own, each time so long after the last; what is returned ends it, and waits."""
    stop_event = threading.Event()

    def loop() -> None:
        while not stop_event.wait(interval):
            action()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()

    def stop() -> None:
        stop_event.set()
        thread.join()

    return stop
