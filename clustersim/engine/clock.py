"""How is an event set for a time, and how do events happen?

simpy sets events after a delay; now + (time - now) may round to another time than the one that is meant.
Events happen as in simpy's own `run`, which makes two calls for each of them: that is a tenth of a large step.
"""

from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL

from clustersim.units import Seconds


class Clock(simpy.Environment):
    """An environment with events at given times."""

    def happen(self) -> None:
        """Let all events happen: simpy's `run` to the end, without failed events that somebody waits for."""
        queue = self._queue
        while queue:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as simpy marks it
            for callback in callbacks:
                callback(event)
            if not event._ok:
                raise event._value

    def at(self, time: Seconds) -> simpy.Event:
        """An event that happens at a time, which is not past."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (time, NORMAL, next(self._eid), event))
        return event
