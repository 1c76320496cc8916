"""Collectives and messages that contend for links: closed forms."""

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
from tests.engine.small_programs import (
    PP_NEXT,
    all_reduce,
    compute,
    event_index,
    make_comm_op,
    make_program,
    make_segment,
    receive,
    send,
    task_times,
)


def run_contended(program: Program, routes: Mapping[str, list[list[int]]], latency: float = 0.0) -> Trace:
    """The trace of a program at unit costs, every rank simulated."""
    cost = LinkCost(UnitCost(program), 8, routes, latency)
    return simulate_program(
        program, singleton_classes(program, 8), cost.unit.segment_cost, contention_map=cost.contention
    )[0]


def start_and_end(trace: Trace, rank: int, task: int) -> tuple[float, float]:
    _, _, start, end = task_times(trace, rank, task)
    return start, end


def two_senders(second_start: float) -> Program:
    """Ranks 0 and 1 send 3 bytes each to ranks 2 and 3; the second begins later."""
    ranks = [[send(3.0)], [compute(second_start), send(3.0, depends_on=(0,))], [receive(3.0)], [receive(3.0)]]
    return make_program(ranks, {PP_NEXT: [[0, 2], [1, 3]]})


def test_two_messages_over_one_nic_take_twice_as_long() -> None:
    trace = run_contended(two_senders(0.0), {PP_NEXT: [[0], [0]]})
    assert start_and_end(trace, 0, 0) == (0.0, 6.0)
    assert start_and_end(trace, 1, 1) == (0.0, 6.0)
    assert start_and_end(trace, 2, 0) == start_and_end(trace, 3, 0) == (0.0, 6.0)


def test_messages_over_two_nics_do_not_contend() -> None:
    trace = run_contended(two_senders(0.0), {PP_NEXT: [[0, 2], [1, 3]]})
    assert start_and_end(trace, 0, 0) == start_and_end(trace, 1, 1) == (0.0, 3.0)


def test_overlapping_messages_share_a_link_while_both_run() -> None:
    """Uncontended from 0 to 1, shared until the first has sent its other 2 bytes at 5, uncontended until 6."""
    trace = run_contended(two_senders(1.0), {PP_NEXT: [[0, 1], [0, 2]]})
    assert start_and_end(trace, 0, 0) == (0.0, 5.0)
    assert start_and_end(trace, 1, 1) == (1.0, 6.0)


def test_latency_is_not_contended() -> None:
    trace = run_contended(two_senders(0.0), {PP_NEXT: [[0], [0]]}, latency=1.0)
    assert start_and_end(trace, 0, 0) == start_and_end(trace, 1, 1) == (0.0, 7.0)


def test_the_parking_lot() -> None:
    """Ranks 0 to 3 send over links 0-1-2, 0, 1 and 2: each gets half of each of its links."""
    ranks = [[send(2.0)] for _ in range(4)] + [[receive(2.0)] for _ in range(4)]
    program = make_program(ranks, {PP_NEXT: [[rank, rank + 4] for rank in range(4)]})
    trace = run_contended(program, {PP_NEXT: [[0, 1, 2], [0], [1], [2]]})
    assert [start_and_end(trace, rank, 0) for rank in range(4)] == [(0.0, 4.0)] * 4


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_collective_is_one_flow_for_any_member_count(members: int) -> None:
    program = make_program([[all_reduce(2.0)]] * members, {"dp": [list(range(members))]})
    trace = run_contended(program, {"dp": [[0, 1, 2]]})
    assert [start_and_end(trace, rank, 0) for rank in range(members)] == [(0.0, 2.0)] * members


def test_a_collective_shares_the_nic_with_pipeline_sends() -> None:
    """Ranks 0 and 1 reduce 4 bytes over their NICs (links 0, 1); rank 0 computes for 1 s, then sends 2 over its own.

    Uncontended until 1, the collective has 3 s left. Both at half speed until the message is through at 1 + 2·2 =
    5; the collective has done 2 of the 3 by then and ends at 6. What waits for the message starts at 5.
    """
    ranks = [
        [all_reduce(4.0), compute(1.0), send(2.0, depends_on=(1,))],
        [all_reduce(4.0)],
        [receive(2.0), compute(1.0, depends_on=(0,))],
    ]
    trace = run_contended(make_program(ranks, {"dp": [[0, 1]], PP_NEXT: [[0, 2]]}), {"dp": [[0, 1]], PP_NEXT: [[0, 2]]})
    assert start_and_end(trace, 0, 0) == start_and_end(trace, 1, 0) == (0.0, 6.0)
    assert start_and_end(trace, 0, 2) == (1.0, 5.0)
    assert start_and_end(trace, 2, 1) == (5.0, 6.0)


