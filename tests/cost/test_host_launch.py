"""Host launches: a GPU's waiting for its host, checked by stepping from launch to launch."""

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
from tests.engine.small_programs import make_comm_op, make_segment

FORWARD, BACKWARD = 1.0, 2.5
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 8.0])
WORKS = st.sampled_from([WorkType.FORWARD, WorkType.RECOMPUTE, WorkType.BACKWARD, WorkType.OPTIMIZER])


def kernel_operation(launches: int = 1, work: WorkType = WorkType.FORWARD) -> Operation:
    copy_kernel = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=0.0, bytes=0.0, launches=launches)
    return Operation(copy_kernel, work)


def comm_operation(work: WorkType = WorkType.FORWARD) -> Operation:
    (operation,) = make_segment(make_comm_op("tp", 1.0)).operations
    return Operation(operation.body, work)


def synced_comm_operation(work: WorkType = WorkType.FORWARD) -> Operation:
    """A collective that the host launches after a host sync."""
    (comm_op,) = make_segment(make_comm_op("tp", 1.0)).comm_ops
    return Operation(replace(comm_op, host_sync=True), work)


def overlapped_operation(chunks: float, work: WorkType = WorkType.FORWARD) -> Operation:
    """A kernel overlapping a collective, both in chunks."""
    (comm_op,) = make_segment(make_comm_op("tp", 1.0)).comm_ops
    full_kernel = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=1.0, bytes=0.0)
    return Operation(CommOverlap(comm_op, full_kernel, chunks), work)


def waits(host: AsyncHost, *pairs: tuple[Operation, float]) -> list[float]:
    operations, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    return host.launch_stalls(Segment("block", tuple(operations)), np.array([seconds]))[0].tolist()


def launch_count(operation: Operation) -> int:
    match operation.body:
        case CommOverlap(chunk_count=chunks):
            return 2 if chunks == float("inf") else 2 * int(chunks)
        case Kernel() as single_kernel:
            return single_kernel.launches
    return 1


def stepwise_end(pairs: list[tuple[Operation, float]]) -> float:
    """End of a segment from launch to launch: the host launches, then continues with the next.

    Before a host sync it has launched everything else, and waits for the GPU.
    """
    host = gpu = issued = 0.0
    first = True
    for index, (operation, seconds) in enumerate(pairs):
        count = launch_count(operation)
        if index and isinstance(operation.body, CommOp) and operation.body.host_sync:
            host = gpu = issued = max(gpu, issued)
        for _ in range(count):
            launch_seconds = BACKWARD if operation.work_type is WorkType.BACKWARD else FORWARD
            if isinstance(operation.body, CommOverlap):  # the later chunks are calls of a loop, which are free here
                launch_seconds *= 2 / count
            ready = host = 0.0 if first else host + launch_seconds
            issued += launch_seconds
            first = False
            gpu = max(gpu, ready) + seconds / count
    return max(gpu, issued)


OPERATIONS = st.one_of(
    st.builds(kernel_operation, st.integers(1, 4), WORKS),
    st.builds(comm_operation, WORKS),
    st.builds(synced_comm_operation, WORKS),
    st.builds(overlapped_operation, st.sampled_from([1.0, 2.0, 4.0, float("inf")]), WORKS),
)


@examples(100)
@given(st.lists(st.tuples(OPERATIONS, SECONDS), max_size=6))
def test_a_segment_ends_when_its_last_launch_has_run(pairs: list[tuple[Operation, float]]) -> None:
    """Where at least one kernel runs without overlap, to which waits can be attributed; elsewhere none is reported."""
    wait_seconds = waits(AsyncHost(FORWARD, BACKWARD), *pairs)
    is_kernel = [isinstance(operation.body, Kernel) for operation, _ in pairs]
    busy = sum(seconds for _, seconds in pairs)
    assert busy + sum(wait_seconds) == pytest.approx(stepwise_end(pairs) if any(is_kernel) else busy)
    assert all(wait >= 0 and (wait == 0 or can_wait) for wait, can_wait in zip(wait_seconds, is_kernel, strict=True))


