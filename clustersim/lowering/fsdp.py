"""Lowering of ZeRO-3 and FSDP: when parameters are gathered and gradients reduced.

Every unit (layer, embedding, head) waits for the all-gather of its parameters. The gather of a unit is
issued when compute reaches the unit `prefetch` positions before it, so at most prefetch + 1 gathered units
are in memory; a pass prefetches nothing for the next pass. Gradients are reduce-scattered unit by unit,
after the gathers on the same stream, and with hybrid sharding all-reduced across replicas there (FSDP2 has
a separate stream for that; where both use the same network ports they share them, which one stream models).
The head stays gathered between its forward and its backward, which follows at once (as torchtitan wraps it
for FSDP2). On a CPU, which has no streams, FSDP2's reduce-scatter ends before the next unit's backward
begins (`waits_for_reduction`). With a pipeline a stage's first forward gathers its units, its last backward
reduces them, and in between they stay unsharded (`parallel.data_parallel_strategy`). FSDP2 gathers into one
buffer and copies each parameter out of it before its unit runs (`foreach_all_gather`'s copy-out,
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); copies of gradients into the reduction buffer
overlap compute and are left out. Without `overlap` a unit waits for the reduction of the one before, too. SimpleFSDP
(`single_parameters`) gathers and reduces the parameters of each operator by themselves, those of a matrix with its
bias; they are issued together, which differs from one by one only where they overlap compute. Where backward is split,
its input gradients need the parameters, its weight gradients do not. Reference: Zhao et al. 2023, "PyTorch FSDP",
sections 3.2 and 3.3.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from clustersim.common.cached_method import cached_by
from clustersim.lowering.program_builder import ParameterCounts, RankProgramBuilder, StagePass
from clustersim.lowering.task_list import shift_task_ids
from clustersim.lowering.units import Unit, execution_order
from clustersim.model.memory_bound import copy_kernel
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, ReductionFrequency
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation, WorkType

COPY_OUT_PREFIX: Final = "copy "
"""Of the name of a kernel that copies a unit's gathered parameters; the unit's name follows."""


class _LoweredPass(NamedTuple):
    """The tasks a pass was lowered to.

    last_compute: id of its last compute task; awaited_reductions: reductions that the next unit waits for.
    """

    tasks: range
    last_compute: int
    reduction_tasks: tuple[int, ...]
    awaited_reductions: tuple[int, ...]


@dataclass
class FsdpLowering:
    """Gathers, runs and reduces unit by unit.

    _unsharded_stages: stages whose units stay gathered; _awaited_reductions: reductions that the next unit
    waits for; _pass_cache: lowered passes by everything that their tasks depend on except the microbatch.
    """

    strategy: FullyShard
    _unsharded_stages: set[int] = field(default_factory=set)
    _awaited_reductions: tuple[int, ...] = ()
    _pass_cache: dict[Hashable, _LoweredPass] = field(default_factory=dict)

    def begin_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
        """Nothing to do: parameters are gathered when they are needed."""

    def lower_pass(self, builder: RankProgramBuilder, stage_pass: StagePass) -> int:
        """Gather, run and (backward) reduce unit by unit; return the last compute task.

        Nothing is gathered for a backward that passes no unit (of a frozen encoder alone).
        """
        if not execution_order(builder.units.stage_units(stage_pass.stage), stage_pass.action.kind):
            return builder.add_full_pass(stage_pass)
        if builder.splits_passes:
            self._lower_units(builder, stage_pass)
        elif (
            self._awaited_reductions
            or self._gathers_parameters(builder, stage_pass)
            or self._reduces_gradients(builder, stage_pass)
        ):
            self._lower_cached(builder, stage_pass)
        else:
            builder.add_units(stage_pass)
        if self.strategy.keeps_unsharded(is_pipelined=builder.plan.layout.is_pipelined):
            self._unsharded_stages.add(stage_pass.stage.index)
        return builder.last_compute or 0

    def _lower_cached(self, builder: RankProgramBuilder, stage_pass: StagePass) -> None:
        """Lower a pass, copying the tasks of an earlier pass if only its first task id and its microbatch differ."""
        first_task, action = len(builder.tasks), stage_pass.action
        is_unsharded, is_final = action.stage in self._unsharded_stages, action in builder.final_backwards
        compute_offset = None if builder.last_compute is None else builder.last_compute - first_task
        key = (
            action.stage,
            action.kind,
            is_unsharded,
            is_final,
            compute_offset,
            shift_task_ids(stage_pass.depends_on, -first_task),
            shift_task_ids(self._awaited_reductions, -first_task),
        )
        if key not in self._pass_cache:
            reduction_count = len(builder.reduction_tasks)
            self._lower_units(builder, stage_pass)
            tasks, reduction_tasks = (
                range(first_task, len(builder.tasks)),
                tuple(builder.reduction_tasks[reduction_count:]),
            )
            self._pass_cache[key] = _LoweredPass(
                tasks, builder.last_compute or 0, reduction_tasks, self._awaited_reductions
            )
        else:
            self._replay_pass(builder, stage_pass, self._pass_cache[key])

    def _lower_units(self, builder: RankProgramBuilder, stage_pass: StagePass) -> None:
        """Lower a pass with the gathers and reductions of its units between them."""
        units, kind = (
            execution_order(builder.units.stage_units(stage_pass.stage), stage_pass.action.kind),
            stage_pass.action.kind,
        )
        gathers, reduces = self._gathers_parameters(builder, stage_pass), self._reduces_gradients(builder, stage_pass)
        needs_gather = [gathers and (kind is ActionKind.FORWARD or not unit.is_head) for unit in units]
        gathered: dict[int, tuple[int, ...]] = {}
        issued = 0
        for index, unit in enumerate(units):
            while issued < min(len(units), index + 1 + self.strategy.prefetch_depth):
                if needs_gather[issued]:
                    gathered[issued] = self._add_gather(builder, units[issued], kind)
                issued += 1
            depends_on = (*gathered.get(index, ()), *self._awaited_reductions)
            self._awaited_reductions = ()
            unit_pass = StagePass(
                stage_pass.stage, stage_pass.action, (*stage_pass.depends_on, *depends_on), stage_pass.input_operations
            )
            copy_operations = self._copy_out(builder, unit, stage_pass) if needs_gather[index] else ()
            task = builder.add_unit(
                unit_pass if index == 0 else StagePass(stage_pass.stage, stage_pass.action, depends_on),
                unit,
                copy_operations,
            )
            if reduces:
                self._add_reduction(builder, stage_pass, unit, task)

    def _replay_pass(self, builder: RankProgramBuilder, stage_pass: StagePass, lowered: _LoweredPass) -> None:
        """Lower a pass as a copy of an earlier one."""
        offset = builder.tasks.copy_tasks(lowered.tasks, stage_pass.action)
        builder.last_compute = lowered.last_compute + offset
        builder.reduction_tasks += shift_task_ids(lowered.reduction_tasks, offset)
        self._awaited_reductions = shift_task_ids(lowered.awaited_reductions, offset)

    def reduce_gradients(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], last_task: int) -> None:
        """Nothing to do: the backwards have reduced their gradients."""

    def end_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], optimizer_task: int) -> None:
        """Nothing to do: the next step gathers what it needs."""

    def _gathers_parameters(self, builder: RankProgramBuilder, stage_pass: StagePass) -> bool:
        """Whether a pass gathers its units' parameters (in backward all but the head's)."""
        kind = stage_pass.action.kind
        if stage_pass.stage.index in self._unsharded_stages or kind is ActionKind.WEIGHT_GRADIENT:
            return False
        return kind is ActionKind.FORWARD or self.strategy.reshards_parameters(
            is_pipelined=builder.plan.layout.is_pipelined
        )

    def _add_gather(self, builder: RankProgramBuilder, unit: Unit, kind: ActionKind) -> tuple[int, ...]:
        depends_on = () if builder.last_compute is None else (builder.last_compute,)
        is_regather, gathers = kind is not ActionKind.FORWARD, tuple[int, ...]()
        has_reference = builder.plan.training.reference_model and not is_regather
        for parameters in self._messages(builder, unit):
            gathers += builder.gather_parameters(f"gather {unit.name}", parameters, depends_on, is_regather=is_regather)
            if has_reference:
                gathers += builder.gather_parameters(f"gather reference {unit.name}", parameters, depends_on)
        return gathers

    def _messages(self, builder: RankProgramBuilder, unit: Unit) -> list[ParameterCounts]:
        """The parameters of a unit that one collective gathers each."""
        parameters = _unit_parameters(builder, unit)
        if not self.strategy.single_parameters:
            return [parameters]
        return [[(group, size)] for group, count in parameters for size in _operator_sizes(unit, group, count)]

    def _add_reduction(self, builder: RankProgramBuilder, stage_pass: StagePass, unit: Unit, task: int) -> None:
        """Reduce the gradients of a unit, which are complete after a task."""
        is_final = (
            stage_pass.action in builder.final_backwards
            or self.strategy.all_reduce is ReductionFrequency.PER_MICROBATCH
        )
        reductions: tuple[int, ...] = ()
        for parameters in self._messages(builder, unit):
            for group, count in parameters:
                reductions += builder.reduce_gradients(
                    f"reduce {unit.name}", group, count, (task,), across_replicas=is_final
                )
        builder.reduction_tasks += reductions
        is_awaited = self.strategy.waits_for_reduction or not self.strategy.overlap
        self._awaited_reductions = reductions if is_awaited else ()

    def _reduces_gradients(self, builder: RankProgramBuilder, stage_pass: StagePass) -> bool:
        """Whether gradients are reduced during a pass."""
        if stage_pass.action.kind not in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            return False
        reduces_per_microbatch = builder.gradient_sync is GradientSync.EVERY_BACKWARD
        return reduces_per_microbatch or stage_pass.action in builder.final_backwards

    def _copy_out(self, builder: RankProgramBuilder, unit: Unit, stage_pass: StagePass) -> tuple[Operation, ...]:
        """The copy of gathered parameters out of the all-gather buffer, if the strategy makes one."""
        if not self.strategy.copies:
            return ()
        work_type = WorkType.FORWARD if stage_pass.action.kind is ActionKind.FORWARD else WorkType.BACKWARD
        return self._copy_operation(builder, unit, work_type)

    @cached_by(lambda _, _builder, unit, work_type: (unit, work_type))
    def _copy_operation(self, builder: RankProgramBuilder, unit: Unit, work_type: WorkType) -> tuple[Operation, ...]:
        dtype = builder.plan.training.recipe.activations
        sharded_counts = ((group, count) for group, count in _unit_parameters(builder, unit) if group.shard_count > 1)
        gathered_bytes = sum(count * group.formats.gathered.bytes for group, count in sharded_counts)
        elements = int(gathered_bytes / dtype.bytes)
        return (Operation(copy_kernel(f"{COPY_OUT_PREFIX}{unit.name}", dtype, elements), work_type),)


def _operator_sizes(unit: Unit, group: ParameterGroup, count: int) -> list[int]:
    """Parameters of a group in each operator of a unit, and those in none whose gradients backward makes."""
    sizes = [op.gradient_count for op in unit.backward if op.gradient_count and op.parameter_group == group.name]
    others = count - sum(sizes)
    return [*sizes, others] if others else sizes


def _unit_parameters(builder: RankProgramBuilder, unit: Unit) -> ParameterCounts:
    """Parameter groups of a unit, each with the number of parameters that it uses."""
    return [
        (group, count) for group in builder.plan.parameter_groups if (count := unit.used_by_group.get(group.name, 0))
    ]
