"""When does the GPU wait for its host?

The host launches the kernels and collectives of a segment in order, the first of them while the previous
segment still runs, and the GPU runs them in that order. So the k-th begins when the host has launched it
and the previous one has ended: with h seconds for each launch and g on the GPU,

    end(k) = max over j <= k of  h(2) + ... + h(j) + g(j) + ... + g(k)

and the segment lasts at least as long as all its launches, h(1) + ... + h(n), before the host turns to the
next one. Host time is hidden while the GPU is behind, and exposed while the host is behind: a pass that is
GPU bound overall may still stall at its short kernels. A kernel of several launches counts as that many
equal ones.

Example: two kernels of 1 s, then one of 4 s, launched in 2 s each. They begin at 0, 2 and 4 s: the GPU
waits 1 s before the second and 1 s before the third, and is done after 8 s, though 6 s of kernels are no
less than 6 s of launches.

Where the host needs a result of the device (how many tokens a collective sends: `CommOp.host_sync`), it
waits until the device has finished everything that was launched; so it does behind a kernel whose result it
needs (`Kernel.host_sync`). What it launches then begins h(j) later at the earliest, so the launch itself is
exposed; the rest of the segment continues with a host that has no lead.

Assumed: the host runs ahead by at most one segment, as in frameworks that wait for the GPU between passes.
Forward (recomputed or not) and backward have launch times of their own: one is Python, the other autograd,
which launches fewer kernels, with parameter hooks between them. A captured segment (CUDA graph) is launched
with its first kernel; where expert operations are not captured, each captured run between them is one
graph.

A kernel and a collective that overlap in chunks are one call of the framework, whose library launches all
chunks in a loop (Transformer Engine, `CommOverlapP2PBase::split_overlap_ag` in transformer_engine/common/
comm_gemm_overlap/comm_gemm_overlap.cpp): the first chunk costs what a kernel and a collective cost, the others
calls of that loop.

Where passes are interleaved (`Segment.interleaved`, `lowering.moe_overlap`), the host launches operations
of one pass while the other's run, and the device waits for collectives, so how far the host is ahead is known
only when the step runs: there launches are tasks (`lowering.host_launches`).

A host that computes the kernels itself (a CPU; `SyncHost`) hides nothing: its launch work precedes each
kernel. Kernels that were timed in isolation contain their own dispatch; the remainder (the modules' Python,
autograd's engine, hooks, placement of distributed tensors) is added per launch, for collectives as for
kernels. The optimizer is timed as it is run, so nothing is added to it.
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


@dataclass(frozen=True, slots=True)
class LaunchLead:
    """Host time of a segment's launches.

    needed: seconds by which the host has to begin before the device, so that the device does not wait for it; total: of
    all launches. If the host begins at h and the device could begin at d, the segment ends max(d, h + needed) plus its
    seconds on the device.
    """

    needed: Seconds = 0.0
    total: Seconds = 0.0


class HostModel(Protocol):
    """Model of the host that launches the operations of a segment."""

    def launch_stalls(self, segment: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] seconds for which the device waits for the host.

        `seconds`: durations of the operations without waiting.
        """

    def launch_lead(self, segment: Segment, seconds: FloatArray) -> LaunchLead:
        """How far the host has to be ahead of the device. seconds: [operations] on the device."""

    @property
    def launches_ahead(self) -> bool:
        """Whether it launches anything ahead of the device, which takes it time."""


@dataclass(frozen=True, slots=True)
class SyncHost:
    """A host that computes the kernels that it launches (a `HostModel`).

    forward_seconds, backward_seconds: host time of each launch that isolated kernel times do not contain.
    """

    forward_seconds: Seconds
    backward_seconds: Seconds

    def launch_stalls(self, segment: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] host seconds before each operation; the optimizer's kernels contain it.

        Host time of a communication op is counted at the next kernel (or, after the last kernel, at that).
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

    def launch_lead(self, segment: Segment, seconds: FloatArray) -> LaunchLead:  # noqa: ARG002 - whatever the segment
        """Not at all: it launches nothing ahead."""
        return LaunchLead()

    @property
    def launches_ahead(self) -> bool:
        """It does not."""
        return False


