"""Engine: tiny programs at unit costs, against traces written by hand."""

import pickle

import pytest

from clustersim.engine.engine import simulate_program
from clustersim.engine.execution_strategies import DeadlockError
from clustersim.symmetry.refinement import singleton_classes, symmetry_classes
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import (
    PP_NEXT,
    all_reduce,
    cause_task,
    compute,
    make_comm_op,
    make_program,
    make_replicated_program,
    receive,
    send,
    simulate_unit_costs,
    task_times,
    trace_spans,
)


def test_an_empty_program_takes_no_time() -> None:
    trace = simulate_unit_costs(make_program([[], []]))
    assert len(trace) == 0
    assert trace.makespan == 0.0


def test_a_stream_runs_its_tasks_in_order() -> None:
    trace = simulate_unit_costs(make_program([[compute(2.0), compute(1.0), compute(3.0)]]))
    assert trace_spans(trace) == [(0, 0, 0.0, 2.0), (0, 1, 2.0, 3.0), (0, 2, 3.0, 6.0)]
    assert trace.critical_predecessor.tolist() == [-1, 0, 1]


def test_streams_run_concurrently_and_dependencies_join_them() -> None:
    steps = [
        compute(2.0),
        all_reduce(5.0),
        compute(1.0),
        compute(1.0, depends_on=(1,)),
        all_reduce(1.0, depends_on=(2,)),
    ]
    trace = simulate_unit_costs(make_program([steps], {"dp": [[0]]}))
    assert trace_spans(trace) == [
        (0, 0, 0.0, 2.0),
        (0, 2, 2.0, 3.0),
        (0, 1, 0.0, 5.0),
        (0, 3, 5.0, 6.0),
        (0, 4, 5.0, 6.0),
    ]
    assert task_times(trace, 0, 3) == (3.0, 5.0, 5.0, 6.0)
    assert cause_task(trace, 0, 3) == (0, 1)
    assert task_times(trace, 0, 4) == (5.0, 5.0, 5.0, 6.0)
    assert cause_task(trace, 0, 4) == (0, 1), "the stream was free later than the task that it waits for"


@pytest.mark.parametrize("after", [(0, 1), (1, 0)])
def test_the_last_dependency_of_a_task_is_its_cause(after: tuple[int, int]) -> None:
    steps = [compute(4.0), all_reduce(1.0), send(1.0, depends_on=after)]
    trace = simulate_unit_costs(make_program([steps, [receive(1.0)]], {"dp": [[0], [1]], PP_NEXT: [[0, 1]]}))
    assert task_times(trace, 0, 2) == (0.0, 4.0, 4.0, 5.0)
    assert cause_task(trace, 0, 2) == (0, 0)


def test_a_collective_starts_with_its_last_member() -> None:
    ranks = [[compute(float(seconds)), all_reduce(2.0, depends_on=(0,))] for seconds in (1, 4, 3)]
    trace = simulate_unit_costs(make_program(ranks, {"dp": [[0, 1, 2]]}))
    assert [task_times(trace, rank, 1) for rank in range(3)] == [
        (0.0, 1.0, 4.0, 6.0),
        (0.0, 4.0, 4.0, 6.0),
        (0.0, 3.0, 4.0, 6.0),
    ]
    assert [cause_task(trace, rank, 1) for rank in range(3)] == [(1, 0)] * 3


def test_collectives_of_a_group_are_matched_in_the_order_of_issue() -> None:
    ranks = [
        [all_reduce(1.0), all_reduce(1.0), compute(1.0, depends_on=(0,))],
        [compute(2.0), all_reduce(1.0, depends_on=(0,)), all_reduce(1.0)],
    ]
    trace = simulate_unit_costs(make_program(ranks, {"dp": [[0, 1]]}))
    assert task_times(trace, 0, 0) == (0.0, 0.0, 2.0, 3.0)
    assert task_times(trace, 0, 1) == (3.0, 3.0, 3.0, 4.0)
    assert task_times(trace, 1, 2) == (3.0, 3.0, 3.0, 4.0)
    assert task_times(trace, 0, 2) == (0.0, 3.0, 3.0, 4.0)


def test_a_rank_may_have_two_collectives_of_a_group_in_flight() -> None:
    """Rank 0 issues one on each of two streams at once; collectives are matched in the order of issue."""
    ranks = [
        [compute(make_comm_op("dp", 1.0)), all_reduce(1.0)],
        [compute(2.0), compute(make_comm_op("dp", 1.0)), all_reduce(1.0, depends_on=(1,))],
    ]
    trace = simulate_unit_costs(make_program(ranks, {"dp": [[0, 1]]}))
    assert task_times(trace, 0, 0) == (0.0, 0.0, 0.0, 3.0)
    assert task_times(trace, 0, 1) == (0.0, 0.0, 3.0, 4.0)
    assert task_times(trace, 1, 1) == (2.0, 2.0, 2.0, 3.0)
    assert task_times(trace, 1, 2) == (0.0, 3.0, 3.0, 4.0)


