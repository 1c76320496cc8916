"""The clock: a simpy environment with events at absolute times and callbacks at the end of an instant.

All of it uses simpy's public interface. simpy schedules events after a delay, and processes events of equal time
in the order in which they were scheduled. A delay of time - now leads to exactly that time up to twice the
present time (Sterbenz, Floating-Point Computation, 1974, theorem 4.3.1), beyond that to within its last bit.
"""

from collections import deque
from collections.abc import Callable

import simpy

from clustersim.common.units import Seconds


class SimEnvironment(simpy.Environment):
    """A simpy environment; `run` and `process` are simpy's, as are `simpy.Event` and `simpy.Timeout`."""

    def __init__(self, start: Seconds = 0.0) -> None:
        super().__init__(start)
        self._deferred: deque[Callable[[], None]] = deque()

    def event_at(self, time: Seconds) -> simpy.Event:
        """An event at an absolute time, which must not be in the past."""
        return simpy.Timeout(self, max(time - self.now, 0.0))

    def call_at_end_of_instant(self, callback: Callable[[], None]) -> None:
        """Call back once all other events of this instant are processed, those included that they cause."""
        self._deferred.append(callback)

    @property
    def instant_is_over(self) -> bool:
        """Whether nothing else is due at this instant, neither an event nor a callback at its end."""
        return self.peek() > self.now and not self._deferred

    def step(self) -> None:
        """Process the next event, or the next callback at the end of this instant if no event is due at it."""
        if self._deferred and self.peek() > self.now:
            self._deferred.popleft()()
        else:
            simpy.Environment.step(self)
