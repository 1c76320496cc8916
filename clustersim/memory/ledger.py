"""How much memory does a rank use, and when?

Activations of a microbatch exist from the start of its forward to the end of its backward on the stage;
temporary memory of a backward exists while it runs. Where backward is split, the first half frees what the
second does not need. Gradients that FSDP accumulates unsharded exist from a stage's first backward until its
last one has reduced them (`Footprint.unreduced_gradient_bytes`). The compute stream runs passes in sequence,
so the peak depends on their order only, not on their durations: `peak` needs no simulation.

A forward and a backward that overlap advance together, layer by layer, so that the forward fills what the
backward frees: one microbatch and about one layer are held, not two microbatches
(`overlapped_passes`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.memory.overlapped_passes import overlapped_peak
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind, OverlappedPair, ScheduleEntry


class TimedPasses(NamedTuple):
    """The passes of a rank, in any order. bounds: [passes, 2] seconds when each begins and ends."""

    actions: Sequence[Action]
    bounds: FloatArray


PassType = tuple[tuple[int, ActionKind], ...]
"""(stage, kind of action) of a pass, or of the forward and of the backward of an overlapped pair."""


class PassOrder(NamedTuple):
    """Passes and overlapped pairs in execution order. type_indices: [passes] into pass_types."""

    pass_types: tuple[PassType, ...]
    type_indices: IntArray


def pass_order(entries: Iterable[ScheduleEntry]) -> PassOrder:
    """Passes of schedule entries; a backward of the very forward it is paired with runs after it."""
    index_of_type: dict[PassType, int] = {}
    type_indices = [
        index_of_type.setdefault(pass_type, len(index_of_type))
        for pass_type in chain.from_iterable(map(_pass_types, entries))
    ]
    return PassOrder((*index_of_type,), np.array(type_indices, dtype=np.int64))


def _pass_types(entry: ScheduleEntry) -> tuple[PassType, ...]:
    if isinstance(entry, Action):
        return ((entry[:2],),)
    forward, backward = entry
    types = forward[:2], backward[:2]
    return (types,) if forward[::2] != backward[::2] else ((types[0],), (types[1],))


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Memory of one rank over time.

    times: [events] seconds, ascending; activations: [events] bytes from that time on; unreduced_gradients:
    [events] bytes by which gradients exceed their shards; resident: bytes by category that do not change;
    fragmentation: factor on all memory of the framework's allocator.
    """

    times: FloatArray
    activations: FloatArray
    unreduced_gradients: FloatArray
    resident: Mapping[MemoryCategory, Bytes]
    fragmentation: float

    @property
    def peak_activations(self) -> Bytes:
        """Peak bytes of activations."""
        return float(self.activations.max(initial=0.0))

    @property
    def changing_bytes(self) -> FloatArray:
        """Bytes of all that changes: [events]."""
        return self.activations + self.unreduced_gradients

    def peak_by_category(self) -> dict[MemoryCategory, Bytes]:
        """Bytes by category at the peak; they sum to `peak`."""
        by_category = dict(self.resident)
        for category, sizes in self._changing_by_category().items():
            at_peak = sizes[self.changing_bytes.argmax()] if len(sizes) else 0.0
            by_category[category] = by_category.get(category, 0.0) + float(at_peak)
        allocated = sum(size for category, size in by_category.items() if category not in _NOT_ALLOCATED)
        by_category[MemoryCategory.FRAGMENTATION] = allocated * (self.fragmentation - 1)
        return by_category

    def over_time(self) -> tuple[FloatArray, FloatArray]:
        """Seconds, from 0, when no activations are held yet; bytes from each on by category: [categories, times].

        Only activations and unreduced gradients change, and fragmentation in proportion.
        """
        changing = {category: np.append(0.0, sizes) for category, sizes in self._changing_by_category().items()}
        bytes_by_category = {
            category: changing.get(category, 0.0) + np.full(1 + len(self.times), self.resident.get(category, 0.0))
            for category in MemoryCategory
        }
        allocated = (sizes for category, sizes in bytes_by_category.items() if category not in _NOT_ALLOCATED)
        bytes_by_category[MemoryCategory.FRAGMENTATION] = sum(allocated) * (self.fragmentation - 1)
        return np.append(0.0, self.times), np.array(list(bytes_by_category.values()))

    def _changing_by_category(self) -> dict[MemoryCategory, FloatArray]:
        """[events] bytes of what changes, by category."""
        return {MemoryCategory.ACTIVATIONS: self.activations, MemoryCategory.GRADIENTS: self.unreduced_gradients}

    @property
    def peak(self) -> Bytes:
        """Peak bytes of the rank."""
        return sum(self.peak_by_category().values())


