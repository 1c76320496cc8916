"""How is an event set for a time?

simpy sets events after a delay; now + (time - now) may round to another time than the one that is meant.
"""

from heapq import heappush

import simpy
from simpy.events import NORMAL

from clustersim.units import Seconds


class Clock(simpy.Environment):
    """An environment with events at given times."""

    def at(self, time: Seconds) -> simpy.Event:
        """An event that happens at a time, which is not past."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (time, NORMAL, next(self._eid), event))
        return event