def test_collectives_inside_segments_share_links() -> None:
    """Of 3 s, one has 2 s left when another of 2 s begins inside a segment: both continue at half speed, until 5 s.

    2 s of the segment are due to contention.
    """
    program = make_program([[compute(1.0, make_comm_op("tp", 2.0)), all_reduce(3.0)]], {"tp": [[0]], "dp": [[0]]})
    trace = run_contended(program, {"tp": [[0]], "dp": [[0]]})
    assert start_and_end(trace, 0, 0) == start_and_end(trace, 0, 1) == (0.0, 5.0)
    assert trace.contended[event_index(trace, 0, 0)] == 2.0


def test_contention_extends_an_overlapped_operation() -> None:
    """A kernel of 1 s in 4 chunks overlaps 2 s of data, that share their link with a reduction of 2 s and so take 4.

    The longer hides the shorter except for one chunk: 4 + 1/4 instead of 2 + 1/4.
    """
    (kernel,) = make_segment(1.0).operations
    assert isinstance(kernel.body, Kernel)
    overlapped = Operation(CommOverlap(make_comm_op("tp", 2.0), kernel.body, 4.0), WorkType.FORWARD)
    program = make_program(
        [[(Stream.COMPUTE, ComputeTask(Segment("block", (overlapped,)))), all_reduce(2.0)]], {"tp": [[0]], "dp": [[0]]}
    )  # fmt: skip
    trace = run_contended(program, {"tp": [[0]], "dp": [[0]]})
    assert start_and_end(trace, 0, 0) == (0.0, 4.25)
    assert start_and_end(trace, 0, 1) == (0.0, 4.0)
    assert trace.contended[event_index(trace, 0, 0)] == 2.0
    uncontended = run_contended(program, {"tp": [[0]], "dp": [[1]]})
    assert start_and_end(uncontended, 0, 0) == (0.0, 2.25)


def overlap_segment(chunks: float, *, local: bool = False) -> Segment:
    """A kernel of 4 s overlapped with 2 s of data as one operation."""
    (kernel,) = make_segment(4.0).operations
    assert isinstance(kernel.body, Kernel)
    return Segment(
        "block", (Operation(CommOverlap(make_comm_op("tp", 2.0), kernel.body, chunks, local), WorkType.FORWARD),)
    )


@pytest.mark.parametrize(
    ("chunks", "local", "end", "exposed"), [(4.0, False, 7.0, 0.5), (4.0, True, 6.0, 0.0), (1.0, True, 10.0, 2.0)]
)
def test_contention_of_an_overlap_splits_into_slowdown_and_exposed(
    chunks: float, local: bool, end: float, exposed: float
) -> None:
    """With φ = 1, 2 s of data slow 4 s of kernel by 1; shared with another rank's 2 s they take 4 and slow it by 2.

    So it runs for 5 s uncontended, and for 6. Not local, a chunk of the shorter is exposed: 2/4 uncontended, 4/4.
    Local, the data begin after the first chunk: in four, they end at 6/4 + 4 before the kernel does; in one, 4 s
    after it, of which 2 uncontended.
    """
    program = make_program(
        [[(Stream.COMPUTE, ComputeTask(overlap_segment(chunks, local=local)))], [all_reduce(2.0)]],
        {"tp": [[0]], "dp": [[1]]},
    )
    links = LinkCost(UnitCost(program), 8, {"tp": [[0]], "dp": [[0]]})
    device = DeviceModel(links.unit, Interference.uniform(1.0))
    cost = SegmentCost(
        program, DeviceModels.uniform(device, program.world_size), UncontendedComm(links.unit, links.contention)
    )
    trace, operation_log = simulate_program(
        program, singleton_classes(program, 8), cost, contention_map=links.contention
    )
    event, contention = event_index(trace, 0, 0), trace.contention
    assert start_and_end(trace, 0, 0) == (0.0, end)
    assert (trace.slowed[event], trace.contended[event]) == (1.0, exposed)
    assert (contention.event.tolist(), contention.operation.tolist()) == ([event], [0])
    assert (contention.exposed_delay.tolist(), contention.transfer_delay.tolist()) == ([exposed], [2.0])
    operations = OperationTraceReader(
        program, singleton_classes(program, 8), cost, None, trace, operation_log
    ).rank_spans(0)
    assert [column.tolist() for column in operations.columns] == [[0], [0], [0], [0.0], [end], [exposed], [2.0]]


def test_an_uncontended_collective_takes_its_isolated_time() -> None:
    program = make_program([[compute(1.0, make_comm_op("tp", 2.0)), all_reduce(3.0)]], {"tp": [[0]], "dp": [[0]]})
    trace = run_contended(program, {"tp": [[0]], "dp": [[1]]})
    assert start_and_end(trace, 0, 0) == start_and_end(trace, 0, 1) == (0.0, 3.0)
    assert trace.contended[event_index(trace, 0, 0)] == 0.0
