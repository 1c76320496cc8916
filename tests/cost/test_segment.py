"""Blocks: operations back to back, a kernel beside an exchange that slows it, and a host that launches them."""

import pickle

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
from tests.engine.small_programs import block, exchange, program

INFINITE = float("inf")
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 8.0])
PARTS = st.sampled_from([0.0, 0.25, 1.0])


def overlap(kernel: float, beside: float, chunks: float = INFINITE, *, local: bool = False) -> Operation:
    """A kernel of so many seconds beside an exchange."""
    whole = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=kernel, bytes=0.0)
    return Operation(CommOverlap(exchange("tp", beside), whole, chunks, local), WorkType.FORWARD)


def cost(interference: float, launch: float = 0.0) -> SegmentCost:
    return by(Interference.uniform(interference), launch)


def by(interference: Interference, launch: float = 0.0) -> SegmentCost:
    made = program([[]], {"tp": [[0]]})
    unit = UnitCost(made)
    return SegmentCost(made, DeviceModels.uniform(DeviceModel(unit, interference, AsyncHost(launch, launch)), 1), unit)


def timed(interference: float, *operations: Operation, launch: float = 0.0) -> SegmentTiming:
    return cost(interference, launch).time_segment(0, Segment("block", operations))


def walked(kernel: float, beside: float, interference: float) -> tuple[float, float]:
    """Ends of a kernel and an exchange that start together, by walking from one end to the next.

    While both run, the kernel does 1/(1 + φ) seconds of work a second.
    """
    both = min(beside, kernel * (1 + interference))
    left = kernel - both / (1 + interference)
    return both + left, beside


@given(SECONDS, SECONDS, PARTS)
def test_a_kernel_is_slowed_only_while_its_exchange_runs(kernel: float, beside: float, interference: float) -> None:
    """Side by side, uncut: the later end. What the kernel lasts longer is `slowed`, what it leaves is exposed."""
    timing = timed(interference, overlap(kernel, beside))
    ended, moved = walked(kernel, beside, interference)
    assert timing.seconds == pytest.approx(max(ended, moved))
    assert timing.overlap_delay.tolist() == pytest.approx([ended - kernel])
    assert timing.exposed_comm.tolist() == pytest.approx([max(moved - ended, 0.0)])


@pytest.mark.parametrize(
    ("kernel", "beside", "seconds", "slowed"),
    [(4.0, 1.0, 4.5, 0.5), (1.0, 4.0, 4.0, 1.0), (2.0, 4.0, 4.0, 2.0), (3.0, 4.0, 5.0, 2.0), (3.0, 0.0, 3.0, 0.0)],
)
def test_slowing_by_hand(kernel: float, beside: float, seconds: float, slowed: float) -> None:
    """With φ = 1 a kernel goes at half pace: 1 s beside costs 0.5 s; beside 4 s, 1 s takes 2 and 2 s take 4."""
    timing = timed(1.0, overlap(kernel, beside))
    assert timing.seconds == seconds
    assert timing.overlap_delay.tolist() == [slowed]


@given(SECONDS, SECONDS, PARTS, PARTS)
def test_kernel_and_exchange_slow_each_other_until_either_ends(
    kernel: float, beside: float, p: float, q: float
) -> None:
    """By walking: while both run the kernel does 1/(1 + p) of its work a second, the exchange 1/(1 + q) of its own."""
    both = min(kernel * (1 + p), beside * (1 + q))
    ended, moved = both + kernel - both / (1 + p), both + beside - both / (1 + q)
    parts = {(CollectiveType.ALL_REDUCE, KernelClass.MEMORY): p}, {(CollectiveType.ALL_REDUCE, KernelClass.MEMORY): q}
    timing = by(Interference.from_measurements(*parts)).time_segment(0, Segment("block", (overlap(kernel, beside),)))
    assert timing.seconds == pytest.approx(max(ended, moved))
    assert timing.overlap_delay.tolist() == pytest.approx([ended - kernel])
    assert timing.exposed_comm.tolist() == pytest.approx([max(moved - ended, 0.0)])
    assert timing.overlaps[0].comm_duration(kernel, beside) == pytest.approx(moved)


def test_a_kernel_of_a_second_beside_a_gather_of_half_a_second() -> None:
    """0.4 s are done in its half second (p = 1/4), so 1.1 s; with q = 1 that is a second, which leaves 0.2 s of 1."""
    pairs = {(CollectiveType.ALL_REDUCE, KernelClass.MEMORY): 0.25}
    for q, seconds in ((0.0, 1.1), (1.0, 1.2)):
        table = Interference.from_measurements(pairs, dict.fromkeys(pairs, q))
        assert by(table).time_segment(0, Segment("block", (overlap(1.0, 0.5),))).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("kernel", "beside"), [(6.0, 2.0), (2.0, 6.0)])
def test_a_slowed_kernel_that_is_cut_hides_the_shorter_but_for_a_chunk(kernel: float, beside: float) -> None:
    """With φ = 1/2 and n = 4: k' is the slowed kernel, and max(k', e) + min(k', e)/n its time with the exchange."""
    ended, _ = walked(kernel, beside, 0.5)
    timing = timed(0.5, overlap(kernel, beside, 4))
    assert timing.seconds == pytest.approx(max(ended, beside) + min(ended, beside) / 4)
    assert timing.exposed_comm[0] == pytest.approx(timing.seconds - ended)