def test_groups_of_one_type_do_not_wait_for_each_other() -> None:
    ranks = [[compute(float(seconds)), all_reduce(1.0, depends_on=(0,))] for seconds in (1, 2, 8, 9)]
    trace = simulate_unit_costs(make_program(ranks, {"dp": [[0, 1], [2, 3]]}))
    assert [task_times(trace, rank, 1)[2] for rank in range(4)] == [2.0, 2.0, 9.0, 9.0]


def test_groups_of_one_type_may_have_different_costs() -> None:
    program = make_program(
        [[all_reduce(1.0)], [all_reduce(1.0)], [all_reduce(1.0)], [all_reduce(1.0)]], {"dp": [[0, 1], [2, 3]]}
    )
    trace, _ = simulate_program(program, singleton_classes(program), UnitCost(program, {"dp": [1.0, 3.0]}).segment_cost)
    assert [task_times(trace, rank, 0)[3] for rank in range(4)] == [1.0, 1.0, 3.0, 3.0]


def test_a_message_ends_on_both_ranks_and_wakes_the_receiver() -> None:
    sender = [compute(2.0), send(3.0, depends_on=(0,)), compute(1.0)]
    receiver = [compute(1.0), receive(3.0), compute(4.0, depends_on=(1,))]
    trace = simulate_unit_costs(make_program([sender, receiver], {PP_NEXT: [[0, 1]]}))
    assert trace_spans(trace) == [
        (1, 0, 0.0, 1.0),
        (0, 0, 0.0, 2.0),
        (0, 2, 2.0, 3.0),
        (1, 1, 2.0, 5.0),
        (0, 1, 2.0, 5.0),
        (1, 2, 5.0, 9.0),
    ]
    assert task_times(trace, 1, 2) == (1.0, 5.0, 5.0, 9.0)
    assert cause_task(trace, 1, 2) == (1, 1)
    assert cause_task(trace, 1, 1) == (0, 0)


def test_messages_of_a_stream_queue_behind_each_other() -> None:
    sender = [compute(1.0), send(3.0, 0, depends_on=(0,)), compute(1.0), send(3.0, 1, depends_on=(2,))]
    receiver = [receive(3.0, 0), receive(3.0, 1)]
    trace = simulate_unit_costs(make_program([sender, receiver], {PP_NEXT: [[0, 1]]}))
    assert task_times(trace, 0, 3) == (4.0, 4.0, 4.0, 7.0)
    assert cause_task(trace, 0, 3) == (0, 1)
    assert task_times(trace, 1, 1) == (4.0, 4.0, 4.0, 7.0)


def test_messages_are_matched_by_tag_and_not_by_order() -> None:
    sender = [send(1.0, 7), send(2.0, 5)]
    receiver = [receive(2.0, 5), receive(1.0, 7), compute(1.0, depends_on=(0,))]
    trace = simulate_unit_costs(make_program([sender, receiver], {PP_NEXT: [[0, 1]]}))
    assert task_times(trace, 1, 1)[2:] == (0.0, 1.0)
    assert task_times(trace, 1, 0)[2:] == (1.0, 3.0)
    assert task_times(trace, 1, 2) == (0.0, 3.0, 3.0, 4.0)


def test_a_message_takes_the_time_of_its_pair() -> None:
    """The pair is the sender's; a rank that sends in one pair and receives in another is timed in both."""
    ranks = [[send(1.0)], [receive(1.0), send(1.0, depends_on=(0,))], [receive(1.0)]]
    program = make_program(ranks, {PP_NEXT: [[1, 2], [0, 1]]})
    trace, _ = simulate_program(
        program, singleton_classes(program), UnitCost(program, {PP_NEXT: [5.0, 2.0]}).segment_cost
    )
    assert task_times(trace, 1, 0)[2:] == (0.0, 2.0)
    assert task_times(trace, 2, 0)[2:] == (2.0, 7.0)


def test_ranks_synchronize_inside_a_segment() -> None:
    """Rank 0 reaches the collective at 1 and rank 1 at 3; it takes 2, then 1 and 4 more."""
    ranks = [[compute(1.0, make_comm_op("tp", 2.0), 1.0)], [compute(3.0, make_comm_op("tp", 2.0), 4.0)]]
    program = make_program(ranks, {"tp": [[0, 1]]})
    trace, operations = simulate_program(program, singleton_classes(program), UnitCost(program).segment_cost)
    assert trace_spans(trace) == [(0, 0, 0.0, 6.0), (1, 0, 0.0, 9.0)]
    rank_0, rank_1 = (operations.task_spans(rank, {0}) for rank in (0, 1))
    assert rank_0.operation.tolist() == rank_1.operation.tolist() == [0, 1, 2]
    assert rank_0.start.tolist() == rank_1.start.tolist() == [0.0, 3.0, 5.0]
    assert (rank_0.end.tolist(), rank_1.end.tolist()) == ([1.0, 5.0, 6.0], [3.0, 5.0, 9.0])


