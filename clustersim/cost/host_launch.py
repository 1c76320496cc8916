"""When does the GPU wait for its host?

The host launches the kernels and collectives of a block one after the other, the first of them while the block before
still runs, and the GPU runs them in that order. So the k-th begins when the host has launched it and the one before it
has ended: with h seconds for each launch and g on the GPU,

    end(k) = max over j <= k of  h(2) + ... + h(j) + g(j) + ... + g(k)

and the block lasts no less than all its launches, h(1) + ... + h(n): then the host turns to the next. What the host
does while the GPU is behind is hidden, what the GPU has to do while the host is behind is not: a pass that is busy on
the whole may wait at its short kernels. A kernel of several launches counts as so many equal ones.

Example: two kernels of 1 s, then one of 4 s, launched in 2 s each. They begin at 0, 2 and 4 s: the GPU waits 1 s before
the second and 1 s before the third, and is done after 8 s, though 6 s of kernels are no less than 6 s of launches.

Where the host must know what the device found out (how many rows an exchange sends: `CommOp.host_sync`), it waits until
the device has done all that it was given. What it launches then begins no earlier than that, h(j) later, so the device
waits for the launch itself; the block goes on from there as it began, with a host that is not ahead.

Assumed: the host gets no further ahead than one block, as in frameworks that wait for the GPU between passes. Forward
(run again or not) and backward have launches of their own: one is Python, the other autograd, whose kernels are fewer
than those that it launches, with hooks of parameters between them. A captured block (CUDA graph) is launched with its
first kernel; where only what is not on the ranks of experts is captured, every stretch between what is.

Where passes take turns (`Segment.interleaved`, `lowering.moe_overlap`), the host launches a part of one while the other's
runs. Assumed: that puts it far enough ahead that the part waits only for what all its launches take longer than its
kernels. Exchanges are between the parts, so that the device does not wait for what the host has to know.

A host that computes what it launches (a CPU; `SameThread`) hides nothing: what it does for a launch comes before its
kernel. Kernels that were timed by themselves contain their own dispatch; the rest (the modules' Python, autograd's
engine, hooks, what finds out how distributed tensors lie) is added to each of them, launch by launch, and for a
collective as for a kernel beside it. The optimizer is timed as it is run, so nothing is added to that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.model.kernels import Kernel
from clustersim.program.task import CommOp, CommOverlap, Segment, WorkType


class Host(Protocol):
    """What launches the operations of a block."""

    def waits(self, block: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] how long the device waits for the host, from what operations take without waiting."""


@dataclass(frozen=True, slots=True)
class SameThread:
    """A host that computes what it launches (a `Host`).

    forward, backward: seconds of each launch that kernels by themselves do not contain.
    """

    forward: Seconds
    backward: Seconds

    def waits(self, block: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] what the host does before each; the optimizer's kernels contain it.

        What it does for an exchange is counted at the kernel that comes next (or, behind the last, at that).
        """
        each = {WorkType.FORWARD: self.forward, WorkType.RECOMPUTE: self.forward, WorkType.BACKWARD: self.backward}
        counts = (launches(operation.body) * each.get(operation.work_type, 0.0) for operation in block.operations)
        each_run = np.fromiter(counts, np.float64, seconds.shape[1])
        return np.broadcast_to(_at_kernels(block, each_run[None, :]), seconds.shape)


@dataclass(frozen=True, slots=True)
class Launching:
    """Seconds that a host needs which is no part of the device (a `Host`).

    forward, backward: for one kernel of forward (and the optimizer) and of backward; collective: for one collective,
    None: as for a kernel beside it; call: for one tensor operation of a loop; graph: for what is captured and launched
    at once, None: all is launched one by one; outside_experts: rows on the ranks of experts, and what sends them there
    and back, are not captured.
    """

    forward: Seconds = 0.0
    backward: Seconds = 0.0
    collective: Seconds | None = None
    call: Seconds = 0.0
    graph: Seconds | None = None
    outside_experts: bool = False

    def waits(self, block: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] how long the GPU waits for the host, from what operations take without waiting.

        Waiting before an operation that an exchange is part of is counted at the kernel that comes next (or, behind
        the last, at that); a block without kernels by themselves does not wait.
        """
        if not (self.graph or self.forward or self.backward or self.collective or self.call) or not block.operations:
            return np.zeros(seconds.shape)
        captured = self._captured(block)
        launches, each = self._launched(block, captured)
        awaits = any(exchange.host_sync for exchange in block.distinct_comm_ops)
        free = np.flatnonzero(~captured).tolist() if awaits else []
        cuts = [place for place in free if place and _awaits(block, place)]
        waited = _overrun if block.interleaved else _waited
        return _at_kernels(block, waited(launches, each, seconds, cuts))

    def _captured(self, block: Segment) -> BoolArray:
        """[operations] whether each is in a graph."""
        if self.graph is None:
            return np.zeros(len(block.operations), dtype=np.bool_)
        if not self.outside_experts:
            return np.ones(len(block.operations), dtype=np.bool_)
        return np.array(
            [
                not (distinct_operation.on_expert_rank or distinct_operation.moe_comm)
                for distinct_operation in block.distinct_operations
            ]
        )[block.operation_index]

    def _launched(self, block: Segment, captured: BoolArray) -> tuple[IntArray, FloatArray]:
        """[operations] launches, and seconds for each; all of a graph comes with its first."""
        launches, each = self._one_by_one(block)
        first = captured & ~np.concatenate(([False], captured[:-1]))
        own = np.where(first, self.graph or 0.0, 0.0)
        return np.where(captured, 1, launches), np.where(captured, own, each)

    def _one_by_one(self, block: Segment) -> tuple[IntArray, FloatArray]:
        """[operations] launches, and seconds for each: the mean where an operation has kernels and collectives."""
        counts = np.array([_launches(operation.body) for operation in block.distinct_operations])[block.operation_index]
        backward = np.array([operation.work_type is WorkType.BACKWARD for operation in block.distinct_operations])[
            block.operation_index
        ]
        kernel = np.where(backward, self.backward, self.forward)
        collective = kernel if self.collective is None else np.full(len(kernel), self.collective)
        launches: IntArray = counts.sum(axis=1)
        seconds = np.stack([kernel, collective, np.full(len(kernel), self.call)], axis=1)
        each: FloatArray = (counts * seconds).sum(axis=1) / launches
        return launches, each


