"""How is work on a device timed? The protocol between the measurement method and a device."""

from collections.abc import Callable
from typing import Protocol

from clustersim.common.units import Seconds

Action = Callable[[], None]
BackgroundLoad = Callable[[Seconds], Action]
"""Starts background work that lasts at least the given seconds or until it is ended.

The returned function ends it, or waits for its end.
"""


class Stopwatch(Protocol):
    """Times work on a device."""

    def now(self) -> Seconds:
        """Wall-clock seconds."""

    def time(self, action: Action, repeats: int) -> Seconds:
        """Total seconds that the device works on `repeats` runs of an action."""
