"""How is a device observed, or kept busy, while it is measured? Periodic actions in a background thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from calibrate.devices.stopwatch import Action
from calibrate.devices.telemetry import mean_telemetry
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import DeviceTelemetry

_INTERVAL_SECONDS: Final = 0.05  # seconds between samples; drivers refresh power ten times a second


class TelemetryLog:
    """Telemetry sampled so far."""

    def __init__(self) -> None:
        self.samples: list[DeviceTelemetry] = []

    @property
    def mean_telemetry(self) -> DeviceTelemetry | None:
        """Mean of the samples; None where the device reports nothing."""
        return mean_telemetry(self.samples)


@contextmanager
def sample_while_running(read_telemetry: Callable[[], DeviceTelemetry]) -> Iterator[TelemetryLog]:
    """Sample telemetry periodically while the block runs, and once at its end if the block was too short."""
    log = TelemetryLog()
    stop = run_periodically(lambda: log.samples.append(read_telemetry()), _INTERVAL_SECONDS)
    try:
        yield log
    finally:
        stop()
        if not log.samples:
            log.samples.append(read_telemetry())


def run_periodically(action: Action, interval: Seconds) -> Action:
    """Run an action periodically in a thread; the returned function stops the thread and waits for it."""
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
