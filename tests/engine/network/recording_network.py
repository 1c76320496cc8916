"""A network that notes who ran at which speed from when."""

from bisect import insort
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.fluid_network import Flow, FlowDemand, FluidNetwork


class Watched(FluidNetwork):
    """`notes`: (when, who, their speed from then on), in the order of time; 0 is the end."""

    def __init__(self, environment: SimEnvironment, links: int) -> None:
        super().__init__(environment, links)
        self.links, self.clock = links, environment
        self.notes: list[tuple[float, Flow, float]] = []

    def _set_rate(self, flow: Flow, rate: float) -> None:
        super()._set_rate(flow, rate)
        self.notes.append((self.clock.now, flow, rate))

    def resume_flow(self, demand: FlowDemand, since: float) -> Flow:
        activity = super().resume_flow(demand, since)
        insort(self.notes, (since, activity, activity.rate), key=lambda note: note[0])
        return activity

    def _finish_flow(self, flow: Flow, timer: simpy.Event) -> None:
        if timer is flow.timer:
            self.notes.append((self.clock.now, flow, 0.0))
        super()._finish_flow(flow, timer)

    def stretches(self) -> Iterator[tuple[float, dict[Flow, float]]]:
        """(how long, everybody's speed in it) of every stretch between two changes."""
        running: dict[Flow, float] = {}
        for (when, activity, speed), (end, *_) in pairwise(self.notes):
            running[activity] = speed
            if not speed:
                del running[activity]
            if end > when:
                yield end - when, running.copy()

    def busy(self, running: dict[Flow, float]) -> FloatArray:
        """Seconds per second that each link is busy."""
        busy: FloatArray = np.zeros(self.links)
        for activity, speed in running.items():
            busy[activity.demand.link_indices] += speed * activity.demand.utilization
        return busy

    def check(self) -> None:
        """No link is busy for more than a second per second, and everybody's work is done, no more and no less."""
        done: dict[Flow, float] = {}
        for seconds, running in self.stretches():
            assert self.busy(running).max(initial=0.0) <= 1 + 1e-12
            for activity, speed in running.items():
                assert speed <= 1.0
                done[activity] = done.get(activity, 0.0) + speed * seconds
        end = max(abs(self.clock.now), abs(self.notes[0][0]) if self.notes else 0.0)  # a clock may begin below zero
        for activity, seconds in done.items():
            assert abs(seconds - activity.demand.work_seconds) <= 1e-9 * activity.demand.work_seconds + 1e-12 * end


def play(links: int, *starts: tuple[float, FlowDemand]) -> tuple[list[float], Watched]:
    """When each of some loads is done that begin at given times, and the network that carried them."""
    environment = SimEnvironment()
    network = Watched(environment, links)
    ends = [0.0] * len(starts)

    def carry(number: int, begin: float, load: FlowDemand) -> Iterator[simpy.Event]:
        yield environment.timeout(begin)
        yield network.start_flow(load)
        ends[number] = environment.now

    for number, (begin, load) in enumerate(starts):
        environment.process(carry(number, begin, load))
    environment.run_all()
    return ends, network


def load(seconds: float, *links: int, busy: float = 1.0, share: float = 1.0) -> FlowDemand:
    """Work of so many seconds that keeps some links equally busy."""
    return FlowDemand(seconds, share, np.array(links, np.int64), np.full(len(links), busy))
