"""Launches: what a GPU waits for its host, found again by walking from launch to launch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.host_launch import AsyncHost
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.program.task import CommOp, CommOverlap, Operation, Segment, TokenDispatcher, TokenRouting, WorkType
from tests.conftest import examples
from tests.engine.small_programs import block, exchange

FORWARD, BACKWARD = 1.0, 2.5
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 8.0])
WORKS = st.sampled_from([WorkType.FORWARD, WorkType.RECOMPUTE, WorkType.BACKWARD, WorkType.OPTIMIZER])


def kernel(launches: int = 1, work: WorkType = WorkType.FORWARD) -> Operation:
    made = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=0.0, bytes=0.0, launches=launches)
    return Operation(made, work)


def sent(work: WorkType = WorkType.FORWARD) -> Operation:
    (made,) = block(exchange("tp", 1.0)).operations
    return Operation(made.body, work)


def awaiting(work: WorkType = WorkType.FORWARD) -> Operation:
    """An exchange that the host launches when all before it is done."""
    (made,) = block(exchange("tp", 1.0)).comm_ops
    return Operation(replace(made, host_sync=True), work)


def cut(chunks: float, work: WorkType = WorkType.FORWARD) -> Operation:
    """A kernel beside an exchange, both in so many chunks."""
    (beside,) = block(exchange("tp", 1.0)).comm_ops
    whole = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=1.0, bytes=0.0)
    return Operation(CommOverlap(beside, whole, chunks), work)


def waits(host: AsyncHost, *pairs: tuple[Operation, float]) -> list[float]:
    operations, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    return host.launch_stalls(Segment("block", tuple(operations)), np.array([seconds]))[0].tolist()


def launches(operation: Operation) -> int:
    match operation.body:
        case CommOverlap(chunk_count=chunks):
            return 2 if chunks == float("inf") else 2 * int(chunks)
        case Kernel() as alone:
            return alone.launches
    return 1


def walked(pairs: list[tuple[Operation, float]]) -> float:
    """When a block is over, from launch to launch: the host first launches, then looks at the next.

    Before what it awaits it has launched all else, and waits for the GPU.
    """
    host = gpu = issued = 0.0
    first = True
    for place, (operation, seconds) in enumerate(pairs):
        number = launches(operation)
        if place and isinstance(operation.body, CommOp) and operation.body.host_sync:
            host = gpu = issued = max(gpu, issued)
        for _ in range(number):
            each = BACKWARD if operation.work_type is WorkType.BACKWARD else FORWARD
            ready = host = 0.0 if first else host + each
            issued += each
            first = False
            gpu = max(gpu, ready) + seconds / number
    return max(gpu, issued)


MADE = st.one_of(
    st.builds(kernel, st.integers(1, 4), WORKS),
    st.builds(sent, WORKS),
    st.builds(awaiting, WORKS),
    st.builds(cut, st.sampled_from([1.0, 2.0, 4.0, float("inf")]), WORKS),
)


@examples(100)
@given(st.lists(st.tuples(MADE, SECONDS), max_size=6))
def test_a_block_ends_when_its_last_launch_has_run(pairs: list[tuple[Operation, float]]) -> None:
    """Where at least one kernel runs by itself, at which the waits can be; elsewhere none is said."""
    found = waits(AsyncHost(FORWARD, BACKWARD), *pairs)
    by_themselves = [isinstance(operation.body, Kernel) for operation, _ in pairs]
    busy = sum(seconds for _, seconds in pairs)
    assert busy + sum(found) == pytest.approx(walked(pairs) if any(by_themselves) else busy)
    assert all(wait >= 0 and (wait == 0 or own) for wait, own in zip(found, by_themselves, strict=True))


def test_what_the_host_waits_for_is_followed_by_a_gpu_that_waits_for_the_host() -> None:
    """Kernels hide launches, but for the exchange's and those behind it that it does not hide: 1 s, then none."""
    host = AsyncHost(1.0, 1.0)
    assert sum(waits(host, (kernel(), 8.0), (awaiting(), 8.0), (kernel(), 8.0))) == 1.0
    assert sum(waits(host, (kernel(), 8.0), (awaiting(), 0.0), (kernel(), 8.0))) == 2.0
    assert sum(waits(host, (kernel(), 8.0), (sent(), 0.0), (kernel(), 8.0))) == 0.0


def test_a_graph_has_nothing_that_its_host_waits_for() -> None:
    assert (
        sum(waits(AsyncHost(1.0, 1.0, graph_seconds=1.0), (kernel(), 8.0), (awaiting(), 0.0), (kernel(), 8.0))) == 0.0
    )


def test_a_host_that_costs_nothing_is_never_waited_for() -> None:
    assert waits(AsyncHost(), (kernel(3), 0.0), (kernel(), 1.0)) == [0.0, 0.0]


def test_a_gpu_that_is_always_behind_never_waits() -> None:
    assert waits(AsyncHost(1.0, 1.0), *[(kernel(), 1.0)] * 5) == [0.0] * 5


def test_short_kernels_before_long_ones_wait_though_the_block_is_busy_on_the_whole() -> None:
    """Ten of 0 s at 1 s each, then one of 20 s: it begins after 10 s; the other way round nothing is seen of it."""
    short, long = [(kernel(), 0.0)] * 10, [(kernel(), 20.0)]
    assert sum(waits(AsyncHost(1.0, 1.0), *short, *long)) == 10.0
    assert sum(waits(AsyncHost(1.0, 1.0), *long, *short)) == 0.0


