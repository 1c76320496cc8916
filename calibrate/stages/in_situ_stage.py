"""What does a step do to kernels that take so long by themselves?

A real layer of the scenario's model runs forward and backward, and the profiler times its kernels one after the other
(`calibrate.in_situ`). What each family takes there, relative to its kernels alone, is a factor that `cost.in_step`
applies.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from calibrate.kernels.progress import lasting
from calibrate.stages.stage import Bench, no_scenario
from calibrate.stages.stage_telemetry import looked_at
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class Chain:
    """A layer's kernels, one after the other."""

    name: ClassVar[str] = "chain"
    minutes: ClassVar[float] = 5.0
    least: ClassVar[Seconds] = 3.0  # a turn of layers, and of their kernels alone

    def obstacle(self, bench: Bench) -> str:
        """A layer is some scenario's."""
        return no_scenario(bench, "layer")

    def due(self, bench: Bench) -> bool:
        """Whether there are no factors, or kernels come whose families may have none."""
        return bool(bench.new) or not bench.record.chain

    def words(self, bench: Bench) -> str:
        """Which layer."""
        return f"a layer of {bench.plan.model.name}, forward and backward: kernels in a step, and alone"

    def measure(self, bench: Bench, seconds: Seconds) -> str:
        """Factors by family."""
        from calibrate.in_situ.measure import chain_rows

        with lasting(self.name, seconds), looked_at(bench, self.name):
            rows = chain_rows(bench.plan, bench.device, seconds)
        bench.session.extend(replace(bench.empty, chain=rows))
        return f"{len(rows)} families of kernels" if rows else "no factor"
