"""How fast is the job in each state of its cluster that occurs?

Every state is a scenario of its own, simulated on first use: with a GPU or a NIC (in the middle of the job)
at reduced speed, or with fewer replicas, as the remaining nodes allow. Fewer replicas that keep the batch
do more microbatches, all as many as the one that does most. Assumed: of several slow components only the
slowest counts, and slowdown and shrinking multiply.
"""

from clustersim.common.cached_method import cached_method
from clustersim.common.errors import ClusterSimError
from clustersim.common.units import Seconds
from clustersim.hardware.failures import FailureSlowdown
from clustersim.reliability.failure_domains import build_failure_domains
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.changes.health import with_slow_gpu, with_slow_nic
from clustersim.scenario.changes.layout import with_replicas
from clustersim.scenario.reliability import ElasticPolicy
from clustersim.simulation import simulate

HEALTHY = "healthy"


class ClusterStates:
    """Rates of one scenario's states. healthy: its result; step_times: by state name, in order of first use."""

    def __init__(self, scenario: Scenario, healthy: SimulationResult) -> None:
        self._scenario, self.healthy = scenario, healthy
        self._domains = build_failure_domains(scenario)
        self.step_times: dict[str, Seconds] = {HEALTHY: healthy.step_time}

    def __call__(self, missing: int, slowdown: FailureSlowdown | None) -> tuple[str, float]:
        """The name of a state, and work per second in it, relative to the healthy job; 0 where it cannot run."""
        if not missing and slowdown is None:
            return HEALTHY, 1.0
        shrunk = self._shrunk_rate(missing) if missing else None
        slowed = None if slowdown is None else self._slowed_rate(slowdown)
        if shrunk is None or slowed is None:
            return shrunk or slowed or (HEALTHY, 1.0)
        return f"{shrunk[0]}, {slowed[0]}", shrunk[1] * slowed[1]

    @cached_method
    def _slowed_rate(self, slowdown: FailureSlowdown) -> tuple[str, float]:
        name = f"a {'NIC' if slowdown.affects_nic else 'GPU'} at {100 * slowdown.remaining_fraction:g} %"
        step = simulate(self._slowed_scenario(slowdown)).step_time
        self.step_times[name] = step
        return name, self.healthy.step_time / step

    def _slowed_scenario(self, slowdown: FailureSlowdown) -> Scenario:
        change = with_slow_nic if slowdown.affects_nic else with_slow_gpu
        return change(self._scenario, slowdown.remaining_fraction)

    @cached_method
    def _shrunk_rate(self, missing: int) -> tuple[str, float]:
        """With as many replicas as the remaining nodes can hold and a legal scenario can have."""
        domains, dp = self._domains, self._scenario.layout.dp
        max_replicas = (domains.nodes - missing) * (domains.gpus // domains.nodes) // domains.replica_ranks
        for replicas in range(min(max_replicas, dp - 1), 0, -1):
            name = f"{replicas} of {dp} replicas"
            if name in self.step_times:
                return name, self._work_rate(replicas, self.step_times[name])
            scenario = self._shrunk_scenario(replicas)
            if scenario is not None:
                self.step_times[name] = simulate(scenario).step_time
                return name, self._work_rate(replicas, self.step_times[name])
        return "cannot run", 0.0

    def _shrunk_scenario(self, replicas: int) -> Scenario | None:
        """The scenario with fewer replicas; None where it is not legal, or does not fit in memory."""
        try:
            changed = with_replicas(self._scenario, replicas)
            return changed if changed.layout.dp == replicas and fits_in_memory(changed) else None
        except ClusterSimError:
            return None

    def _work_rate(self, replicas: int, step_time: Seconds) -> float:
        """Work per second; a kept batch counts in full, though its last microbatches are partly empty."""
        batch_fraction = 1.0
        if self._scenario.reliability.elastic is ElasticPolicy.SHRINK_BATCH:
            batch_fraction = replicas / self._scenario.layout.dp
        return batch_fraction * self.healthy.step_time / step_time