def test_backward_has_launches_of_its_own_and_what_is_run_again_those_of_forward() -> None:
    """Four launches: the first is there when the block begins, the fourth after three more."""
    for work, item in ((WorkType.FORWARD, 1.0), (WorkType.RECOMPUTE, 1.0), (WorkType.BACKWARD, 2.0)):
        assert sum(waits(AsyncHost(1.0, 2.0), *[(kernel(work=work), 0.0)] * 4)) == 4 * item


def test_waiting_before_an_exchange_is_counted_at_the_next_kernel() -> None:
    """The exchange of 1 s begins at 2 s, 1 s late, and the last kernel at 4 s, another second late."""
    assert waits(AsyncHost(2.0, 2.0), (kernel(), 1.0), (sent(), 1.0), (kernel(), 3.0)) == [0.0, 0.0, 2.0]


def test_an_exchange_costs_the_host_what_a_collective_does() -> None:
    """1 + 5 s of launches for a kernel of 1 s and an exchange of 1 s: 4 s later than the GPU alone."""
    host = AsyncHost(forward_seconds=1.0, backward_seconds=1.0, collective_seconds=5.0)
    assert waits(host, (kernel(), 1.0), (sent(), 1.0)) == [4.0, 0.0]


def test_kernels_in_chunks_beside_an_exchange_cost_their_own_launches_and_its() -> None:
    """1 + 2 x (1 + 3) s of launches, for 1 s and 2 s of work: 6 s late, all of it at the kernel by itself."""
    host = AsyncHost(forward_seconds=1.0, backward_seconds=1.0, collective_seconds=3.0)
    assert waits(host, (kernel(), 1.0), (cut(2.0), 2.0)) == [6.0, 0.0]


def test_a_loop_of_the_host_costs_its_calls_and_no_launch() -> None:
    looped = Kernel("copy", KernelKind.COPY, DType.BF16, flops=0.0, bytes=0.0, host_calls=10)
    host = AsyncHost(forward_seconds=100.0, backward_seconds=100.0, call_seconds=0.5)
    assert waits(host, (Operation(looped, WorkType.FORWARD), 2.0)) == [pytest.approx(3.0)]


@pytest.mark.parametrize(("graph", "late"), [(2.0, 0.0), (6.0, 1.5)])
def test_a_captured_block_is_launched_at_once(graph: float, late: float) -> None:
    """Kernels of 1, 0.5 and 2 s and an exchange of 1 s: a graph of 2 s is hidden, one of 6 s is not."""
    host = AsyncHost(forward_seconds=9.0, backward_seconds=9.0, collective_seconds=9.0, graph_seconds=graph)
    made = waits(host, (kernel(), 1.0), (kernel(3), 0.5), (sent(), 1.0), (kernel(), 2.0))
    assert made == pytest.approx([0.0, 0.0, 0.0, late])


def travelling() -> Operation:
    """An exchange that brings rows to experts, and is launched when all before it is done."""
    exchanged = awaiting().body
    assert isinstance(exchanged, CommOp)
    return Operation(replace(exchanged, routing=TokenRouting(TokenDispatcher.ALL_TO_ALL, 8, 2)), WorkType.FORWARD)


def routed() -> Operation:
    return replace(kernel(), on_expert_rank=True)


def test_what_is_outside_of_experts_is_launched_at_once_and_what_they_do_one_by_one() -> None:
    """A graph (2 s), then a dispatch (1 s) and a kernel (1 s) of 3 s to launch each, then a graph again.

    The graph's kernels hide its launch. What is sent begins 3 s behind them, as the host had to know how much; it is
    over 1 s before the experts' kernel is launched, which is over 1 s before the second graph is.
    """
    host = AsyncHost(forward_seconds=3.0, backward_seconds=9.0, graph_seconds=2.0, excludes_experts=True)
    parts = (kernel(), 1.0), (kernel(4), 2.0), (travelling(), 1.0), (routed(), 1.0), (kernel(2), 5.0), (kernel(), 1.0)
    assert waits(host, *parts) == pytest.approx([0.0, 0.0, 0.0, 3.0 + 2.0, 1.0, 0.0])


@given(st.lists(st.tuples(WORKS, st.integers(1, 4), SECONDS), min_size=1, max_size=8), st.booleans())
@examples(60)
def test_without_experts_all_is_outside_of_them(parts: list[tuple[WorkType, int, float]], one: bool) -> None:
    pairs = [(kernel(launches, work), seconds) for work, launches, seconds in parts]
    host = AsyncHost(FORWARD, BACKWARD, graph_seconds=4.0 if one else 0.5)
    assert waits(replace(host, excludes_experts=True), *pairs) == waits(host, *pairs)


@given(st.lists(st.tuples(WORKS, st.integers(1, 4), SECONDS), min_size=1, max_size=8))
@examples(60)
def test_passes_in_turns_wait_for_what_launches_take_longer_on_the_whole(
    parts: list[tuple[WorkType, int, float]],
) -> None:
    """So never longer than a pass alone, whose short kernels wait before long ones."""
    pairs = [(kernel(launches, work), seconds) for work, launches, seconds in parts]
    operations, seconds = zip(*pairs, strict=True)
    in_turns = Segment("block", operations, interleaved=True)
    host = AsyncHost(FORWARD, BACKWARD)
    waited = host.launch_stalls(in_turns, np.array([seconds]))[0].sum()
    took = sum(launches * (BACKWARD if work is WorkType.BACKWARD else FORWARD) for work, launches, _ in parts)
    assert waited == pytest.approx(max(0.0, took - sum(seconds)))
    first = BACKWARD if parts[0][0] is WorkType.BACKWARD else FORWARD
    assert waited <= sum(waits(host, *pairs)) + first + 1e-9