def _waited(launches: IntArray, each: FloatArray, seconds: FloatArray, cuts: Sequence[int]) -> FloatArray:
    """[runs, operations] how long the GPU waits, in parts that the host begins with it."""
    count = seconds.shape[1]
    parts = [(a, b, float(each[0]) if a == 0 else 0.0) for a, b in pairwise((0, *cuts, count))]
    late = [_late(launches[a:b], each[a:b], seconds[:, a:b], ahead=ahead) for a, b, ahead in parts]
    return np.concatenate(late, axis=1)


def _overrun(launches: IntArray, each: FloatArray, seconds: FloatArray, _: Sequence[int]) -> FloatArray:
    """[runs, operations] how much longer all launches take than what is launched, at the last of them."""
    late = np.zeros(seconds.shape)
    late[:, -1] = np.maximum((launches * each).sum() - seconds.sum(axis=1), 0.0)
    return late


def _awaits(block: Segment, place: int) -> bool:
    exchange = block.operations[place].comm_op
    return exchange is not None and exchange.host_sync


def _late(launches: IntArray, each: FloatArray, seconds: FloatArray, *, ahead: Seconds) -> FloatArray:
    """[runs, operations] how long the GPU waits before and within operations of so many launches, of `each` seconds.

    ahead: by how much the host begins before the GPU.
    """
    issued = np.cumsum(np.repeat(each, launches))
    part = np.repeat(seconds / launches, launches, axis=1)
    idle = np.maximum(issued - ahead - (np.cumsum(part, axis=1) - part), 0.0)
    waited = np.maximum.accumulate(idle, axis=1)[:, np.cumsum(launches) - 1]  # so far
    waited[:, -1] = np.maximum(waited[:, -1], issued[-1] - np.ascontiguousarray(part).sum(axis=1))
    late: FloatArray = np.diff(waited, prepend=0.0, axis=1)
    return late


def _at_kernels(block: Segment, late: FloatArray) -> FloatArray:
    """The same waits, each at the next kernel that runs by itself."""
    own = np.flatnonzero(
        np.array([isinstance(distinct_operation.body, Kernel) for distinct_operation in block.distinct_operations])[
            block.operation_index
        ]
    )
    waits, count = np.zeros(late.shape), late.shape[1]
    if len(own):
        following = own[np.minimum(np.searchsorted(own, np.arange(count)), len(own) - 1)]
        for run, item in zip(waits, late, strict=True):
            np.add.at(run, following, item)
    return waits


def launches(does: Kernel | CommOp | CommOverlap) -> int:
    """How many kernels and collectives the host launches for an operation."""
    return sum(_launches(does)[:2])


def _launches(does: Kernel | CommOp | CommOverlap) -> tuple[int, int, int]:
    """What the host launches for an operation: kernels, collectives, and calls of a loop."""
    match does:
        case CommOp():
            return 0, 1, 0
        case CommOverlap(kernel=kernel, chunk_count=chunks):
            pieces = 1 if math.isinf(chunks) else int(chunks)
            return kernel.launches * pieces, pieces, 0
        case Kernel(calls=0) as kernel:
            return kernel.launches, 0, 0
        case kernel:
            return 0, 0, kernel.calls
