"""How is an event set for a time, and how do events happen?

simpy sets events after a delay; now + (time - now) may round to another time than the one that is meant.
Events happen in simpy's own order, with less work for each of them (a step has tens of thousands): half of them happen
at the instant at which they are set, behind all that was set before, so they need no heap.
"""

from collections import deque
from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL, EventPriority

from clustersim.common.units import Seconds


class SimEnvironment(simpy.Environment):
    """An environment with events at given times, which nobody else lets happen (`run` and `step` of simpy do not)."""

    now: Seconds = 0.0  # where simpy has a property, which is a call each time that it is read

    def __init__(self, start: Seconds = 0.0) -> None:
        super().__init__(start)
        self.now = start
        self._immediate: deque[simpy.Event] = deque()
        self._deferred: deque[simpy.Event] = deque()

    def event_after(self, seconds: Seconds) -> simpy.Event:
        """An event after some seconds, as simpy's `timeout`."""
        event, time = _ScheduledEvent(self), self.now + seconds  # as `at`, without a call more for each
        if time > self.now:
            heappush(self._queue, (time, NORMAL, next(self._eid), event))
        else:
            self._immediate.append(event)
        return event

    def event_at(self, time: Seconds) -> simpy.Event:
        """An event that happens at a time, which is not past."""
        event = _ScheduledEvent(self)
        if time > self.now:
            heappush(self._queue, (time, NORMAL, next(self._eid), event))
        else:
            self._immediate.append(event)
        return event

    def end_of_instant(self) -> simpy.Event:
        """An event at the end of this instant, once all that was already due has happened."""
        event = _ScheduledEvent(self)
        self._deferred.append(event)
        return event

    @property
    def instant_is_over(self) -> bool:
        """Whether nothing more happens in this instant."""
        return not (self._immediate or self._deferred)

    def schedule(self, event: simpy.Event, priority: EventPriority = NORMAL, delay: Seconds = 0.0) -> None:
        """See simpy, which calls this for events that are triggered."""
        if priority == NORMAL and self.now + delay == self.now:
            self._immediate.append(event)
        else:
            heappush(self._queue, (self.now + delay, priority, next(self._eid), event))

    def run_all(self) -> None:
        """Let all events happen: simpy's `run` to the end, without failed events that somebody waits for.

        What waits in the heap for this instant was set before it began, so before all that was set in it (but for the
        beginnings of processes, which simpy lets go first).
        """
        heap, immediate, deferred = self._queue, self._immediate, self._deferred
        while heap or immediate or deferred:
            if heap and (not (immediate or deferred) or heap[0][0] == self.now):
                self.now, _, _, event = heappop(heap)
                self._now = self.now
            else:
                event = (immediate or deferred).popleft()
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as simpy marks it
            for callback in callbacks:
                callback(event)
            if not event._ok:
                raise event._value


class _ScheduledEvent(simpy.Event):
    """An event that will happen: it is triggered when it is made."""

    _ok, _value = True, None

    def __init__(self, environment: SimEnvironment) -> None:
        self.env, self.callbacks = environment, []
