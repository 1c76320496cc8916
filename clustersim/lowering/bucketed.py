"""DDP, ZeRO-1 and ZeRO-2: when are gradients reduced and updated parameters gathered?

The backward that completes gradients (or its half, the weights') is cut where buckets become full, and each bucket's
collective is issued there (Li et al. 2020, section 3.2.3). With ZeRO, the parameters that the last step updated are
gathered at the start of the step, in the order in which the first forward needs them, and that forward waits for them
layer by layer (Megatron-LM's distributed optimizer with `overlap_param_gather`). Without overlap everything is
communicated after the last backward, but for ZeRO-2's gradients, which cannot wait: they are reduced after every
backward, and the next pass waits for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from clustersim.lowering.passes import Lowering, Pass, Plain, shape
from clustersim.lowering.tasklist import buckets
from clustersim.lowering.units import operations_of
from clustersim.parallel.pipeline import Stage
from clustersim.program.action import ActionKind
from clustersim.program.task import Collective


@dataclass(slots=True)
class Bucketed:
    """collective: reduces gradients; bucket: parameters; gathers: parameters are sharded between steps.

    every_microbatch: gradients are reduced after each microbatch's backward, not only after the last one's.
    """

    collective: Collective
    bucket: float
    last_microbatch: int
    overlap: bool = True
    gathers: bool = False
    every_microbatch: bool = False
    _gathered: dict[int, dict[int, int]] = field(default_factory=dict)
    _awaited: tuple[int, ...] = ()

    def begin(self, low: Lowering, stages: Sequence[Stage]) -> None:
        """Gather the parameters that the previous step updated, in the order in which forward needs them."""
        if not (self.gathers and self.overlap):
            return
        for stage in stages:
            self._gathered[stage.number] = self._gather(low, stage)

    def run(self, low: Lowering, run: Pass) -> int:
        """One block, or pieces where gathers or full buckets cut it."""
        if self._awaited:
            run, self._awaited = Pass(run.stage, run.action, (*run.after, *self._awaited), run.arriving), ()
        if run.action.kind is ActionKind.FORWARD:
            return self._forward(low, run)
        completes = self.every_microbatch or (self.overlap and run.action.microbatch == self.last_microbatch)
        if completes and run.action.kind is not ActionKind.INPUT_GRADIENT:
            return self._backward(low, run)
        return Plain().run(low, run)

    def reduce(self, low: Lowering, stages: Sequence[Stage], after: int) -> None:
        """Without overlap, reduce each stage's gradients in one piece after the last backward."""
        if self.overlap or self.every_microbatch:
            return
        for stage in stages:
            low.reducing.append(self._reduction(low, low.plan.parameters(stage), after))

    def end(self, low: Lowering, stages: Sequence[Stage], after: int) -> None:
        """Without overlap, gather the updated parameters at the end of the step."""
        if not self.gathers or self.overlap:
            return
        for stage in stages:
            payload = low.plan.parameters(stage) * low.plan.training.precision.compute.bytes
            low.communicate("gather parameters", Collective.ALL_GATHER, payload, (after,))

    def _reduction(self, low: Lowering, parameters: int, after: int) -> int:
        payload = parameters * low.plan.training.precision.gradients.bytes
        return low.communicate("reduce gradients", self.collective, payload, (after,))

    def _gather(self, low: Lowering, stage: Stage) -> dict[int, int]:
        """Issue gathers of whole units, a bucket or more at a time: the gather after which each unit may run."""
        width, waiting, full = low.plan.training.precision.compute.bytes, [], 0
        gathered: dict[int, int] = {}
        units = low.units.of(stage)
        for place, unit in enumerate(units):
            waiting.append(place)
            full += unit.parameters
            if full >= self.bucket or place == len(units) - 1:
                task = low.communicate("gather parameters", Collective.ALL_GATHER, full * width, ())
                gathered |= dict.fromkeys(waiting, task)
                waiting, full = [], 0
        return gathered

    def _forward(self, low: Lowering, run: Pass) -> int:
        gathered = self._gathered.pop(run.stage.number, None)
        if gathered is None:
            return Plain().run(low, run)
        units = low.units.of(run.stage)
        task, after, arriving = -1, run.after, run.arriving
        for begin, end, gather in _runs([gathered[place] for place in range(len(units))]):
            part = Pass(run.stage, run.action, (*after, gather), arriving)
            operations = operations_of(units[begin:end], ActionKind.FORWARD)
            task = low.compute(part, (*shape(run.stage), begin, end), operations)
            after, arriving = (), ()
        return task

    def _backward(self, low: Lowering, run: Pass) -> int:
        operations = low.units.operations(run.stage, run.action.kind)
        task, after, arriving = -1, run.after, run.arriving
        for place, (piece, parameters) in enumerate(buckets(operations, self.bucket)):
            part = Pass(run.stage, run.action, after, arriving)
            task = low.compute(part, (*shape(run.stage), "bucket", place), piece)
            after, arriving = (), ()
            if parameters:
                low.reducing.append(self._reduction(low, parameters, task))
                after = () if self.overlap else (low.reducing[-1],)
        self._awaited = after
        return task


def _runs(gathers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranges of neighbouring units that wait for the same gather: (begin, end, gather)."""
    cuts = [place for place in range(1, len(gathers)) if gathers[place] != gathers[place - 1]]
    edges = [0, *cuts, len(gathers)]
    return [(begin, end, gathers[begin]) for begin, end in pairwise(edges)]
