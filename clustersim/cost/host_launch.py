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

A host that computes what it launches (a CPU; `SyncHost`) hides nothing: what it does for a launch comes before its
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


class HostModel(Protocol):
    """What launches the operations of a block."""

    def launch_stalls(self, segment: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] how long the device waits for the host, from what operations take without waiting."""


@dataclass(frozen=True, slots=True)
class SyncHost:
    """A host that computes what it launches (a `HostModel`).

    forward, backward: seconds of each launch that kernels by themselves do not contain.
    """

    forward_seconds: Seconds
    backward_seconds: Seconds

    def launch_stalls(self, segment: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] what the host does before each; the optimizer's kernels contain it.

        What it does for an exchange is counted at the kernel that comes next (or, behind the last, at that).
        """
        seconds_by_work_type = {
            WorkType.FORWARD: self.forward_seconds,
            WorkType.RECOMPUTE: self.forward_seconds,
            WorkType.BACKWARD: self.backward_seconds,
        }
        host_seconds = (
            launch_count(operation.body) * seconds_by_work_type.get(operation.work_type, 0.0)
            for operation in segment.operations
        )
        operation_seconds = np.fromiter(host_seconds, np.float64, seconds.shape[1])
        return np.broadcast_to(_shift_to_kernels(segment, operation_seconds[None, :]), seconds.shape)