@pytest.mark.parametrize(("kernel", "beside"), [(6.0, 2.0), (2.0, 6.0)])
def test_where_the_first_chunk_is_local_an_exchange_hides_behind_the_others(kernel: float, beside: float) -> None:
    """max(k', e + k'/n)."""
    ended, _ = walked(kernel, beside, 0.5)
    timing = timed(0.5, overlap(kernel, beside, 4, local=True))
    assert timing.seconds == pytest.approx(max(ended, beside + ended / 4))


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(["kernel", "exchange", "overlap"]))
    if kind == "overlap":
        chunks = draw(st.sampled_from([1.0, 2.0, 4.0, INFINITE]))
        return overlap(draw(SECONDS), draw(SECONDS), chunks, local=chunks < INFINITE and draw(st.booleans()))
    seconds = draw(SECONDS)
    return block(exchange("tp", seconds) if kind == "exchange" else seconds).operations[0]


@given(st.lists(operations(), max_size=5), PARTS)
def test_the_parts_of_every_operation_sum_to_its_duration(made: list[Operation], interference: float) -> None:
    """Kernels as they are alone, what slows them and what is exposed; none is negative."""
    timing = timed(interference, *made)
    kernels = [0.0 if operation.kernel is None else operation.kernel.flops for operation in made]
    assert timing.kernel_seconds.tolist() == pytest.approx(kernels)
    assert (timing.kernel_seconds + timing.overlap_delay + timing.exposed_comm).tolist() == pytest.approx(
        list(timing.durations)
    )
    assert min([*timing.exposed_comm, *timing.overlap_delay, 0.0]) >= -1e-12
    assert timing.offsets.tolist() == pytest.approx(np.cumsum([0.0, *timing.durations]).tolist())


@given(SECONDS, SECONDS, SECONDS, PARTS)
def test_a_longer_exchange_or_kernel_of_an_overlap_costs_what_it_would_have_cost_from_the_start(
    kernel: float, beside: float, more: float, interference: float
) -> None:
    timing = timed(interference, overlap(kernel, beside, 4))
    (both,) = timing.overlaps.values()
    longer = timed(interference, overlap(kernel, beside + more, 4)).seconds
    assert both.duration(kernel, beside + more) == pytest.approx(longer)
    slower = timed(interference, overlap(kernel + more, beside, 4)).seconds
    assert timing.fixed(timing.kernel_seconds + more) + kernel + more == pytest.approx(slower)


def kernel(seconds: float, launches: int = 1) -> Operation:
    """A kernel of so many seconds that the host launches in so many parts."""
    made = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=seconds, bytes=0.0, launches=launches)
    return Operation(made, WorkType.FORWARD)


def test_waiting_for_the_host_is_a_part_of_what_a_kernel_takes() -> None:
    """Three launches of 2 s for 1 + 1 + 4 s of kernels, as `cost.launching` works it out: they begin at 0, 2, 4 s."""
    timing = timed(0.0, kernel(1.0), kernel(1.0), kernel(4.0), launch=2.0)
    assert timing.launch_stalls.tolist() == [0.0, 1.0, 1.0]
    assert timing.durations == (1.0, 2.0, 5.0)
    assert timing.kernel_seconds.tolist() == [1.0, 2.0, 5.0]
    assert timing.exposed_comm.tolist() == timing.overlap_delay.tolist() == [0.0, 0.0, 0.0]


@given(st.lists(operations(), max_size=5), PARTS, st.sampled_from([0.0, 0.25, 1.0, 4.0]))
def test_parts_sum_to_what_operations_take_whoever_waits(
    made: list[Operation], interference: float, launch: float
) -> None:
    timing, alone = timed(interference, *made, launch=launch), timed(interference, *made)
    assert (timing.kernel_seconds - timing.launch_stalls).tolist() == pytest.approx(alone.kernel_seconds.tolist())
    assert (timing.kernel_seconds + timing.overlap_delay + timing.exposed_comm).tolist() == pytest.approx(
        list(timing.durations)
    )
    if not timing.launch_stalls.any():
        assert timing.durations == alone.durations, "a block that keeps its GPU busy does not change"


def test_blocks_of_the_same_operations_share_a_timing() -> None:
    costs, operations = cost(0.0), block(1.0, exchange("tp", 2.0)).operations
    one, other = (costs.time_segment(0, Segment(name, operations)) for name in ("one", "other"))
    assert one is other
    turns = costs.time_segment(0, Segment("turns", operations, interleaved=True))
    assert turns is not one


def test_what_is_known_by_identity_stays_behind() -> None:
    costs, one = cost(0.0), block(1.0, exchange("tp", 2.0))
    timing = costs.time_segment(0, one)
    again, same = pickle.loads(pickle.dumps((costs, one)))
    assert again.block(0, same).durations == timing.durations
    assert again.block(0, block(4.0)).seconds == 4.0
