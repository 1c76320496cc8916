"""Run of a fast path: sub-segments on idle links as one event, with a fallback to flows.

The event is at the end of the last sub-segment. Its links are reserved meanwhile; the network has no flows on
them. When another flow arrives on one of these links, the transfer in flight becomes an ordinary flow with
its progress so far, and the run ends with it; between transfers the run continues, and checks its links again
when the next transfer would load them.
"""

from bisect import bisect_right

import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.fluid_action import Completion
from clustersim.engine.kernel.network.fluid_network import FluidNetwork
from clustersim.engine.scalar.fast_path import FastPath
from clustersim.engine.scalar.sub_segment import ContendedTransfer


class FastPathRun(Completion):
    """A fast path in progress. completed_count: sub-segments that are complete at its end.

    contended: the transfer of the last of them, if it shared its links and may have taken longer; phase_times:
    planned starts of phases, and the end.
    """

    __slots__ = ("_environment", "_network", "completed_count", "contended", "fast_path", "phase_times")

    contended: ContendedTransfer | None

    def __init__(self, environment: SimEnvironment, network: FluidNetwork, fast_path: FastPath) -> None:
        self.phase_times = fast_path.end_times.phase_times(environment.now)
        self.done = environment.event_at(self.phase_times[-1])
        self._environment, self._network, self.fast_path = environment, network, fast_path
        self.completed_count, self.contended = len(fast_path.sub_segments), None
        network.reserve(fast_path.link_ids, self)
        self.done.callbacks.append(self._release)

    def planned_start(self, index: int) -> Seconds:
        """Planned start of a sub-segment."""
        return self.phase_times[self.fast_path.first_phase[index]]

    def _release(self, _: simpy.Event) -> None:
        self._network.release(self.fast_path.link_ids, self)

    def on_conflict(self) -> None:
        """Release the links when another flow arrives; a transfer in flight becomes a flow."""
        self._network.release(self.fast_path.link_ids, self)
        phase = bisect_right(self.phase_times, self._environment.now) - 1
        phases = self.fast_path.phases
        if phase < len(phases) and (demand := phases[phase].demand) is not None:
            self._complete_with_flow(phase, self._network.resume_flow(demand, self.phase_times[phase]).done)
            return
        flow_phases = (
            phase_index for phase_index in range(phase + 1, len(phases)) if phases[phase_index].demand is not None
        )
        if (next_flow := next(flow_phases, None)) is not None:
            self._environment.event_at(self.phase_times[next_flow]).callbacks.append(
                lambda _: self._try_resume(next_flow)
            )

    def _try_resume(self, phase: int) -> None:
        """Continue if the links are idle again; otherwise share them."""
        demand = self.fast_path.phases[phase].demand
        if self._network.are_idle(self.fast_path.link_ids):
            self._network.reserve(self.fast_path.link_ids, self)
        elif demand is not None:
            self._complete_with_flow(phase, self._network.start_flow(demand))

    def _complete_with_flow(self, phase: int, transferred: simpy.Event) -> None:
        """Complete with the transfer of a phase, whenever that does."""
        index = self.fast_path.phases[phase].sub_segment_index
        self.contended, self.completed_count = self.fast_path.sub_segments[index].transfer, index + 1
        self.complete_with(transferred)
