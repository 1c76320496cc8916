"""How long does a compute segment take, and when does each operation inside it run?

Operations of a segment run back to back, so their offsets are running sums. A segment is timed per rank,
because ranks may have different devices, and collectives of different groups may differ; ranks for which
all of this is equal share a timing.

A kernel that overlaps a collective of its own segment (`CommOverlap`) is slowed by it while both run, and slows
it.

The host launches a segment's kernels and collectives while earlier ones run; where it falls behind, the GPU
stalls (`cost.host_launch`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.cached_method import cached_by, cached_method
from clustersim.common.units import Seconds
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.imbalanced_kernels import ImbalancedKernels
from clustersim.cost.interference import KERNEL_CLASSES, InterferenceTable, KernelClass, kernel_class_of
from clustersim.cost.timing import Bottleneck, CommCost, CommTiming, KernelTiming, Provenance
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.program.program import Program
from clustersim.program.task import OVERLAPPING_STREAMS, CommOp, CommOverlap, Operation, Segment, Stream
from clustersim.symmetry.labels import label_rows, pair_labels

_ScalarOrArray = TypeVar("_ScalarOrArray", float, FloatArray)
"""Seconds of one kernel, or an array of them."""


@dataclass(frozen=True, slots=True)
class OverlapModel:
    """A kernel overlapped with a communication op, as one operation (`CommOverlap`).

    comm_seconds: duration of the communication without overlap; kernel_slowdown, comm_slowdown: fractions by
    which the kernel and the communication take longer while both run. Whichever ends first was slowed for its
    whole duration, the other for the same time.
    """

    overlap: CommOverlap
    comm_seconds: Seconds
    kernel_slowdown: float
    comm_slowdown: float = 0.0

    def kernel_delay(self, kernel_seconds: Seconds, comm_seconds: Seconds) -> Seconds:
        """Seconds by which the communication delays the kernel: until either ends."""
        return self._kernel_delay(kernel_seconds, comm_seconds, min)

    def comm_duration(self, kernel_seconds: Seconds, comm_seconds: Seconds) -> Seconds:
        """Duration of the communication while it overlaps the kernel."""
        return comm_seconds + self._comm_delay(kernel_seconds, comm_seconds, min)

    def kernel_duration(self, kernel_seconds: Seconds, comm_seconds: Seconds) -> Seconds:
        """Duration of the kernel while it overlaps the communication; the rest of `duration` is exposed."""
        return kernel_seconds + self.kernel_delay(kernel_seconds, comm_seconds)

    def durations(self, kernel_seconds: FloatArray) -> FloatArray:
        """Durations of kernel and communication overlapped, given the kernels' seconds without overlap (any shape)."""
        return self._overlapped_duration(kernel_seconds, self.comm_seconds, np.minimum, np.maximum)

    def duration(self, kernel_seconds: Seconds, comm_seconds: Seconds) -> Seconds:
        """Duration of a kernel overlapped with communication that takes `comm_seconds` without it."""
        return self._overlapped_duration(kernel_seconds, comm_seconds, min, max)

    def _kernel_delay(
        self,
        kernel_seconds: _ScalarOrArray,
        comm_seconds: Seconds,
        minimum: Callable[[_ScalarOrArray, Any], _ScalarOrArray],
    ) -> _ScalarOrArray:
        slowed_comm = comm_seconds * (1.0 + self.comm_slowdown)
        return minimum(
            kernel_seconds * self.kernel_slowdown, slowed_comm * self.kernel_slowdown / (1.0 + self.kernel_slowdown)
        )

    def _comm_delay(
        self,
        kernel_seconds: _ScalarOrArray,
        comm_seconds: Seconds,
        minimum: Callable[[_ScalarOrArray, Any], _ScalarOrArray],
    ) -> _ScalarOrArray:
        slowed_kernel = kernel_seconds * (1.0 + self.kernel_slowdown)
        return minimum(
            slowed_kernel * self.comm_slowdown / (1.0 + self.comm_slowdown), comm_seconds * self.comm_slowdown
        )

    def _overlapped_duration(
        self,
        kernel_seconds: _ScalarOrArray,
        comm_seconds: Seconds,
        minimum: Callable[[_ScalarOrArray, Any], _ScalarOrArray],
        maximum: Callable[[_ScalarOrArray, Any], _ScalarOrArray],
    ) -> _ScalarOrArray:
        kernel_busy = kernel_seconds + self._kernel_delay(kernel_seconds, comm_seconds, minimum)
        comm_busy = (
            comm_seconds + self._comm_delay(kernel_seconds, comm_seconds, minimum)
            if self.comm_slowdown
            else comm_seconds
        )
        chunks = self.overlap.chunk_count
        if self.overlap.is_ring:
            return maximum(kernel_busy, comm_busy + kernel_busy / chunks)
        return maximum(kernel_busy, comm_busy) + minimum(kernel_busy, comm_busy) / chunks


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTiming:
    """Timing of every operation of a segment, in the segment's order. Compared by identity, as ranks share it.

    durations: [operations] seconds; offsets: [operations + 1] seconds from the segment's start, the running sum
    of durations; exposed_comm: [operations] seconds of each that are communication not hidden by a kernel (all
    of a collective's time, none of a kernel's); overlap_delay: [operations] seconds by which the communication
    of an overlapped operation delays its kernel; launch_stalls: [operations] seconds of each during which the
    GPU waits for the host; overlaps: overlapped operations by index; provenance, bottleneck, error,
    in_situ_slowdown: one per operation.
    """

    durations: tuple[Seconds, ...]
    offsets: FloatArray
    exposed_comm: FloatArray
    overlap_delay: FloatArray
    launch_stalls: FloatArray
    overlaps: Mapping[int, OverlapModel]
    provenance: tuple[Provenance, ...]
    bottleneck: tuple[Bottleneck, ...]
    error: tuple[float | None, ...]
    in_situ_slowdown: tuple[float, ...]

    @property
    def seconds(self) -> Seconds:
        """Duration of the segment."""
        return float(self.offsets[-1])

    @property
    def kernel_seconds(self) -> FloatArray:
        """[operations] seconds of each operation's kernels without overlap, launch stalls included."""
        return np.array(self.durations) - self.exposed_comm - self.overlap_delay

    @property
    def running_share(self) -> FloatArray:
        """[operations] share of `kernel_seconds` in which kernels run: the rest are launch stalls."""
        seconds = self.kernel_seconds
        return 1.0 - np.divide(self.launch_stalls, seconds, out=np.zeros(len(seconds)), where=seconds > 0.0)

    def fixed(self, kernel_seconds: FloatArray) -> FloatArray:
        """Seconds of operations that are not kernel time, when kernels take these seconds: [.., operations] both."""
        fixed_seconds = self.exposed_comm + self.overlap_delay
        if self.overlaps:
            fixed_seconds = np.broadcast_to(fixed_seconds, kernel_seconds.shape).copy()
        for index, overlap in self.overlaps.items():
            kernel = kernel_seconds[..., index]
            fixed_seconds[..., index] = overlap.durations(kernel) - kernel
        return fixed_seconds


