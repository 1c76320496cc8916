"""Segments: back-to-back operations, kernels overlapping collectives that slow them, and host launches."""

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.host_launch import AsyncHost
from clustersim.cost.interference import Interference, KernelClass
from clustersim.cost.segment import SegmentCost, SegmentTiming
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.program.task import CollectiveType, CommOverlap, Operation, Segment, WorkType
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import StreamTask, all_reduce, make_comm_op, make_program, make_segment

INFINITE = float("inf")
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 8.0])
LEVELS = st.sampled_from([0.0, 0.25, 1.0])


def overlap(kernel_seconds: float, comm_seconds: float, chunks: float = INFINITE, *, local: bool = False) -> Operation:
    """A kernel of the given seconds that overlaps a collective."""
    full_kernel = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=kernel_seconds, bytes=0.0)
    return Operation(CommOverlap(make_comm_op("tp", comm_seconds), full_kernel, chunks, local), WorkType.FORWARD)


def uniform_cost(interference: float, launch: float = 0.0) -> SegmentCost:
    return segment_cost(Interference.uniform(interference), launch)


def segment_cost(interference: Interference, launch: float = 0.0, steps: Sequence[StreamTask] = ()) -> SegmentCost:
    rank_program = make_program([steps], {"tp": [[0]], "dp": [[0]]})
    unit = UnitCost(rank_program)
    return SegmentCost(
        rank_program, DeviceModels.uniform(DeviceModel(unit, interference, AsyncHost(launch, launch)), 1), unit
    )


def segment_timing(interference: float, *operations: Operation, launch: float = 0.0) -> SegmentTiming:
    return uniform_cost(interference, launch).time_segment(0, Segment("block", operations))


def stepwise_ends(kernel_seconds: float, comm_seconds: float, interference: float) -> tuple[float, float]:
    """Ends of a kernel and a collective that start together, stepping from one end to the next.

    While both run, the kernel does 1/(1 + φ) seconds of work a second.
    """
    overlap_end = min(comm_seconds, kernel_seconds * (1 + interference))
    remaining = kernel_seconds - overlap_end / (1 + interference)
    return overlap_end + remaining, comm_seconds


@given(SECONDS, SECONDS, LEVELS)
def test_a_kernel_is_slowed_only_while_its_collective_runs(
    kernel_seconds: float, comm_seconds: float, interference: float
) -> None:
    """Overlapped without chunks: the later end. The kernel's extra time is `slowed`, the uncovered rest is exposed."""
    timing = segment_timing(interference, overlap(kernel_seconds, comm_seconds))
    kernel_end, comm_end = stepwise_ends(kernel_seconds, comm_seconds, interference)
    assert timing.seconds == pytest.approx(max(kernel_end, comm_end))
    assert timing.overlap_delay.tolist() == pytest.approx([kernel_end - kernel_seconds])
    assert timing.exposed_comm.tolist() == pytest.approx([max(comm_end - kernel_end, 0.0)])


@pytest.mark.parametrize(
    ("kernel", "comm", "seconds", "slowed"),
    [(4.0, 1.0, 4.5, 0.5), (1.0, 4.0, 4.0, 1.0), (2.0, 4.0, 4.0, 2.0), (3.0, 4.0, 5.0, 2.0), (3.0, 0.0, 3.0, 0.0)],
)
def test_slowdown_by_hand(kernel: float, comm: float, seconds: float, slowed: float) -> None:
    """With φ = 1 a kernel runs at half rate: 1 s of overlap costs 0.5 s; during 4 s, 1 s takes 2 and 2 s take 4."""
    timing = segment_timing(1.0, overlap(kernel, comm))
    assert timing.seconds == seconds
    assert timing.overlap_delay.tolist() == [slowed]


@given(SECONDS, SECONDS, LEVELS, LEVELS)
def test_kernel_and_collective_slow_each_other_until_either_ends(
    kernel_seconds: float, comm_seconds: float, p: float, q: float
) -> None:
    """Stepwise: while both run, the kernel runs at 1/(1 + p) of its rate and the collective at 1/(1 + q)."""
    overlap_end = min(kernel_seconds * (1 + p), comm_seconds * (1 + q))
    kernel_end, comm_end = (
        overlap_end + kernel_seconds - overlap_end / (1 + p),
        overlap_end + comm_seconds - overlap_end / (1 + q),
    )
    slowdowns = (
        {(CollectiveType.ALL_REDUCE, KernelClass.MEMORY): p},
        {(CollectiveType.ALL_REDUCE, KernelClass.MEMORY): q},
    )
    timing = segment_cost(Interference.from_measurements(*slowdowns)).time_segment(
        0, Segment("block", (overlap(kernel_seconds, comm_seconds),))
    )
    assert timing.seconds == pytest.approx(max(kernel_end, comm_end))
    assert timing.overlap_delay.tolist() == pytest.approx([kernel_end - kernel_seconds])
    assert timing.exposed_comm.tolist() == pytest.approx([max(comm_end - kernel_end, 0.0)])
    assert timing.overlaps[0].comm_duration(kernel_seconds, comm_seconds) == pytest.approx(comm_end)


