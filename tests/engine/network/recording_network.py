"""A network that notes who ran at which speed from when."""

from bisect import insort
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.kernel.network.fluid_network import Activity, Load, Network


class Watched(Network):
    """`notes`: (when, who, their speed from then on), in the order of time; 0 is the end."""

    def __init__(self, environment: Clock, links: int) -> None:
        super().__init__(environment, links)
        self.links, self.clock = links, environment
        self.notes: list[tuple[float, Activity, float]] = []

    def _run(self, activity: Activity, speed: float) -> None:
        super()._run(activity, speed)
        self.notes.append((self.clock.now, activity, speed))

    def resumed(self, load: Load, since: float) -> Activity:
        activity = super().resumed(load, since)
        insort(self.notes, (since, activity, activity.speed), key=lambda note: note[0])
        return activity

    def _finish(self, activity: Activity, due: simpy.Event) -> None:
        if due is activity.due:
            self.notes.append((self.clock.now, activity, 0.0))
        super()._finish(activity, due)

    def stretches(self) -> Iterator[tuple[float, dict[Activity, float]]]:
        """(how long, everybody's speed in it) of every stretch between two changes."""
        running: dict[Activity, float] = {}
        for (when, activity, speed), (end, *_) in pairwise(self.notes):
            running[activity] = speed
            if not speed:
                del running[activity]
            if end > when:
                yield end - when, running.copy()

    def busy(self, running: dict[Activity, float]) -> FloatArray:
        """Seconds per second that each link is busy."""
        busy: FloatArray = np.zeros(self.links)
        for activity, speed in running.items():
            busy[activity.load.links] += speed * activity.load.busy
        return busy

    def check(self) -> None:
        """No link is busy for more than a second per second, and everybody's work is done, no more and no less."""
        done: dict[Activity, float] = {}
        for seconds, running in self.stretches():
            assert self.busy(running).max(initial=0.0) <= 1 + 1e-12
            for activity, speed in running.items():
                assert speed <= 1.0
                done[activity] = done.get(activity, 0.0) + speed * seconds
        end = max(abs(self.clock.now), abs(self.notes[0][0]) if self.notes else 0.0)  # a clock may begin below zero
        for activity, seconds in done.items():
            assert abs(seconds - activity.load.seconds) <= 1e-9 * activity.load.seconds + 1e-12 * end


def play(links: int, *starts: tuple[float, Load]) -> tuple[list[float], Watched]:
    """When each of some loads is done that begin at given times, and the network that carried them."""
    environment = Clock()
    network = Watched(environment, links)
    ends = [0.0] * len(starts)

    def carry(number: int, begin: float, load: Load) -> Iterator[simpy.Event]:
        yield environment.timeout(begin)
        yield network.start(load)
        ends[number] = environment.now

    for number, (begin, load) in enumerate(starts):
        environment.process(carry(number, begin, load))
    environment.happen()
    return ends, network


def load(seconds: float, *links: int, busy: float = 1.0, share: float = 1.0) -> Load:
    """Work of so many seconds that keeps some links equally busy."""
    return Load(seconds, share, np.array(links, np.int64), np.full(len(links), busy))
