"""What does torch.nn.DataParallel do?

One process drives all GPUs of a node. For each microbatch the first GPU broadcasts all weights and scatters the tokens,
every GPU runs its part forward, the logits are gathered on the first GPU, which computes the loss of the whole batch
and scatters its gradient, every GPU runs backward, and gradients are reduced to the first GPU, which alone runs the
optimizer. Nothing overlaps. That one Python thread launches every GPU's kernels is not modelled: it would only be
slower. Source: torch/nn/parallel/{data_parallel,replicate,scatter_gather}.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from clustersim.common.units import Bytes
from clustersim.lowering.task_list import Blocks, TaskList
from clustersim.lowering.units import Unit, Units, operations_of
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


def lower_naive(plan: Plan, groups: Mapping[str, ProcessGroups]) -> Program:
    """The program of one step: the first rank's, and that of all others."""
    blocks = Blocks()
    programs = tuple(_Rank(plan, blocks, root=root).program() for root in (True, False))
    kind = np.minimum(np.arange(plan.layout.world_size), 1)
    used = {exchange.comm_group for program in programs for exchange in program.comm_ops}
    return Program(programs, kind, {role: group for role, group in groups.items() if role in used})


@dataclass
class _Rank:
    """Issues the tasks of the first rank, or of the others."""

    plan: Plan
    blocks: Blocks
    root: bool
    tasks: TaskList = field(default_factory=TaskList)
    last: tuple[int, ...] = ()

    @cached_property
    def whole_batch(self) -> tuple[Unit, ...]:
        """The units of a model that sees the microbatches of all GPUs at once, as the first GPU's loss does."""
        everything = replace(self.plan.training, microbatch=self.plan.layout.dp * self.plan.training.microbatch)
        plan = replace(self.plan, training=everything)
        return Units(plan).of(plan.stages[0])

    def program(self) -> RankProgram:
        """All microbatches, then the optimizer on the first rank."""
        (stage,) = self.plan.stages
        units = Units(self.plan)
        for microbatch in range(self.plan.microbatches):
            self._microbatch(units.of(stage), stage, microbatch)
        if self.root:
            self._optimize(self._count(stage, self.plan.trained_groups))
        return self.tasks.program()

    def _microbatch(self, units: tuple[Unit, ...], stage: PipelineStage, microbatch: int) -> None:
        recipe, tokens = self.plan.training.recipe, self._tokens
        forward, backward = (Action(0, kind, microbatch) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
        logits = tokens * self.plan.model.vocab * recipe.activations.bytes
        self._communicate("replicate weights", CollectiveType.BROADCAST, self._stored(stage))
        self._communicate("scatter tokens", CollectiveType.SCATTER, tokens * TOKEN_BYTES)
        self._compute("forward", _without_loss(operations_of(units, forward.kind)), forward)
        self._communicate("gather logits", CollectiveType.GATHER, logits)
        if self.root:
            *_, whole = self.whole_batch
            self._compute("loss", _loss(whole.forward), forward)
            self._compute("loss gradient", _loss(whole.backward), backward)
        self._communicate("scatter gradients of logits", CollectiveType.SCATTER, logits)
        self._compute("backward", _without_loss(operations_of(units, backward.kind)), backward)
        gradients = self._count(stage, self.plan.trained_groups) * recipe.weight_formats.gradients.bytes
        self._communicate("reduce gradients", CollectiveType.REDUCE, gradients)

    def _count(self, stage: PipelineStage, groups: Iterable[ParameterGroup]) -> int:
        """Parameters of some groups."""
        return sum(self.plan.parameter_count(stage, group.name) for group in groups)

    def _stored(self, stage: PipelineStage) -> Bytes:
        """Bytes of all weights."""
        groups = self.plan.parameter_groups
        return sum(self._count(stage, (group,)) * group.formats.stored.bytes for group in groups)

    def _optimize(self, parameters: int) -> None:
        training = self.plan.training
        kernels = optimizer_step_kernels(training, parameters)
        if training.gradient_clipping:
            kernels = (*gradient_norm_kernels(training, parameters), *kernels)
        self._compute("optimizer", [Operation(kernel, WorkType.OPTIMIZER) for kernel in kernels], None)

    def _compute(self, name: str, operations: list[Operation], action: Action | None) -> None:
        block = self.blocks.block((name, self.root), name, operations)
        self.last = (self.tasks.add(Stream.COMPUTE, ComputeTask(block, self.last, action)),)

    def _communicate(self, name: str, collective: CollectiveType, payload: Bytes) -> None:
        task = CollectiveTask(CommOp(name, collective, DP_GROUP.name, float(payload)), self.last)
        self.last = (self.tasks.add(Stream.DP, task),)

    @property
    def _tokens(self) -> int:
        """Tokens of a microbatch on all GPUs together."""
        return self.plan.layout.dp * self.plan.training.microbatch * self.plan.training.sequence


def _is_loss(operation: Operation) -> bool:
    return operation.kernel is not None and operation.kernel.kind is KernelKind.LOSS


def _loss(operations: Iterable[Operation]) -> list[Operation]:
    return [operation for operation in operations if _is_loss(operation)]


def _without_loss(operations: Iterable[Operation]) -> list[Operation]:
    return [operation for operation in operations if not _is_loss(operation)]