@dataclass(frozen=True, slots=True)
class AsyncHost:
    """Seconds that a host needs which is no part of the device (a `HostModel`).

    forward, backward: for one kernel of forward (and the optimizer) and of backward; collective: for one collective,
    None: as for a kernel beside it; call: for one tensor operation of a loop; graph: for what is captured and launched
    at once, None: all is launched one by one; outside_experts: rows on the ranks of experts, and what sends them there
    and back, are not captured.
    """

    forward_seconds: Seconds = 0.0
    backward_seconds: Seconds = 0.0
    collective_seconds: Seconds | None = None
    call_seconds: Seconds = 0.0
    graph_seconds: Seconds | None = None
    excludes_experts: bool = False

    def launch_stalls(self, segment: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] how long the GPU waits for the host, from what operations take without waiting.

        Waiting before an operation that an exchange is part of is counted at the kernel that comes next (or, behind
        the last, at that); a block without kernels by themselves does not wait.
        """
        if (
            not (
                self.graph_seconds
                or self.forward_seconds
                or self.backward_seconds
                or self.collective_seconds
                or self.call_seconds
            )
            or not segment.operations
        ):
            return np.zeros(seconds.shape)
        captured = self._captured_mask(segment)
        launch_counts, launch_seconds = self._operation_launches(segment, captured)
        has_host_sync = any(comm_op.host_sync for comm_op in segment.distinct_comm_ops)
        uncaptured = np.flatnonzero(~captured).tolist() if has_host_sync else []
        sync_points = [index for index in uncaptured if index and _has_host_sync(segment, index)]
        stall_model = _stalls_interleaved if segment.interleaved else _stalls_in_order
        return _shift_to_kernels(segment, stall_model(launch_counts, launch_seconds, seconds, sync_points))

    def _captured_mask(self, segment: Segment) -> BoolArray:
        """[operations] whether each is in a graph."""
        if self.graph_seconds is None:
            return np.zeros(len(segment.operations), dtype=np.bool_)
        if not self.excludes_experts:
            return np.ones(len(segment.operations), dtype=np.bool_)
        return np.array(
            [not (operation.on_expert_rank or operation.moe_comm) for operation in segment.distinct_operations]
        )[segment.operation_index]

    def _operation_launches(self, segment: Segment, captured: BoolArray) -> tuple[IntArray, FloatArray]:
        """[operations] launches, and seconds for each; all of a graph comes with its first."""
        launch_counts, launch_seconds = self._eager_launches(segment)
        starts_graph = captured & ~np.concatenate(([False], captured[:-1]))
        graph_seconds = np.where(starts_graph, self.graph_seconds or 0.0, 0.0)
        return np.where(captured, 1, launch_counts), np.where(captured, graph_seconds, launch_seconds)

    def _eager_launches(self, segment: Segment) -> tuple[IntArray, FloatArray]:
        """[operations] launches, and seconds for each: the mean where an operation has kernels and collectives."""
        counts = np.array([_launch_counts(operation.body) for operation in segment.distinct_operations])[
            segment.operation_index
        ]
        is_backward = np.array([operation.work_type is WorkType.BACKWARD for operation in segment.distinct_operations])[
            segment.operation_index
        ]
        kernel_seconds = np.where(is_backward, self.backward_seconds, self.forward_seconds)
        collective_seconds = (
            kernel_seconds if self.collective_seconds is None else np.full(len(kernel_seconds), self.collective_seconds)
        )
        launch_counts: IntArray = counts.sum(axis=1)
        seconds = np.stack(
            [kernel_seconds, collective_seconds, np.full(len(kernel_seconds), self.call_seconds)], axis=1
        )
        launch_seconds: FloatArray = (counts * seconds).sum(axis=1) / launch_counts
        return launch_counts, launch_seconds


def _stalls_in_order(
    launch_counts: IntArray, launch_seconds: FloatArray, seconds: FloatArray, sync_points: Sequence[int]
) -> FloatArray:
    """[runs, operations] how long the GPU waits, in parts that the host begins with it."""
    count = seconds.shape[1]
    sections = [(a, b, float(launch_seconds[0]) if a == 0 else 0.0) for a, b in pairwise((0, *sync_points, count))]
    stalls = [
        _launch_delay(launch_counts[a:b], launch_seconds[a:b], seconds[:, a:b], lead=lead) for a, b, lead in sections
    ]
    return np.concatenate(stalls, axis=1)


def _stalls_interleaved(
    launch_counts: IntArray, launch_seconds: FloatArray, seconds: FloatArray, _: Sequence[int]
) -> FloatArray:
    """[runs, operations] how much longer all launches take than what is launched, at the last of them."""
    stalls = np.zeros(seconds.shape)
    stalls[:, -1] = np.maximum((launch_counts * launch_seconds).sum() - seconds.sum(axis=1), 0.0)
    return stalls


def _has_host_sync(segment: Segment, index: int) -> bool:
    comm_op = segment.operations[index].comm_op
    return comm_op is not None and comm_op.host_sync


def _launch_delay(
    launch_counts: IntArray, launch_seconds: FloatArray, seconds: FloatArray, *, lead: Seconds
) -> FloatArray:
    """[runs, operations] how long the GPU waits before and within operations of so many launches, of `each` seconds.

    ahead: by how much the host begins before the GPU.
    """
    issue_times = np.cumsum(np.repeat(launch_seconds, launch_counts))
    kernel_seconds = np.repeat(seconds / launch_counts, launch_counts, axis=1)
    lateness = np.maximum(issue_times - lead - (np.cumsum(kernel_seconds, axis=1) - kernel_seconds), 0.0)
    cumulative_stall = np.maximum.accumulate(lateness, axis=1)[:, np.cumsum(launch_counts) - 1]  # so far
    cumulative_stall[:, -1] = np.maximum(
        cumulative_stall[:, -1], issue_times[-1] - np.ascontiguousarray(kernel_seconds).sum(axis=1)
    )
    stalls: FloatArray = np.diff(cumulative_stall, prepend=0.0, axis=1)
    return stalls


def _shift_to_kernels(segment: Segment, stalls: FloatArray) -> FloatArray:
    """The same waits, each at the next kernel that runs by itself."""
    kernel_indices = np.flatnonzero(
        np.array([isinstance(operation.body, Kernel) for operation in segment.distinct_operations])[
            segment.operation_index
        ]
    )
    kernel_stalls, count = np.zeros(stalls.shape), stalls.shape[1]
    if len(kernel_indices):
        next_kernel = kernel_indices[
            np.minimum(np.searchsorted(kernel_indices, np.arange(count)), len(kernel_indices) - 1)
        ]
        for run, run_stalls in zip(kernel_stalls, stalls, strict=True):
            np.add.at(run, next_kernel, run_stalls)
    return kernel_stalls


def launch_count(body: Kernel | CommOp | CommOverlap) -> int:
    """How many kernels and collectives the host launches for an operation."""
    return sum(_launch_counts(body)[:2])


def _launch_counts(body: Kernel | CommOp | CommOverlap) -> tuple[int, int, int]:
    """What the host launches for an operation: kernels, collectives, and calls of a loop."""
    match body:
        case CommOp():
            return 0, 1, 0
        case CommOverlap(kernel=kernel, chunk_count=chunks):
            chunk_count = 1 if math.isinf(chunks) else int(chunks)
            return kernel.launches * chunk_count, chunk_count, 0
        case Kernel(host_calls=0) as kernel:
            return kernel.launches, 0, 0
        case kernel:
            return 0, 0, kernel.host_calls
