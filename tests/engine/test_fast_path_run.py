"""Fast path: a segment whose links are shared is one event until other traffic arrives. Closed forms.

Rank 0 computes for 1 s, moves data over link 0 for 2 s, and computes for 1 s. Rank 1 sends 1 s of data over
that link.
"""

import itertools

import pytest

from clustersim.cost.contention import UncontendedComm
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.program.program import Program
from clustersim.symmetry.refinement import singleton_classes
from clustersim.trace.trace import Trace
from tests.benchmarks.isolated_process import count_events
from tests.engine.fake_costs import UnitCost
from tests.engine.fake_links import LinkCost
from tests.engine.small_programs import (
    PP_NEXT,
    StreamTask,
    all_reduce,
    compute,
    event_index,
    make_comm_op,
    make_program,
    receive,
    send,
    task_times,
)

TP_COMM_OP = make_comm_op("tp", 2.0)


def message_program(send_time: float) -> Program:
    """Rank 1's message is sent at `send_time`."""
    ranks = [[compute(1.0, TP_COMM_OP, 1.0)], [compute(send_time), send(1.0, depends_on=(0,))], [receive(1.0)]]
    return make_program(ranks, {"tp": [[0]], PP_NEXT: [[1, 2]]})


def run_program(program: Program, latency: float = 0.0, *, coalesce: bool = True) -> tuple[Trace, OperationSpanLog]:
    links = LinkCost(UnitCost(program), 2, {"tp": [[0]], PP_NEXT: [[0]], "dp": [[1]]}, latency)
    machines = DeviceModels.uniform(DeviceModel(links.unit), program.world_size)
    cost = SegmentCost(program, machines, UncontendedComm(links.unit, links.contention))
    return simulate_program(
        program, singleton_classes(program, 2), cost, contention_map=links.contention, coalesce=coalesce
    )


def operation_times(operation_log: OperationSpanLog, *tasks: int) -> list[tuple[float, float]]:
    """Start and end of each operation of rank 0."""
    spans = operation_log.task_spans(0, set(tasks or (0,)))
    return sorted(zip(spans.start.tolist(), spans.end.tolist(), strict=True))


@pytest.mark.parametrize(
    ("second", "moves", "message"),
    [
        (0.0, 3.0, 1.0),  # over when the exchange begins
        (0.5, 3.5, 2.0),  # half of it then shares the link for a second
        (1.0, 4.0, 3.0),  # both begin together
        (1.5, 4.0, 3.5),
        (2.0, 4.0, 4.0),  # both end together
        (2.5, 3.5, 4.0),
        (3.0, 3.0, 4.0),  # comes as the exchange goes
        (3.5, 3.0, 4.5),
        (9.0, 3.0, 10.0),
    ],
)
def test_a_message_shares_links_with_comm_ops_not_kernels(second: float, moves: float, message: float) -> None:
    trace, operation_log = run_program(message_program(second))
    assert task_times(trace, 0, 0)[2:] == (0.0, moves + 1.0)
    assert task_times(trace, 1, 1)[2:] == (second, message)
    assert operation_times(operation_log) == [(0.0, 1.0), (1.0, moves), (moves, moves + 1.0)]
    assert trace.contended[event_index(trace, 0, 0)] == moves - 3.0


@pytest.mark.parametrize(
    ("second", "moves", "message"),
    [
        (0.0, 3.5, 1.5),
        (0.25, 3.75, 2.0),  # comes to the link between kernel and data, and has a quarter left when these move
        (0.75, 4.25, 3.0),
        (2.0, 4.5, 4.5),
    ],
)
def test_latency_is_uncontended(second: float, moves: float, message: float) -> None:
    """Half a second of latency: data move from 1.5 to 3.5, and a message's from half a second after it is sent."""
    trace, operation_log = run_program(message_program(second), 0.5)
    assert task_times(trace, 1, 1)[2:] == (second, message)
    assert operation_times(operation_log) == [(0.0, 1.0), (1.0, moves), (moves, moves + 1.0)]


