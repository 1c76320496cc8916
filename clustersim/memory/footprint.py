"""What lies in a rank's memory for the whole step?

Parameters, gradients and optimizer states, sharded as ZeRO's stage says (Rajbhandari et al. 2020, section 5: with 2
bytes for parameters and gradients and 12 for master weights and moments of P parameters on N ranks, 16 P, 4 P + 12 P/N,
2 P + 14 P/N and 16 P/N bytes); the layers that ZeRO-3 has gathered; the bucket of whole gradients that ZeRO-2 fills
(one: the next is filled while it is reduced only if the network lags); buffers of process groups; the driver's context.
"""

from dataclasses import dataclass
from enum import Enum

from clustersim.parallel.data import NaiveDataParallel, Zero
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.units import Bytes
from clustersim.workload.framework import Framework
from clustersim.workload.training import Optimizer


class Category(Enum):
    """What memory is used for; the value is its name in answers."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication buffers"
    CONTEXT = "driver context"
    FRAGMENTATION = "fragmentation"


@dataclass(frozen=True)
class Footprint:
    """Bytes of what stays. context: of the accelerator's driver and libraries."""

    plan: Plan
    framework: Framework
    context: Bytes

    def resident(self, pipeline_rank: int) -> dict[Category, Bytes]:
        """Bytes by category that a rank holds for the whole step; activations and fragmentation are not among them."""
        stages = self.plan.stages_of(pipeline_rank)
        count = float(sum(self.plan.parameters(stage) for stage in stages))
        precision = self.plan.training.precision
        return {
            Category.PARAMETERS: count * precision.compute.bytes / self._shards(3),
            Category.GRADIENTS: count * precision.gradients.bytes / self._shards(2),
            Category.OPTIMIZER: count * self._state_bytes / self._shards(1),
            Category.GATHERED: self.gathered(stages),
            Category.COMMUNICATION: self.groups * self.framework.communicator + self.receives + self.bucket(count),
            Category.CONTEXT: self.context,
        }

    @property
    def _state_bytes(self) -> int:
        """Bytes of master weights and moments per parameter."""
        precision = self.plan.training.precision
        moments = 2 if self.plan.training.optimizer is Optimizer.ADAM else 1
        copied = precision.master not in {None, precision.compute}  # else the weights are their own master
        return moments * precision.moments.bytes + (precision.master.bytes if precision.master and copied else 0)

    def _shards(self, stage: int) -> int:
        """Ranks over which ZeRO spreads what its stage `stage` shards."""
        return self.plan.replicas if self.plan.layout.data.stage >= stage else 1

    def gathered(self, stages: tuple[Stage, ...]) -> Bytes:
        """Whole units that ZeRO-3 holds at once, and one unit's whole gradients."""
        match self.plan.layout.data:
            case Zero(stage=3, reshard_after_forward=reshards, ahead=ahead) if self.plan.replicas > 1:
                units = sorted((count for stage in stages for count in self.plan.unit_parameters(stage)), reverse=True)
                held = units[: ahead + 1] if reshards else units
                precision = self.plan.training.precision
                return float(sum(held) * precision.compute.bytes + units[0] * precision.gradients.bytes)
        return 0.0

    def bucket(self, count: float) -> Bytes:
        """A bucket of the stage's `count` whole gradients, where those of ZeRO-2 wait for their reduction."""
        match self.plan.layout.data:
            case Zero(stage=2) as strategy if self.plan.replicas > 1:
                width = self.plan.training.precision.gradients.bytes
                return min(strategy.bucket_bytes(self.plan.replicas, width), count * width)
        return 0.0

    @property
    def groups(self) -> int:
        """Process groups that the rank is in (those of one member need no buffers)."""
        layout = self.plan.layout
        if isinstance(layout.data, NaiveDataParallel):
            return 1
        return sum(degree > 1 for degree in (layout.tp, layout.cp, layout.dp, layout.pp))

    @property
    def receives(self) -> Bytes:
        """A posted activation and a posted gradient for each virtual stage."""
        if self.plan.layout.pp == 1:
            return 0.0
        return 2 * self.plan.chunks * self.plan.activation / self.plan.layout.tp
