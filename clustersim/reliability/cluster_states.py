"""How fast is the job in each state of its cluster that occurs?

Every state is a scenario of its own, simulated once when it is asked for: with a GPU or a NIC at part speed (one in the
middle of the job), or with fewer replicas, for as many nodes as are left. Fewer replicas that keep the batch do more
microbatches, all of them as many as the one that does most. Assumed: of several slow parts the slowest counts, and
what slows a job slows it as much with fewer replicas.
"""

from clustersim.common.errors import ClusterSimError
from clustersim.common.units import Seconds
from clustersim.hardware.failures import FailureSlowdown
from clustersim.reliability.failure_domains import site_of
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.changes.training import with_slow_gpu
from clustersim.scenario.reliability import ElasticPolicy
from clustersim.simulation import simulate

HEALTHY = "healthy"


class States:
    """Those of one scenario. healthy: its result; seconds: step times by name, as they were asked for."""

    def __init__(self, scenario: Scenario, healthy: SimulationResult) -> None:
        self._scenario, self.healthy = scenario, healthy
        self._site = site_of(scenario)
        self._tokens = float(scenario.training.global_batch)
        self.seconds: dict[str, Seconds] = {HEALTHY: healthy.step_time}
        self._slow: dict[FailureSlowdown, tuple[str, float]] = {}
        self._fewer: dict[int, tuple[str, float]] = {}

    def __call__(self, missing: int, slower: FailureSlowdown | None) -> tuple[str, float]:
        """The name of a state, and work per second in it: of the healthy job's; 0 where it cannot run."""
        if not missing and slower is None:
            return HEALTHY, 1.0
        fewer = self._with_fewer(missing) if missing else None
        slow = None if slower is None else self._with_slower(slower)
        if fewer is None or slow is None:
            return fewer or slow or (HEALTHY, 1.0)
        return f"{fewer[0]}, {slow[0]}", fewer[1] * slow[1]

    def _with_slower(self, slower: FailureSlowdown) -> tuple[str, float]:
        if slower not in self._slow:
            name = f"a {'NIC' if slower.affects_nic else 'GPU'} at {100 * slower.remaining_fraction:g} %"
            step = simulate(self._slowed(slower)).step_time
            self.seconds[name] = step
            self._slow[slower] = name, self.healthy.step_time / step
        return self._slow[slower]

    def _slowed(self, slower: FailureSlowdown) -> Scenario:
        if not slower.affects_nic:
            return with_slow_gpu(self._scenario, slower.remaining_fraction)
        number = self._scenario.layout.world_size // 2
        place = int(self._scenario.cluster.machine_gpu_ids[number])
        return self._scenario.with_overrides(
            [f"disturbances.nics=[{{gpu: {place}, bandwidth: {slower.remaining_fraction!r}}}]"]
        )

    def _with_fewer(self, missing: int) -> tuple[str, float]:
        if missing not in self._fewer:
            self._fewer[missing] = self._shrunk(missing)
        return self._fewer[missing]

    def _shrunk(self, missing: int) -> tuple[str, float]:
        """With as many replicas as the nodes that are left can hold and a step can have."""
        site, dp = self._site, self._scenario.layout.dp
        left = (site.nodes - missing) * (site.gpus // site.nodes) // site.replica
        for replicas in range(min(left, dp - 1), 0, -1):
            name = f"{replicas} of {dp} replicas"
            if name in self.seconds:
                return name, self._pace(replicas, self.seconds[name])
            scenario = self._with_replicas(replicas)
            if scenario is not None:
                self.seconds[name] = simulate(scenario).step_time
                return name, self._pace(replicas, self.seconds[name])
        return "cannot run", 0.0

    def _with_replicas(self, replicas: int) -> Scenario | None:
        """The scenario with fewer of them; None where its parts do not agree, or do not fit in memory."""
        layout, training = self._scenario.layout, self._scenario.training
        batch = replicas * training.microbatch
        if self._scenario.reliability.elastic is ElasticPolicy.SHRINK_BATCH:
            batch *= training.global_batch // (layout.dp * training.microbatch)
        else:
            batch *= -(-training.global_batch // batch)
        degrees = layout.as_configured
        gpus = layout.world_size // layout.dp * replicas
        try:
            changed = self._scenario.with_overrides(
                [
                    f"layout.dp={degrees.dp * replicas // layout.dp}",
                    f"cluster.gpus={gpus}",
                    f"training.global_batch={batch}",
                ]
            )
            return changed if changed.layout.dp == replicas and fits_in_memory(changed) else None
        except ClusterSimError:
            return None

    def _pace(self, replicas: int, step: Seconds) -> float:
        """Work per second; a batch that is kept counts as what it is, though the last microbatches are not full."""
        part = 1.0
        if self._scenario.reliability.elastic is ElasticPolicy.SHRINK_BATCH:
            part = replicas / self._scenario.layout.dp
        return part * self.healthy.step_time / step
