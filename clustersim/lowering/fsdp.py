"""ZeRO-3 and FSDP: when are parameters gathered and gradients reduced?

Every unit (layer, embedding, head) waits for the gather of its parameters. The gather of a unit is issued when compute
reaches the unit `prefetch` places before it, so at most prefetch + 1 gathered units are in memory; a pass prefetches
nothing for the next pass. Gradients are reduced and scattered unit by unit, behind the gathers in the same stream, and
with hybrid sharding summed across the replicas there (FSDP2 has a stream of its own for that; where both use the same
network ports they share them, which one stream says). The head stays gathered between its forward and its backward,
which follows at once (as torchtitan wraps it for FSDP2). On a CPU, which has no streams, FSDP2's reduce-scatter ends
before the next unit's backward begins (`waits`). With a pipeline a stage's first forward gathers its units, its
last backward reduces them, and between the two they stay (`parallel.data_parallel_strategy`).
FSDP2 gathers into one buffer and copies each parameter out of it before its unit runs (`foreach_all_gather`'s copy-out,
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); copies of gradients into the buffer that is reduced run
beside compute and are left out. Where backward is run in halves, its input gradients need the parameters, its weight
gradients do not.
Reference: Zhao et al. 2023, "PyTorch FSDP", sections 3.2 and 3.3.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from clustersim.lowering.program_builder import Held, Lowering, Pass
from clustersim.lowering.task_list import moved
from clustersim.lowering.units import Unit, in_order
from clustersim.model.memory_bound import copy_kernel
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, ReductionFrequency
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation, WorkType


class _Made(NamedTuple):
    """What a pass was lowered to. computed: its last compute task; awaited: reductions that the next unit waits for."""

    tasks: range
    computed: int
    reducing: tuple[int, ...]
    awaited: tuple[int, ...]


@dataclass(slots=True)
class Sharded:
    """Gathers, runs and reduces unit by unit.

    _kept: stages whose units were gathered and stay so; _awaited: reductions that the next unit waits for; _copied:
    copies of units, which passes share; _made: passes by all that their tasks depend on but the microbatch.
    """

    strategy: FullyShard
    _kept: set[int] = field(default_factory=set)
    _awaited: tuple[int, ...] = ()
    _copied: dict[tuple[int, WorkType], tuple[Operation, ...]] = field(default_factory=dict)
    _made: dict[Hashable, _Made] = field(default_factory=dict)

    def begin(self, low: Lowering, stages: Sequence[PipelineStage]) -> None:
        """Nothing to do: parameters are gathered when they are needed."""

    def run(self, low: Lowering, run: Pass) -> int:
        """Gather, run and (backward) reduce unit by unit; return the last compute task."""
        if low.cuts:
            self._unit_by_unit(low, run)
        elif self._awaited or self._gathers(low, run) or self._reduces(low, run):
            self._as_before(low, run)
        else:
            low.one_by_one(run)
        if self.strategy.keeps_unsharded(is_pipelined=low.plan.layout.is_pipelined):
            self._kept.add(run.stage.index)
        return low.computed or 0

    def _as_before(self, low: Lowering, run: Pass) -> None:
        """Lower a pass as one whose tasks depend on the same, but for where they begin and for the microbatch."""
        now, action = len(low.tasks), run.action
        kept, last = action.stage in self._kept, action in low.last
        computed = None if low.computed is None else low.computed - now
        key = action.stage, action.kind, kept, last, computed, moved(run.after, -now), moved(self._awaited, -now)
        if key not in self._made:
            reduced = len(low.reducing)
            self._unit_by_unit(low, run)
            tasks, reducing = range(now, len(low.tasks)), tuple(low.reducing[reduced:])
            self._made[key] = _Made(tasks, low.computed or 0, reducing, self._awaited)
        else:
            self._again(low, run, self._made[key])

    def _unit_by_unit(self, low: Lowering, run: Pass) -> None:
        """Lower a pass with the gathers and reductions of its units between them."""
        units, kind = in_order(low.units.of(run.stage), run.action.kind), run.action.kind
        gathers, reduces = self._gathers(low, run), self._reduces(low, run)
        wanted = [gathers and (kind is ActionKind.FORWARD or not unit.head) for unit in units]
        gathered: dict[int, tuple[int, ...]] = {}
        issued = 0
        for place, unit in enumerate(units):
            while issued < min(len(units), place + 1 + self.strategy.prefetch_depth):
                if wanted[issued]:
                    gathered[issued] = self._gather(low, units[issued], kind)
                issued += 1
            own = (*gathered.get(place, ()), *self._awaited)
            self._awaited = ()
            part = Pass(run.stage, run.action, (*run.after, *own), run.arriving)
            copied = self._copies(low, unit, run) if wanted[place] else ()
            task = low.unit(part if place == 0 else Pass(run.stage, run.action, own), unit, copied)
            if reduces:
                self._reduce(low, run, unit, task)

    def _again(self, low: Lowering, run: Pass, made: _Made) -> None:
        """Lower a pass as one before it was."""
        further = low.tasks.again(made.tasks, run.action)
        low.computed = made.computed + further
        low.reducing += moved(made.reducing, further)
        self._awaited = moved(made.awaited, further)

    def reduce(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Nothing to do: the backwards have reduced their gradients."""

    def end(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Nothing to do: the next step gathers what it needs."""

    def _gathers(self, low: Lowering, run: Pass) -> bool:
        """Whether a pass gathers its units' parameters, backward all but the head's."""
        kind = run.action.kind
        if run.stage.index in self._kept or kind is ActionKind.WEIGHT_GRADIENT:
            return False
        return kind is ActionKind.FORWARD or self.strategy.reshards_parameters(
            is_pipelined=low.plan.layout.is_pipelined
        )

    def _gather(self, low: Lowering, unit: Unit, kind: ActionKind) -> tuple[int, ...]:
        after = () if low.computed is None else (low.computed,)
        again = kind is not ActionKind.FORWARD
        return low.gather(f"gather {unit.name}", _held(low, unit), after, again=again)

    def _reduce(self, low: Lowering, run: Pass, unit: Unit, task: int) -> None:
        """Reduce the gradients of a unit, which are there after a task."""
        last = run.action in low.last or self.strategy.all_reduce is ReductionFrequency.PER_MICROBATCH
        reductions: tuple[int, ...] = ()
        for item in _held(low, unit):
            reductions += low.reduce(f"reduce {unit.name}", *item, (task,), across=last)
        low.reducing += reductions
        self._awaited = reductions if self.strategy.waits_for_reduction else ()

    def _reduces(self, low: Lowering, run: Pass) -> bool:
        """Whether gradients are reduced during a pass."""
        if run.action.kind not in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            return False
        every = low.sync is GradientSync.EVERY_BACKWARD
        return every or run.action in low.last

    def _copies(self, low: Lowering, unit: Unit, run: Pass) -> tuple[Operation, ...]:
        """The copy of what a pass has gathered into the parameters' own memory, if there is one."""
        if not self.strategy.copies:
            return ()
        work = WorkType.FORWARD if run.action.kind is ActionKind.FORWARD else WorkType.BACKWARD
        key = id(unit), work
        if key not in self._copied:
            self._copied[key] = self._copy(low, unit, work)
        return self._copied[key]

    def _copy(self, low: Lowering, unit: Unit, work: WorkType) -> tuple[Operation, ...]:
        dtype = low.plan.training.recipe.activations
        held = ((group, count) for group, count in _held(low, unit) if group.shard_count > 1)
        gathered = sum(count * group.formats.gathered.bytes for group, count in held)
        elements = int(gathered / dtype.bytes)
        return (Operation(copy_kernel(f"copy {unit.name}", dtype, elements), work),)


def _held(low: Lowering, unit: Unit) -> Held:
    """The groups of which a unit has parameters, and how many."""
    return [(group, count) for group in low.plan.parameter_groups if (count := unit.counts.get(group.name, 0))]
