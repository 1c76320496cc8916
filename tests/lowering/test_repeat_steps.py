"""Successive steps: dependencies across their boundary, and the time of n steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from clustersim.common.errors import ClusterSimError
from clustersim.engine.engine import simulate_program
from clustersim.lowering.repeat_steps import repeat_steps
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    NaiveDataParallel,
    Zero1,
    Zero2,
)
from clustersim.parallel.layout import Layout
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import CollectiveTask, ComputeTask, ReceiveTask, SendTask
from clustersim.trace.trace import Trace
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import PP_NEXT, compute, make_program, receive, send, task_times, trace_spans
from tests.lowering.plans import TRAINING, lower_plan, make_plan, task_names
from tests.strategies import costed_programs, fold_ranks

SMALL_BUCKET = 1.0
STRATEGIES = [
    DdpStrategy(),
    DdpStrategy(overlap=False),
    Zero1(bucket=SMALL_BUCKET, overlap_param_gather=True),
    Zero1(overlap=False),
    Zero2(bucket=SMALL_BUCKET, overlap_param_gather=True),
    Zero2(overlap=False),
    FullyShard(),
    FullyShard(overlap=False),
]


def one_step(data: DataParallelStrategy, *, clipping: bool = True, pp: int = 1) -> Program:
    training = replace(TRAINING, gradient_clipping=clipping)
    return lower_plan(make_plan(Layout(dp=2, pp=pp, data=data), training))


def trace_of(step_program: Program) -> Trace:
    return run_folded(UnitCost(step_program))


def run_folded(cost: UnitCost) -> Trace:
    return simulate_program(cost.program, fold_ranks(cost.program, cost.segment_cost), cost.segment_cost)[0]


def task_ids_named(rank_program: RankProgram, name: str, step: int, *, steps: int = 2) -> list[int]:
    """Ids of a step's tasks of this name."""
    step_of_task = rank_program.step_indices(steps)
    return [
        task_id
        for task_id, task_name in enumerate(task_names(rank_program))
        if task_name == name and step_of_task[task_id] == step
    ]


def test_one_step_is_the_program_itself() -> None:
    step_program = one_step(Zero1())
    assert repeat_steps(step_program, 1) is step_program


@pytest.mark.parametrize("steps", [0, -2])
def test_fewer_than_one_step_is_rejected(steps: int) -> None:
    with pytest.raises(ClusterSimError, match=f"{steps} steps cannot be run: the least is 1"):
        repeat_steps(one_step(DdpStrategy()), steps)


def test_repeated_steps_have_equal_tasks_on_equal_streams() -> None:
    step_program = one_step(FullyShard(), pp=2)
    for single, tripled in zip(step_program.programs, repeat_steps(step_program, 3).programs, strict=True):
        assert tripled.streams == single.streams * 3
        assert [type(task) for task in tripled.tasks] == [type(task) for task in single.tasks] * 3
        assert tripled.tasks[: len(single.tasks)] == single.tasks


def test_segments_and_comm_ops_are_shared_between_steps() -> None:
    step_program = one_step(Zero1(), pp=2)
    for single, tripled in zip(step_program.programs, repeat_steps(step_program, 3).programs, strict=True):
        segments = [
            {task.segment for task in rank_program.tasks if isinstance(task, ComputeTask)}
            for rank_program in (single, tripled)
        ]
        assert segments[0] == segments[1], "segments are compared by identity"
        assert single.comm_ops == tripled.comm_ops


def test_dependencies_are_in_the_same_or_the_previous_step() -> None:
    for data in STRATEGIES:
        for rank_program in repeat_steps(one_step(data, pp=2), 3).programs:
            step_of_task = rank_program.step_indices(3)
            for task_id, task in enumerate(rank_program.tasks):
                assert all(
                    dependency < task_id and step_of_task[task_id] - step_of_task[dependency] in (0, 1)
                    for dependency in task.depends_on
                )