def test_a_host_sync_exposes_the_launches_after_it() -> None:
    """Kernels hide launches, except the collective's and those after it that it does not hide: 1 s, then none."""
    host = AsyncHost(1.0, 1.0)
    assert sum(waits(host, (kernel_operation(), 8.0), (synced_comm_operation(), 8.0), (kernel_operation(), 8.0))) == 1.0
    assert sum(waits(host, (kernel_operation(), 8.0), (synced_comm_operation(), 0.0), (kernel_operation(), 8.0))) == 2.0
    assert sum(waits(host, (kernel_operation(), 8.0), (comm_operation(), 0.0), (kernel_operation(), 8.0))) == 0.0


def test_a_graph_has_no_host_sync() -> None:
    assert (
        sum(
            waits(
                AsyncHost(1.0, 1.0, graph_seconds=1.0),
                (kernel_operation(), 8.0),
                (synced_comm_operation(), 0.0),
                (kernel_operation(), 8.0),
            )
        )
        == 0.0
    )


def test_a_host_without_launch_cost_is_never_waited_for() -> None:
    assert waits(AsyncHost(), (kernel_operation(3), 0.0), (kernel_operation(), 1.0)) == [0.0, 0.0]


def test_a_gpu_that_is_always_behind_never_waits() -> None:
    assert waits(AsyncHost(1.0, 1.0), *[(kernel_operation(), 1.0)] * 5) == [0.0] * 5


def test_short_kernels_before_long_ones_wait_for_launches() -> None:
    """Ten of 0 s at 1 s each, then one of 20 s: it starts after 10 s; in the opposite order the launches are hidden."""
    short_kernels, long_kernels = [(kernel_operation(), 0.0)] * 10, [(kernel_operation(), 20.0)]
    assert sum(waits(AsyncHost(1.0, 1.0), *short_kernels, *long_kernels)) == 10.0
    assert sum(waits(AsyncHost(1.0, 1.0), *long_kernels, *short_kernels)) == 0.0


def test_recompute_has_forward_launches_and_backward_its_own() -> None:
    """Four launches: the first is there when the segment starts, the fourth after three more."""
    for work, launch_seconds in ((WorkType.FORWARD, 1.0), (WorkType.RECOMPUTE, 1.0), (WorkType.BACKWARD, 2.0)):
        assert sum(waits(AsyncHost(1.0, 2.0), *[(kernel_operation(work=work), 0.0)] * 4)) == 4 * launch_seconds


def test_waiting_before_a_collective_is_counted_at_the_next_kernel() -> None:
    """The collective of 1 s starts at 2 s, 1 s late, and the last kernel at 4 s, another second late."""
    assert waits(
        AsyncHost(2.0, 2.0), (kernel_operation(), 1.0), (comm_operation(), 1.0), (kernel_operation(), 3.0)
    ) == [0.0, 0.0, 2.0]


def test_a_collective_costs_its_host_launch() -> None:
    """1 + 5 s of launches for a kernel of 1 s and a collective of 1 s: 4 s later than the GPU alone."""
    host = AsyncHost(forward_seconds=1.0, backward_seconds=1.0, collective_seconds=5.0)
    assert waits(host, (kernel_operation(), 1.0), (comm_operation(), 1.0)) == [4.0, 0.0]


@pytest.mark.parametrize(("chunks", "late"), [(float("inf"), 3.0 - 1.0), (2.0, 3.0), (5.0, 6.0)])
def test_chunked_overlap_costs_one_call_of_the_framework(chunks: float, late: float) -> None:
    """1 + 1 + 3 s of launches and 2 x 0.5 s for every later chunk, for 1 s and 2 s of work."""
    host = AsyncHost(forward_seconds=1.0, backward_seconds=1.0, collective_seconds=3.0, call_seconds=0.5)
    assert waits(host, (kernel_operation(), 1.0), (overlapped_operation(chunks), 2.0)) == [pytest.approx(late), 0.0]


def test_a_host_loop_costs_its_calls_and_no_launch() -> None:
    looped = Kernel("copy", KernelKind.COPY, DType.BF16, flops=0.0, bytes=0.0, host_calls=10)
    host = AsyncHost(forward_seconds=100.0, backward_seconds=100.0, call_seconds=0.5)
    assert waits(host, (Operation(looped, WorkType.FORWARD), 2.0)) == [pytest.approx(3.0)]


