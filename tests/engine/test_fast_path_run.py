"""A block whose exchanges share links with somebody is one event for as long as nobody comes: closed forms.

Rank 0 computes for 1 s, moves data over link 0 for 2 s, and computes for 1 s. Rank 1 sends 1 s of data over that link.
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
from tests.benchmarks.isolated_process import events_of
from tests.engine.fake_costs import UnitCost
from tests.engine.fake_links import LinkCost
from tests.engine.small_programs import NEXT, Step, compute, exchange, meet, program, receive, row_of, send, waits

MOVES = exchange("tp", 2.0)


def sent_at(second: float) -> Program:
    """Rank 1's message begins at a second."""
    ranks = [[compute(1.0, MOVES, 1.0)], [compute(second), send(1.0, after=(0,))], [receive(1.0)]]
    return program(ranks, {"tp": [[0]], NEXT: [[1, 2]]})


def ran(made: Program, latency: float = 0.0, *, coalesce: bool = True) -> tuple[Trace, OperationSpanLog]:
    links = LinkCost(UnitCost(made), 2, {"tp": [[0]], NEXT: [[0]], "dp": [[1]]}, latency)
    machines = DeviceModels.uniform(DeviceModel(links.unit), made.world_size)
    cost = SegmentCost(made, machines, UncontendedComm(links.unit, links.sharing))
    return simulate_program(made, singleton_classes(made, 2), cost, contention_map=links.sharing, coalesce=coalesce)


def operations(written: OperationSpanLog, *tasks: int) -> list[tuple[float, float]]:
    """When each operation of rank 0 began and ended."""
    found = written.task_spans(0, set(tasks or (0,)))
    return sorted(zip(found.start.tolist(), found.end.tolist(), strict=True))


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
def test_whoever_comes_shares_with_the_exchange_and_with_no_kernel(second: float, moves: float, message: float) -> None:
    trace, written = ran(sent_at(second))
    assert waits(trace, 0, 0)[2:] == (0.0, moves + 1.0)
    assert waits(trace, 1, 1)[2:] == (second, message)
    assert operations(written) == [(0.0, 1.0), (1.0, moves), (moves, moves + 1.0)]
    assert trace.contended[row_of(trace, 0, 0)] == moves - 3.0


@pytest.mark.parametrize(
    ("second", "moves", "message"),
    [
        (0.0, 3.5, 1.5),
        (0.25, 3.75, 2.0),  # comes to the link between kernel and data, and has a quarter left when these move
        (0.75, 4.25, 3.0),
        (2.0, 4.5, 4.5),
    ],
)
def test_latency_is_shared_with_nobody(second: float, moves: float, message: float) -> None:
    """Half a second of it: the data move from 1.5 to 3.5, and a message's from half a second after it is sent."""
    trace, written = ran(sent_at(second), 0.5)
    assert waits(trace, 1, 1)[2:] == (second, message)
    assert operations(written) == [(0.0, 1.0), (1.0, moves), (moves, moves + 1.0)]


def test_several_exchanges_are_shared_one_by_one() -> None:
    """Of three of 2 s, the message of 1 s that begins at 5 meets the second alone: it has moved 1 s, and 1 is left."""
    ranks = [
        [compute(1.0, MOVES, 1.0, MOVES, 1.0, 0.5, MOVES)],
        [compute(5.0), send(1.0, after=(0,))],
        [receive(1.0)],
    ]
    trace, written = ran(program(ranks, {"tp": [[0]], NEXT: [[1, 2]]}))
    begun = [0.0, 1.0, 3.0, 4.0, 7.0, 8.0, 8.5, 10.5]
    assert operations(written) == list(itertools.pairwise(begun))
    assert waits(trace, 1, 1)[2:] == (5.0, 7.0)
    assert trace.contention.operation.tolist() == [3]


@pytest.mark.parametrize("second", [0.0, 0.3, 1.0, 1.1, 2.7, 3.0, 3.9])
def test_times_are_equal_to_the_last_digit_to_those_of_operations_run_one_by_one(second: float) -> None:
    """0.1 and 0.7 are no binary fractions, so their sums depend on the order in which they are added up."""
    ranks = [
        [compute(0.1, exchange("tp", 0.7), 0.7, exchange("tp", 1.3), 0.1) for _ in range(4)],
        [compute(second), send(0.9, after=(0,))],
        [receive(0.9)],
    ]
    made = program(ranks, {"tp": [[0]], NEXT: [[1, 2]]})
    (whole, once), (fine, each) = (ran(made, 0.1, coalesce=coalesce) for coalesce in (True, False))
    for rank, task in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (2, 0)]:
        assert waits(whole, rank, task) == waits(fine, rank, task)
    assert operations(once, *range(4)) == operations(each, *range(4))


def test_a_block_that_nobody_visits_is_one_event_however_many_exchanges_it_has() -> None:
    """More exchanges are no more events; where the data stream may come, each operation has its own."""

    def events(exchanges: int, *data: Step) -> int:
        block = compute(*[1.0, MOVES] * exchanges, 1.0)
        ranks = [[block, *data], [compute(999.0), send(1.0, after=(0,))], [receive(1.0)]]
        made = program(ranks, {"tp": [[0]], "dp": [[0]], NEXT: [[1, 2]]})
        return events_of(lambda: ran(made))

    assert events(1) == events(8)
    assert events(8, meet(1.0)) > events(1, meet(1.0)) + 7


def test_two_that_want_one_link_share_it_whoever_was_first() -> None:
    """Rank 1's exchange of 2 s begins at 2, when rank 0's, which began at 1, has 1 s left: that ends at 4, its at 5."""
    ranks = [[compute(1.0, MOVES, 1.0)], [compute(2.0, MOVES, 1.0)]]
    trace, _ = ran_on_one(program(ranks, {"tp": [[0], [1]]}))
    assert waits(trace, 0, 0)[2:] == (0.0, 5.0)
    assert waits(trace, 1, 0)[2:] == (0.0, 6.0)


def ran_on_one(made: Program) -> tuple[Trace, OperationSpanLog]:
    """Both groups cross link 0."""
    links = LinkCost(UnitCost(made), 2, {"tp": [[0], [0]]})
    cost = SegmentCost(
        made, DeviceModels.uniform(DeviceModel(links.unit), made.world_size), UncontendedComm(links.unit, links.sharing)
    )
    return simulate_program(made, singleton_classes(made, 2), cost, contention_map=links.sharing)
