"""The event loop: a simpy environment with events at absolute times and a faster queue.

simpy schedules events after a delay; now + (time - now) may round to another time than the intended one.
Events are processed in simpy's order, with less work for each (a step has tens of thousands): half of them
are due at the instant at which they are scheduled, behind all that was scheduled before, so they need no
heap.
"""

from collections import deque
from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL, EventPriority

from clustersim.common.units import Seconds


class SimEnvironment(simpy.Environment):
    """A simpy environment with events at absolute times; only `run_all` processes it, not simpy's `run` or `step`."""

    now: Seconds = 0.0  # simpy has a property here, which costs a call for every access

    def __init__(self, start: Seconds = 0.0) -> None:
        super().__init__(start)
        self.now = start
        self._immediate: deque[simpy.Event] = deque()
        self._deferred: deque[simpy.Event] = deque()

    def event_after(self, seconds: Seconds) -> simpy.Event:
        """An event after a delay in seconds, as simpy's `timeout`."""
        event, time = _ScheduledEvent(self), self.now + seconds  # `event_at` inlined
        if time > self.now:
            heappush(self._queue, (time, NORMAL, next(self._eid), event))
        else:
            self._immediate.append(event)
        return event

    def event_at(self, time: Seconds) -> simpy.Event:
        """An event at an absolute time, which must not be in the past."""
        event = _ScheduledEvent(self)
        if time > self.now:
            heappush(self._queue, (time, NORMAL, next(self._eid), event))
        else:
            self._immediate.append(event)
        return event

    def end_of_instant(self) -> simpy.Event:
        """An event at the end of this instant, after all events that were already due."""
        event = _ScheduledEvent(self)
        self._deferred.append(event)
        return event

    @property
    def instant_is_over(self) -> bool:
        """Whether no more events are due at this instant."""
        return not (self._immediate or self._deferred)

    def schedule(self, event: simpy.Event, priority: EventPriority = NORMAL, delay: Seconds = 0.0) -> None:
        """See simpy, which calls this for triggered events."""
        if priority == NORMAL and self.now + delay == self.now:
            self._immediate.append(event)
        else:
            heappush(self._queue, (self.now + delay, priority, next(self._eid), event))

    def run_all(self) -> None:
        """Process all events: simpy's `run` until the queue is empty, without failed events that a process waits for.

        What is due at this instant in the heap was scheduled before the instant began, so before all that was
        scheduled in it (except starts of processes, which simpy processes first).
        """
        heap, immediate, deferred = self._queue, self._immediate, self._deferred
        while heap or immediate or deferred:
            if heap and (not (immediate or deferred) or heap[0][0] == self.now):
                self.now, _, _, event = heappop(heap)
                self._now = self.now
            else:
                event = (immediate or deferred).popleft()
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # simpy's mark of a processed event
            for callback in callbacks:
                callback(event)
            if not event._ok:
                raise event._value


class _ScheduledEvent(simpy.Event):
    """An event that is triggered when it is created, as simpy's Timeout."""

    _ok, _value = True, None

    def __init__(self, environment: SimEnvironment) -> None:
        self.env, self.callbacks = environment, []