def test_tags_are_unique_and_all_messages_are_received() -> None:
    first, second = repeat_steps(one_step(DdpStrategy(), pp=2), 3).programs
    for sender, receiver in [(first, second), (second, first)]:
        sent = [(task.comm_op.comm_group, task.tag) for task in sender.tasks if isinstance(task, SendTask)]
        received = [(task.comm_op.comm_group, task.tag) for task in receiver.tasks if isinstance(task, ReceiveTask)]
        assert len(set(sent)) == len(sent)
        assert set(sent) == set(received)


def test_microbatches_are_numbered_through_all_steps() -> None:
    """8 samples on 2 ranks are 4 microbatches a step."""
    (rank_program,) = repeat_steps(one_step(DdpStrategy()), 2).programs
    forwards = [word for word in task_names(rank_program) if word.startswith("F")]
    assert list(dict.fromkeys(forwards)) == [f"F{microbatch}" for microbatch in range(8)]


def test_step_of_counts_the_tasks_of_the_rank() -> None:
    for single, tripled in zip(*(repeat_steps(one_step(Zero1(), pp=2), n).programs for n in (1, 3)), strict=True):
        np.testing.assert_array_equal(tripled.step_indices(3), np.repeat(np.arange(3), len(single.tasks)))


def test_step_of_a_rank_without_tasks_is_empty() -> None:
    assert RankProgram((), ()).step_indices(4).tolist() == []


def test_zero_1_gathers_start_after_the_optimizer_and_overlap_forward() -> None:
    """A layer's forward takes 2 x 64 tokens per parameter, its gather 2 bytes: the next gather is done long before."""
    two_steps = repeat_steps(one_step(Zero1(bucket=SMALL_BUCKET, overlap_param_gather=True)), 2)
    (rank_program,) = two_steps.programs
    trace = trace_of(two_steps)
    (optimizer,) = task_ids_named(rank_program, "optimizer", 0)
    gathers = task_ids_named(rank_program, "gather parameters", 1)
    pieces = task_ids_named(rank_program, "F4", 1)
    assert len(gathers) == len(pieces) == 6, "embedding, four layers, head"
    assert [rank_program.tasks[gather].depends_on for gather in gathers] == [(optimizer,)] * 6
    assert task_times(trace, 0, gathers[0])[2] == task_times(trace, 0, optimizer)[3]
    assert task_times(trace, 0, pieces[0])[2] == task_times(trace, 0, gathers[0])[3]
    for piece, previous in zip(pieces[2:], pieces[1:], strict=False):
        assert task_times(trace, 0, piece)[2] == task_times(trace, 0, previous)[3], "never waits for its gather"


def test_without_overlap_forward_waits_for_the_gather_after_the_optimizer() -> None:
    two_steps = repeat_steps(one_step(Zero1(overlap=False)), 2)
    (rank_program,) = two_steps.programs
    (optimizer,), (gather,) = (
        task_ids_named(rank_program, "optimizer", 0),
        task_ids_named(rank_program, "gather parameters", 0),
    )
    first, *others = task_ids_named(rank_program, "F4", 1)
    assert rank_program.tasks[first].depends_on == (gather,)
    assert others == []
    trace = trace_of(two_steps)
    assert task_times(trace, 0, optimizer)[3] == task_times(trace, 0, gather)[2]
    assert task_times(trace, 0, gather)[3] == task_times(trace, 0, first)[2]


@pytest.mark.parametrize(("overlap", "ahead"), [(True, 2), (False, 1)])
def test_the_gathers_that_fsdp_prefetches_first_wait_for_the_optimizer(overlap: bool, ahead: int) -> None:
    (rank_program,) = repeat_steps(one_step(FullyShard(overlap=overlap)), 2).programs
    (optimizer,) = task_ids_named(rank_program, "optimizer", 0)
    waiting = [task_id for task_id, task in enumerate(rank_program.tasks) if optimizer in task.depends_on]
    assert [task_names(rank_program)[task_id] for task_id in waiting] == ["gather embedding", "gather layer"][:ahead]
    assert all(rank_program.step_indices(2)[task_id] == 1 for task_id in waiting)


