"""Who does what, when: tiny programs at unit costs, against lists written by hand."""

import pickle

import pytest

from clustersim.engine.engine import DeadlockError, simulate_program
from clustersim.symmetry.refinement import singleton_classes, symmetry_classes
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import (
    NEXT,
    cause_of,
    compute,
    exchange,
    meet,
    played,
    program,
    receive,
    replicated,
    send,
    spans,
    waits,
)


def test_an_empty_program_takes_no_time() -> None:
    trace = played(program([[], []]))
    assert len(trace) == 0
    assert trace.makespan == 0.0


def test_a_stream_runs_its_tasks_in_order() -> None:
    trace = played(program([[compute(2.0), compute(1.0), compute(3.0)]]))
    assert spans(trace) == [(0, 0, 0.0, 2.0), (0, 1, 2.0, 3.0), (0, 2, 3.0, 6.0)]
    assert trace.critical_predecessor.tolist() == [-1, 0, 1]


def test_streams_of_a_rank_run_side_by_side_and_after_joins_them() -> None:
    steps = [compute(2.0), meet(5.0), compute(1.0), compute(1.0, after=(1,)), meet(1.0, after=(2,))]
    trace = played(program([steps], {"dp": [[0]]}))
    assert spans(trace) == [(0, 0, 0.0, 2.0), (0, 2, 2.0, 3.0), (0, 1, 0.0, 5.0), (0, 3, 5.0, 6.0), (0, 4, 5.0, 6.0)]
    assert waits(trace, 0, 3) == (3.0, 5.0, 5.0, 6.0)
    assert cause_of(trace, 0, 3) == (0, 1)
    assert waits(trace, 0, 4) == (5.0, 5.0, 5.0, 6.0)
    assert cause_of(trace, 0, 4) == (0, 1), "the stream was free later than the task that it waits for"


@pytest.mark.parametrize("after", [(0, 1), (1, 0)])
def test_the_last_of_several_that_a_task_waits_for_is_its_cause(after: tuple[int, int]) -> None:
    steps = [compute(4.0), meet(1.0), send(1.0, after=after)]
    trace = played(program([steps, [receive(1.0)]], {"dp": [[0], [1]], NEXT: [[0, 1]]}))
    assert waits(trace, 0, 2) == (0.0, 4.0, 4.0, 5.0)
    assert cause_of(trace, 0, 2) == (0, 0)


def test_a_collective_starts_when_its_last_member_has_come() -> None:
    ranks = [[compute(float(seconds)), meet(2.0, after=(0,))] for seconds in (1, 4, 3)]
    trace = played(program(ranks, {"dp": [[0, 1, 2]]}))
    assert [waits(trace, rank, 1) for rank in range(3)] == [
        (0.0, 1.0, 4.0, 6.0),
        (0.0, 4.0, 4.0, 6.0),
        (0.0, 3.0, 4.0, 6.0),
    ]
    assert [cause_of(trace, rank, 1) for rank in range(3)] == [(1, 0)] * 3


def test_collectives_of_a_group_are_matched_in_the_order_of_issue() -> None:
    ranks = [
        [meet(1.0), meet(1.0), compute(1.0, after=(0,))],
        [compute(2.0), meet(1.0, after=(0,)), meet(1.0)],
    ]
    trace = played(program(ranks, {"dp": [[0, 1]]}))
    assert waits(trace, 0, 0) == (0.0, 0.0, 2.0, 3.0)
    assert waits(trace, 0, 1) == (3.0, 3.0, 3.0, 4.0)
    assert waits(trace, 1, 2) == (3.0, 3.0, 3.0, 4.0)
    assert waits(trace, 0, 2) == (0.0, 3.0, 3.0, 4.0)


def test_a_rank_may_have_two_collectives_of_a_group_under_way() -> None:
    """Rank 0 issues one on each of two streams at once; the first two that issue theirs meet, then the second two."""
    ranks = [
        [compute(exchange("dp", 1.0)), meet(1.0)],
        [compute(2.0), compute(exchange("dp", 1.0)), meet(1.0, after=(1,))],
    ]
    trace = played(program(ranks, {"dp": [[0, 1]]}))
    assert waits(trace, 0, 0) == (0.0, 0.0, 0.0, 3.0)
    assert waits(trace, 0, 1) == (0.0, 0.0, 3.0, 4.0)
    assert waits(trace, 1, 1) == (2.0, 2.0, 2.0, 3.0)
    assert waits(trace, 1, 2) == (0.0, 3.0, 3.0, 4.0)


