"""What does a device do while it is timed, and by whose clock? The seam between the method and a device."""

from collections.abc import Callable
from typing import Protocol

from clustersim.common.units import Seconds

Action = Callable[[], None]
BackgroundLoad = Callable[[Seconds], Action]
"""Begins other work that lasts so many seconds, or until it is ended; what it returns ends it, or waits for it."""


class Stopwatch(Protocol):
    """A device's clock."""

    def now(self) -> Seconds:
        """Seconds by the wall."""

    def time(self, action: Action, repeats: int) -> Seconds:
        """Seconds that the device works on so many runs of an action, all together."""
