"""Which call of a profiled step ran which kernels of the plan?

In one pass both sides run the same work in the same order, and differ in how it is divided: a plan has one matmul
for queries, keys and values where a framework has three, one norm where PyTorch runs eight kernels. So first matmuls
and attention are matched (`anchors`), then what is between them (`windows`). In backward the autograd node that
launched a call tells the forward operator, hence the operator; without nodes backward is matched as forward is.

What repeats in every layer belongs to the layers: a call between two matmuls is always given to an operator, so that
its time scales with them. Only before the first matmul of a pass and in the optimizer calls may belong to none. What
FSDP2 copies belongs to the plan's copies (`transfers`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from calibrate.profile.anchors import Block, Share, anchor_blocks, match_anchors, part_of, split_block
from calibrate.profile.plan_kernels import PassKind, PlanKernel, PlanPass
from calibrate.profile.step_calls import Call, CallPass
from calibrate.profile.transfers import is_transfer, match_transfers
from calibrate.profile.windows import UNMATCHED, match_window
from clustersim.common.units import Seconds
from clustersim.model.kernels import MemoryBoundOp, MemoryBoundShape
from clustersim.program.task import WorkType

_MAX_UNMATCHED: Final = 0.5  # of the time of a backward's matmuls, if its nodes tell their operators
_ACCUMULATE_NODE: Final = "AccumulateGrad"
_Operator = tuple[str, int]
"""Role of an operator, and its occurrence in forward counted from the end, which is that in backward."""


class ForwardMap:
    """The plan's operator of each autograd sequence number of a step's forwards."""

    def __init__(self) -> None:
        self._by_sequence: dict[int, _Operator] = {}
        self._ordered: list[int] = []

    def add(self, plan: PlanPass, calls: CallPass, shares: Sequence[Share]) -> None:
        """Add a matched forward."""
        for call_index, kernel_index, _ in shares:
            sequence = calls.calls[call_index].sequence
            if kernel_index >= 0 and sequence >= 0:
                kernel = plan.kernels[kernel_index]
                self._by_sequence[sequence] = kernel.role, kernel.from_end
        self._ordered = sorted(self._by_sequence)

    def __bool__(self) -> bool:
        return bool(self._ordered)

    def operator(self, sequence: int) -> _Operator:
        """The operator of a node, by the nearest forward operator at or before it."""
        position = max(0, bisect_right(self._ordered, sequence) - 1)
        return self._by_sequence[self._ordered[position]]


def match_pass(plan: PlanPass, calls: CallPass, forward: ForwardMap) -> list[Share]:
    """Match the calls of one pass with the plan's kernels of that pass. forward: the forwards of the step so far."""
    transfers = match_transfers(plan.kernels, calls.calls)
    if not transfers:
        return _match_computing(plan, calls, range(len(calls.calls)), forward)
    copied = {call for call, _, _ in transfers}
    kernels = [index for index, kernel in enumerate(plan.kernels) if not is_transfer(kernel)]
    computing = _match_computing(
        replace(plan, kernels=tuple(plan.kernels[index] for index in kernels)),
        calls,
        [index for index in range(len(calls.calls)) if index not in copied],
        forward,
    )
    return transfers + [
        (call, kernels[kernel] if kernel >= 0 else UNMATCHED, fraction) for call, kernel, fraction in computing
    ]


def _match_computing(plan: PlanPass, calls: CallPass, indices: Sequence[int], forward: ForwardMap) -> list[Share]:
    """Match the calls of one pass that compute (their indices)."""
    if plan.kind is not PassKind.BACKWARD or not forward:
        return match_in_order(plan.kernels, calls.calls, indices, can_skip=True)
    recompute = [index for index, kernel in enumerate(plan.kernels) if kernel.work is WorkType.RECOMPUTE]
    recomputed = [index for index in indices if recompute and calls.calls[index].is_recomputed]
    subset = [plan.kernels[index] for index in recompute]
    shares = [
        (call, recompute[kernel] if kernel >= 0 else UNMATCHED, fraction)
        for call, kernel, fraction in match_in_order(subset, calls.calls, recomputed, can_skip=False)
    ]
    others = [index for index in indices if not (recompute and calls.calls[index].is_recomputed)]
    by_node = shares + _match_by_node(plan.kernels, calls.calls, others, forward)
    if _unmatched_anchor_seconds(by_node, calls) < _MAX_UNMATCHED * _anchor_seconds(calls):
        return by_node
    in_order = match_in_order(plan.kernels, calls.calls, indices, can_skip=False)
    return min(by_node, in_order, key=lambda matched: _unmatched_anchor_seconds(matched, calls))


def _anchor_seconds(calls: CallPass) -> Seconds:
    return sum(call.seconds for call in calls.calls if call.is_anchor)


def _unmatched_anchor_seconds(shares: Sequence[Share], calls: CallPass) -> Seconds:
    return sum(
        calls.calls[index].seconds * fraction
        for index, kernel, fraction in shares
        if kernel < 0 and calls.calls[index].is_anchor
    )


