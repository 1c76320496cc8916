"""How do pieces of a block go on that share links with nobody for now?

As one event, at the end of the last of them. Their links are kept meanwhile, and nothing moves there as far as the
network is concerned. Where somebody else comes to one of these links, the exchange that is under way becomes an
activity, which has had its links for itself so far, and the passage ends with it; between exchanges the passage goes
on, and looks at its links again when the next exchange would load them.
"""

from bisect import bisect_right

import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.kernel.network.fluid_network import Network
from clustersim.engine.scalar.fast_path import Course
from clustersim.engine.scalar.sub_segment import Transfer


class Passage:
    """A course under way. done: happens at its end; reached: the pieces that are done then.

    shared: the last of these, if it shared its links, so that it may have taken longer; times: of phases as planned.
    """

    __slots__ = ("_clock", "_network", "course", "done", "reached", "shared", "times")

    shared: Transfer | None

    def __init__(self, clock: Clock, network: Network, course: Course) -> None:
        self._clock, self._network, self.course = clock, network, course
        self.times, self.done = course.ends.times(clock.now), simpy.Event(clock)
        self.reached, self.shared = len(course.pieces), None
        network.keep(course.links, self._visited)
        clock.at(self.times[-1]).callbacks.append(self._arrive)

    def start(self, piece: int) -> Seconds:
        """When a piece begins, as planned."""
        return self.times[self.course.first[piece]]

    def _arrive(self, _: simpy.Event) -> None:
        """End as planned, unless links are shared."""
        if self.shared is None:
            self._network.leave(self.course.links, self._visited)
            self.done.succeed()

    def _visited(self) -> None:
        """Give up the links, to which somebody else comes; what is under way there becomes an activity."""
        self._network.leave(self.course.links, self._visited)
        phase = bisect_right(self.times, self._clock.now) - 1
        phases = self.course.phases
        if phase < len(phases) and (load := phases[phase].load) is not None:
            self._share(phase, self._network.resumed(load, self.times[phase]).done)
            return
        later = (number for number in range(phase + 1, len(phases)) if phases[number].load is not None)
        if (following := next(later, None)) is not None:
            self._clock.at(self.times[following]).callbacks.append(lambda _: self._load(following))

    def _load(self, phase: int) -> None:
        """Go on if the links are free again; otherwise share them."""
        load = self.course.phases[phase].load
        if self._network.free(self.course.links):
            self._network.keep(self.course.links, self._visited)
        elif load is not None:
            self._share(phase, self._network.start(load))

    def _share(self, phase: int, moved: simpy.Event) -> None:
        """End with the exchange whose data move in a phase, when they have."""
        piece = self.course.phases[phase].piece
        self.shared, self.reached = self.course.pieces[piece].transfer, piece + 1
        moved.callbacks.append(self._end)

    def _end(self, _: simpy.Event) -> None:
        self.done.succeed()
