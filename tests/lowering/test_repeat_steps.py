"""Successive steps: what waits for what across their border, and what n steps take."""

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
from tests.engine.small_programs import NEXT, compute, program, receive, send, spans, waits
from tests.lowering.plans import TRAINING, lowered, planned, words
from tests.strategies import costed, fold

SMALL_BUCKET = 1.0
STRATEGIES = [
    DdpStrategy(),
    DdpStrategy(overlap=False),
    Zero1(bucket=SMALL_BUCKET),
    Zero1(overlap=False),
    Zero2(bucket=SMALL_BUCKET),
    Zero2(overlap=False),
    FullyShard(),
    FullyShard(overlap=False),
]


def one_step(data: DataParallelStrategy, *, clipping: bool = True, pp: int = 1) -> Program:
    training = replace(TRAINING, gradient_clipping=clipping)
    return lowered(planned(Layout(dp=2, pp=pp, data=data), training))


def played(made: Program) -> Trace:
    return timeline(UnitCost(made))


def timeline(cost: UnitCost) -> Trace:
    return simulate_program(cost.program, fold(cost.program, cost.blocks), cost.blocks)[0]


def named(made: RankProgram, name: str, step: int, *, steps: int = 2) -> list[int]:
    """Numbers of a step's tasks of this name."""
    of = made.step_indices(steps)
    return [number for number, word in enumerate(words(made)) if word == name and of[number] == step]


def test_one_step_is_the_program_itself() -> None:
    made = one_step(Zero1())
    assert repeat_steps(made, 1) is made


@pytest.mark.parametrize("steps", [0, -2])
def test_there_is_no_program_of_less_than_a_step(steps: int) -> None:
    with pytest.raises(ClusterSimError, match=f"{steps} steps cannot be run: the least is 1"):
        repeat_steps(one_step(DdpStrategy()), steps)


def test_every_step_has_the_tasks_of_the_one_on_the_same_streams() -> None:
    made = one_step(FullyShard(), pp=2)
    for one, three in zip(made.programs, repeat_steps(made, 3).programs, strict=True):
        assert three.streams == one.streams * 3
        assert [type(task) for task in three.tasks] == [type(task) for task in one.tasks] * 3
        assert three.tasks[: len(one.tasks)] == one.tasks


def test_blocks_and_exchanges_stay_shared_so_that_they_are_costed_once() -> None:
    made = one_step(Zero1(), pp=2)
    for one, three in zip(made.programs, repeat_steps(made, 3).programs, strict=True):
        blocks = [
            {task.segment for task in rank_program.tasks if isinstance(task, ComputeTask)}
            for rank_program in (one, three)
        ]
        assert blocks[0] == blocks[1], "blocks are compared by identity"
        assert one.comm_ops == three.comm_ops


def test_a_task_waits_for_earlier_tasks_of_its_own_step_or_the_one_before() -> None:
    for data in STRATEGIES:
        for rank_program in repeat_steps(one_step(data, pp=2), 3).programs:
            of = rank_program.step_indices(3)
            for number, task in enumerate(rank_program.tasks):
                assert all(needed < number and of[number] - of[needed] in (0, 1) for needed in task.depends_on)


def test_tags_are_unique_and_every_message_that_is_sent_is_received() -> None:
    first, second = repeat_steps(one_step(DdpStrategy(), pp=2), 3).programs
    for sender, receiver in [(first, second), (second, first)]:
        sent = [(task.comm_op.comm_group, task.tag) for task in sender.tasks if isinstance(task, SendTask)]
        received = [(task.comm_op.comm_group, task.tag) for task in receiver.tasks if isinstance(task, ReceiveTask)]
        assert len(set(sent)) == len(sent)
        assert set(sent) == set(received)


def test_microbatches_are_numbered_through_all_steps() -> None:
    """8 samples on 2 ranks are 4 microbatches a step."""
    (only,) = repeat_steps(one_step(DdpStrategy()), 2).programs
    forwards = [word for word in words(only) if word.startswith("F")]
    assert list(dict.fromkeys(forwards)) == [f"F{number}" for number in range(8)]


def test_step_of_counts_each_ranks_own_tasks() -> None:
    for one, item in zip(*(repeat_steps(one_step(Zero1(), pp=2), n).programs for n in (1, 3)), strict=True):
        np.testing.assert_array_equal(item.step_indices(3), np.repeat(np.arange(3), len(one.tasks)))


def test_step_of_a_rank_without_tasks_is_empty() -> None:
    assert RankProgram((), ()).step_indices(4).tolist() == []


def test_gathers_of_zero_1_start_with_the_end_of_the_optimizer_and_all_but_the_first_hide_behind_the_forward() -> None:
    """A layer's forward takes 2 x 64 tokens per parameter, its gather 2 bytes: the next gather is done long before."""
    made = repeat_steps(one_step(Zero1(bucket=SMALL_BUCKET)), 2)
    (only,) = made.programs
    trace = played(made)
    (optimizer,) = named(only, "optimizer", 0)
    gathers = named(only, "gather parameters", 1)
    pieces = named(only, "F4", 1)
    assert len(gathers) == len(pieces) == 6, "embedding, four layers, head"
    assert [only.tasks[gather].depends_on for gather in gathers] == [(optimizer,)] * 6
    assert waits(trace, 0, gathers[0])[2] == waits(trace, 0, optimizer)[3]
    assert waits(trace, 0, pieces[0])[2] == waits(trace, 0, gathers[0])[3]
    for piece, before in zip(pieces[2:], pieces[1:], strict=False):
        assert waits(trace, 0, piece)[2] == waits(trace, 0, before)[3], "never waits for its gather"


