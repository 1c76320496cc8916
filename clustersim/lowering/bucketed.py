"""DDP, ZeRO-1 and ZeRO-2: when are gradients reduced and updated parameters gathered?

The backward that completes gradients (or its half, the weights') is cut where buckets become full, and each bucket's
collective is issued there (Li et al. 2020, section 3.2.3). With ZeRO, the parameters that the last step updated are
gathered at the start of the step, in the order in which the first forward needs them, and that forward waits for them
layer by layer (Megatron-LM's distributed optimizer with `overlap_param_gather`). Without overlap everything is
communicated after the last backward, but for ZeRO-2's gradients where there is no pipeline, which cannot wait: they are
reduced after every backward, and the next pass waits for them. Groups of parameters have buckets of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from clustersim.lowering.program_builder import Lowering, Pass
from clustersim.lowering.task_list import buckets
from clustersim.lowering.units import operations_of
from clustersim.parallel.data_parallel_strategy import DdpStrategy, GradientSync, Zero1
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import DP_GROUP
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.program.action import FORWARD, ActionKind

_EVERY: Final = GradientSync.EVERY_BACKWARD
Gathers = tuple[int, ...]
"""Tasks after which the parameters of a unit are there."""


@dataclass(slots=True)
class Bucketed:
    """Runs passes in pieces that end where a bucket is full."""

    strategy: DdpStrategy | Zero1
    _gathered: dict[int, list[Gathers]] = field(default_factory=dict)
    _awaited: tuple[int, ...] = ()

    def begin(self, low: Lowering, stages: Sequence[PipelineStage]) -> None:
        """Gather the parameters that the previous step updated, in the order in which forward needs them."""
        if not (self._gathers and self.strategy.overlap):
            return
        for stage in stages:
            self._gathered[stage.index] = self._gather(low, stage)

    def run(self, low: Lowering, run: Pass) -> int:
        """One block, or pieces where gathers or full buckets cut it."""
        if self._awaited:
            run, self._awaited = Pass(run.stage, run.action, (*run.after, *self._awaited), run.arriving), ()
        if run.action.kind is FORWARD:
            return self._forward(low, run)
        return self._backward(low, run) if self._reduces(low, run) else low.whole(run)

    def reduce(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Without overlap, reduce each stage's gradients in one piece after the last backward."""
        if low.sync is not GradientSync.AFTER_BACKWARD:
            return
        for stage in stages:
            for group in low.plan.trained_groups:
                low.reducing += self._reduction(low, group, low.plan.parameter_count(stage, group.name), after)

    def end(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Without overlap, gather the updated parameters at the end of the step."""
        if not self._gathers or self.strategy.overlap:
            return
        for stage in stages:
            for group in low.plan.trained_groups:
                low.gather("gather parameters", [(group, low.plan.parameter_count(stage, group.name))], (after,))

    @property
    def _gathers(self) -> bool:
        """Whether parameters are sharded between steps."""
        return self.strategy.zero_stage > 0

    def _reduces(self, low: Lowering, run: Pass) -> bool:
        """Whether gradients are reduced during a backward."""
        if run.action in low.last:
            return low.sync is not GradientSync.AFTER_BACKWARD
        return low.sync is _EVERY and run.action.kind is not ActionKind.INPUT_GRADIENT

    def _reduction(self, low: Lowering, group: ParameterGroup, parameters: int, after: int) -> tuple[int, ...]:
        return low.reduce("reduce gradients", group, parameters, (after,))

    def _gather(self, low: Lowering, stage: PipelineStage) -> list[Gathers]:
        """Issue gathers of whole units, a bucket or more at a time: those after which each unit may run."""
        units = low.units.of(stage)
        gathered: list[Gathers] = [()] * len(units)
        for group in low.plan.trained_groups:
            waiting, full, size = [], 0, self._bucket(low, stage, group)
            for place, unit in enumerate(units):
                waiting.append(place)
                full += unit.counts.get(group.name, 0)
                if full >= size or (full and place == len(units) - 1):
                    tasks = low.gather("gather parameters", [(group, full)], ())
                    for item in waiting:
                        gathered[item] += tasks
                    waiting, full = [], 0
        return gathered

    def _forward(self, low: Lowering, run: Pass) -> int:
        gathered = self._gathered.pop(run.stage.index, None)
        if gathered is None:
            return low.whole(run)
        units = low.units.of(run.stage)
        task, after, arriving = -1, run.after, run.arriving
        for begin, end, gathers in _runs(gathered):
            part = Pass(run.stage, run.action, (*after, *gathers), arriving)
            operations = operations_of(units[begin:end], ActionKind.FORWARD)
            task = low.compute(part, (low.units.shape(run.stage), begin, end), operations)
            after, arriving = (), ()
        return task

    def _backward(self, low: Lowering, run: Pass) -> int:
        operations = low.units.operations(run.stage, run.action.kind)
        groups = {group.name: group for group in low.plan.trained_groups}
        sizes = {name: self._bucket(low, run.stage, group) for name, group in groups.items()}
        task, after, arriving = -1, run.after, run.arriving
        for place, (piece, full) in enumerate(buckets(operations, sizes)):
            part = Pass(run.stage, run.action, after, arriving)
            task = low.compute(part, (low.units.shape(run.stage), "bucket", place), piece)
            after, arriving = (), ()
            for name, parameters in full.items():
                reduced = self._reduction(low, groups[name], parameters, task)
                low.reducing += reduced
                after = () if self.strategy.overlap else reduced
        self._awaited = after
        return task

    def _bucket(self, low: Lowering, stage: PipelineStage, group: ParameterGroup) -> float:
        """Parameters in a bucket of a stage's; Megatron-LM's rule counts dense weights' ranks, for experts, too."""
        width, ranks = group.formats.gradients.bytes, low.plan.layout.group_size(DP_GROUP)
        return self.strategy.bucket_bytes(ranks, width, is_first_chunk=low.plan.is_first_chunk(stage)) / width


def _runs(gathers: Sequence[Gathers]) -> list[tuple[int, int, Gathers]]:
    """Ranges of neighbouring units that wait for the same gathers: (begin, end, gathers)."""
    cuts = [place for place in range(1, len(gathers)) if gathers[place] != gathers[place - 1]]
    edges = [0, *cuts, len(gathers)]
    return [(begin, end, gathers[begin]) for begin, end in pairwise(edges)]