# held by the driver and by the communication library, not by the framework's allocator
_NOT_ALLOCATED = (MemoryCategory.CONTEXT, MemoryCategory.COMMUNICATION)


def ledger_from_passes(
    footprint: Footprint, activations: Activations, pipeline_rank: int, passes: TimedPasses
) -> MemoryLedger:
    """The ledger of a rank that ran these passes."""
    entries, bounds = _paired_passes(passes)
    times, is_begin, changes = _memory_events(footprint, activations, pass_order(entries), bounds)
    by_time = np.lexsort((is_begin, times))  # at equal times what has ended is freed first
    ordered = _with_created_gradients(footprint, activations, pipeline_rank, changes[by_time])
    return _build_ledger(footprint, pipeline_rank, times[by_time], ordered)


def _paired_passes(passes: TimedPasses) -> tuple[list[ScheduleEntry], FloatArray]:
    """Passes, and pairs of a forward and a backward that overlap in time, in order of their begin; their bounds."""
    order = np.lexsort((passes.bounds[:, 1], passes.bounds[:, 0]))
    bounds, entries = passes.bounds[order], [passes.actions[index] for index in order.tolist()]
    overlaps_next = np.flatnonzero(bounds[1:, 0] < bounds[:-1, 1])
    paired: dict[int, OverlappedPair] = {}
    for first in overlaps_next.tolist():
        both = entries[first], entries[first + 1]
        if first - 1 not in paired and {action.kind for action in both} == {ActionKind.FORWARD, ActionKind.BACKWARD}:
            paired[first] = OverlappedPair(*(both if both[0].kind is ActionKind.FORWARD else both[::-1]))
    ends = bounds[:, 1].copy()
    for first in paired:
        ends[first] = max(ends[first], ends[first + 1])
    is_entry = np.ones(len(entries), dtype=bool)
    is_entry[[first + 1 for first in paired]] = False
    kept = np.flatnonzero(is_entry)
    return [paired.get(index, entries[index]) for index in kept.tolist()], np.stack([bounds[:, 0], ends], axis=1)[kept]


def ledger_from_order(
    footprint: Footprint, activations: Activations, pipeline_rank: int, order: PassOrder
) -> MemoryLedger:
    """The ledger of a rank that runs these passes in sequence, at the times 0, 1, 2 ..."""
    bounds = np.arange(len(order.type_indices))[:, None] + np.array([0.0, 1.0])
    times, _, changes = _memory_events(footprint, activations, order, bounds)
    ordered = _with_created_gradients(footprint, activations, pipeline_rank, changes)
    return _build_ledger(footprint, pipeline_rank, times, ordered)


def _with_created_gradients(
    footprint: Footprint, activations: Activations, pipeline_rank: int, changes: FloatArray
) -> FloatArray:
    """Changes of a step whose only backward creates the gradients, at its end; changes: [events, 2].

    It frees activations as it creates them, layer by layer, so that it needs most either when it begins, without
    gradients, or in the first layer, with all of them.
    """
    created = footprint.created_gradient_bytes(pipeline_rank)
    if not created:
        return changes
    changed = changes.copy()
    before, transient = changes[:-2, 0].sum(), changes[-2, 0]
    last_transient = activations.last_layer_bytes - before
    if last_transient + created > transient:
        changed[-2:, 0] += np.array([1.0, -1.0]) * (last_transient - transient)
        changed[-2, 1] += created
    else:
        changed[-1, 1] += created
    return changed