def test_groups_of_a_role_do_not_wait_for_each_other() -> None:
    ranks = [[compute(float(seconds)), meet(1.0, after=(0,))] for seconds in (1, 2, 8, 9)]
    trace = played(program(ranks, {"dp": [[0, 1], [2, 3]]}))
    assert [waits(trace, rank, 1)[2] for rank in range(4)] == [2.0, 2.0, 9.0, 9.0]


def test_groups_of_a_role_may_be_unequally_fast() -> None:
    made = program([[meet(1.0)], [meet(1.0)], [meet(1.0)], [meet(1.0)]], {"dp": [[0, 1], [2, 3]]})
    trace, _ = simulate_program(made, singleton_classes(made), UnitCost(made, {"dp": [1.0, 3.0]}).blocks)
    assert [waits(trace, rank, 0)[3] for rank in range(4)] == [1.0, 1.0, 3.0, 3.0]


def test_a_message_is_done_at_both_ends_together_and_wakes_the_receiver() -> None:
    sender = [compute(2.0), send(3.0, after=(0,)), compute(1.0)]
    receiver = [compute(1.0), receive(3.0), compute(4.0, after=(1,))]
    trace = played(program([sender, receiver], {NEXT: [[0, 1]]}))
    assert spans(trace) == [
        (1, 0, 0.0, 1.0),
        (0, 0, 0.0, 2.0),
        (0, 2, 2.0, 3.0),
        (1, 1, 2.0, 5.0),
        (0, 1, 2.0, 5.0),
        (1, 2, 5.0, 9.0),
    ]
    assert waits(trace, 1, 2) == (1.0, 5.0, 5.0, 9.0)
    assert cause_of(trace, 1, 2) == (1, 1)
    assert cause_of(trace, 1, 1) == (0, 0)


def test_messages_of_a_stream_queue_behind_each_other() -> None:
    sender = [compute(1.0), send(3.0, 0, after=(0,)), compute(1.0), send(3.0, 1, after=(2,))]
    receiver = [receive(3.0, 0), receive(3.0, 1)]
    trace = played(program([sender, receiver], {NEXT: [[0, 1]]}))
    assert waits(trace, 0, 3) == (4.0, 4.0, 4.0, 7.0)
    assert cause_of(trace, 0, 3) == (0, 1)
    assert waits(trace, 1, 1) == (4.0, 4.0, 4.0, 7.0)


def test_messages_are_matched_by_tag_and_not_by_order() -> None:
    sender = [send(1.0, 7), send(2.0, 5)]
    receiver = [receive(2.0, 5), receive(1.0, 7), compute(1.0, after=(0,))]
    trace = played(program([sender, receiver], {NEXT: [[0, 1]]}))
    assert waits(trace, 1, 1)[2:] == (0.0, 1.0)
    assert waits(trace, 1, 0)[2:] == (1.0, 3.0)
    assert waits(trace, 1, 2) == (0.0, 3.0, 3.0, 4.0)


def test_a_message_in_a_slow_pair_takes_the_pairs_time() -> None:
    """The pair is the sender's; a rank that sends in one pair and receives in another is timed in both."""
    ranks = [[send(1.0)], [receive(1.0), send(1.0, after=(0,))], [receive(1.0)]]
    made = program(ranks, {NEXT: [[1, 2], [0, 1]]})
    trace, _ = simulate_program(made, singleton_classes(made), UnitCost(made, {NEXT: [5.0, 2.0]}).blocks)
    assert waits(trace, 1, 0)[2:] == (0.0, 2.0)
    assert waits(trace, 2, 0)[2:] == (2.0, 7.0)


def test_ranks_meet_inside_a_block() -> None:
    """Rank 0 comes to the exchange at 1 and rank 1 at 3; it takes 2, then 1 and 4 more."""
    ranks = [[compute(1.0, exchange("tp", 2.0), 1.0)], [compute(3.0, exchange("tp", 2.0), 4.0)]]
    made = program(ranks, {"tp": [[0, 1]]})
    trace, operations = simulate_program(made, singleton_classes(made), UnitCost(made).blocks)
    assert spans(trace) == [(0, 0, 0.0, 6.0), (1, 0, 0.0, 9.0)]
    first, second = (operations.task_spans(rank, {0}) for rank in (0, 1))
    assert first.operation.tolist() == second.operation.tolist() == [0, 1, 2]
    assert first.start.tolist() == second.start.tolist() == [0.0, 3.0, 5.0]
    assert (first.end.tolist(), second.end.tolist()) == ([1.0, 5.0, 6.0], [3.0, 5.0, 9.0])


