"""Fluid actions: remaining work that is done at a rate which changes.

Whatever takes time and can be slowed is one: kernels while collectives overlap them, collectives while kernels
do, flows on shared links, segments that members of a group run jointly. In SimGrid's terms: an action with
remaining work, rate, rate bound and last update. When the end moves earlier, another event becomes the completion
and takes over all that wait for the former one; when it moves later, the timer stays and sets the next one.

Reference: Casanova et al., "Versatile, scalable, and accurate simulation of distributed applications and
platforms", J. Parallel Distrib. Comput. 74(10), 2014, section 3 (fluid models with lazy updates).
"""

from math import inf

import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import SimEnvironment


class Completion:
    """When is something done? `done` is the event, and may be replaced: read it when you begin to wait."""

    __slots__ = ("done",)

    done: simpy.Event

    def complete_with(self, event: simpy.Event) -> None:
        """Complete when another event occurs, which takes over all callbacks: the replaced one does nothing."""
        event.callbacks += self.done.callbacks
        self.done.callbacks = []
        self.done = event


class FluidAction(Completion):
    """Work that remained at the last update, in seconds at rate 1.

    rate: 0 until the action begins; rate_bound: the highest.
    """

    __slots__ = ("_timer", "_timer_due", "environment", "last_update", "rate", "rate_bound", "remaining")

    def __init__(self, environment: SimEnvironment, remaining: Seconds) -> None:
        self.environment, self.remaining, self.rate, self.rate_bound = environment, remaining, 0.0, 1.0
        self.done = self._timer = simpy.Event(environment)
        self.last_update, self._timer_due = 0.0, inf

    def set_rate(self, rate: float) -> None:
        """Continue at this rate, above 0, from now on."""
        now = self.environment.now
        self.remaining = max(self.remaining - (now - self.last_update) * self.rate, 0.0)
        self.last_update, self.rate = now, rate
        self._set_timer(now, self.remaining / rate)

    def set_rate_bound(self, rate: float) -> None:
        """Bound the rate from now on."""
        self.rate_bound = rate
        self.set_rate(rate)

    def set_remaining(self, remaining: Seconds) -> None:
        """Continue with other remaining work, at rate 1, from now on."""
        now = self.environment.now
        self.remaining, self.rate, self.last_update = remaining, 1.0, now
        self._set_timer(now, remaining)

    def _set_timer(self, now: Seconds, seconds: Seconds) -> None:
        """Complete after so many seconds; a timer that is due before stays, and sets the next one."""
        due = now + seconds
        if due <= self._timer_due:
            if self._timer is not self.done:
                self._timer.callbacks = []
            self.complete_with(simpy.Timeout(self.environment, seconds))
            self._timer, self._timer_due = self.done, due
        elif self._timer is self.done:
            self.complete_with(simpy.Event(self.environment))
            self._timer.callbacks = [self._set_next_timer]

    def _set_next_timer(self, _: simpy.Event) -> None:
        now, self._timer_due = self.environment.now, inf
        self._set_timer(now, max(self.last_update + self.remaining / self.rate - now, 0.0))