@pytest.mark.parametrize(("graph", "late"), [(2.0, 0.0), (6.0, 1.5)])
def test_a_captured_segment_is_launched_at_once(graph: float, late: float) -> None:
    """Kernels of 1, 0.5 and 2 s and a collective of 1 s: a graph launch of 2 s is hidden, one of 6 s is not."""
    host = AsyncHost(forward_seconds=9.0, backward_seconds=9.0, collective_seconds=9.0, graph_seconds=graph)
    wait_seconds = waits(
        host, (kernel_operation(), 1.0), (kernel_operation(3), 0.5), (comm_operation(), 1.0), (kernel_operation(), 2.0)
    )
    assert wait_seconds == pytest.approx([0.0, 0.0, 0.0, late])


def dispatch_operation() -> Operation:
    """An operation that dispatches tokens to experts, launched after a host sync."""
    comm_op = synced_comm_operation().body
    assert isinstance(comm_op, CommOp)
    return Operation(replace(comm_op, routing=TokenRouting(TokenDispatcher.ALL_TO_ALL, 8, 2)), WorkType.FORWARD)


def expert_kernel() -> Operation:
    return replace(kernel_operation(), on_expert_rank=True)


def test_graphs_outside_experts_with_eager_expert_kernels() -> None:
    """A graph (2 s), then a dispatch (1 s) and a kernel (1 s) of 3 s to launch each, then a graph again.

    The graph's kernels hide its launch. The dispatch starts 3 s after them, as the host had to know its size; it
    ends 1 s before the experts' kernel is launched, which ends 1 s before the second graph is.
    """
    host = AsyncHost(forward_seconds=3.0, backward_seconds=9.0, graph_seconds=2.0, excludes_experts=True)
    timed_operations = (
        (kernel_operation(), 1.0),
        (kernel_operation(4), 2.0),
        (dispatch_operation(), 1.0),
        (expert_kernel(), 1.0),
        (kernel_operation(2), 5.0),
        (kernel_operation(), 1.0),
    )
    assert waits(host, *timed_operations) == pytest.approx([0.0, 0.0, 0.0, 3.0 + 2.0, 1.0, 0.0])


@given(st.lists(st.tuples(WORKS, st.integers(1, 4), SECONDS), min_size=1, max_size=8), st.booleans())
@examples(60)
def test_without_experts_outside_experts_changes_nothing(
    cases: list[tuple[WorkType, int, float]], is_slow_graph: bool
) -> None:
    pairs = [(kernel_operation(launches, work), seconds) for work, launches, seconds in cases]
    host = AsyncHost(FORWARD, BACKWARD, graph_seconds=4.0 if is_slow_graph else 0.5)
    assert waits(replace(host, excludes_experts=True), *pairs) == waits(host, *pairs)


def test_interleaved_passes_have_launches_of_their_own() -> None:
    """They are tasks (`lowering.host_launches`), so nothing waits inside."""
    interleaved = Segment("block", (kernel_operation(4), kernel_operation(4)), interleaved=True)
    assert AsyncHost(FORWARD, BACKWARD).launch_stalls(interleaved, np.zeros((1, 2))).tolist() == [[0.0, 0.0]]


def test_the_host_waits_behind_a_kernel_whose_result_it_needs() -> None:
    """By hand: without the wait the host is 2 s ahead after the long kernel; with it the next launch is exposed."""
    host = AsyncHost(forward_seconds=1.0)
    long, short = (Kernel(name, KernelKind.COPY, DType.BF16, flops=1.0, bytes=0.0) for name in ("long", "short"))
    synced = Operation(replace(long, host_sync=True), WorkType.FORWARD)
    plain, last = Operation(long, WorkType.FORWARD), Operation(short, WorkType.FORWARD)
    assert waits(host, (plain, 3.0), (last, 0.5)) == [0.0, 0.0]
    assert waits(host, (synced, 3.0), (last, 0.5))[1] == 1.0
    assert waits(host, (plain, 0.5), (synced, 3.0)) == waits(host, (plain, 0.5), (plain, 3.0))  # nothing follows it


def test_kernels_in_graphs_have_no_host_to_wait_for() -> None:
    synced = Operation(
        Kernel("synced", KernelKind.COPY, DType.BF16, flops=1.0, bytes=0.0, host_sync=True), WorkType.FORWARD
    )
    host = AsyncHost(forward_seconds=1.0, graph_seconds=1e-6)
    assert waits(host, (synced, 3.0), (synced, 3.0)) == [0.0, 0.0]