def test_only_the_overlapped_comm_op_is_contended() -> None:
    """Of three of 2 s, the message of 1 s sent at 5 overlaps only the second: it has moved 1 s, and 1 is left."""
    ranks = [
        [compute(1.0, TP_COMM_OP, 1.0, TP_COMM_OP, 1.0, 0.5, TP_COMM_OP)],
        [compute(5.0), send(1.0, depends_on=(0,))],
        [receive(1.0)],
    ]
    trace, operation_log = run_program(make_program(ranks, {"tp": [[0]], PP_NEXT: [[1, 2]]}))
    starts = [0.0, 1.0, 3.0, 4.0, 7.0, 8.0, 8.5, 10.5]
    assert operation_times(operation_log) == list(itertools.pairwise(starts))
    assert task_times(trace, 1, 1)[2:] == (5.0, 7.0)
    assert trace.contention.operation.tolist() == [3]


@pytest.mark.parametrize("second", [0.0, 0.3, 1.0, 1.1, 2.7, 3.0, 3.9])
def test_the_fast_path_is_bitwise_equal_to_single_operations(second: float) -> None:
    """0.1 and 0.7 are no binary fractions, so their sums depend on the order in which they are added up."""
    ranks = [
        [compute(0.1, make_comm_op("tp", 0.7), 0.7, make_comm_op("tp", 1.3), 0.1) for _ in range(4)],
        [compute(second), send(0.9, depends_on=(0,))],
        [receive(0.9)],
    ]
    program = make_program(ranks, {"tp": [[0]], PP_NEXT: [[1, 2]]})
    (coalesced, coalesced_log), (by_operation, by_operation_log) = (
        run_program(program, 0.1, coalesce=coalesce) for coalesce in (True, False)
    )
    for rank, task in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (2, 0)]:
        assert task_times(coalesced, rank, task) == task_times(by_operation, rank, task)
    assert operation_times(coalesced_log, *range(4)) == operation_times(by_operation_log, *range(4))


def test_an_uncontended_segment_is_one_event() -> None:
    """More communication operations are no more events; where the DP stream may contend, each operation has its own."""

    def count_run_events(comm_op_count: int, *dp_steps: StreamTask) -> int:
        segment_step = compute(*[1.0, TP_COMM_OP] * comm_op_count, 1.0)
        ranks = [[segment_step, *dp_steps], [compute(999.0), send(1.0, depends_on=(0,))], [receive(1.0)]]
        program = make_program(ranks, {"tp": [[0]], "dp": [[0]], PP_NEXT: [[1, 2]]})
        return count_events(lambda: run_program(program))

    assert count_run_events(1) == count_run_events(8)
    assert count_run_events(8, all_reduce(1.0)) > count_run_events(1, all_reduce(1.0)) + 7


def test_two_comm_ops_share_a_link_regardless_of_order() -> None:
    """Rank 1's exchange of 2 s begins at 2, when rank 0's, which began at 1, has 1 s left: that ends at 4, its at 5."""
    ranks = [[compute(1.0, TP_COMM_OP, 1.0)], [compute(2.0, TP_COMM_OP, 1.0)]]
    trace, _ = run_on_one_link(make_program(ranks, {"tp": [[0], [1]]}))
    assert task_times(trace, 0, 0)[2:] == (0.0, 5.0)
    assert task_times(trace, 1, 0)[2:] == (0.0, 6.0)


def run_on_one_link(program: Program) -> tuple[Trace, OperationSpanLog]:
    """Both groups cross link 0."""
    links = LinkCost(UnitCost(program), 2, {"tp": [[0], [0]]})
    cost = SegmentCost(
        program,
        DeviceModels.uniform(DeviceModel(links.unit), program.world_size),
        UncontendedComm(links.unit, links.contention),
    )
    return simulate_program(program, singleton_classes(program, 2), cost, contention_map=links.contention)