class SegmentCost:
    """Times segments and communication ops for the ranks of one program."""

    def __init__(self, program: Program, device_models: DeviceModels, comm_cost: CommCost) -> None:
        self.program = program
        self.device_models = device_models
        self._comm_cost = comm_cost
        self._group_indices = program.group_indices
        self._load_classes = [
            np.unique(load_factors, return_inverse=True)[1].reshape(-1) for load_factors in program.expert_loads.factors
        ]
        self._canonical_by_content: dict[tuple[bool, tuple[Operation, ...]], Segment] = {}
        self._timing_cache: dict[tuple[Segment, int], SegmentTiming] = {}
        self._imbalanced_kernels = [ImbalancedKernels(kind.kernels) for kind in device_models.models]
        standalone_collectives = (
            comm_op.collective for rank_program in program.programs for comm_op in rank_program.task_comm_ops
        )
        may_coincide = any(Stream.EP in rank_program.streams for rank_program in program.programs)
        self._interference = InterferenceTable(
            [kind.interference for kind in device_models.models],
            dict.fromkeys(standalone_collectives),
            may_coincide=may_coincide,
        )

    def time_segment(self, rank: int, segment: Segment) -> SegmentTiming:
        """Timing of a segment on one rank."""
        key = self._timing_class(rank, segment)
        if key not in self._timing_cache:
            self._time_segment(rank, key[0])
        return self._timing_cache[key]

    def _timing_class(self, rank: int, segment: Segment) -> tuple[Segment, int]:
        """Equal for ranks and segments with the same timing."""
        segment = self._canonical_segment(segment)
        return segment, int(self._classify_ranks(segment)[rank])

    @cached_method
    def _canonical_segment(self, segment: Segment) -> Segment:
        """The first requested segment with the same operations, which is timed for all of them."""
        return self._canonical_by_content.setdefault((segment.interleaved, segment.operations), segment)

    def timing_classes(self, segment: Segment) -> IntArray:
        """[ranks] class of each rank; ranks of one class share the segment's timing."""
        return self._classify_ranks(self._canonical_segment(segment))

    @property
    def rank_features(self) -> IntArray:
        """[ranks] class of each rank by device model and expert loads."""
        return (
            pair_labels(self.device_models.index_of_rank, label_rows(np.stack(self._load_classes, axis=1)))
            if self._load_classes
            else self.device_models.index_of_rank
        )

    @cached_method
    def _classify_ranks(self, segment: Segment) -> IntArray:
        """Timing classes of the ranks for a segment: by device model, loads, and seconds of its collectives."""
        classes = self.device_models.index_of_rank
        for load_index in dict.fromkeys(operation.load_index for operation in segment.distinct_operations):
            if load_index is not None:
                classes = pair_labels(classes, self._load_classes[load_index])
        for comm_op in segment.distinct_comm_ops:
            timing = self._comm_cost.time_comm_op(comm_op)
            for column in (timing.seconds, timing.nvlink_share):
                if column is None or (column == column[0]).all():
                    continue
                group_class = np.unique(column, return_inverse=True)[1].reshape(-1)
                rank_class = group_class[self._group_indices[comm_op.comm_group]]
                classes = np.unique(classes * (len(column) + 1) + rank_class, return_inverse=True)[1].reshape(-1)
        return classes

    def comm_timing(self, rank: int, comm_op: CommOp) -> KernelTiming:
        """Timing of a communication op in the group of one rank (its first member, for pairs)."""
        timing = self._comm_cost.time_comm_op(comm_op)
        group_index = self._group_indices[comm_op.comm_group][rank]
        return KernelTiming(float(timing.seconds[group_index]), timing.provenance, timing.bottleneck, timing.error)

    def comm_timing_by_group(self, comm_op: CommOp) -> CommTiming:
        """Timing of a communication op in every group of its communicator."""
        return self._comm_cost.time_comm_op(comm_op)

    def comm_seconds(self, ranks: IntArray, comm_op: CommOp) -> FloatArray:
        """Seconds of a communication op in the group of each of these ranks (their first members, for pairs)."""
        seconds: FloatArray = self._comm_cost.time_comm_op(comm_op).seconds[
            self._group_indices[comm_op.comm_group][ranks]
        ]
        return seconds

    def interference_level(self, comm_op: CommOp) -> int:
        """Interference level of kernels while a DP or EP collective is in flight; 0 means none."""
        return self._interference.level_of(comm_op.collective)

    def combined_interference_level(self, first: int, second: int) -> int:
        """Interference level of kernels while collectives of two streams are in flight; 0 means none."""
        return self._interference.combined_level(first, second)

    @cached_by(_timing_class)
    def slowdown(self, rank: int, segment: Segment) -> FloatArray:
        """Slowdown of a segment's kernels on a rank at each level from 1 on: [levels - 1, operations] fractions.

        Fractions of `SegmentTiming.kernel_seconds`, whose launch stalls are not slowed: the host launches at its pace.
        """
        return self._kernel_slowdown(rank, segment) * self.time_segment(rank, segment).running_share

    def _kernel_slowdown(self, rank: int, segment: Segment) -> FloatArray:
        """Slowdown of a segment's kernels while they run: [levels - 1, operations] fractions."""
        model_index = int(self.device_models.index_of_rank[rank])
        kernels = (operation.kernel for operation in segment.distinct_operations)
        class_indices = np.array(
            [0 if kernel is None else _CLASS_INDEX[kernel.kind] for kernel in kernels], dtype=np.int64
        )
        slowdown_table = np.array(
            [levels[model_index] for levels in self._interference.levels], dtype=np.float64
        ).reshape(-1, len(KERNEL_CLASSES))
        return slowdown_table[:, class_indices[segment.operation_index]]

    @cached_property
    def compute_slows_comm(self) -> bool:
        """Whether kernels slow any DP or EP collective."""
        if not any(model.interference.slows_collectives for model in self.device_models.models):
            return False  # before any program's tasks are gone through
        issued_ops = (issued for rank_program in self.program.programs for issued in rank_program.issued_comm_ops)
        overlapping_ops = dict.fromkeys(comm_op for stream, comm_op in issued_ops if stream in OVERLAPPING_STREAMS)
        return any(map(self._slows, overlapping_ops))

    def _slows(self, comm_op: CommOp) -> bool:
        """Whether kernels of any class, on any device model, slow a collective in any of its groups."""
        shares = self._comm_cost.time_comm_op(comm_op).nvlink_share
        nvlink_share = 0.0 if shares is None else float(shares.max(initial=0.0))
        return any(
            kind.interference.collective_slowdown(comm_op.collective, kernel_class, nvlink_share) > 0.0
            for kind in self.device_models.models
            for kernel_class in KERNEL_CLASSES
        )

    def _nvlink_share(self, rank: int, comm_op: CommOp) -> float:
        """Share of a collective's transfer for which ports are busy in the group of one rank."""
        shares = self._comm_cost.time_comm_op(comm_op).nvlink_share
        return 0.0 if shares is None else float(shares[self._group_indices[comm_op.comm_group][rank]])

    def _comm_slowdown(self, rank: int, comm_op: CommOp, kernel_class: KernelClass) -> float:
        """Slowdown of a collective in the group of one rank by the rank's kernels of a class."""
        interference, nvlink_share = self._device_model(rank).interference, self._nvlink_share(rank, comm_op)
        return interference.collective_slowdown(comm_op.collective, kernel_class, nvlink_share)

    @cached_by(
        lambda self, rank, segment, comm_op: (
            self._timing_class(rank, segment),
            comm_op.collective,
            self._nvlink_share(rank, comm_op),
        )
    )
    def comm_speed(self, rank: int, segment: Segment, comm_op: CommOp) -> float:
        """Speed of a collective while a rank runs this segment, relative to no overlap, averaged over the segment."""
        timing = self.time_segment(rank, segment)
        kernels = timing.kernel_seconds * (1.0 + self.slowdown(rank, segment)[self.interference_level(comm_op) - 1])
        fixed = timing.fixed(timing.kernel_seconds)
        kinds = (
            KernelKind.MATMUL if operation.kernel is None else operation.kernel.kind for operation in segment.operations
        )
        slowdown = np.array([self._comm_slowdown(rank, comm_op, kernel_class_of(kind)) for kind in kinds])
        total = float((kernels + fixed).sum())
        return float((kernels / (1.0 + slowdown) + fixed).sum()) / total if total > 0.0 else 1.0

    def comm_slows_compute(self, ranks: IntArray) -> bool:
        """Whether a DP or EP collective slows any kernel of these ranks."""
        model_indices = np.unique(self.device_models.index_of_rank[ranks]).tolist()
        return any(
            slowdown > 0.0
            for level in self._interference.levels
            for model_index in model_indices
            for slowdown in level[model_index]
        )

    def _device_model(self, rank: int) -> DeviceModel:
        return self.device_models.models[int(self.device_models.index_of_rank[rank])]

    def _time_segment(self, rank: int, segment: Segment) -> None:
        """Time a segment on a rank; with imbalanced loads, on all ranks of the same device model at once."""
        classes, model_index = self.timing_classes(segment), int(self.device_models.index_of_rank[rank])
        ranks = [rank]
        if any(distinct_operation.load_index is not None for distinct_operation in segment.distinct_operations):
            same_model_ranks = np.flatnonzero(self.device_models.index_of_rank == model_index)
            ranks = same_model_ranks[np.unique(classes[same_model_ranks], return_index=True)[1]].tolist()
        rank_segments = [self._rank_segment(timed_rank, segment) for timed_rank in ranks]
        seconds = np.stack([rank_segment.seconds for rank_segment in rank_segments])
        stalls = self.device_models.models[model_index].host.launch_stalls(segment, seconds)
        for timed_rank, rank_segment, rank_seconds, launch_stalls in zip(
            ranks, rank_segments, seconds, stalls, strict=True
        ):
            self._timing_cache[segment, int(classes[timed_rank])] = rank_segment.to_segment_timing(
                rank_seconds, launch_stalls
            )

    def _rank_segment(self, rank: int, segment: Segment) -> "_RankSegment":
        model_index = int(self.device_models.index_of_rank[rank])
        timed_operations = [
            self._timed_operation(rank, model_index, operation) for operation in segment.distinct_operations
        ]
        return _RankSegment(timed_operations, segment.operation_index)

    def _operation_key(self, rank: int, model_index: int, operation: Operation) -> tuple[bool, int, Operation]:
        """Equal for ranks with one time of an operation: those of one device model, where it is a balanced kernel."""
        depends_on_rank = operation.load_index is not None or not isinstance(operation.body, Kernel)
        return depends_on_rank, rank if depends_on_rank else model_index, operation

    @cached_by(_operation_key)
    def _timed_operation(self, rank: int, model_index: int, operation: Operation) -> "_TimedOperation":
        """Timing of a program's operation on a rank."""
        match operation.body:
            case CommOp() as comm_op:
                timing = self.comm_timing(rank, comm_op)
                return timing, (timing.seconds, 0.0), None
            case CommOverlap() as overlap:
                return self._time_overlap(rank, overlap)
            case kernel if operation.load_index is not None:
                load_factor = float(self.program.expert_loads.factors[operation.load_index, rank])
                return self._imbalanced_kernels[model_index].time_kernel(kernel, load_factor), _NO_COMM, None
            case kernel:
                return self.device_models.models[model_index].kernels.time_kernel(kernel), _NO_COMM, None

    def _time_overlap(self, rank: int, overlap: CommOverlap) -> "_TimedOperation":
        """Timing of a kernel overlapped with a communication op."""
        device_model, comm = self._device_model(rank), self.comm_timing(rank, overlap.comm_op)
        kernel = _time_chunked_kernel(device_model, overlap.kernel, overlap.chunk_count)
        pair = overlap.comm_op.collective, kernel_class_of(overlap.kernel.kind)
        model = OverlapModel(
            overlap,
            comm.seconds,
            device_model.interference.kernels[pair],
            self._comm_slowdown(rank, overlap.comm_op, pair[1]),
        )
        kernel_delay = model.kernel_delay(kernel.seconds, comm.seconds)
        seconds = model.duration(kernel.seconds, comm.seconds)
        comm_duration = model.comm_duration(kernel.seconds, comm.seconds)
        dominant = comm if comm_duration > kernel.seconds + kernel_delay else kernel
        return replace(dominant, seconds=seconds), (seconds - kernel.seconds - kernel_delay, kernel_delay), model