def test_a_block_is_one_event_for_a_rank_alone_and_for_ranks_that_meet_and_its_operations_are_without() -> None:
    """Two equal ranks fold to one, whose block then is its own; unfolded they meet inside it. Times are equal."""
    steps = [compute(1.0, exchange("tp", 2.0), 4.0), compute(0.5)]
    made = replicated(steps, 2, {"tp": [[0, 1]]})
    cost, fold = UnitCost(made).blocks, symmetry_classes(made, {})
    whole, none = simulate_program(made, fold, cost)
    pieces, three = simulate_program(made, fold, cost, coalesce=False)
    every, joint = simulate_program(made, singleton_classes(made), cost)
    assert (fold.count, len(none), len(three), len(joint)) == (1, 0, 4, 0)
    assert spans(whole) == spans(pieces) == [(0, 0, 0.0, 7.0), (0, 1, 7.0, 7.5)]
    assert sorted(spans(every)) == sorted([*spans(whole), (1, 0, 0.0, 7.0), (1, 1, 7.0, 7.5)])
    of = three.task_spans(0, {0, 1})
    assert of.start.tolist() == [0.0, 1.0, 3.0, 7.0]
    assert of.end.tolist() == [1.0, 3.0, 7.0, 7.5]


def test_a_block_without_exchanges_is_one_event_even_unfolded() -> None:
    made = replicated([compute(1.0, 2.0)], 2, {})
    _, operations = simulate_program(made, singleton_classes(made), UnitCost(made).blocks)
    assert len(operations) == 0


def test_one_rank_stands_for_all_that_do_the_same() -> None:
    made = replicated([compute(1.0), meet(2.0, after=(0,))], 4, {"dp": [[0, 1], [2, 3]]})
    trace = played(made, symmetry_classes(made, {}))
    assert trace.representative.tolist() == [0, 0, 0, 0]
    assert spans(trace) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 3.0)]


@pytest.mark.parametrize(
    ("ranks", "groups", "named"),
    [
        (
            [[compute(1.0), receive(1.0), compute(1.0, after=(1,))], []],
            {NEXT: [[1, 0]]},
            "rank 0 never finished task 1",
        ),
        ([[meet(1.0)], [compute(1.0)]], {"dp": [[0, 1]]}, "rank 0 never finished task 0"),
        (
            [[meet(1.0), meet(1.0, role="world")], [meet(1.0, role="world"), meet(1.0)]],
            {"dp": [[0, 1]], "world": [[0, 1]]},
            "rank 0 never finished task 0",
        ),
        ([[compute(exchange("tp", 1.0))], [compute(1.0)]], {"tp": [[0, 1]]}, "rank 0 never finished task 0"),
    ],
    ids=["a message that nobody sends", "a member that never comes", "opposite orders", "alone inside a block"],
)
def test_a_deadlock_names_who_waits(ranks: list, groups: dict, named: str) -> None:
    with pytest.raises(DeadlockError, match=named):
        played(program(ranks, groups))


def test_two_simulations_side_by_side_do_not_disturb_each_other() -> None:
    """The same and another program, alone and in between: worlds share nothing."""
    steps = [[compute(1.0), send(2.0, after=(0,))], [receive(2.0), compute(1.0, exchange("tp", 1.0), after=(0,))]]
    one = program(steps, {NEXT: [[0, 1]], "tp": [[0], [1]]})
    two = program(steps[::-1], {NEXT: [[1, 0]], "tp": [[0], [1]]})
    cost = UnitCost(one).blocks
    alone = spans(simulate_program(one, singleton_classes(one), cost)[0])
    turned = [(1 - rank, task, start, end) for rank, task, start, end in spans(played(two))]
    assert sorted(turned) == sorted(alone)
    assert spans(simulate_program(one, singleton_classes(one), cost)[0]) == alone == spans(played(one))


def test_the_same_program_gives_the_same_bytes() -> None:
    ranks = [[compute(1.0), meet(1.0), meet(1.0, after=(0,)), compute(1.0, after=(1,))] for _ in range(4)]
    made = program(ranks, {"dp": [[0, 2], [1, 3]]})
    assert pickle.dumps(played(made)) == pickle.dumps(played(made))
