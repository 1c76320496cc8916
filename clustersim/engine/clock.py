"""How is an event set for a time, and how do events happen?

simpy sets events after a delay; now + (time - now) may round to another time than the one that is meant.
Events happen as in simpy's own `run`, with fewer calls for each of them (a step has tens of thousands).
"""

from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL

from clustersim.units import Seconds


class Clock(simpy.Environment):
    """An environment with events at given times, which nobody else lets happen."""

    def wait(self, seconds: Seconds) -> simpy.Event:
        """An event after some seconds, as simpy's `timeout`."""
        due = _Due(self)
        heappush(self._queue, (self._now + seconds, NORMAL, next(self._eid), due))
        return due

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
        due = _Due(self)
        heappush(self._queue, (time, NORMAL, next(self._eid), due))
        return due


class _Due(simpy.Event):
    """An event that will happen: it is triggered when it is made."""

    _ok, _value = True, None

    def __init__(self, environment: Clock) -> None:
        self.env, self.callbacks = environment, []