_TimedOperation = tuple[KernelTiming, tuple[Seconds, Seconds], OverlapModel | None]
"""An operation on one rank: timing, (exposed communication, kernel delay) in seconds, overlap model if any."""
_NO_COMM: Final = 0.0, 0.0
"""No exposed communication and no delay."""
_CLASS_INDEX: Final = {kind: KERNEL_CLASSES.index(kernel_class_of(kind)) for kind in KernelKind}
"""Index of each kernel kind's class."""


@dataclass(frozen=True, slots=True)
class _RankSegment:
    """The timed operations of a segment on one rank.

    timed_operations: the distinct ones; operation_index: [operations] which of these each is.
    """

    timed_operations: list[_TimedOperation]
    operation_index: IntArray

    @property
    def seconds(self) -> FloatArray:
        """[operations] seconds of each."""
        return np.array([timing.seconds for timing, _, _ in self.timed_operations], dtype=np.float64)[
            self.operation_index
        ]

    def to_segment_timing(self, seconds: FloatArray, launch_stalls: FloatArray) -> SegmentTiming:
        """Assemble the segment's timing. seconds: [operations]; launch_stalls: [operations], as in `SegmentTiming`."""
        durations, indices = (seconds + launch_stalls).tolist(), self.operation_index.tolist()
        comm_shares = np.array([share for _, share, _ in self.timed_operations], dtype=np.float64).reshape(-1, 2)[
            self.operation_index
        ]
        timings = [self.timed_operations[index][0] for index in indices]
        return SegmentTiming(
            durations=tuple(durations),
            offsets=np.concatenate(([0.0], np.cumsum(durations))),
            exposed_comm=comm_shares[:, 0],
            overlap_delay=comm_shares[:, 1],
            launch_stalls=launch_stalls,
            overlaps=self._overlaps(indices),
            provenance=tuple([timing.provenance for timing in timings]),
            bottleneck=tuple([timing.bottleneck for timing in timings]),
            error=tuple([timing.error for timing in timings]),
            in_situ_slowdown=tuple([timing.in_situ_slowdown for timing in timings]),
        )

    def _overlaps(self, indices: list[int]) -> dict[int, OverlapModel]:
        """Overlap models by operation position."""
        models = {index: model for index, (_, _, model) in enumerate(self.timed_operations) if model is not None}
        return (
            {
                position: models[operation_index]
                for position, operation_index in enumerate(indices)
                if operation_index in models
            }
            if models
            else {}
        )


def _time_chunked_kernel(device_model: DeviceModel, kernel: Kernel, chunks: float) -> KernelTiming:
    """Timing of a kernel split into this many chunks that run in sequence (infinite: not split)."""
    if math.isinf(chunks):
        return device_model.kernels.time_kernel(kernel)
    chunk_count = int(chunks)
    timing = device_model.kernels.time_kernel(kernel.split_into(chunk_count))
    return replace(timing, seconds=timing.seconds * chunk_count)