def test_without_overlap_the_next_forward_waits_for_the_gather_behind_the_optimizer() -> None:
    made = repeat_steps(one_step(Zero1(overlap=False)), 2)
    (only,) = made.programs
    (optimizer,), (gather,) = named(only, "optimizer", 0), named(only, "gather parameters", 0)
    first, *others = named(only, "F4", 1)
    assert only.tasks[first].depends_on == (gather,)
    assert others == []
    trace = played(made)
    assert waits(trace, 0, optimizer)[3] == waits(trace, 0, gather)[2]
    assert waits(trace, 0, gather)[3] == waits(trace, 0, first)[2]


@pytest.mark.parametrize(("overlap", "ahead"), [(True, 2), (False, 1)])
def test_the_gathers_that_fsdp_prefetches_first_wait_for_the_optimizer(overlap: bool, ahead: int) -> None:
    (only,) = repeat_steps(one_step(FullyShard(overlap=overlap)), 2).programs
    (optimizer,) = named(only, "optimizer", 0)
    waiting = [number for number, task in enumerate(only.tasks) if optimizer in task.depends_on]
    assert [words(only)[number] for number in waiting] == ["gather embedding", "gather layer"][:ahead]
    assert all(only.step_indices(2)[number] == 1 for number in waiting)


@pytest.mark.parametrize("data", [*STRATEGIES, NaiveDataParallel()])
def test_without_pipelining_n_steps_take_n_times_one(data: DataParallelStrategy) -> None:
    """Every rank does the same, its last task ends when all else has ended, and the next step starts from there."""
    made = one_step(data)
    once = played(made).makespan
    assert played(repeat_steps(made, 4)).makespan == pytest.approx(4 * once, rel=1e-12)


def test_a_rank_that_is_done_goes_on_and_its_messages_are_not_mixed_up() -> None:
    """Rank 0 computes 1 s and sends 1 s, rank 1 then computes 5 s: 2 + 5 n, not n x 7.

    Rank 0 computes from 0, 1 and 2; its messages follow each other from 1 to 4.
    """
    made = repeat_steps(program([[compute(1.0), send(1.0, after=(0,))], [receive(1.0), compute(5.0, after=(0,))]],
                          {NEXT: [[0, 1]]}), 3)  # fmt: skip
    trace = played(made)
    assert [row for row in spans(trace) if row[0] == 0 and row[1] % 2 == 1] == [
        (0, 1, 1.0, 2.0), (0, 3, 2.0, 3.0), (0, 5, 3.0, 4.0),
    ]  # fmt: skip
    assert [row for row in spans(trace) if row[0] == 1 and row[1] % 2 == 1] == [
        (1, 1, 2.0, 7.0), (1, 3, 7.0, 12.0), (1, 5, 12.0, 17.0),
    ]  # fmt: skip


@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize("clipping", [True, False])
def test_the_pipeline_overlaps_steps_but_never_its_own_passes(data: DataParallelStrategy, clipping: bool) -> None:
    """The second stage may still run its optimizer while the first begins the next step: at most n times one step."""
    made = one_step(data, clipping=clipping, pp=2)
    once, thrice = played(made), played(repeat_steps(made, 3))
    busy = (once.end - once.start)[(once.stream == 0) & (once.rank == 0)].sum()
    assert 3 * busy <= thrice.makespan <= 3 * once.makespan * (1 + 1e-12)


@examples(60)
@given(costed())
def test_law_the_first_step_is_as_if_alone_and_n_steps_take_at_most_n_times_as_long(cost: UnitCost) -> None:
    """Later steps cannot delay earlier ones, and all that a step waits for has ended when the one before it has."""
    once, size = cost.program, [len(rank_program.tasks) for rank_program in cost.program.programs]
    alone, both = timeline(cost), timeline(replace(cost, program=repeat_steps(once, 3)))
    first = both.task < np.array([size[kind] for kind in once.program_index])[both.rank]
    assert sorted(zip(*rows(both, first), strict=True)) == sorted(zip(*rows(alone, alone.task >= 0), strict=True))
    assert both.makespan <= 3 * alone.makespan


def rows(trace: Trace, chosen: np.ndarray) -> list[list[float]]:
    columns = trace.rank, trace.task, trace.queued, trace.ready, trace.start, trace.end
    return [column[chosen].tolist() for column in columns]


def test_gathers_at_the_start_and_at_the_end_are_the_only_collectives_that_look_back() -> None:
    for data in STRATEGIES:
        (only,) = repeat_steps(one_step(data), 2).programs
        half, of = len(only.tasks) // 2, only.step_indices(2)
        back = [n for n, task in enumerate(only.tasks) if any(of[needed] < of[n] for needed in task.depends_on)]
        alone = [
            half + n
            for n, task in enumerate(only.tasks[:half])
            if isinstance(task, CollectiveTask) and not task.depends_on
        ]
        trailing = isinstance(only.tasks[half - 1], CollectiveTask)
        assert back == alone + ([named(only, "F4", 1)[0]] if trailing else [])