def _build_ledger(footprint: Footprint, pipeline_rank: int, times: FloatArray, changes: FloatArray) -> MemoryLedger:
    """changes: [events, 2] of activations and of unreduced gradients, in order of time."""
    held = np.cumsum(changes, axis=0)
    resident = footprint.resident_bytes(pipeline_rank)
    fragmentation = footprint.framework.fragmentation_with(footprint.plan.training.recompute)
    return MemoryLedger(times, held[:, 0], held[:, 1], resident, fragmentation)


def _memory_events(
    footprint: Footprint, activations: Activations, order: PassOrder, bounds: FloatArray
) -> tuple[FloatArray, BoolArray, FloatArray]:
    """When memory changes, whether a pass begins then, and by how much: [events], [events], [events, 2].

    bounds: [passes, 2] when they begin and end. A forward changes nothing at its end.
    """
    sizes = np.array([_entry_change(activations, pass_type) for pass_type in order.pass_types]).reshape(-1, 2)
    frees = np.array([kind is not ActionKind.FORWARD for *_, (_, kind) in order.pass_types], dtype=bool)
    changes = np.stack([sizes[order.type_indices], _gradient_changes(footprint, order)], axis=-1)
    is_begin = np.broadcast_to([True, False], bounds.shape)
    events = np.stack([np.ones_like(frees), frees], axis=1)[order.type_indices]
    return bounds[events], is_begin[events], changes[events]


def _gradient_changes(footprint: Footprint, order: PassOrder) -> FloatArray:
    """Change of a rank's unreduced gradients when each pass begins and ends: [passes, 2].

    Once a first unit is reduced, the buffer of one unit stays until the next one's reduction (FSDP2,
    `FSDPParamGroup.comm_ctx.reduce_scatter_state`).
    """
    changes = np.zeros((len(order.type_indices), 2))
    if not footprint.frees_reduced_gradients:
        return changes
    stages, reductions = footprint.plan.stages, []
    for stage_index, first, last in _gradient_lifetimes(order):
        unreduced = footprint.unreduced_gradient_bytes(stages[stage_index])
        changes[first, 0] += unreduced
        changes[last, 1] -= unreduced
        reductions.append((last, footprint.reduction_buffer_bytes(stages[stage_index])))
    if reductions:
        changes[min(reductions)[0], 0] += max(size for _, size in reductions)
    return changes


def _gradient_lifetimes(order: PassOrder) -> Iterator[tuple[int, int, int]]:
    """Each stage, with the indices of the first and of the last pass that produces its weight gradients."""
    first, last = np.empty((2, len(order.pass_types)), dtype=np.int64)  # pass of each type
    passes = np.arange(len(order.type_indices))
    first[order.type_indices[::-1]] = passes[::-1]  # of equal indices numpy keeps the last
    last[order.type_indices] = passes
    types_by_stage: dict[int, list[int]] = {}
    for index, (*_, (stage, kind)) in enumerate(order.pass_types):
        if kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            types_by_stage.setdefault(stage, []).append(index)
    for stage, types in types_by_stage.items():
        yield stage, int(first[types].min()), int(last[types].max())


def _entry_change(activations: Activations, pass_type: PassType) -> tuple[Bytes, Bytes]:
    """Change of a rank's bytes when a pass or an overlapped pair begins, and when it ends.

    Where pairs do not overlap (`layout.overlap_moe_expert_parallel_comm`), the forward runs before the backward.
    """
    changes = [_pass_change(activations, *stage_and_kind) for stage_and_kind in pass_type]
    if len(pass_type) == 1:
        return changes[0]
    (forward, _), (backward, backward_kind) = pass_type
    begin = changes[0][0] + changes[1][0]
    if activations.plan.layout.overlap_moe_expert_parallel_comm and backward_kind is ActionKind.BACKWARD:
        begin = overlapped_peak(activations, activations.plan.stages[forward], activations.plan.stages[backward])
    return begin, sum(map(sum, changes)) - begin


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