def test_a_one_second_kernel_with_a_half_second_collective() -> None:
    """0.4 s are done in its half second (p = 1/4), so 1.1 s; with q = 1 that is a second, which leaves 0.2 s of 1."""
    pairs = {(CollectiveType.ALL_REDUCE, KernelClass.MEMORY): 0.25}
    for q, seconds in ((0.0, 1.1), (1.0, 1.2)):
        table = Interference.from_measurements(pairs, dict.fromkeys(pairs, q))
        assert segment_cost(table).time_segment(0, Segment("block", (overlap(1.0, 0.5),))).seconds == pytest.approx(
            seconds
        )


@pytest.mark.parametrize(("kernel", "comm"), [(6.0, 2.0), (2.0, 6.0)])
def test_a_chunked_kernel_hides_the_shorter_except_for_one_chunk(kernel: float, comm: float) -> None:
    """With φ = 1/2 and n = 4: k' is the slowed kernel, and max(k', e) + min(k', e)/n its time with the exchange."""
    kernel_end, _ = stepwise_ends(kernel, comm, 0.5)
    timing = segment_timing(0.5, overlap(kernel, comm, 4))
    assert timing.seconds == pytest.approx(max(kernel_end, comm) + min(kernel_end, comm) / 4)
    assert timing.exposed_comm[0] == pytest.approx(timing.seconds - kernel_end)


@pytest.mark.parametrize(("kernel", "comm"), [(6.0, 2.0), (2.0, 6.0)])
def test_with_a_local_first_chunk_a_collective_hides_behind_the_others(kernel: float, comm: float) -> None:
    """max(k', e + k'/n)."""
    kernel_end, _ = stepwise_ends(kernel, comm, 0.5)
    timing = segment_timing(0.5, overlap(kernel, comm, 4, local=True))
    assert timing.seconds == pytest.approx(max(kernel_end, comm + kernel_end / 4))


@st.composite
def random_operations(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(["kernel", "exchange", "overlap"]))
    if kind == "overlap":
        chunks = draw(st.sampled_from([1.0, 2.0, 4.0, INFINITE]))
        return overlap(draw(SECONDS), draw(SECONDS), chunks, local=chunks < INFINITE and draw(st.booleans()))
    seconds = draw(SECONDS)
    return make_segment(make_comm_op("tp", seconds) if kind == "exchange" else seconds).operations[0]


@given(st.lists(random_operations(), max_size=5), LEVELS)
def test_time_categories_of_operations_sum_to_their_durations(
    operation_list: list[Operation], interference: float
) -> None:
    """Kernels without overlap, their slowdown and exposed communication; none is negative."""
    timing = segment_timing(interference, *operation_list)
    kernels = [0.0 if operation.kernel is None else operation.kernel.flops for operation in operation_list]
    assert timing.kernel_seconds.tolist() == pytest.approx(kernels)
    assert (timing.kernel_seconds + timing.overlap_delay + timing.exposed_comm).tolist() == pytest.approx(
        list(timing.durations)
    )
    assert min([*timing.exposed_comm, *timing.overlap_delay, 0.0]) >= -1e-12
    assert timing.offsets.tolist() == pytest.approx(np.cumsum([0.0, *timing.durations]).tolist())


@given(SECONDS, SECONDS, SECONDS, LEVELS)
def test_extending_an_overlap_equals_timing_the_extended_one(
    kernel_seconds: float, comm_seconds: float, extra_seconds: float, interference: float
) -> None:
    timing = segment_timing(interference, overlap(kernel_seconds, comm_seconds, 4))
    (overlap_timing,) = timing.overlaps.values()
    with_extra_comm = segment_timing(interference, overlap(kernel_seconds, comm_seconds + extra_seconds, 4)).seconds
    assert overlap_timing.duration(kernel_seconds, comm_seconds + extra_seconds) == pytest.approx(with_extra_comm)
    with_extra_kernel = segment_timing(interference, overlap(kernel_seconds + extra_seconds, comm_seconds, 4)).seconds
    assert timing.fixed(timing.kernel_seconds + extra_seconds) + kernel_seconds + extra_seconds == pytest.approx(
        with_extra_kernel
    )


