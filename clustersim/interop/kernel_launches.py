"""From where in its program did the host launch each kernel?

The innermost operator around the launch, with its input shapes; the autograd sequence number of the forward
operator that it belongs to: its own in forward, in backward that of the node (`autograd::engine::
evaluate_function`), by which PyTorch's profiler itself links both passes. A forward operator inside a node is
recomputation. What FSDP2 or a process group copies (`fsdp::chunk_cat`, the input that `c10d::_reduce_scatter_base_`
clones) is launched inside an operator of theirs. Operators are nested by time on each thread. Reference:
pytorch/pytorch, torch/csrc/autograd/profiler_kineto.cpp; torch/csrc/autograd/engine.cpp;
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.interop.kineto_events import NO_ID, RankEvents, lookup

NODE_NAME: Final = "autograd::engine::evaluate_function: "
_TRANSFER_PREFIXES: Final = ("fsdp::", "c10d::")
_OPERATOR, _NODE, _TRANSFER = range(3)
_Frame = tuple[float, int, int, int, int]
"""End, operator, sequence number of the forward operator around it, autograd node and transfer around it; -1: none."""


@dataclass(frozen=True, slots=True)
class KernelLaunches:
    """Launches of a rank's GPU spans, in their order; -1: unknown.

    launch_start, launch_end: [n] seconds at which the host launched it, minus infinity where that is unknown;
    queue_start: [n] seconds of its start on the same clock, that of the trace; operator: [n] index into `operators`,
    (name, input shapes); call: [n] number of the operator's call; sequence: [n] of the forward operator that launched
    it; node: [n] sequence number of the autograd node that launched it; node_name: [n] index into `operators`;
    transfer: [n] index into `operators` of the operator of FSDP2 or of a process group around it; in_update: [n]
    whether an optimizer step launched it.
    """

    launch_start: FloatArray
    launch_end: FloatArray
    queue_start: FloatArray
    operator: IntArray
    call: IntArray
    sequence: IntArray
    node: IntArray
    node_name: IntArray
    transfer: IntArray
    in_update: IntArray
    operators: Sequence[tuple[str, Any]]

    @classmethod
    def from_events(cls, events: RankEvents, order: IntArray) -> "KernelLaunches":
        """Launches of a trace's GPU events. order: the events' order."""
        gpu, launches, operators = events.gpu, events.launches, events.operators
        index, is_known = lookup(
            launches.integers("correlation"), np.arange(len(launches)), gpu.integers("correlation")[order]
        )
        launch_start, launch_thread = launches.floats("start"), launches.integers("thread")
        context = _enclosing_operators(events, launch_start, launch_thread)
        per_event = np.full((4, len(order)), NO_ID)
        if len(launches):
            per_event = np.where(is_known, context[:, index], NO_ID)
        operator, sequence, node, transfer = per_event
        name, dims = operators.integers("name"), operators.integers("dims")
        pairs, pair_index = np.unique(np.stack([name, dims], axis=1), axis=0, return_inverse=True)
        pair_index = pair_index.reshape(-1)
        begins, ends = np.full((2, len(order)), -np.inf)
        if len(launches):
            begins = np.where(is_known, launch_start[index] * 1e-6, -np.inf)
            ends = np.where(is_known, (launch_start + launches.floats("duration"))[index] * 1e-6, -np.inf)
        return cls(
            launch_start=begins,
            launch_end=ends,
            queue_start=gpu.floats("start")[order] * 1e-6,
            operator=_take(pair_index, operator),
            call=operator,
            sequence=sequence,
            node=_take(operators.integers("sequence"), node),
            node_name=_take(pair_index, node),
            transfer=_take(pair_index, transfer),
            in_update=_in_intervals(events.updates, launch_start[index] if len(launches) else np.zeros(len(order))),
            operators=[
                (events.names[name_index], events.dims[dims_index] if dims_index >= 0 else None)
                for name_index, dims_index in pairs.tolist()
            ],
        )


def _take(values: IntArray, index: IntArray) -> IntArray:
    """Values at an index, -1 where that is -1."""
    if not len(values):
        return np.full(len(index), NO_ID)
    return np.where(index >= 0, values[np.maximum(index, 0)], NO_ID)


def _in_intervals(intervals: Sequence[tuple[float, float]], times: FloatArray) -> IntArray:
    """[times] 1 within one of the intervals, which do not overlap, else 0."""
    if not intervals:
        return np.zeros(len(times), dtype=np.int64)
    bounds = np.array(sorted(intervals))
    index = np.searchsorted(bounds[:, 0], times, side="right") - 1
    is_inside: IntArray = ((index >= 0) & (times < bounds[np.maximum(index, 0), 1])).astype(np.int64)
    return is_inside


def _enclosing_operators(events: RankEvents, times: FloatArray, threads: IntArray) -> IntArray:
    """Innermost operator, forward sequence number, autograd node and transfer around each launch: [4, launches]."""
    context = np.full((4, len(times)), NO_ID)
    operators = events.operators
    start, duration = operators.floats("start"), operators.floats("duration")
    thread, sequence = operators.integers("thread"), operators.integers("sequence")
    kinds = np.array([_frame_kind(name) for name in events.names], dtype=np.int64)[operators.integers("name")]
    for thread_id in np.unique(threads).tolist():
        own_operators = np.flatnonzero(thread == thread_id)
        own_operators = own_operators[np.lexsort((-duration[own_operators], start[own_operators]))]
        launches = np.flatnonzero(threads == thread_id)
        launches = launches[np.argsort(times[launches], kind="stable")]
        context[:, launches] = _sweep_thread(
            own_operators.tolist(),
            start[own_operators].tolist(),
            duration[own_operators].tolist(),
            sequence[own_operators].tolist(),
            kinds[own_operators].tolist(),
            times[launches].tolist(),
        )
    return context


def _frame_kind(name: str) -> int:
    if name.startswith(NODE_NAME):
        return _NODE
    return _TRANSFER if name.startswith(_TRANSFER_PREFIXES) else _OPERATOR


def _sweep_thread(
    operators: list[int],
    starts: list[float],
    durations: list[float],
    sequences: list[int],
    kinds: list[int],
    times: list[float],
) -> IntArray:
    """The context of launches on one thread, whose operators begin in this order: [4, launches]."""
    stack: list[_Frame] = []
    position, count, context = 0, len(operators), []
    for time in times:
        while position < count and starts[position] <= time:
            begin = starts[position]
            while stack and stack[-1][0] <= begin:
                stack.pop()
            _, _, forward, node, transfer = stack[-1] if stack else (0.0, NO_ID, NO_ID, NO_ID, NO_ID)
            number = sequences[position]
            if kinds[position] == _NODE:
                forward, node = NO_ID, position
            elif number >= 0 and (node == NO_ID or number != sequences[node]):
                forward = number
            if kinds[position] == _TRANSFER and transfer == NO_ID:
                transfer = position
            stack.append((begin + durations[position], position, forward, node, transfer))
            position += 1
        while stack and stack[-1][0] < time:
            stack.pop()
        _, operator, forward, node, transfer = stack[-1] if stack else (0.0, NO_ID, NO_ID, NO_ID, NO_ID)
        operator, node, transfer = (operators[index] if index >= 0 else NO_ID for index in (operator, node, transfer))
        context.append((operator, forward, node, transfer))
    return np.array(context, dtype=np.int64).reshape(-1, 4).T
