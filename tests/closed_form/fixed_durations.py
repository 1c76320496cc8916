"""Training steps of a tiny model with durations set by hand.

Of a layer, only the attention core takes time: `forward` and `backward` seconds (again `forward` where it is
recomputed), in proportion to the number of keys where it is split, and optionally the gradient of one weight,
`weight` seconds. Embedding, head and everything else are free, except optionally the loss and the optimizer,
so the seconds of a stage equal its number of layers. A communication operation takes the seconds that
`comm_seconds` maps its name to, by default 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.segment import SegmentCost
from clustersim.cost.timing import Bottleneck, CommTiming, KernelTiming, Provenance
from clustersim.engine.engine import simulate_program
from clustersim.lowering.repeat_steps import repeat_steps
from clustersim.lowering.training_step import lower_step
from clustersim.lowering.units import Unit, UnitBuilder
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind
from clustersim.model.layer_stack import MlpType
from clustersim.model.training import Training
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, resize_model, uniform_model
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.program import Program
from clustersim.program.task import CollectiveTask, CommOp
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.symmetry.refinement import singleton_classes
from clustersim.trace.trace import Trace
from tests.strategies import fold_ranks

SEQUENCE = 16
MODEL = uniform_model(
    name="tiny",
    layers=8,
    hidden=8,
    ffn=16,
    heads=2,
    kv_heads=2,
    head_dim=4,
    vocab=4,
    max_positions=SEQUENCE,
    mlp=MlpType.GELU,
    norm=Norm.RMSNORM,
    positions=PositionEncoding.ROTARY,
    tied_embeddings=False,
    linear_bias=False,
    qkv_bias=False,
)
CommSeconds = float | Callable[[CommOp], float | list[float]]
"""Seconds of all operations of a name, or a function of the operation; a list has one entry per group."""


@dataclass(frozen=True)
class FixedDurations:
    """Seconds of kernels; comm_seconds: of communication operations, by name."""

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 0.0
    loss: float = 0.0
    optimizer: float = 0.0
    comm_seconds: Mapping[str, CommSeconds] = field(default_factory=dict)

    def kernel_seconds(self, kernel: Kernel) -> float:
        if kernel.name == "mlp.up.weight_gradient":
            return self.weight
        key_fraction = kernel.shape.key / SEQUENCE if isinstance(kernel.shape, AttentionShape) else 1.0
        return key_fraction * {
            KernelKind.ATTENTION_FORWARD: self.forward,
            KernelKind.ATTENTION_BACKWARD: self.backward,
            KernelKind.LOSS: self.loss,
            KernelKind.OPTIMIZER: self.optimizer,
        }.get(kernel.kind, 0.0)

    def fixed_cost(self, program: Program) -> "FixedCost":
        """Costs of a program's kernels and communication operations."""
        return FixedCost(self, program)

    def comm_op_seconds(self, comm_op: CommOp) -> float | list[float]:
        seconds = self.comm_seconds.get(comm_op.name, 0.0)
        return seconds(comm_op) if callable(seconds) else seconds


@dataclass(frozen=True)
class FixedCost:
    durations: FixedDurations
    program: Program

    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        return KernelTiming(self.durations.kernel_seconds(kernel), Provenance.MEASURED, Bottleneck.COMPUTE)

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        groups = len(self.program.groups[comm_op.comm_group].members)
        seconds = np.broadcast_to(np.array(self.durations.comm_op_seconds(comm_op), dtype=float), groups)
        return CommTiming(seconds, Provenance.MEASURED, Bottleneck.BANDWIDTH, "fixed", "link")


@dataclass(frozen=True)
class Step:
    """One training step: model, layout, schedule and training options."""

    layers: int = 8
    layout: Layout = Layout()  # noqa: RUF009 - frozen
    schedule: Schedule = OneFOneB()  # noqa: RUF009 - frozen
    microbatches: int = 1
    model: TransformerModel = MODEL
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        options = {"gradient_clipping": False, **self.training}
        batch = self.microbatches * self.layout.dp
        training = Training(sequence=SEQUENCE, global_batch=batch, **options)
        return Plan(resize_model(self.model, layers=self.layers), training, self.layout, self.schedule.placement)

    @property
    def program(self) -> Program:
        return lower_step(self.plan, self.schedule.order(self.layout.pp, self.microbatches))

    def run(self, durations: FixedDurations, *, folded: bool = True, steps: int = 1) -> Trace:
        program = repeat_steps(self.program, steps)
        fixed_cost = durations.fixed_cost(program)
        cost = SegmentCost(program, DeviceModels.uniform(DeviceModel(fixed_cost), program.world_size), fixed_cost)
        return simulate_program(program, fold_ranks(program, cost) if folded else singleton_classes(program), cost)[0]

    def step_seconds(self, durations: FixedDurations) -> float:
        """The step time, checked to be equal with and without rank folding."""
        folded, unfolded = self.run(durations).makespan, self.run(durations, folded=False).makespan
        assert folded == unfolded
        return folded

    def fsdp_units(self) -> tuple[Unit, ...]:
        """Embedding, layers and head of the first stage."""
        plan = self.plan
        return UnitBuilder(plan).stage_units(plan.stages[0])

    def issued_comm_ops(self, name: str, pipeline_rank: int = 0) -> list[CommOp]:
        """Collectives of one name on the DP stream of a pipeline rank, in program order."""
        tasks = self.program.programs[pipeline_rank].tasks
        return [t.comm_op for t in tasks if isinstance(t, CollectiveTask) and t.comm_op.name == name]
