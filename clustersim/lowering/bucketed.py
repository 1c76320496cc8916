"""Lowering of DDP, ZeRO-1 and ZeRO-2: when gradients are reduced and updated parameters gathered, in buckets.

The backward that completes gradients (or its weight-gradient half) is split where buckets become full, and
each bucket's collective is issued there (Li et al. 2020, section 3.2.3). With ZeRO, the updated parameters are
gathered at the end of the step, or, where that overlaps, at the start of the next one, in the order in which its first
forward needs them, and that forward waits for them layer by layer (Megatron-LM's distributed optimizer with
`overlap_param_gather`). Without overlap everything is communicated after the last backward, except for
ZeRO-2's gradients without a pipeline, which cannot wait: they are reduced after every backward, and the
next pass waits for them. Each parameter group has its own buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from clustersim.lowering.program_builder import RankProgramBuilder, StagePass
from clustersim.lowering.task_list import split_into_buckets
from clustersim.lowering.units import pass_operations
from clustersim.parallel.data_parallel_strategy import DdpStrategy, GradientSync, Zero1
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import DP_GROUP
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.program.action import FORWARD, ActionKind

_PER_MICROBATCH: Final = GradientSync.EVERY_BACKWARD
GatherTasks = tuple[int, ...]
"""Tasks after which the parameters of a unit are gathered."""


@dataclass(slots=True)
class BucketedLowering:
    """Splits passes into slices that end where a bucket is full.

    _gathers_by_stage: gathers that the stage's first forward waits for, by unit; _awaited_reductions:
    reductions that the next pass waits for.
    """

    strategy: DdpStrategy | Zero1
    _gathers_by_stage: dict[int, list[GatherTasks]] = field(default_factory=dict)
    _awaited_reductions: tuple[int, ...] = ()

    def begin_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
        """Gather the parameters that the previous step updated, in the order in which forward needs them."""
        if not (isinstance(self.strategy, Zero1) and self.strategy.gathers_in_forward):
            return
        for stage in stages:
            self._gathers_by_stage[stage.index] = self._add_gathers(builder, stage)

    def lower_pass(self, builder: RankProgramBuilder, stage_pass: StagePass) -> int:
        """One segment, or slices between gathers or full buckets."""
        if self._awaited_reductions:
            stage_pass, self._awaited_reductions = (
                StagePass(
                    stage_pass.stage,
                    stage_pass.action,
                    (*stage_pass.depends_on, *self._awaited_reductions),
                    stage_pass.input_operations,
                ),
                (),
            )
        if stage_pass.action.kind is FORWARD:
            return self._add_forward(builder, stage_pass)
        return (
            self._add_backward(builder, stage_pass)
            if self._reduces_in_pass(builder, stage_pass)
            else builder.add_full_pass(stage_pass)
        )

    def reduce_gradients(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], last_task: int) -> None:
        """Without overlap, reduce each stage's gradients at once after the last backward."""
        if builder.gradient_sync is not GradientSync.AFTER_BACKWARD:
            return
        for stage in stages:
            for group in builder.plan.trained_groups:
                builder.reduction_tasks += self._add_reduction(
                    builder, group, builder.plan.parameter_count(stage, group.name), last_task
                )

    def end_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], optimizer_task: int) -> None:
        """Gather the parameters that were updated in shards, unless the next forward does."""
        if not isinstance(self.strategy, Zero1) or self.strategy.gathers_in_forward:
            return
        for stage in stages:
            for group in builder.plan.trained_groups:
                builder.gather_parameters(
                    "gather parameters", [(group, builder.plan.parameter_count(stage, group.name))], (optimizer_task,)
                )

    def _reduces_in_pass(self, builder: RankProgramBuilder, stage_pass: StagePass) -> bool:
        """Whether gradients are reduced during a backward."""
        if stage_pass.action in builder.final_backwards:
            return builder.gradient_sync is not GradientSync.AFTER_BACKWARD
        return builder.gradient_sync is _PER_MICROBATCH and stage_pass.action.kind is not ActionKind.INPUT_GRADIENT

    def _add_reduction(
        self, builder: RankProgramBuilder, group: ParameterGroup, parameter_count: int, after: int
    ) -> tuple[int, ...]:
        return builder.reduce_gradients("reduce gradients", group, parameter_count, (after,))

    def _add_gathers(self, builder: RankProgramBuilder, stage: PipelineStage) -> list[GatherTasks]:
        """Issue gathers of full units, at least a bucket at a time; return the gathers that each unit waits for."""
        units = builder.units.stage_units(stage)
        gathers: list[GatherTasks] = [()] * len(units)
        for group in builder.plan.trained_groups:
            pending, filled, bucket_size = [], 0, self._bucket_size(builder, stage, group)
            for index, unit in enumerate(units):
                pending.append(index)
                filled += unit.parameters_by_group.get(group.name, 0)
                if filled >= bucket_size or (filled and index == len(units) - 1):
                    tasks = builder.gather_parameters("gather parameters", [(group, filled)], ())
                    for unit_index in pending:
                        gathers[unit_index] += tasks
                    pending, filled = [], 0
        return gathers

    def _add_forward(self, builder: RankProgramBuilder, stage_pass: StagePass) -> int:
        unit_gathers = self._gathers_by_stage.pop(stage_pass.stage.index, None)
        if unit_gathers is None:
            return builder.add_full_pass(stage_pass)
        units = builder.units.stage_units(stage_pass.stage)
        task, depends_on, input_operations = -1, stage_pass.depends_on, stage_pass.input_operations
        for begin, end, gathers in _unit_ranges(unit_gathers):
            slice_pass = StagePass(stage_pass.stage, stage_pass.action, (*depends_on, *gathers), input_operations)
            operations = pass_operations(units[begin:end], ActionKind.FORWARD)
            task = builder.add_compute(
                slice_pass, (builder.units.stage_class(stage_pass.stage), begin, end), operations
            )
            depends_on, input_operations = (), ()
        return task

    def _add_backward(self, builder: RankProgramBuilder, stage_pass: StagePass) -> int:
        operations = builder.units.stage_operations(stage_pass.stage, stage_pass.action.kind)
        groups = {group.name: group for group in builder.plan.trained_groups}
        bucket_sizes = {name: self._bucket_size(builder, stage_pass.stage, group) for name, group in groups.items()}
        task, depends_on, input_operations = -1, stage_pass.depends_on, stage_pass.input_operations
        for index, (bucket_operations, filled) in enumerate(split_into_buckets(operations, bucket_sizes)):
            slice_pass = StagePass(stage_pass.stage, stage_pass.action, depends_on, input_operations)
            task = builder.add_compute(
                slice_pass, (builder.units.stage_class(stage_pass.stage), "bucket", index), bucket_operations
            )
            depends_on, input_operations = (), ()
            for name, parameter_count in filled.items():
                reductions = self._add_reduction(builder, groups[name], parameter_count, task)
                builder.reduction_tasks += reductions
                depends_on = () if self.strategy.overlap else reductions
        self._awaited_reductions = depends_on
        return task

    def _bucket_size(self, builder: RankProgramBuilder, stage: PipelineStage, group: ParameterGroup) -> float:
        """Parameters in a bucket of a stage.

        Megatron-LM's rule uses the size of the dense DP group, for experts, too.
        """
        gradient_bytes, dp_size = group.formats.gradients.bytes, builder.plan.layout.group_size(DP_GROUP)
        return (
            self.strategy.bucket_bytes(dp_size, gradient_bytes, is_first_chunk=builder.plan.is_first_chunk(stage))
            / gradient_bytes
        )


def _unit_ranges(gathers: Sequence[GatherTasks]) -> list[tuple[int, int, GatherTasks]]:
    """Ranges of adjacent units that wait for the same gathers: (begin, end, gathers)."""
    boundaries = [index for index in range(1, len(gathers)) if gathers[index] != gathers[index - 1]]
    edges = [0, *boundaries, len(gathers)]
    return [(begin, end, gathers[begin]) for begin, end in pairwise(edges)]