def match_in_order(
    kernels: Sequence[PlanKernel], calls: Sequence[Call], indices: Sequence[int], *, can_skip: bool
) -> list[Share]:
    """Match calls (their indices, in order) with kernels that run in the same order."""
    blocks = anchor_blocks(kernels)
    anchors = [index for index in indices if calls[index].is_anchor]
    block_of = match_anchors(kernels, blocks, calls, anchors)
    shares: list[Share] = []
    for number, block in enumerate(blocks):
        members = [index for index in anchors if block_of.get(index) == number]
        shares += split_block(kernels, block, calls, members)
    shares += [(index, UNMATCHED, 1.0) for index in anchors if index not in block_of]
    others = set(indices) - set(anchors)
    before, window = -1, list[int]()
    for index in (*(index for index in indices if index in block_of or index in others), None):
        if index is not None and index in others:
            window.append(index)
            continue
        after = len(blocks) if index is None else block_of[index]
        candidates = _candidates(kernels, blocks, before, after)
        is_open = can_skip and (before < 0 or all(kernels[i].work is WorkType.OPTIMIZER for i in candidates))
        shares += match_window(kernels, candidates, calls, window, can_skip=is_open)
        before, window = after, []
    return shares


def _candidates(kernels: Sequence[PlanKernel], blocks: Sequence[Block], first: int, last: int) -> list[int]:
    """Memory-bound kernels between two blocks; around a block if both are the same; if there are none, the nearest."""
    if first == last:
        first, last = first - 1, last + 1
    begin = blocks[first][0] if first >= 0 else -1
    end = blocks[last][-1] if last < len(blocks) else len(kernels)
    between = [index for index in range(begin + 1, end) if not kernels[index].is_tensor_kernel]
    outside = (*range(end, len(kernels)), *range(begin, -1, -1))
    return between or [index for index in outside if not kernels[index].is_tensor_kernel][:1]


def _match_by_node(
    kernels: Sequence[PlanKernel], calls: Sequence[Call], indices: Sequence[int], forward: ForwardMap
) -> list[Share]:
    """Match a backward by the forward operators of its nodes."""
    by_operator: dict[_Operator, list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.work is not WorkType.RECOMPUTE:
            by_operator.setdefault((kernel.role, kernel.occurrence), []).append(index)
    shares: list[Share] = []
    previous = UNMATCHED
    for operator, group in groupby(_with_operators(calls, indices, forward), key=lambda pair: pair[0]):
        operator_kernels = [] if operator is None else by_operator.get(operator, [])
        members = [index for _, index in group]
        matched = _match_operator(kernels, operator_kernels, calls, members)
        taken = {index for index, _, _ in matched}
        memory = [kernel for kernel in operator_kernels if _is_memory_bound(kernels[kernel])]
        left = [index for index in members if index not in taken]
        if memory:
            matched += match_window(kernels, memory, calls, left, can_skip=False)
            previous = memory[-1]
        elif previous == UNMATCHED:
            previous = _first_memory_bound(kernels)
        if not memory:
            matched += [(index, previous, 1.0) for index in left]
        shares += matched
    return shares


def _with_operators(
    calls: Sequence[Call], indices: Sequence[int], forward: ForwardMap
) -> list[tuple[_Operator | None, int]]:
    """Each call with the operator of its node; gradients are accumulated for the operator before."""
    operators: list[tuple[_Operator | None, int]] = []
    last: _Operator | None = None
    for index in indices:
        if _ACCUMULATE_NODE not in calls[index].node_name and calls[index].node >= 0:
            last = forward.operator(calls[index].node)
        operators.append((last, index))
    return operators


def _match_operator(
    kernels: Sequence[PlanKernel], operator_kernels: Sequence[int], calls: Sequence[Call], members: Sequence[int]
) -> list[Share]:
    """Match the matmuls, the attention and the gradient accumulation of one operator's backward."""
    anchors = [kernel for kernel in operator_kernels if kernels[kernel].is_tensor_kernel]
    accumulations = [kernel for kernel in operator_kernels if _is_accumulation(kernels[kernel])]
    anchor_calls = [index for index in members if calls[index].is_anchor]
    fitting = [index for index in anchor_calls if any(part_of(kernels[i], calls[index]) is not None for i in anchors)]
    unmatched = [(index, UNMATCHED, 1.0) for index in anchor_calls if index not in fitting]
    return [*split_block(kernels, anchors, calls, fitting), *unmatched] + [
        (index, accumulations[0], 1.0)
        for index in members
        if accumulations and _ACCUMULATE_NODE in calls[index].node_name
    ]


def _is_accumulation(kernel: PlanKernel) -> bool:
    shape = kernel.kernel.shape
    return isinstance(shape, MemoryBoundShape) and shape.routine is MemoryBoundOp.ACCUMULATE


def _is_memory_bound(kernel: PlanKernel) -> bool:
    return not kernel.is_tensor_kernel and not _is_accumulation(kernel)


def _first_memory_bound(kernels: Sequence[PlanKernel]) -> int:
    return next((index for index, kernel in enumerate(kernels) if _is_memory_bound(kernel)), UNMATCHED)
