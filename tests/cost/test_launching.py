"""Launches: what a GPU waits for its host, found again by walking from launch to launch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.cost.launching import Launching
from clustersim.dtypes import DType
from clustersim.program.task import Block, Operation, Overlap, Work
from clustersim.workload.kernels import Kernel, KernelKind
from tests.conftest import examples
from tests.engine.small import block, exchange

FORWARD, BACKWARD = 1.0, 2.5
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 8.0])
WORKS = st.sampled_from([Work.FORWARD, Work.RECOMPUTE, Work.BACKWARD, Work.OPTIMIZER])


def kernel(launches: int = 1, work: Work = Work.FORWARD) -> Operation:
    made = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=0.0, bytes=0.0, launches=launches)
    return Operation(made, work)


def sent(work: Work = Work.FORWARD) -> Operation:
    (made,) = block(exchange("tp", 1.0)).operations
    return Operation(made.does, work)


def cut(chunks: float, work: Work = Work.FORWARD) -> Operation:
    """A kernel beside an exchange, both in so many chunks."""
    (beside,) = block(exchange("tp", 1.0)).exchanges
    whole = Kernel("kernel", KernelKind.COPY, DType.BF16, flops=1.0, bytes=0.0)
    return Operation(Overlap(beside, whole, chunks), work)


def waits(host: Launching, *pairs: tuple[Operation, float]) -> list[float]:
    operations, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    return host.waits(Block("block", tuple(operations)), seconds).tolist()


def launches(operation: Operation) -> int:
    match operation.does:
        case Overlap(chunks=chunks):
            return 2 if chunks == float("inf") else 2 * int(chunks)
        case Kernel() as alone:
            return alone.launches
    return 1


def walked(pairs: list[tuple[Operation, float]]) -> float:
    """When a block is over, from launch to launch: the host first launches, then looks at the next."""
    host = gpu = 0.0
    first = True
    for operation, seconds in pairs:
        number = launches(operation)
        for _ in range(number):
            each = BACKWARD if operation.work is Work.BACKWARD else FORWARD
            ready = host = 0.0 if first else host + each
            first = False
            gpu = max(gpu, ready) + seconds / number
    return max(gpu, sum(launches(each) * (BACKWARD if each.work is Work.BACKWARD else FORWARD) for each, _ in pairs))


MADE = st.one_of(
    st.builds(kernel, st.integers(1, 4), WORKS),
    st.builds(sent, WORKS),
    st.builds(cut, st.sampled_from([1.0, 2.0, 4.0, float("inf")]), WORKS),
)


@examples(100)
@given(st.lists(st.tuples(MADE, SECONDS), max_size=6))
def test_a_block_ends_when_its_last_launch_has_run(pairs: list[tuple[Operation, float]]) -> None:
    """Where at least one kernel runs by itself, at which the waits can be; elsewhere none is said."""
    found = waits(Launching(FORWARD, BACKWARD), *pairs)
    by_themselves = [isinstance(each.does, Kernel) for each, _ in pairs]
    busy = sum(seconds for _, seconds in pairs)
    assert busy + sum(found) == pytest.approx(walked(pairs) if any(by_themselves) else busy)
    assert all(wait >= 0 and (wait == 0 or own) for wait, own in zip(found, by_themselves, strict=True))


def test_a_host_that_costs_nothing_is_never_waited_for() -> None:
    assert waits(Launching(), (kernel(3), 0.0), (kernel(), 1.0)) == [0.0, 0.0]


def test_a_gpu_that_is_always_behind_never_waits() -> None:
    assert waits(Launching(1.0, 1.0), *[(kernel(), 1.0)] * 5) == [0.0] * 5


def test_short_kernels_before_long_ones_wait_though_the_block_is_busy_on_the_whole() -> None:
    """Ten of 0 s at 1 s each, then one of 20 s: it begins after 10 s; the other way round nothing is seen of it."""
    short, long = [(kernel(), 0.0)] * 10, [(kernel(), 20.0)]
    assert sum(waits(Launching(1.0, 1.0), *short, *long)) == 10.0
    assert sum(waits(Launching(1.0, 1.0), *long, *short)) == 0.0


def test_backward_has_launches_of_its_own_and_what_is_run_again_those_of_forward() -> None:
    """Four launches: the first is there when the block begins, the fourth after three more."""
    for work, each in ((Work.FORWARD, 1.0), (Work.RECOMPUTE, 1.0), (Work.BACKWARD, 2.0)):
        assert sum(waits(Launching(1.0, 2.0), *[(kernel(work=work), 0.0)] * 4)) == 4 * each


def test_waiting_before_an_exchange_is_counted_at_the_next_kernel() -> None:
    """The exchange of 1 s begins at 2 s, 1 s late, and the last kernel at 4 s, another second late."""
    assert waits(Launching(2.0, 2.0), (kernel(), 1.0), (sent(), 1.0), (kernel(), 3.0)) == [0.0, 0.0, 2.0]
