"""Which call of a profiled step ran which kernels of the plan?

In one pass both sides run the same work in the same order, and differ in how it is divided: a plan has one matmul
for queries, keys and values where a framework has three, one norm where PyTorch runs eight kernels. So first matmuls
and attention are matched, by order and, where the trace has them, by shapes: a run of calls to each operator, whose
sizes add up to those of the operator; then what is between them, by order, name and size. A call belongs to one
operator, or to none. In backward the autograd node that launched a call tells the forward operator, hence the
operator; without nodes backward is matched as forward is.

What repeats in every layer belongs to the layers: a call between two matmuls is always given to an operator, so that
its time scales with them. Only before the first matmul of a pass and in the optimizer calls may belong to none.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.profile.affinity import affinity_cost, is_same_size
from calibrate.profile.plan_kernels import PassKind, PlanKernel, PlanPass
from calibrate.profile.step_calls import Call, CallPass
from clustersim.model.kernels import KernelKind, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.program.task import WorkType
from clustersim.results.profiled_step import GpuSpanKind

UNMATCHED: Final = -1
_SKIP_COST: Final = 0.9  # of a call that belongs to no operator
_EMPTY_COST: Final = 1.5  # of an operator that no call belongs to
_EMPTY_ANCHOR_COST: Final = 3.0
_COUNT_WEIGHT: Final = 0.15  # of the logarithm of a call count relative to the plan's launches
_IMPOSSIBLE: Final = math.inf
_MAX_CALLS_PER_BLOCK: Final = 12
_MIN_BAND: Final = 40  # blocks around the diagonal that are tried
_ACCUMULATE_NODE: Final = "AccumulateGrad"
Share = tuple[int, int, float]
"""A call, the plan's kernel that it ran (UNMATCHED: none), and which part of its time belongs to that."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive matmuls or attention kernels of one operator. kernels: indices of the plan's kernels."""

    kernels: tuple[int, ...]


def match_pass(plan: PlanPass, calls: CallPass, forward: "ForwardMap | None" = None) -> list[Share]:
    """Match the calls of one pass with the plan's kernels of that pass.

    forward: which operators the forward operators of the step belong to, by sequence number, for a backward.
    """
    indices = list(range(len(calls.calls)))
    if plan.kind is not PassKind.BACKWARD or forward is None:
        return match_in_order(plan.kernels, calls.calls, indices, can_skip=True)
    recomputed = [index for index in indices if calls.calls[index].is_recomputed]
    recompute_kernels = [index for index, kernel in enumerate(plan.kernels) if kernel.work is WorkType.RECOMPUTE]
    shares: list[Share] = []
    if recomputed and recompute_kernels:
        subset = [plan.kernels[index] for index in recompute_kernels]
        shares += [
            (call, recompute_kernels[kernel] if kernel >= 0 else UNMATCHED, part)
            for call, kernel, part in match_in_order(subset, calls.calls, recomputed, can_skip=False)
        ]
        indices = [index for index in indices if not calls.calls[index].is_recomputed]
    return shares + _match_by_node(plan.kernels, calls.calls, indices, forward)


class ForwardMap:
    """The plan's forward kernel (role, occurrence from the end) of each sequence number of the step's forwards."""

    def __init__(self) -> None:
        self._by_sequence: dict[int, tuple[str, int]] = {}
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

    def operator(self, sequence: int) -> tuple[str, int] | None:
        """Role of the operator of a node, by the nearest forward operator at or before it."""
        if not self._ordered:
            return None
        position = max(0, bisect_right(self._ordered, sequence) - 1)
        return self._by_sequence[self._ordered[position]]


def _match_by_node(
    kernels: Sequence[PlanKernel], calls: Sequence[Call], indices: Sequence[int], forward: ForwardMap
) -> list[Share]:
    """Match a backward by the forward operators of its nodes."""
    by_operator: dict[tuple[str, int], list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.work is not WorkType.RECOMPUTE:
            by_operator.setdefault((kernel.role, kernel.occurrence), []).append(index)
    shares: list[Share] = []
    groups: list[tuple[tuple[str, int] | None, list[int]]] = []
    last: tuple[str, int] | None = None
    for index in indices:
        call = calls[index]
        if _ACCUMULATE_NODE not in call.node_name and call.node >= 0:
            last = forward.operator(call.node) or last
        if groups and groups[-1][0] == last:
            groups[-1][1].append(index)
        else:
            groups.append((last, [index]))
    previous_memory: int | None = None
    for operator, group in groups:
        own = by_operator.get(operator, []) if operator is not None else []
        anchors = [kernel for kernel in own if kernels[kernel].is_tensor_kernel]
        accumulates = [kernel for kernel in own if _is_accumulation(kernels[kernel])]
        memory = [kernel for kernel in own if kernel not in anchors and kernel not in accumulates]
        anchor_calls = [index for index in group if calls[index].is_anchor and anchors]
        shares += _split_block(kernels, anchors, calls, anchor_calls)
        left: list[int] = []
        for index in group:
            if index in anchor_calls:
                continue
            if _ACCUMULATE_NODE in calls[index].node_name and accumulates:
                shares.append((index, accumulates[0], 1.0))
            else:
                left.append(index)
        if memory:
            shares += _match_window(kernels, memory, calls, left, can_skip=False)
            previous_memory = memory[-1]
        else:
            fallback = _nearest_memory(kernels, own, previous_memory)
            shares += [(index, fallback, 1.0) for index in left]
    return shares


def _is_accumulation(kernel: PlanKernel) -> bool:
    shape = kernel.kernel.shape
    return isinstance(shape, MemoryBoundShape) and shape.routine is MemoryBoundOp.ACCUMULATE


def _nearest_memory(kernels: Sequence[PlanKernel], own: Sequence[int], previous: int | None) -> int:
    """The memory-bound kernel that was matched last, else the next one behind an operator."""
    if previous is not None:
        return previous
    start = own[-1] if own else 0
    candidates = (
        index
        for index in (*range(start, len(kernels)), *range(start - 1, -1, -1))
        if not kernels[index].is_tensor_kernel and not _is_accumulation(kernels[index])
    )
    return next(candidates, UNMATCHED)


def match_in_order(
    kernels: Sequence[PlanKernel], calls: Sequence[Call], indices: Sequence[int], *, can_skip: bool
) -> list[Share]:
    """Match calls (their indices, in order) with kernels that run in the same order."""
    blocks = _blocks(kernels)
    anchors = [index for index in indices if calls[index].is_anchor]
    block_of = _match_anchors(kernels, blocks, calls, anchors)
    shares: list[Share] = []
    for number, block in enumerate(blocks):
        members = [index for index in anchors if block_of.get(index) == number]
        shares += _split_block(kernels, block.kernels, calls, members)
    windows: list[tuple[int, int, list[int]]] = []
    before, window = -1, list[int]()
    for index in indices:
        if index in block_of:
            windows.append((before, block_of[index], window))
            before, window = block_of[index], []
        else:
            window.append(index)
    windows.append((before, len(blocks), window))
    taken: set[int] = set()
    for first, last, window in windows:
        if window:
            candidates = _candidates(kernels, blocks, first, last)
            matched = _match_window(
                kernels, candidates, calls, window, can_skip=can_skip and (first < 0 or _is_update(kernels, candidates))
            )
            taken.update(kernel for _, kernel, _ in matched)
            shares += matched
    return shares


def _blocks(kernels: Sequence[PlanKernel]) -> list[_Block]:
    """Runs of matmuls and attention kernels of one operator."""
    blocks: list[list[int]] = []
    previous: tuple[str, WorkType] | None = None
    for index, kernel in enumerate(kernels):
        if not kernel.is_tensor_kernel:
            continue
        key = kernel.role, kernel.work
        repeated = blocks and any(kernels[other].kernel.name == kernel.kernel.name for other in blocks[-1])
        if key == previous and not repeated:
            blocks[-1].append(index)
        else:
            blocks.append([index])
        previous = key
    return [_Block(tuple(block)) for block in blocks]


def _match_anchors(
    kernels: Sequence[PlanKernel], blocks: Sequence[_Block], calls: Sequence[Call], anchors: Sequence[int]
) -> Mapping[int, int]:
    """The block of each matmul and attention call, by call; calls that fit none are left out.

    The cheapest division of the calls into runs, one for each block in order.
    """
    count, width = len(anchors), len(blocks)
    if not count or not width:
        return {}
    typical = sorted(calls[index].seconds for index in anchors)[count // 2]
    skip = [min(1.0, calls[index].seconds / typical) * 2.0 + 0.05 for index in anchors]
    band = max(_MIN_BAND, count // 4)
    best = [[_IMPOSSIBLE] * (count + 1) for _ in range(width + 1)]
    choice: list[list[tuple[int, int]]] = [[(0, 0)] * (count + 1) for _ in range(width + 1)]
    best[0][0] = 0.0
    for number in range(width + 1):
        center = number * count // width
        low, high = max(0, center - band), min(count, center + band)
        row = best[number]
        if number:
            block, previous = blocks[number - 1], best[number - 1]
            for position in range(low, high + 1):
                cost, source = previous[position] + _EMPTY_ANCHOR_COST, (1, 0)
                for length in range(1, min(_MAX_CALLS_PER_BLOCK * len(block.kernels), position) + 1):
                    start = position - length
                    if not _fits_block(kernels, block, calls[anchors[start]]):
                        break
                    if previous[start] < cost:
                        run = [calls[index] for index in anchors[start:position]]
                        total = previous[start] + _block_cost(kernels, block, run)
                        if total < cost:
                            cost, source = total, (1, length)
                row[position], choice[number][position] = cost, source
        for position in range(max(1, low), high + 1):
            total = row[position - 1] + skip[position - 1]
            if total < row[position]:
                row[position], choice[number][position] = total, (0, 1)
    return _trace_back(choice, anchors, width, count)


def _trace_back(
    choice: Sequence[Sequence[tuple[int, int]]], anchors: Sequence[int], number: int, position: int
) -> dict[int, int]:
    assigned: dict[int, int] = {}
    while number or position:
        blocks, length = choice[number][position]
        if blocks:
            assigned.update(dict.fromkeys(anchors[position - length : position], number - 1))
            number -= 1
        elif not length:
            break
        position -= length
    return assigned


def _fits_block(kernels: Sequence[PlanKernel], block: _Block, call: Call) -> bool:
    """Whether a call may be a part of a block: of the same kind, and two of three sizes equal to one of its matmuls."""
    return any(_part_of(kernels[index], call) is not None for index in block.kernels)


def _part_of(kernel: PlanKernel, call: Call) -> float | None:
    """Which part of a kernel a call may be, by its shape; None: none; 1 where shapes are unknown."""
    shape = kernel.kernel.shape
    if kernel.kernel.kind in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD):
        return 1.0 if call.kind is GpuSpanKind.ATTENTION else None
    if call.kind is not GpuSpanKind.MATMUL:
        return None
    if call.matmul is None or not isinstance(shape, MatmulShape):
        return 1.0
    m, n, k, batch = call.matmul
    wanted = max(shape.m, shape.n), min(shape.m, shape.n), shape.k
    if shape.batch != batch:
        is_flattened = sorted((m, n, k)) == sorted(wanted)
        return batch / shape.batch if is_flattened and batch < shape.batch and not shape.batch % batch else None
    if k == wanted[2]:  # a part of the rows or columns
        for own, other in ((m, n), (n, m)):
            for width, height in ((wanted[0], wanted[1]), (wanted[1], wanted[0])):
                if own == height and other <= width:
                    return other / width
        return None
    return k / wanted[2] if (m, n) == wanted[:2] and k < wanted[2] else None


def _block_cost(kernels: Sequence[PlanKernel], block: _Block, run: Sequence[Call]) -> float:
    """How far a run of calls is from a block: in FLOP where shapes are known, else in seconds."""
    planned = sum(kernels[index].seconds for index in block.kernels)
    measured = sum(call.seconds for call in run)
    time_cost = 0.3 * min(2.0, abs(math.log(max(measured, 1e-9) / max(planned, 1e-9))))
    flops = [2.0 * math.prod(call.matmul) for call in run if call.matmul is not None]
    planned_flops = sum(kernels[index].kernel.flops * kernels[index].repeats for index in block.kernels)
    if len(flops) == len(run) and planned_flops > 0.0 and kernels[block.kernels[0]].kernel.kind is KernelKind.MATMUL:
        return time_cost * 0.2 + 4.0 * min(1.0, abs(math.log(sum(flops) / planned_flops)))
    return time_cost + 0.05 * abs(len(run) - len(block.kernels))


def _split_block(
    kernels: Sequence[PlanKernel], block: Sequence[int], calls: Sequence[Call], members: Sequence[int]
) -> list[Share]:
    """Divide the calls of a block among its kernels: by shape, else one each in order, else by modelled time."""
    if not block or not members:
        return []
    if len(block) == 1:
        return [(index, block[0], 1.0) for index in members]
    shares: list[Share] = []
    unknown: list[int] = []
    for index in members:
        fitting = [kernel for kernel in block if _part_of(kernels[kernel], calls[index]) is not None]
        if calls[index].matmul is not None and len(fitting) == 1:
            shares.append((index, fitting[0], 1.0))
        else:
            unknown.append(index)
    if len(unknown) == len(block):
        return shares + [(index, kernel, 1.0) for index, kernel in zip(unknown, block, strict=True)]
    total = sum(kernels[kernel].seconds for kernel in block)
    return shares + [(index, kernel, kernels[kernel].seconds / total) for index in unknown for kernel in block]


def _candidates(kernels: Sequence[PlanKernel], blocks: Sequence[_Block], first: int, last: int) -> list[int]:
    """Memory-bound kernels between two blocks; around a block if both are the same."""
    if first == last:
        first, last = first - 1, last + 1
    begin = blocks[first].kernels[0] if first >= 0 else -1
    end = blocks[last].kernels[-1] if last < len(blocks) else len(kernels)
    return [index for index in range(begin + 1, end) if not kernels[index].is_tensor_kernel] or [
        index
        for index in (*range(end, len(kernels)), *range(begin, -1, -1))
        if index >= 0 and not kernels[index].is_tensor_kernel
    ][:1]


def _is_update(kernels: Sequence[PlanKernel], candidates: Sequence[int]) -> bool:
    """Whether kernels are those of the optimizer."""
    return bool(candidates) and all(kernels[index].work is WorkType.OPTIMIZER for index in candidates)


def _match_window(
    kernels: Sequence[PlanKernel], candidates: Sequence[int], calls: Sequence[Call], window: Sequence[int], *,
    can_skip: bool,
) -> list[Share]:  # fmt: skip
    """Match calls with memory-bound kernels in order; calls that do nothing alike belong to none, where allowed."""
    if not candidates:
        return [(index, UNMATCHED, 1.0) for index in window]
    runs = _similar_runs(calls, window)
    costs = [
        [sum(affinity_cost(kernels[kernel], calls[index]) for index in run) for kernel in candidates] for run in runs
    ]
    skips = [_SKIP_COST * len(run) if can_skip else _IMPOSSIBLE for run in runs]
    lengths = [len(run) for run in runs]
    launches = [max(1, kernels[kernel].kernel.launches) for kernel in candidates]
    count, width = len(runs), len(candidates)
    best = [[_IMPOSSIBLE] * (count + 1) for _ in range(width + 1)]
    choice: list[list[tuple[int, tuple[int, ...]]]] = [[(0, ())] * (count + 1) for _ in range(width + 1)]
    best[0] = [0.0]
    for position in range(1, count + 1):
        best[0].append(best[0][-1] + skips[position - 1])
        choice[0][position] = position, ()
    for number in range(1, width + 1):
        for position in range(count + 1):
            cost, source = best[number - 1][position] + _EMPTY_COST, (0, ())
            total, length, members = 0.0, 0, []
            for start in range(position - 1, -1, -1):
                own = costs[start][number - 1]
                if own <= skips[start]:
                    total, length = total + own, length + lengths[start]
                    members.append(start)
                else:
                    total += skips[start]
                if not members:
                    prior = _EMPTY_COST
                else:
                    prior = _COUNT_WEIGHT * abs(math.log(length / launches[number - 1]))
                if best[number - 1][start] + total + prior < cost:
                    cost, source = best[number - 1][start] + total + prior, (position - start, tuple(members))
            best[number][position], choice[number][position] = cost, source
    assigned = [UNMATCHED] * count
    position = count
    for number in range(width, 0, -1):
        length, members = choice[number][position]
        for member in members:
            assigned[member] = candidates[number - 1]
        position -= length
    return [(index, kernel, 1.0) for run, kernel in zip(runs, assigned, strict=True) for index in run]


def _similar_runs(calls: Sequence[Call], window: Sequence[int]) -> list[list[int]]:
    """Runs of equal calls; single ones in a short window."""
    if len(window) <= 150:
        return [[index] for index in window]
    runs: list[list[int]] = []
    for index in window:
        if runs and _same_call(calls[runs[-1][-1]], calls[index]):
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _same_call(first: Call, second: Call) -> bool:
    return (first.operator, first.update, first.name) == (second.operator, second.update, second.name)


__all__ = ["UNMATCHED", "ForwardMap", "Share", "is_same_size", "match_in_order", "match_pass"]
