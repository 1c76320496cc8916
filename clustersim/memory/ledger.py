"""How full is a rank's memory, and when?

Activations of a microbatch are there from the start of its forward to the end of its backward on the stage; what a
backward needs for a moment is there while it runs. Where it is run in halves, the first frees what the second does not
need. The compute stream runs passes one after the other, so the peak
depends on their order alone, not on how long they take: `peak` needs no simulation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Seconds
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Category, Footprint
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind, ScheduleEntry, flatten_entries


class Pass(NamedTuple):
    """One action and when it ran (any increasing numbers will do where only the peak is asked)."""

    action: Action
    start: Seconds
    end: Seconds


class Turns(NamedTuple):
    """Passes that run one after the other. kinds: stages and kinds of actions; numbers: [passes] of their kinds."""

    kinds: tuple[tuple[int, ActionKind], ...]
    numbers: IntArray


def in_turns(steps: Iterable[ScheduleEntry]) -> Turns:
    """Passes of steps, those of pairs one after the other."""
    known: dict[tuple[int, ActionKind], int] = {}
    numbers = [known.setdefault(action[:2], len(known)) for action in flatten_entries(steps)]
    return Turns((*known,), np.array(numbers, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Memory of one rank over time.

    times: [events] seconds, ascending; activations: [events] bytes from that time on; resident: bytes by category that
    do not change; fragmentation: factor on all that the framework's allocator holds.
    """

    times: FloatArray
    activations: FloatArray
    resident: Mapping[Category, Bytes]
    fragmentation: float

    @property
    def peak_activations(self) -> Bytes:
        """The most bytes that activations take."""
        return float(self.activations.max(initial=0.0))

    def at_peak(self) -> dict[Category, Bytes]:
        """Bytes by category when memory is fullest; they sum to `peak`."""
        parts = dict(self.resident)
        parts[Category.ACTIVATIONS] = self.peak_activations
        allocated = sum(size for category, size in parts.items() if category not in _OUTSIDE)
        parts[Category.FRAGMENTATION] = allocated * (self.fragmentation - 1)
        return parts

    def over_time(self) -> tuple[FloatArray, FloatArray]:
        """Seconds, at first 0, when no activations are held yet; bytes from each on by category: [categories, times].

        What is activations' alone changes, and the allocator rounds it up by a part.
        """
        missing, peak = self.peak_activations - np.append(0.0, self.activations), self.at_peak()
        less = {Category.ACTIVATIONS: missing, Category.FRAGMENTATION: missing * (self.fragmentation - 1)}
        held = [np.full(len(missing), peak.get(category, 0.0)) - less.get(category, 0.0) for category in Category]
        return np.append(0.0, self.times), np.array(held)

    @property
    def peak(self) -> Bytes:
        """The most bytes that the rank needs."""
        return sum(self.at_peak().values())


# held by the driver and by the communication library, not by the framework's allocator
_OUTSIDE = (Category.CONTEXT, Category.COMMUNICATION)


def ledger(footprint: Footprint, activations: Activations, pipeline_rank: int, passes: Iterable[Pass]) -> Ledger:
    """The ledger of a rank that runs these passes."""
    changes = np.array([*_changes(activations, passes)], dtype=np.float64).reshape(-1, 3)
    times, _, sizes = np.ascontiguousarray(changes[np.lexsort(changes.T[::-1])].T)
    return Ledger(times, np.cumsum(sizes), footprint.resident(pipeline_rank), footprint.framework.fragmentation)


def ordered_ledger(footprint: Footprint, activations: Activations, pipeline_rank: int, turns: Turns) -> Ledger:
    """The ledger of a rank that runs these passes one after the other, at the times 0, 1, 2 ...

    A pair's peak is the same side by side: its backward has freed nothing before its forward has begun.
    """
    sizes = np.array([_change(activations, *item) for item in turns.kinds])
    frees = np.array([kind is not ActionKind.FORWARD for _, kind in turns.kinds])
    events = np.stack([np.ones_like(frees), frees], axis=1)[turns.numbers]  # [passes, 2] its begin, its end
    times = np.arange(len(turns.numbers))[:, None] + np.array([0.0, 1.0])
    held = np.cumsum(sizes[turns.numbers][events])
    return Ledger(times[events], held, footprint.resident(pipeline_rank), footprint.framework.fragmentation)


def _changes(activations: Activations, passes: Iterable[Pass]) -> Iterable[tuple[Seconds, int, Bytes]]:
    """(time, order at equal times: freed before allocated, bytes)."""
    known: dict[tuple[int, ActionKind], tuple[Bytes, Bytes]] = {}
    for action, start, end in passes:
        key = action.stage, action.kind
        if key not in known:
            known[key] = _change(activations, *key)
        begins, ends = known[key]
        yield start, 1, begins
        if action.kind is not ActionKind.FORWARD:
            yield end, 0, ends


def _change(activations: Activations, stage: int, kind: ActionKind) -> tuple[Bytes, Bytes]:
    """By how many bytes a rank holds more when a pass begins, and when it ends."""
    kept, waiting, passing = activations.needs(activations.plan.stages[stage], kind)
    kept += _outputs(activations.plan)
    match kind:
        case ActionKind.FORWARD:
            return kept, 0.0
        case ActionKind.BACKWARD:
            return passing, -kept - passing
        case ActionKind.INPUT_GRADIENT:
            return passing, waiting - kept - passing
        case ActionKind.WEIGHT_GRADIENT:
            return passing, -waiting - passing


def _outputs(plan: Plan) -> Bytes:
    """Logits of all GPUs (compute format and fp32) that torch.nn.DataParallel gathers on its first."""
    if not isinstance(plan.layout.data, NaiveDataParallel):
        return 0.0
    tokens = (plan.layout.dp - 1) * plan.training.microbatch * plan.training.sequence
    return float(tokens * plan.model.vocab * (plan.training.recipe.activations.bytes + DType.FP32.bytes))