def test_coalesced_segments_record_no_operations() -> None:
    """Two equal ranks fold to one; unfolded they synchronize inside the segment. Times are equal."""
    steps = [compute(1.0, make_comm_op("tp", 2.0), 4.0), compute(0.5)]
    program = make_replicated_program(steps, 2, {"tp": [[0, 1]]})
    cost, rank_classes = UnitCost(program).segment_cost, symmetry_classes(program, {})
    coalesced, coalesced_log = simulate_program(program, rank_classes, cost)
    by_operation, operation_log = simulate_program(program, rank_classes, cost, coalesce=False)
    all_ranks, all_ranks_log = simulate_program(program, singleton_classes(program), cost)
    assert (rank_classes.count, len(coalesced_log), len(operation_log), len(all_ranks_log)) == (1, 0, 4, 0)
    assert trace_spans(coalesced) == trace_spans(by_operation) == [(0, 0, 0.0, 7.0), (0, 1, 7.0, 7.5)]
    assert sorted(trace_spans(all_ranks)) == sorted([*trace_spans(coalesced), (1, 0, 0.0, 7.0), (1, 1, 7.0, 7.5)])
    operations = operation_log.task_spans(0, {0, 1})
    assert operations.start.tolist() == [0.0, 1.0, 3.0, 7.0]
    assert operations.end.tolist() == [1.0, 3.0, 7.0, 7.5]


def test_a_segment_without_communication_is_one_event_unfolded() -> None:
    program = make_replicated_program([compute(1.0, 2.0)], 2, {})
    _, operations = simulate_program(program, singleton_classes(program), UnitCost(program).segment_cost)
    assert len(operations) == 0


def test_one_rank_represents_its_class() -> None:
    program = make_replicated_program([compute(1.0), all_reduce(2.0, depends_on=(0,))], 4, {"dp": [[0, 1], [2, 3]]})
    trace = simulate_unit_costs(program, symmetry_classes(program, {}))
    assert trace.representative.tolist() == [0, 0, 0, 0]
    assert trace_spans(trace) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 3.0)]


@pytest.mark.parametrize(
    ("ranks", "groups", "named"),
    [
        (
            [[compute(1.0), receive(1.0), compute(1.0, depends_on=(1,))], []],
            {PP_NEXT: [[1, 0]]},
            "rank 0 never finished task 1",
        ),
        ([[all_reduce(1.0)], [compute(1.0)]], {"dp": [[0, 1]]}, "rank 0 never finished task 0"),
        (
            [
                [all_reduce(1.0), all_reduce(1.0, comm_group="world")],
                [all_reduce(1.0, comm_group="world"), all_reduce(1.0)],
            ],
            {"dp": [[0, 1]], "world": [[0, 1]]},
            "rank 0 never finished task 0",
        ),
        ([[compute(make_comm_op("tp", 1.0))], [compute(1.0)]], {"tp": [[0, 1]]}, "rank 0 never finished task 0"),
    ],
    ids=["a message that nobody sends", "a member that never comes", "opposite orders", "alone inside a block"],
)
def test_a_deadlock_names_the_waiting_rank(ranks: list, groups: dict, named: str) -> None:
    with pytest.raises(DeadlockError, match=named):
        simulate_unit_costs(make_program(ranks, groups))


def test_simulations_share_no_state() -> None:
    """The same and another program, separately and interleaved, give the same spans."""
    steps = [
        [compute(1.0), send(2.0, depends_on=(0,))],
        [receive(2.0), compute(1.0, make_comm_op("tp", 1.0), depends_on=(0,))],
    ]
    program = make_program(steps, {PP_NEXT: [[0, 1]], "tp": [[0], [1]]})
    swapped_program = make_program(steps[::-1], {PP_NEXT: [[1, 0]], "tp": [[0], [1]]})
    cost = UnitCost(program).segment_cost
    expected = trace_spans(simulate_program(program, singleton_classes(program), cost)[0])
    swapped_back = [
        (1 - rank, task, start, end) for rank, task, start, end in trace_spans(simulate_unit_costs(swapped_program))
    ]
    assert sorted(swapped_back) == sorted(expected)
    assert (
        trace_spans(simulate_program(program, singleton_classes(program), cost)[0])
        == expected
        == trace_spans(simulate_unit_costs(program))
    )


def test_traces_are_deterministic() -> None:
    ranks = [
        [compute(1.0), all_reduce(1.0), all_reduce(1.0, depends_on=(0,)), compute(1.0, depends_on=(1,))]
        for _ in range(4)
    ]
    program = make_program(ranks, {"dp": [[0, 2], [1, 3]]})
    assert pickle.dumps(simulate_unit_costs(program)) == pickle.dumps(simulate_unit_costs(program))