@dataclass(frozen=True, slots=True)
class AsyncHost:
    """A host that launches asynchronously, with the seconds that it needs (a `HostModel`).

    forward_seconds, backward_seconds: for one kernel of forward (and the optimizer) and of backward;
    collective_seconds: for one collective, None: as for a kernel of the same pass; call_seconds: for one tensor
    operation of a loop; graph_seconds: for launching a captured graph, None: everything is launched eagerly;
    excludes_experts: operations on expert ranks, and token dispatch and combine, are not captured.
    """

    forward_seconds: Seconds = 0.0
    backward_seconds: Seconds = 0.0
    collective_seconds: Seconds | None = None
    call_seconds: Seconds = 0.0
    graph_seconds: Seconds | None = None
    excludes_experts: bool = False

    def launch_stalls(self, segment: Segment, seconds: FloatArray) -> FloatArray:
        """[runs, operations] seconds for which the GPU waits for the host, given operations' seconds without waiting.

        A stall before an operation with communication is counted at the next kernel (or, after the last kernel, at
        that); a segment without standalone kernels does not stall, nor does an interleaved one, whose launches are
        tasks (`LaunchOp`).
        """
        if segment.interleaved or not (self.launches_ahead and segment.operations):
            return np.zeros(seconds.shape)
        captured = self._captured_mask(segment)
        launch_counts, launch_seconds = self._operation_launches(segment, captured)
        has_host_sync = any(_sync_offset(operation.body) is not None for operation in segment.distinct_operations)
        uncaptured = np.flatnonzero(~captured).tolist() if has_host_sync else []
        sync_points = _sync_points(segment, uncaptured)
        stalls = _stalls_in_order(launch_counts, launch_seconds, seconds, sync_points)
        return _shift_to_kernels(segment, stalls)

    def launch_lead(self, segment: Segment, seconds: FloatArray) -> LaunchLead:
        """The longest time by which a launch is behind what the device can have done before it."""
        if not segment.operations:
            return LaunchLead()
        launch_counts, launch_seconds = self._operation_launches(segment, self._captured_mask(segment))
        issue_times, (kernel_seconds,) = _times_by_launch(launch_counts, launch_seconds, seconds[None, :])
        lateness = issue_times - (np.cumsum(kernel_seconds) - kernel_seconds)
        return LaunchLead(float(lateness.max()), float(issue_times[-1]))

    @property
    def launches_ahead(self) -> bool:
        """Whether any launch takes time."""
        return any(
            (
                self.graph_seconds,
                self.forward_seconds,
                self.backward_seconds,
                self.collective_seconds,
                self.call_seconds,
            )
        )

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
        """[operations] launches, and seconds of each; a graph is launched with its first operation."""
        launch_counts, launch_seconds = self._eager_launches(segment)
        starts_graph = captured & ~np.concatenate(([False], captured[:-1]))
        graph_seconds = np.where(starts_graph, self.graph_seconds or 0.0, 0.0)
        return np.where(captured, 1, launch_counts), np.where(captured, graph_seconds, launch_seconds)

    def _eager_launches(self, segment: Segment) -> tuple[IntArray, FloatArray]:
        """[operations] eager launches, and mean seconds of each where an operation has kernels and collectives."""
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
    """[runs, operations] seconds for which the GPU waits, in sections that begin at host syncs."""
    count = seconds.shape[1]
    sections = [(a, b, float(launch_seconds[0]) if a == 0 else 0.0) for a, b in pairwise((0, *sync_points, count))]
    stalls = [
        _launch_delay(launch_counts[a:b], launch_seconds[a:b], seconds[:, a:b], lead=lead) for a, b, lead in sections
    ]
    return np.concatenate(stalls, axis=1)


def _sync_points(segment: Segment, uncaptured: Sequence[int]) -> list[int]:
    """Operations before which the host waits for the device, inside the segment."""
    offsets = ((index, _sync_offset(segment.operations[index].body)) for index in uncaptured)
    points = {index + offset for index, offset in offsets if offset is not None}
    return sorted(point for point in points if 0 < point < len(segment.operations))


def _sync_offset(body: Kernel | CommOp | CommOverlap) -> int | None:
    """Whether the host waits before an operation (0) or behind it (1); None: it does not wait."""
    match body:
        case Kernel(host_sync=True):
            return 1
        case CommOp(host_sync=True) | CommOverlap(comm_op=CommOp(host_sync=True)):
            return 0
    return None


def _launch_delay(
    launch_counts: IntArray, launch_seconds: FloatArray, seconds: FloatArray, *, lead: Seconds
) -> FloatArray:
    """[runs, operations] GPU stall before and within operations, given launch counts and seconds per launch.

    lead: seconds by which the host begins before the GPU.
    """
    issue_times, kernel_seconds = _times_by_launch(launch_counts, launch_seconds, seconds)
    lateness = np.maximum(issue_times - lead - (np.cumsum(kernel_seconds, axis=1) - kernel_seconds), 0.0)
    cumulative_stall = np.maximum.accumulate(lateness, axis=1)[
        :, np.cumsum(launch_counts) - 1
    ]  # stall up to the end of each operation
    cumulative_stall[:, -1] = np.maximum(
        cumulative_stall[:, -1], issue_times[-1] - np.ascontiguousarray(kernel_seconds).sum(axis=1)
    )
    stalls: FloatArray = np.diff(cumulative_stall, prepend=0.0, axis=1)
    return stalls


def _times_by_launch(
    launch_counts: IntArray, launch_seconds: FloatArray, seconds: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """[launches] when each is done, if the host begins at 0, and [runs, launches] seconds of each on the device."""
    return (
        np.cumsum(np.repeat(launch_seconds, launch_counts)),
        np.repeat(seconds / launch_counts, launch_counts, axis=1),
    )


def _shift_to_kernels(segment: Segment, stalls: FloatArray) -> FloatArray:
    """The same stalls, moved to the next standalone kernel."""
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
    """Number of kernels and collectives that the host launches for an operation."""
    return sum(_launch_counts(body)[:2])


def _launch_counts(body: Kernel | CommOp | CommOverlap) -> tuple[int, int, int]:
    """What the host launches for an operation: numbers of kernels, collectives, and calls of a loop."""
    match body:
        case CommOp():
            return 0, 1, 0
        case CommOverlap(kernel=kernel, chunk_count=chunks):
            chunk_count = 1 if math.isinf(chunks) else int(chunks)
            return kernel.launches, 1, (kernel.launches + 1) * (chunk_count - 1)
        case Kernel(host_calls=0) as kernel:
            return kernel.launches, 0, 0
        case kernel:
            return 0, 0, kernel.host_calls