def kernel_operation(seconds: float, launches: int = 1) -> Operation:
    """A kernel of the given seconds that the host launches in that many launches."""
    copy_kernel = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=seconds, bytes=0.0, launches=launches)
    return Operation(copy_kernel, WorkType.FORWARD)


def test_launch_waiting_counts_as_kernel_time() -> None:
    """Three launches of 2 s for 1 + 1 + 4 s of kernels, computed as in `cost.host_launch`: they start at 0, 2, 4 s."""
    timing = segment_timing(0.0, kernel_operation(1.0), kernel_operation(1.0), kernel_operation(4.0), launch=2.0)
    assert timing.launch_stalls.tolist() == [0.0, 1.0, 1.0]
    assert timing.durations == (1.0, 2.0, 5.0)
    assert timing.kernel_seconds.tolist() == [1.0, 2.0, 5.0]
    assert timing.exposed_comm.tolist() == timing.overlap_delay.tolist() == [0.0, 0.0, 0.0]


def test_collectives_slow_kernels_and_not_the_launches_that_they_wait_for() -> None:
    """The same three kernels at half rate: 2 s, 1 + 2 s and 1 + 8 s, where the GPU waits 1 s before two of them."""
    costs = segment_cost(Interference.uniform(1.0), 2.0, [all_reduce(1.0)])
    segment = Segment("block", (kernel_operation(1.0), kernel_operation(1.0), kernel_operation(4.0)))
    timing, level = costs.time_segment(0, segment), costs.interference_level(make_comm_op("dp", 1.0))
    slowdown = costs.slowdown(0, segment)[level - 1]
    assert (timing.kernel_seconds * (1.0 + slowdown)).tolist() == pytest.approx([2.0, 3.0, 9.0])


@given(st.lists(random_operations(), max_size=5), LEVELS, st.sampled_from([0.0, 0.25, 1.0, 4.0]))
def test_time_categories_with_launch_waiting_sum_to_the_durations(
    operation_list: list[Operation], interference: float, launch: float
) -> None:
    timing, without_launch = (
        segment_timing(interference, *operation_list, launch=launch),
        segment_timing(interference, *operation_list),
    )
    assert (timing.kernel_seconds - timing.launch_stalls).tolist() == pytest.approx(
        without_launch.kernel_seconds.tolist()
    )
    assert (timing.kernel_seconds + timing.overlap_delay + timing.exposed_comm).tolist() == pytest.approx(
        list(timing.durations)
    )
    if not timing.launch_stalls.any():
        assert timing.durations == without_launch.durations, "a block that keeps its GPU busy does not change"


def test_segments_of_the_same_operations_share_a_timing() -> None:
    costs, operations = uniform_cost(0.0), make_segment(1.0, make_comm_op("tp", 2.0)).operations
    first, second = (costs.time_segment(0, Segment(name, operations)) for name in ("one", "other"))
    assert first is second
    interleaved = costs.time_segment(0, Segment("turns", operations, interleaved=True))
    assert interleaved is not first


def test_an_unpickled_cost_knows_its_segments() -> None:
    costs, segment = uniform_cost(0.0), make_segment(1.0, make_comm_op("tp", 2.0))
    timing = costs.time_segment(0, segment)
    unpickled_costs, unpickled_segment = pickle.loads(pickle.dumps((costs, segment)))
    assert unpickled_costs.time_segment(0, unpickled_segment).durations == timing.durations


def test_an_unpickled_cost_does_not_mistake_segments_for_those_that_are_gone() -> None:
    """New operations often have the addresses of operations that were timed before."""

    def pickled_cost() -> bytes:
        costs = uniform_cost(0.0)
        segments = [make_segment(1.0, 2.0) for _ in range(1000)]
        assert {costs.time_segment(0, segment).seconds for segment in segments} == {3.0}
        return pickle.dumps(costs)

    unpickled_costs = pickle.loads(pickled_cost())
    segments = [make_segment(3.0, 5.0) for _ in range(1000)]
    assert {unpickled_costs.time_segment(0, segment).seconds for segment in segments} == {8.0}
