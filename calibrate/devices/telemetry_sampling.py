"""How is a device seen while it works? What others do at the same time: look at it, or keep it busy."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from calibrate.devices.stopwatch import Action
from calibrate.devices.telemetry import mean
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import DeviceTelemetry

_BETWEEN: Final = 0.05  # seconds; drivers refresh power ten times a second


class Watch:
    """What was seen so far."""

    def __init__(self) -> None:
        self.states: list[DeviceTelemetry] = []

    @property
    def under(self) -> DeviceTelemetry | None:
        """The means of it; None where the device tells nothing."""
        return mean(self.states)


@contextmanager
def watching(look: Callable[[], DeviceTelemetry]) -> Iterator[Watch]:
    """Look at a device again and again while the block runs, and once when it ends before the first look."""
    watch = Watch()
    end = repeated(lambda: watch.states.append(look()), _BETWEEN)
    try:
        yield watch
    finally:
        end()
        if not watch.states:
            watch.states.append(look())


def repeated(action: Action, between: Seconds) -> Action:
    """Do something in a thread of its own, each time so long after the last; what is returned ends it, and waits."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(between):
            action()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end
