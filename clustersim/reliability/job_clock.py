"""The clock of one job: what happens while the job waits, and what of it ends the waiting.

A job is the only one that waits; all else (repairs, detections, maintenance) happens at a time that is known in advance
and takes none itself. So a queue of calls is enough, and a run costs a fraction of what it would as processes of an
event loop. What is due at the same time happens in the order in which it was planned.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from clustersim.common.units import Seconds


class WallLimitReached(Exception):  # noqa: N818 - control flow, not an error
    """The clock has reached the end of the simulated time."""


class JobClock:
    """now: seconds since the start of the job; limit: time at which waiting raises `WallLimitReached`."""

    __slots__ = ("_cause", "_count", "_planned", "limit", "now")

    def __init__(self, limit: Seconds) -> None:
        self.now, self.limit = 0.0, limit
        self._planned: list[tuple[Seconds, int, Callable[[], None]]] = []
        self._count = 0
        self._cause: object = None

    def call_after(self, delay: Seconds, call: Callable[[], None]) -> None:
        """Plan a call, which may interrupt the job."""
        self._count += 1
        heappush(self._planned, (self.now + delay, self._count, call))

    def interrupt(self, cause: object) -> None:
        """End the job's waiting now. cause: what the wait returns."""
        self._cause = cause

    def wait(self, delay: Seconds) -> object:
        """Let so much time pass; return the cause of an interrupt, with which it ends, or None."""
        planned, end = self._planned, self.now + delay
        self._count += 1
        until = min(end, self.limit)
        while planned and planned[0] < (until, self._count):
            self.now, _, call = heappop(planned)
            call()
            if self._cause is not None:
                cause, self._cause = self._cause, None
                return cause
        self.now = until
        if end >= self.limit:
            raise WallLimitReached
        return None