@pytest.mark.parametrize("data", [*STRATEGIES, NaiveDataParallel()])
def test_without_pipelining_n_steps_take_n_times_one(data: DataParallelStrategy) -> None:
    """Every rank does the same, its last task ends when all else has ended, and the next step starts from there."""
    step_program = one_step(data)
    step_seconds = trace_of(step_program).makespan
    assert trace_of(repeat_steps(step_program, 4)).makespan == pytest.approx(4 * step_seconds, rel=1e-12)


def test_ranks_run_ahead_into_the_next_step_with_distinct_messages() -> None:
    """Rank 0 computes 1 s and sends 1 s, rank 1 then computes 5 s: 2 + 5 n, not n x 7.

    Rank 0 computes from 0, 1 and 2; its messages follow each other from 1 to 4.
    """
    three_steps = repeat_steps(
        make_program(
            [[compute(1.0), send(1.0, depends_on=(0,))], [receive(1.0), compute(5.0, depends_on=(0,))]],
            {PP_NEXT: [[0, 1]]},
        ),
        3,
    )
    trace = trace_of(three_steps)
    assert [span for span in trace_spans(trace) if span[0] == 0 and span[1] % 2 == 1] == [
        (0, 1, 1.0, 2.0), (0, 3, 2.0, 3.0), (0, 5, 3.0, 4.0),
    ]  # fmt: skip
    assert [span for span in trace_spans(trace) if span[0] == 1 and span[1] % 2 == 1] == [
        (1, 1, 2.0, 7.0), (1, 3, 7.0, 12.0), (1, 5, 12.0, 17.0),
    ]  # fmt: skip


@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize("clipping", [True, False])
def test_the_pipeline_overlaps_steps_but_never_its_own_passes(data: DataParallelStrategy, clipping: bool) -> None:
    """The second stage may still run its optimizer while the first begins the next step: at most n times one step."""
    step_program = one_step(data, clipping=clipping, pp=2)
    one_step_trace, three_step_trace = trace_of(step_program), trace_of(repeat_steps(step_program, 3))
    busy = (one_step_trace.end - one_step_trace.start)[(one_step_trace.stream == 0) & (one_step_trace.rank == 0)].sum()
    assert 3 * busy <= three_step_trace.makespan <= 3 * one_step_trace.makespan * (1 + 1e-12)


@examples(60)
@given(costed_programs())
def test_the_first_step_is_unchanged_and_n_steps_take_at_most_n_times(cost: UnitCost) -> None:
    """Later steps cannot delay earlier ones, and all dependencies of a step end with the previous one."""
    single_program, task_counts = cost.program, [len(rank_program.tasks) for rank_program in cost.program.programs]
    single_trace, tripled_trace = run_folded(cost), run_folded(replace(cost, program=repeat_steps(single_program, 3)))
    in_first_step = (
        tripled_trace.task < np.array([task_counts[kind] for kind in single_program.program_index])[tripled_trace.rank]
    )
    assert sorted(zip(*selected_columns(tripled_trace, in_first_step), strict=True)) == sorted(
        zip(*selected_columns(single_trace, single_trace.task >= 0), strict=True)
    )
    assert tripled_trace.makespan <= 3 * single_trace.makespan


def selected_columns(trace: Trace, selected: np.ndarray) -> list[list[float]]:
    columns = trace.rank, trace.task, trace.ready, trace.start, trace.end
    return [column[selected].tolist() for column in columns]


def test_only_gathers_depend_on_the_previous_step() -> None:
    for data in STRATEGIES:
        (rank_program,) = repeat_steps(one_step(data), 2).programs
        half, step_of_task = len(rank_program.tasks) // 2, rank_program.step_indices(2)
        cross_step = [
            n
            for n, task in enumerate(rank_program.tasks)
            if any(step_of_task[dependency] < step_of_task[n] for dependency in task.depends_on)
        ]
        initial_gathers = [
            half + n
            for n, task in enumerate(rank_program.tasks[:half])
            if isinstance(task, CollectiveTask) and not task.depends_on
        ]
        has_final_gather = isinstance(rank_program.tasks[half - 1], CollectiveTask)
        assert cross_step == initial_gathers + ([task_ids_named(rank_program, "F4", 1)[0]] if has_final_gather else [])
