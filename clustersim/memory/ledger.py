"""How much memory does a rank use, and when?

Activations of a microbatch exist from the start of its forward to the end of its backward on the stage;
temporary memory of a backward exists while it runs. Where backward is split, the first half frees what the
second does not need. The compute stream runs passes in sequence, so the peak depends on their order only,
not on their durations: `peak` needs no simulation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Seconds
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind, ScheduleEntry, flatten_entries


class TimedPass(NamedTuple):
    """One action and when it ran (any increasing numbers will do where only the peak is needed)."""

    action: Action
    start: Seconds
    end: Seconds


class PassOrder(NamedTuple):
    """Passes in execution order. pass_types: (stage, kind of action); type_indices: [passes] into pass_types."""

    pass_types: tuple[tuple[int, ActionKind], ...]
    type_indices: IntArray


def pass_order(entries: Iterable[ScheduleEntry]) -> PassOrder:
    """Passes of schedule entries, those of overlapped pairs in sequence."""
    index_of_type: dict[tuple[int, ActionKind], int] = {}
    type_indices = [index_of_type.setdefault(action[:2], len(index_of_type)) for action in flatten_entries(entries)]
    return PassOrder((*index_of_type,), np.array(type_indices, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Memory of one rank over time.

    times: [events] seconds, ascending; activations: [events] bytes from that time on; resident: bytes by
    category that do not change; fragmentation: factor on all memory of the framework's allocator.
    """

    times: FloatArray
    activations: FloatArray
    resident: Mapping[MemoryCategory, Bytes]
    fragmentation: float

    @property
    def peak_activations(self) -> Bytes:
        """Peak bytes of activations."""
        return float(self.activations.max(initial=0.0))

    def peak_by_category(self) -> dict[MemoryCategory, Bytes]:
        """Bytes by category at the peak; they sum to `peak`."""
        by_category = dict(self.resident)
        by_category[MemoryCategory.ACTIVATIONS] = self.peak_activations
        allocated = sum(size for category, size in by_category.items() if category not in _NOT_ALLOCATED)
        by_category[MemoryCategory.FRAGMENTATION] = allocated * (self.fragmentation - 1)
        return by_category

    def over_time(self) -> tuple[FloatArray, FloatArray]:
        """Seconds, from 0, when no activations are held yet; bytes from each on by category: [categories, times].

        Only activations change, and fragmentation in proportion.
        """
        below_peak, peak = self.peak_activations - np.append(0.0, self.activations), self.peak_by_category()
        reduction = {
            MemoryCategory.ACTIVATIONS: below_peak,
            MemoryCategory.FRAGMENTATION: below_peak * (self.fragmentation - 1),
        }
        bytes_by_category = [
            np.full(len(below_peak), peak.get(category, 0.0)) - reduction.get(category, 0.0)
            for category in MemoryCategory
        ]
        return np.append(0.0, self.times), np.array(bytes_by_category)

    @property
    def peak(self) -> Bytes:
        """Peak bytes of the rank."""
        return sum(self.peak_by_category().values())


# held by the driver and by the communication library, not by the framework's allocator
_NOT_ALLOCATED = (MemoryCategory.CONTEXT, MemoryCategory.COMMUNICATION)


def ledger_from_passes(
    footprint: Footprint, activations: Activations, pipeline_rank: int, passes: Iterable[TimedPass]
) -> MemoryLedger:
    """The ledger of a rank that ran these passes."""
    changes = np.array([*_byte_changes(activations, passes)], dtype=np.float64).reshape(-1, 3)
    times, _, sizes = np.ascontiguousarray(changes[np.lexsort(changes.T[::-1])].T)
    return MemoryLedger(
        times, np.cumsum(sizes), footprint.resident_bytes(pipeline_rank), footprint.framework.fragmentation
    )


def ledger_from_order(
    footprint: Footprint, activations: Activations, pipeline_rank: int, order: PassOrder
) -> MemoryLedger:
    """The ledger of a rank that runs these passes in sequence, at the times 0, 1, 2 ...

    An overlapped pair has the same peak: its backward has freed nothing before its forward has begun.
    """
    sizes = np.array([_pass_change(activations, *pass_type) for pass_type in order.pass_types])
    frees = np.array([kind is not ActionKind.FORWARD for _, kind in order.pass_types])
    events = np.stack([np.ones_like(frees), frees], axis=1)[
        order.type_indices
    ]  # [passes, 2] whether memory changes at the begin and at the end
    times = np.arange(len(order.type_indices))[:, None] + np.array([0.0, 1.0])
    bytes_held = np.cumsum(sizes[order.type_indices][events])
    return MemoryLedger(
        times[events], bytes_held, footprint.resident_bytes(pipeline_rank), footprint.framework.fragmentation
    )


def _byte_changes(activations: Activations, passes: Iterable[TimedPass]) -> Iterable[tuple[Seconds, int, Bytes]]:
    """(time, order at equal times: freed before allocated, bytes)."""
    changes_by_type: dict[tuple[int, ActionKind], tuple[Bytes, Bytes]] = {}
    for action, start, end in passes:
        key = action.stage, action.kind
        if key not in changes_by_type:
            changes_by_type[key] = _pass_change(activations, *key)
        allocated, released = changes_by_type[key]
        yield start, 1, allocated
        if action.kind is not ActionKind.FORWARD:
            yield end, 0, released


def _pass_change(activations: Activations, stage: int, kind: ActionKind) -> tuple[Bytes, Bytes]:
    """Change of a rank's bytes when a pass begins, and when it ends."""
    saved, for_wgrad, transient = activations.stage_bytes(activations.plan.stages[stage], kind)
    saved += _gathered_logit_bytes(activations.plan)
    match kind:
        case ActionKind.FORWARD:
            return saved, 0.0
        case ActionKind.BACKWARD:
            return transient, -saved - transient
        case ActionKind.INPUT_GRADIENT:
            return transient, for_wgrad - saved - transient
        case ActionKind.WEIGHT_GRADIENT:
            return transient, -for_wgrad - transient


def _gathered_logit_bytes(plan: Plan) -> Bytes:
    """Bytes of all GPUs' logits (compute format and FP32) that torch.nn.DataParallel gathers on its first."""
    if not plan.layout.data.is_single_process:
        return 0.0
    tokens = (plan.layout.dp - 1) * plan.training.microbatch * plan.training.sequence
    return float(tokens * plan.model.vocab * (plan.training.recipe.activations.bytes + DType.FP32.bytes))
