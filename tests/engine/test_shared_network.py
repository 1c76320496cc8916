"""Collectives and messages that meet on links: closed forms."""

from collections.abc import Mapping

import pytest

from clustersim.cost.contention import UncontendedComm
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.interference import Interference
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.model.kernels import Kernel
from clustersim.program.program import Program
from clustersim.program.task import CommOverlap, ComputeTask, Operation, Segment, Stream, WorkType
from clustersim.symmetry.refinement import singleton_classes
from clustersim.trace.trace import Trace
from tests.engine.fake_costs import UnitCost
from tests.engine.fake_links import LinkCost
from tests.engine.small_programs import NEXT, block, compute, exchange, meet, program, receive, row_of, send, waits


def shared(made: Program, routes: Mapping[str, list[list[int]]], latency: float = 0.0) -> Trace:
    """The trace of a program at unit costs, every rank run."""
    cost = LinkCost(UnitCost(made), 8, routes, latency)
    return simulate_program(made, singleton_classes(made, 8), cost.unit.blocks, contention_map=cost.sharing)[0]


def starts(trace: Trace, rank: int, task: int) -> tuple[float, float]:
    _, _, start, end = waits(trace, rank, task)
    return start, end


def two_senders(second: float) -> Program:
    """Ranks 0 and 1 send 3 bytes each to ranks 2 and 3; the second begins later."""
    ranks = [[send(3.0)], [compute(second), send(3.0, after=(0,))], [receive(3.0)], [receive(3.0)]]
    return program(ranks, {NEXT: [[0, 2], [1, 3]]})


def test_two_messages_over_one_nic_take_twice_as_long() -> None:
    trace = shared(two_senders(0.0), {NEXT: [[0], [0]]})
    assert starts(trace, 0, 0) == (0.0, 6.0)
    assert starts(trace, 1, 1) == (0.0, 6.0)
    assert starts(trace, 2, 0) == starts(trace, 3, 0) == (0.0, 6.0)


def test_messages_over_two_nics_do_not_meet() -> None:
    trace = shared(two_senders(0.0), {NEXT: [[0, 2], [1, 3]]})
    assert starts(trace, 0, 0) == starts(trace, 1, 1) == (0.0, 3.0)


def test_messages_that_overlap_share_while_they_do() -> None:
    """Alone from 0 to 1, together until the first has sent its other 2 bytes at 5, alone until 6."""
    trace = shared(two_senders(1.0), {NEXT: [[0, 1], [0, 2]]})
    assert starts(trace, 0, 0) == (0.0, 5.0)
    assert starts(trace, 1, 1) == (1.0, 6.0)


def test_latency_is_not_shared() -> None:
    trace = shared(two_senders(0.0), {NEXT: [[0], [0]]}, latency=1.0)
    assert starts(trace, 0, 0) == starts(trace, 1, 1) == (0.0, 7.0)


def test_the_parking_lot() -> None:
    """Ranks 0 to 3 send over links 0-1-2, 0, 1 and 2: everybody has half of each link."""
    ranks = [[send(2.0)] for _ in range(4)] + [[receive(2.0)] for _ in range(4)]
    made = program(ranks, {NEXT: [[rank, rank + 4] for rank in range(4)]})
    trace = shared(made, {NEXT: [[0, 1, 2], [0], [1], [2]]})
    assert [starts(trace, rank, 0) for rank in range(4)] == [(0.0, 4.0)] * 4


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_collective_is_one_load_however_many_ranks_wait_for_it(members: int) -> None:
    made = program([[meet(2.0)]] * members, {"dp": [list(range(members))]})
    trace = shared(made, {"dp": [[0, 1, 2]]})
    assert [starts(trace, rank, 0) for rank in range(members)] == [(0.0, 2.0)] * members


def test_a_collective_shares_the_nic_with_pipeline_sends() -> None:
    """Ranks 0 and 1 reduce 4 bytes over their NICs (links 0, 1); rank 0 computes for 1 s, then sends 2 over its own.

    Alone until 1, the collective has 3 s left. Both at half speed until the message is through at 1 + 2·2 = 5; the
    collective has done 2 of the 3 by then and ends at 6. What waits for the message starts at 5.
    """
    ranks = [
        [meet(4.0), compute(1.0), send(2.0, after=(1,))],
        [meet(4.0)],
        [receive(2.0), compute(1.0, after=(0,))],
    ]
    trace = shared(program(ranks, {"dp": [[0, 1]], NEXT: [[0, 2]]}), {"dp": [[0, 1]], NEXT: [[0, 2]]})
    assert starts(trace, 0, 0) == starts(trace, 1, 0) == (0.0, 6.0)
    assert starts(trace, 0, 2) == (1.0, 5.0)
    assert starts(trace, 2, 1) == (5.0, 6.0)


