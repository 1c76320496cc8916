"""A fluid network that records the rate changes of its flows."""

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.fluid_network import Flow, FlowDemand, FluidNetwork


class RecordingNetwork(FluidNetwork):
    """`rate_changes`: (time, flow, its rate from then on), in the order of time; 0 is the end."""

    def __init__(self, environment: SimEnvironment, link_count: int) -> None:
        super().__init__(environment, link_count)
        self.link_count = link_count
        self.rate_changes: list[tuple[float, Flow, float]] = []
        self._noted_rates: dict[Flow, float] = {}

    def begin_flow(self, flow: Flow) -> None:
        self._noted_rates[flow] = 0.0
        super().begin_flow(flow)
        self._note_rates()

    def resume_flow(self, demand: FlowDemand, since: float) -> Flow:
        flow = super().resume_flow(demand, since)
        self._noted_rates[flow] = flow.rate
        insort(self.rate_changes, (since, flow, flow.rate), key=lambda note: note[0])
        return flow

    def end_flow(self, flow: Flow, event: simpy.Event) -> None:
        del self._noted_rates[flow]
        self.rate_changes.append((self.environment.now, flow, 0.0))
        super().end_flow(flow, event)

    def mark_dirty(self, links: Sequence[int]) -> None:
        super().mark_dirty(links)
        self.environment.call_at_end_of_instant(self._note_rates)

    def _note_rates(self) -> None:
        changed = [flow for flow, rate in self._noted_rates.items() if flow.rate != rate]
        self.rate_changes += [(self.environment.now, flow, flow.rate) for flow in changed]
        self._noted_rates |= {flow: flow.rate for flow in changed}

    def constant_rate_intervals(self) -> Iterator[tuple[float, dict[Flow, float]]]:
        """(duration, rate of every flow in it) of every interval between two rate changes."""
        running: dict[Flow, float] = {}
        for (when, flow, speed), (end, *_) in pairwise(self.rate_changes):
            running[flow] = speed
            if not speed:
                del running[flow]
            if end > when:
                yield end - when, running.copy()

    def link_utilization(self, running: dict[Flow, float]) -> FloatArray:
        """Utilization of each link, in seconds busy per second."""
        utilization: FloatArray = np.zeros(self.link_count)
        for flow, speed in running.items():
            utilization[flow.demand.link_indices] += speed * flow.demand.utilization
        return utilization

    def check_invariants(self) -> None:
        """No link is utilized beyond 1, and the completed work of every flow equals its demand."""
        completed_seconds: dict[Flow, float] = {}
        for seconds, running in self.constant_rate_intervals():
            assert self.link_utilization(running).max(initial=0.0) <= 1 + 1e-12
            for flow, speed in running.items():
                assert speed <= 1.0
                completed_seconds[flow] = completed_seconds.get(flow, 0.0) + speed * seconds
        end = max(
            abs(self.environment.now), abs(self.rate_changes[0][0]) if self.rate_changes else 0.0
        )  # a clock may begin below zero
        for flow, seconds in completed_seconds.items():
            assert abs(seconds - flow.demand.work_seconds) <= 1e-9 * flow.demand.work_seconds + 1e-12 * end


def run_flows(link_count: int, *starts: tuple[float, FlowDemand]) -> tuple[list[float], RecordingNetwork]:
    """Completion times of demands that start at given times, and the network that carried them."""
    environment = SimEnvironment()
    network = RecordingNetwork(environment, link_count)
    ends = [0.0] * len(starts)

    def start_flow(index: int, begin: float, demand: FlowDemand) -> Iterator[simpy.Event]:
        yield environment.timeout(begin)
        yield network.start_flow(demand)
        ends[index] = environment.now

    for index, (begin, demand) in enumerate(starts):
        environment.process(start_flow(index, begin, demand))
    environment.run()
    return ends, network


def flow_demand(seconds: float, *links: int, busy: float = 1.0, share: float = 1.0) -> FlowDemand:
    """A demand of given seconds that loads some links equally."""
    return FlowDemand(seconds, share, np.array(links, np.int64), np.full(len(links), busy))
