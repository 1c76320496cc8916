"""Which matmuls and attention calls of a profiled step ran which operators of the plan?

The operators' matmuls and attention kernels are blocks in the plan's order; calls are divided into runs, one for each
block, by dynamic programming over the number of blocks and calls: a block may have several calls (three matmuls for
queries, keys and values), a call may belong to none, and a block may have none. The cost of a run is how far its FLOP
are from the block's where the trace has shapes, else how far its time is.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from calibrate.profile.plan_kernels import PlanKernel
from calibrate.profile.step_calls import Call
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, KernelKind, MatmulShape
from clustersim.program.task import WorkType
from clustersim.results.profiled_step import GpuSpanKind

Share = tuple[int, int, float]
"""A call, the plan's kernel that it ran, and which part of its time belongs to that."""
Block = tuple[int, ...]
"""Consecutive matmuls or attention kernels of one operator: indices of the plan's kernels."""
_EMPTY_COST: Final = 3.0  # of a block without calls
_SKIP_COST: Final = 2.0  # of a call of typical duration that belongs to none; shorter ones cost less
_LEAST_SKIP_COST: Final = 0.05
_TIME_WEIGHT: Final = 0.3  # of the logarithm of a run's seconds relative to the model's
_FLOP_WEIGHT: Final = 4.0
_MAX_FLOP_EXCESS: Final = 0.15
_COUNT_WEIGHT: Final = 0.05
_MAX_CALLS: Final = 12  # of one kernel of a block
_MIN_BAND: Final = 40  # calls around the diagonal that are tried, or a share of them
_BAND_DIVISOR: Final = 16
_GROUPED: Final = "grouped"
_ATTENTION: Final = (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)


def anchor_blocks(kernels: Sequence[PlanKernel]) -> list[Block]:
    """Runs of matmuls and attention kernels of one operator."""
    blocks: list[list[int]] = []
    previous: tuple[str, WorkType] | None = None
    for index, kernel in enumerate(kernels):
        if not kernel.is_tensor_kernel:
            continue
        key = kernel.role, kernel.work
        is_repeated = blocks and any(kernels[other].kernel.name == kernel.kernel.name for other in blocks[-1])
        if key == previous and not is_repeated:
            blocks[-1].append(index)
        else:
            blocks.append([index])
        previous = key
    return [tuple(block) for block in blocks]


