"""Lowering of torch.nn.DataParallel.

One process drives all GPUs of a node. For each microbatch the root GPU broadcasts all weights and scatters
the tokens, every GPU runs forward on its share, the logits are gathered on the root GPU, which computes the
loss of the full batch and scatters its gradient, every GPU runs backward, and gradients are reduced to the
root GPU, which alone runs the optimizer. Nothing overlaps. That one Python thread launches every GPU's
kernels is not modelled: it would only be slower. Source:
torch/nn/parallel/{data_parallel,replicate,scatter_gather}.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from clustersim.common.units import Bytes
from clustersim.lowering.task_list import SegmentCache, TaskList
from clustersim.lowering.units import Unit, UnitBuilder, pass_operations
from clustersim.model.kernels import KernelKind
from clustersim.model.layers import gradient_norm_kernels, optimizer_step_kernels
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import DP_GROUP
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind
from clustersim.program.program import ProcessGroups, Program, RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, CommOp, ComputeTask, Operation, Stream, WorkType

TOKEN_BYTES = 8  # torch.long


def lower_torch_data_parallel(plan: Plan, groups: Mapping[str, ProcessGroups]) -> Program:
    """The program of one step: program 0 is the root rank's, program 1 that of all others."""
    segments = SegmentCache()
    programs = tuple(_TorchDataParallelRank(plan, segments, is_root=root).build_program() for root in (True, False))
    program_index = np.minimum(np.arange(plan.layout.world_size), 1)
    used_groups = {comm_op.comm_group for program in programs for comm_op in program.comm_ops}
    return Program(
        programs,
        program_index,
        {comm_group: group for comm_group, group in groups.items() if comm_group in used_groups},
    )


@dataclass
class _TorchDataParallelRank:
    """Issues the tasks of the root rank, or of the others."""

    plan: Plan
    segments: SegmentCache
    is_root: bool
    tasks: TaskList = field(default_factory=TaskList)
    last_task: tuple[int, ...] = ()

    @cached_property
    def full_batch_units(self) -> tuple[Unit, ...]:
        """The units of a model with the microbatches of all GPUs at once, as the root GPU's loss sees them."""
        full_batch_training = replace(
            self.plan.training, microbatch=self.plan.layout.dp * self.plan.training.microbatch
        )
        plan = replace(self.plan, training=full_batch_training)
        return UnitBuilder(plan).stage_units(plan.stages[0])

    def build_program(self) -> RankProgram:
        """All microbatches, then the optimizer on the root rank."""
        (stage,) = self.plan.stages
        units = UnitBuilder(self.plan)
        for microbatch in range(self.plan.microbatches):
            self._add_microbatch(units.stage_units(stage), stage, microbatch)
        if self.is_root:
            self._add_optimizer(self._parameter_count(stage, self.plan.trained_groups))
        return self.tasks.build()

    def _add_microbatch(self, units: tuple[Unit, ...], stage: PipelineStage, microbatch: int) -> None:
        recipe, tokens = self.plan.training.recipe, self._global_tokens
        forward, backward = (Action(0, kind, microbatch) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
        logits = tokens * self.plan.model.vocab * recipe.activations.bytes
        self._add_collective("replicate weights", CollectiveType.BROADCAST, self._weight_bytes(stage))
        self._add_collective("scatter tokens", CollectiveType.SCATTER, tokens * TOKEN_BYTES)
        self._add_compute("forward", _non_loss_operations(pass_operations(units, forward.kind)), forward)
        self._add_collective("gather logits", CollectiveType.GATHER, logits)
        if self.is_root:
            *_, head_unit = self.full_batch_units
            self._add_compute("loss", _loss_operations(head_unit.forward), forward)
            self._add_compute("loss gradient", _loss_operations(head_unit.backward), backward)
        self._add_collective("scatter gradients of logits", CollectiveType.SCATTER, logits)
        self._add_compute("backward", _non_loss_operations(pass_operations(units, backward.kind)), backward)
        gradients = self._parameter_count(stage, self.plan.trained_groups) * recipe.weight_formats.gradients.bytes
        self._add_collective("reduce gradients", CollectiveType.REDUCE, gradients)

    def _parameter_count(self, stage: PipelineStage, groups: Iterable[ParameterGroup]) -> int:
        """Parameters of some parameter groups."""
        return sum(self.plan.parameter_count(stage, group.name) for group in groups)

    def _weight_bytes(self, stage: PipelineStage) -> Bytes:
        """Bytes of all weights."""
        groups = self.plan.parameter_groups
        return sum(self._parameter_count(stage, (group,)) * group.formats.stored.bytes for group in groups)

    def _add_optimizer(self, parameter_count: int) -> None:
        training = self.plan.training
        kernels = optimizer_step_kernels(training, parameter_count)
        if training.gradient_clipping:
            kernels = (*gradient_norm_kernels(training, parameter_count), *kernels)
        self._add_compute("optimizer", [Operation(kernel, WorkType.OPTIMIZER) for kernel in kernels], None)

    def _add_compute(self, name: str, operations: list[Operation], action: Action | None) -> None:
        segment = self.segments.segment((name, self.is_root), name, operations)
        self.last_task = (self.tasks.add(Stream.COMPUTE, ComputeTask(segment, self.last_task, action)),)

    def _add_collective(self, name: str, collective: CollectiveType, payload: Bytes) -> None:
        task = CollectiveTask(CommOp(name, collective, DP_GROUP.name, float(payload)), self.last_task)
        self.last_task = (self.tasks.add(Stream.DP, task),)

    @property
    def _global_tokens(self) -> int:
        """Tokens of a microbatch on all GPUs."""
        return self.plan.layout.dp * self.plan.training.microbatch * self.plan.training.sequence


def _is_loss(operation: Operation) -> bool:
    return operation.kernel is not None and operation.kernel.kind is KernelKind.LOSS


def _loss_operations(operations: Iterable[Operation]) -> list[Operation]:
    return [operation for operation in operations if _is_loss(operation)]


def _non_loss_operations(operations: Iterable[Operation]) -> list[Operation]:
    return [operation for operation in operations if not _is_loss(operation)]
