"""ZeRO-3 and FSDP: when are parameters gathered and gradients reduced?

Every unit (layer, embedding, head) waits for the gather of its parameters. The gather of a unit is issued when compute
reaches the unit `prefetch` places before it, so at most prefetch + 1 gathered units are in memory; a pass prefetches
nothing for the next pass. Gradients are reduced and scattered unit by unit, behind the gathers in the same stream. The
head stays gathered between its forward and its backward, which follows at once (as torchtitan wraps it for FSDP2).
FSDP2 gathers into one buffer and copies each parameter out of it before its unit runs (`foreach_all_gather`'s copy-out,
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); copies of gradients into the buffer that is reduced run
beside compute and are left out. Where backward is run in halves, its input gradients need the parameters, its weight
gradients do not.
Reference: Zhao et al. 2023, "PyTorch FSDP", sections 3.2 and 3.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clustersim.lowering.passes import Lowering, Pass
from clustersim.lowering.units import Unit
from clustersim.parallel.data import FullyShard
from clustersim.parallel.parameters import ParameterGroup
from clustersim.parallel.pipeline import Stage
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation, Work
from clustersim.workload.streaming import copy


@dataclass(frozen=True, slots=True)
class Sharded:
    """Gathers, runs and reduces unit by unit."""

    strategy: FullyShard

    def begin(self, low: Lowering, stages: Sequence[Stage]) -> None:
        """Nothing to do: parameters are gathered when they are needed."""

    def run(self, low: Lowering, run: Pass) -> int:
        """Gather, run and (backward) reduce unit by unit; return the last compute task."""
        kind = run.action.kind
        units = low.units.of(run.stage)[:: 1 if kind is ActionKind.FORWARD else -1]
        gathers: dict[int, tuple[int, ...]] = {}
        issued = 0
        for place, unit in enumerate(units):
            while issued < min(len(units), place + 1 + self.strategy.ahead):
                if self._gathers(units[issued], kind):
                    gathers[issued] = self._gather(low, units[issued])
                issued += 1
            own = gathers.get(place, ())
            part = Pass(run.stage, run.action, (*run.after, *own), run.arriving)
            self._compute(low, part if place == 0 else Pass(run.stage, run.action, own), unit)
        return low.computed or 0

    def reduce(self, low: Lowering, stages: Sequence[Stage], after: int) -> None:
        """Nothing to do: every backward has reduced its gradients."""

    def end(self, low: Lowering, stages: Sequence[Stage], after: int) -> None:
        """Nothing to do: the next step gathers what it needs."""

    def _gathers(self, unit: Unit, kind: ActionKind) -> bool:
        again = self.strategy.reshard_after_forward and not unit.head
        return kind is ActionKind.FORWARD or (again and kind is not ActionKind.WEIGHT_GRADIENT)

    def _gather(self, low: Lowering, unit: Unit) -> tuple[int, ...]:
        after = () if low.computed is None else (low.computed,)
        gathers = (low.gather(f"gather {unit.name}", *each, after) for each in _held(low, unit))
        return tuple(task for tasks in gathers for task in tasks)

    def _compute(self, low: Lowering, run: Pass, unit: Unit) -> None:
        """Run one unit, and reduce its gradients once they are there."""
        kind = run.action.kind
        copied = self._copies(low, unit, kind)
        task = low.compute(run, id(unit), (*copied, *unit.operations(kind)))
        if kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            for each in _held(low, unit):
                low.reducing += low.reduce(f"reduce {unit.name}", *each, (task,))

    def _copies(self, low: Lowering, unit: Unit, kind: ActionKind) -> tuple[Operation, ...]:
        """The copy of what was gathered into the parameters' own memory, if there is one."""
        if not (self.strategy.copies and self._gathers(unit, kind)):
            return ()
        work = Work.FORWARD if kind is ActionKind.FORWARD else Work.BACKWARD
        dtype = low.plan.training.recipe.activations
        held = ((group, count) for group, count in _held(low, unit) if group.shards > 1)
        gathered = sum(count * group.formats.gathered.bytes for group, count in held)
        elements = int(gathered / dtype.bytes)
        return (Operation(copy(f"copy {unit.name}", dtype, elements), work),)


def _held(low: Lowering, unit: Unit) -> list[tuple[ParameterGroup, int]]:
    """The groups of which a unit has parameters, and how many."""
    return [(group, count) for group in low.plan.parameter_groups if (count := unit.counts.get(group.name, 0))]
