"""How long does this host need to launch what a step computes?

Python, autograd and the hooks of strategies, for each launch of the scenario's forward and backward
(`calibrate.host`), as they are, compiled, and captured in a graph.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from calibrate.kernels.progress import lasting
from calibrate.stages.stage import Bench, no_scenario
from calibrate.stages.stage_telemetry import looked_at
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class Host:
    """The host's time for each launch."""

    name: ClassVar[str] = "host"
    minutes: ClassVar[float] = 2.0
    least: ClassVar[Seconds] = 0.0

    def obstacle(self, bench: Bench) -> str:
        """Launches are those of some scenario's layers."""
        return no_scenario(bench, "layers")

    def due(self, bench: Bench) -> bool:
        """Whether no state was measured, or kernels of another scenario come."""
        return bool(bench.new) or not bench.record.host

    def words(self, bench: Bench) -> str:
        """What is launched."""
        return f"launches of layers of {bench.plan.model.name} by this host, forward and backward"

    def measure(self, bench: Bench, seconds: Seconds) -> str:
        """A row for each state."""
        from calibrate.host.measure import host_rows

        with lasting(self.name, seconds), looked_at(bench, self.name):
            rows = host_rows(bench.plan, bench.device, seconds)
        bench.session.extend(replace(bench.empty, host=rows))
        return ", ".join(row.state.value for row in rows) or "nothing"