def test_collectives_inside_blocks_share() -> None:
    """Of 3 s, one has 2 s left when another of 2 s begins inside a block: both go on at half speed, until 5 s.

    2 s of the block are because it shared its link.
    """
    made = program([[compute(1.0, exchange("tp", 2.0)), meet(3.0)]], {"tp": [[0]], "dp": [[0]]})
    trace = shared(made, {"tp": [[0]], "dp": [[0]]})
    assert starts(trace, 0, 0) == starts(trace, 0, 1) == (0.0, 5.0)
    assert trace.contended[row_of(trace, 0, 0)] == 2.0


def test_a_kernel_beside_its_own_contended_exchange_takes_what_their_overlap_takes() -> None:
    """A kernel of 1 s in 4 chunks beside 2 s of data, that share their link with a reduction of 2 s and so take 4.

    The longer hides the shorter but for one chunk: 4 + 1/4 instead of 2 + 1/4.
    """
    (kernel,) = block(1.0).operations
    assert isinstance(kernel.body, Kernel)
    both = Operation(CommOverlap(exchange("tp", 2.0), kernel.body, 4.0), WorkType.FORWARD)
    made = program(
        [[(Stream.COMPUTE, ComputeTask(Segment("block", (both,)))), meet(2.0)]], {"tp": [[0]], "dp": [[0]]}
    )  # fmt: skip
    trace = shared(made, {"tp": [[0]], "dp": [[0]]})
    assert starts(trace, 0, 0) == (0.0, 4.25)
    assert starts(trace, 0, 1) == (0.0, 4.0)
    assert trace.contended[row_of(trace, 0, 0)] == 2.0
    alone = shared(made, {"tp": [[0]], "dp": [[1]]})
    assert starts(alone, 0, 0) == (0.0, 2.25)


def beside(chunks: float, *, local: bool = False) -> Segment:
    """A kernel of 4 s and 2 s of data as one operation."""
    (kernel,) = block(4.0).operations
    assert isinstance(kernel.body, Kernel)
    return Segment(
        "block", (Operation(CommOverlap(exchange("tp", 2.0), kernel.body, chunks, local), WorkType.FORWARD),)
    )


@pytest.mark.parametrize(
    ("chunks", "local", "end", "exposed"), [(4.0, False, 7.0, 0.5), (4.0, True, 6.0, 0.0), (1.0, True, 10.0, 2.0)]
)
def test_what_sharing_adds_beside_a_kernel_is_apart_by_what_runs(
    chunks: float, local: bool, end: float, exposed: float
) -> None:
    """With φ = 1, 2 s of data slow 4 s of kernel by 1; shared with another rank's 2 s they take 4 and slow it by 2.

    So it runs for 5 s alone, and for 6. Not local, a chunk of the shorter shows: 2/4 alone, 4/4. Local, the data begins
    after the first chunk: in four, it ends at 6/4 + 4 before the kernel does; in one, 4 s after it, of which 2 alone.
    """
    made = program(
        [[(Stream.COMPUTE, ComputeTask(beside(chunks, local=local)))], [meet(2.0)]], {"tp": [[0]], "dp": [[1]]}
    )
    links = LinkCost(UnitCost(made), 8, {"tp": [[0]], "dp": [[0]]})
    machine = DeviceModel(links.unit, Interference.uniform(1.0))
    cost = SegmentCost(made, DeviceModels.uniform(machine, made.world_size), UncontendedComm(links.unit, links.sharing))
    trace, written = simulate_program(made, singleton_classes(made, 8), cost, contention_map=links.sharing)
    row, contention = row_of(trace, 0, 0), trace.contention
    assert starts(trace, 0, 0) == (0.0, end)
    assert (trace.slowed[row], trace.contended[row]) == (1.0, exposed)
    assert (contention.event.tolist(), contention.operation.tolist()) == ([row], [0])
    assert (contention.exposed_delay.tolist(), contention.transfer_delay.tolist()) == ([exposed], [2.0])
    of = OperationTraceReader(made, singleton_classes(made, 8), cost, None, trace, written).rank_spans(0)
    assert [column.tolist() for column in of.columns] == [[0], [0], [0], [0.0], [end], [exposed], [2.0]]


def test_a_collective_inside_a_block_that_has_its_link_for_itself_takes_its_own_time() -> None:
    made = program([[compute(1.0, exchange("tp", 2.0)), meet(3.0)]], {"tp": [[0]], "dp": [[0]]})
    trace = shared(made, {"tp": [[0]], "dp": [[1]]})
    assert starts(trace, 0, 0) == starts(trace, 0, 1) == (0.0, 3.0)
    assert trace.contended[row_of(trace, 0, 0)] == 0.0