def match_anchors(
    kernels: Sequence[PlanKernel], blocks: Sequence[Block], calls: Sequence[Call], anchors: Sequence[int]
) -> Mapping[int, int]:
    """The block of each matmul and attention call (their indices), by call; calls that fit none are left out."""
    count, width = len(anchors), len(blocks)
    if not count or not width:
        return {}
    typical = sorted(calls[index].seconds for index in anchors)[count // 2]
    skips = [min(1.0, calls[index].seconds / typical) * _SKIP_COST + _LEAST_SKIP_COST for index in anchors]
    best = [math.inf] * (count + 1)
    best[0] = 0.0
    choices: list[list[int | None]] = []
    for number in range(width + 1):
        center, band = number * count // width, max(_MIN_BAND, count // _BAND_DIVISOR)
        bounds = max(0, center - band), min(count, center + band)
        if number:
            anchor_calls = [calls[index] for index in anchors]
            best, choice = _next_block(kernels, blocks[number - 1], anchor_calls, best, bounds)
        else:
            choice = [None] * (count + 1)
        for position in range(max(1, bounds[0]), bounds[1] + 1):
            skipped = best[position - 1] + skips[position - 1]
            if skipped < best[position]:
                best[position], choice[position] = skipped, None
        choices.append(choice)
    return _trace_back(choices, anchors)


def _next_block(
    kernels: Sequence[PlanKernel],
    block: Block,
    calls: Sequence[Call],
    previous: Sequence[float],
    bounds: tuple[int, int],
) -> tuple[list[float], list[int | None]]:
    """Least costs with one block more, by the number of calls so far; and how many of them the block has."""
    best, choice = [math.inf] * len(previous), list[int | None]([None]) * len(previous)
    for position in range(bounds[0], bounds[1] + 1):
        cost, length = previous[position] + _EMPTY_COST, 0
        for tried in range(1, min(_MAX_CALLS * len(block), position) + 1):
            start = position - tried
            if all(part_of(kernels[index], calls[start]) is None for index in block):
                break
            if previous[start] < cost:
                total = previous[start] + _run_cost(kernels, block, calls[start:position])
                if total < cost:
                    cost, length = total, tried
        best[position], choice[position] = cost, length
    return best, choice


def _trace_back(choices: Sequence[Sequence[int | None]], anchors: Sequence[int]) -> dict[int, int]:
    """The block of each call. choices: by block and number of calls, how many the block has; None: one is skipped."""
    assigned: dict[int, int] = {}
    number, position = len(choices) - 1, len(anchors)
    while number or position:
        length = choices[number][position]
        if length is None:
            position -= 1
            if position < 0:
                break
            continue
        assigned.update(dict.fromkeys(anchors[position - length : position], number - 1))
        number, position = number - 1, position - length
    return assigned


def part_of(kernel: PlanKernel, call: Call) -> float | None:
    """Which part of a matmul or attention kernel a call may be, by its shape; None: none; 1: shapes are unknown."""
    shape = kernel.kernel.shape
    if kernel.kernel.kind in _ATTENTION:
        return 1.0 if call.kind is GpuSpanKind.ATTENTION else None
    if call.kind is not GpuSpanKind.MATMUL:
        return None
    is_grouped = kernel.kernel.kind in GROUPED_MATMUL_KINDS
    if is_grouped or _GROUPED in call.operator:  # sizes of groups are on the device
        return 1.0 if is_grouped and (_GROUPED in call.operator or not call.operator) else None
    if call.matmul is None or not isinstance(shape, MatmulShape):
        return 1.0
    return _part_of_matmul(shape, call.matmul)


def _part_of_matmul(shape: MatmulShape, traced: tuple[int, int, int, int]) -> float | None:
    """A part has two of three sizes, and no more of the third; rows and columns may be exchanged."""
    m, n, k, batch = traced
    rows, columns = max(shape.m, shape.n), min(shape.m, shape.n)
    if shape.batch != batch:
        is_flattened = sorted((m, n, k)) == sorted((rows, columns, shape.k))
        return batch / shape.batch if is_flattened and shape.batch % batch == 0 else None
    if k != shape.k:
        return k / shape.k if (m, n) == (rows, columns) and k < shape.k else None
    pairs = ((size, other, width, height) for size, other in ((m, n), (n, m))
             for width, height in ((rows, columns), (columns, rows)))  # fmt: skip
    return next((other / width for size, other, width, height in pairs if size == height and other <= width), None)


def _run_cost(kernels: Sequence[PlanKernel], block: Block, run: Sequence[Call]) -> float:
    """How far a run of calls is from a block."""
    planned = sum(kernels[index].seconds for index in block)
    measured = sum(call.seconds for call in run)
    time_cost = _TIME_WEIGHT * min(2.0, abs(math.log(max(measured, 1e-9) / max(planned, 1e-9))))
    flops = [2.0 * math.prod(call.matmul) for call in run if call.matmul is not None]
    planned_flops = sum(kernels[index].kernel.flops * kernels[index].repeats for index in block)
    is_known = len(flops) == len(run) and kernels[block[0]].kernel.kind is KernelKind.MATMUL
    if is_known and planned_flops > 0.0:
        excess = abs(math.log(sum(flops) / planned_flops))
        return time_cost / 5 + _FLOP_WEIGHT * excess if excess < _MAX_FLOP_EXCESS else math.inf
    return time_cost + _COUNT_WEIGHT * abs(len(run) - len(block))


def split_block(
    kernels: Sequence[PlanKernel], block: Sequence[int], calls: Sequence[Call], members: Sequence[int]
) -> list[Share]:
    """Divide the calls of a block among its kernels: by shape, else one each in order, else by modelled time."""
    if not block or not members:
        return []
    shares: list[Share] = []
    ambiguous: list[int] = []
    for index in members:
        fitting = [kernel for kernel in block if part_of(kernels[kernel], calls[index]) is not None]
        if len(block) == 1 or (calls[index].matmul is not None and len(fitting) == 1):
            shares.append((index, fitting[0] if fitting else block[0], 1.0))
        else:
            ambiguous.append(index)
    if len(ambiguous) == len(block):
        return shares + [(index, kernel, 1.0) for index, kernel in zip(ambiguous, block, strict=True)]
    total = sum(kernels[kernel].seconds for kernel in block)
    return shares + [(index, kernel, kernels[kernel].seconds / total) for index in ambiguous for kernel in block]
