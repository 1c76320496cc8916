"""Where every second goes, on traces small enough to do by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.program.task import ComputeTask, Stream
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.time_categories import BUBBLE_CATEGORIES, TIME_CATEGORIES, TimeCategory
from tests.results.random_trace_cases import MIXED, MIXED_TIMING, cases
from tests.results.trace_cases import BACKWARD, FORWARD, STEP, Case, Row, collective, nonzero, receive

DATA, RECEIVE = Stream.DP, Stream.RECEIVE


def parts(case: Case, rank: int = 0) -> dict[str, float]:
    return nonzero(folded(case).rank_seconds(rank))


def folded(case: Case) -> TimeBreakdown:
    return compute_breakdown(case.joined, case.timing_of)


@given(cases())
def test_parts_sum_to_the_makespan_on_every_rank_and_in_the_mean(case: Case) -> None:
    answer = folded(case)
    makespan = case.trace.makespan
    for rank in range(len(case.representative)):
        assert sum(answer.rank_seconds(rank).values()) == pytest.approx(makespan, rel=1e-12, abs=1e-12)
    assert sum(answer.mean_seconds().values()) == pytest.approx(makespan, rel=1e-12, abs=1e-12)


@given(cases())
def test_no_part_is_negative(case: Case) -> None:
    assert (folded(case).seconds >= -1e-12 * (1 + case.trace.makespan)).all()


@given(cases(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_parts_of_a_span_sum_to_it_and_those_beside_it_add_up(case: Case, one: float, other: float) -> None:
    """Idle parts, which no block's mean over its runs divides, add up one by one."""
    makespan = case.trace.makespan
    since, until = (part * makespan for part in sorted((one, other)))
    spans = ((0.0, since), (since, until), (until, makespan))
    parts = [compute_breakdown(case.joined, case.timing_of, span).seconds for span in spans]
    for (begin, end), seconds in zip(spans, parts, strict=True):
        assert seconds.sum(axis=1) == pytest.approx(end - begin, rel=1e-9, abs=1e-12)
        assert (seconds >= -1e-12 * (1 + makespan)).all()
    idle = [part.index for part in BUBBLE_CATEGORIES]
    whole = folded(case).seconds
    assert sum(parts)[:, idle] == pytest.approx(whole[:, idle], rel=1e-9, abs=1e-12)
    assert sum(parts).sum(axis=1) == pytest.approx(whole.sum(axis=1), rel=1e-9, abs=1e-12)


def test_a_blocks_operations_are_told_apart() -> None:
    """Kernels by their work; exchanges, and what an overlap leaves exposed, by their axis."""
    case = Case((Row(ComputeTask(MIXED), 0, 9),), timings={MIXED: MIXED_TIMING})
    assert parts(case) == {
        "compute": 5.0, "recompute": 1.5, "optimizer": 0.75, "exposed tp": 1.25, "exposed cp": 0.5,
    }  # fmt: skip


def test_what_kernels_wait_for_their_host_has_a_part_of_its_own() -> None:
    """Of the 3 s, 1.5 s and 0.75 s of three kernels by themselves, the host lets the GPU wait 1 s, 0.5 s and 0.25 s."""
    hosted = replace(MIXED_TIMING, launch_stalls=np.array([1.0, 0.0, 0.0, 0.5, 0.0, 0.25]))
    case = Case((Row(ComputeTask(MIXED), 0, 9),), timings={MIXED: hosted})
    assert parts(case) == {
        "compute": 4.0, "recompute": 1.0, "optimizer": 0.5, "kernel launch": 1.75, "exposed tp": 1.25,
        "exposed cp": 0.5,
    }  # fmt: skip


def test_waiting_and_slowing_inside_a_block_have_parts_of_their_own() -> None:
    """9 s of own time in 12 s: 2 s for members of an exchange, 1 s by communication beside."""
    case = Case((Row(ComputeTask(MIXED), 0, 12, waited=2.0, slowed=1.0),), timings={MIXED: MIXED_TIMING})
    assert parts(case)["wait"] == 2.0
    assert parts(case)["slowed by communication"] == 1.0
    assert parts(case)["compute"] == 5.0


def test_what_nothing_else_explains_is_how_long_kernels_took() -> None:
    """7.25 s of kernels, 5 s of them compute, and 1.75 s of exchanges; in 4.5 s, the kernels have taken 2.75 s."""
    case = Case((Row(ComputeTask(MIXED), 0, 4.5),), timings={MIXED: MIXED_TIMING})
    assert parts(case)["compute"] == pytest.approx(5.0 * 2.75 / 7.25)
    assert parts(case)["exposed tp"] == pytest.approx(1.25)
    assert "wait" not in parts(case)


def test_waiting_for_activations_is_bubble_until_they_move() -> None:
    """Idle for 5 s; the message that ends it moves in the last 2."""
    case = Case((Row(receive(), 3, 5, -1, RECEIVE), Row(FORWARD, 5, 6, 0)), staged=True)
    assert parts(case) == {"bubble warm-up": 3.0, "exposed pp": 2.0, "compute": 1.0}


def test_only_the_part_of_a_transfer_inside_the_gap_is_exposed() -> None:
    """A message moves from 1 to 5, beside a forward until 3: 2 s of it are hidden."""
    case = Case((Row(FORWARD, 0, 3), Row(receive(), 1, 5, -1, RECEIVE), Row(BACKWARD, 5, 6, 1)), staged=True)
    assert parts(case) == {"compute": 4.0, "exposed pp": 2.0}


def test_bubbles_have_phases() -> None:
    """1 s idle before each of F F B F B: warm-up up to the first B, cool-down after the last F."""
    tasks = [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD]
    rows: list[Row] = []
    for place, task in enumerate(tasks):
        rows.append(Row(receive(), 2 * place + 1, 2 * place + 1, -1, RECEIVE))
        rows.append(Row(task, 2 * place + 1, 2 * place + 2, 2 * place))
    assert parts(Case(tuple(rows), staged=True)) == {
        "compute": 5.0, "bubble warm-up": 3.0, "bubble steady": 1.0, "bubble cool-down": 1.0,
    }  # fmt: skip


def test_a_collective_queued_behind_others_exposes_all_that_its_stream_moves() -> None:
    """Idle from 10 to 20 for a reduction that moves 16..20, behind one that moved 8..13.

    3 s and 4 s of them are exposed; in the 3 s between, the stream waited for other ranks.
    """
    rows = (
        Row(BACKWARD, 0, 10),
        Row(collective("dp", "first"), 8, 13, -1, DATA),
        Row(collective("dp", "second"), 16, 20, 1, DATA),
        Row(STEP, 20, 21, 2),
    )
    assert parts(Case(rows)) == {"compute": 10.0, "exposed dp": 7.0, "wait": 3.0, "optimizer": 1.0}


def test_waiting_for_all_stages_is_bubble_in_a_pipeline_and_wait_without_one() -> None:
    """The last stage ends its backward 5 s before the first, and waits for it in the reduction of the gradient norm."""
    rows = (Row(FORWARD, 0, 1), Row(BACKWARD, 1, 2), Row(collective("world"), 7, 8, -1, DATA), Row(STEP, 8, 9, 2))
    expected = {"compute": 2.0, "exposed dp": 1.0, "optimizer": 1.0}
    assert parts(Case(rows, staged=True)) == {**expected, "bubble cool-down": 5.0}
    assert parts(Case(rows)) == {**expected, "wait": 5.0}


def test_the_end_of_the_step_belongs_to_the_data_stream_then_to_the_pipeline() -> None:
    """Rank 0 ends computing at 10 of 20; its data stream moves 8..12 and 15..16 and waits for a replica from 12."""
    rows = (
        Row(BACKWARD, 0, 10),
        Row(collective("dp", "first"), 8, 12, -1, DATA),
        Row(collective("dp", "second"), 15, 16, 1, DATA),
        Row(BACKWARD, 0, 20, rank=1),
    )
    expected = {"compute": 10.0, "exposed dp": 3.0}
    assert parts(Case(rows, (0, 1), staged=True)) == {**expected, "wait": 3.0, "bubble cool-down": 4.0}
    assert parts(Case(rows, (0, 1))) == {**expected, "wait": 7.0}


def test_communication_beside_compute_is_hidden() -> None:
    rows = (Row(BACKWARD, 0, 10), Row(collective("dp"), 2, 9, -1, DATA))
    assert parts(Case(rows)) == {"compute": 10.0}


def test_a_collective_on_the_compute_stream_is_exposed_and_its_members_are_waited_for() -> None:
    rows = (Row(FORWARD, 0, 1), Row(collective("dp"), 4, 6), Row(STEP, 6, 7, 1))
    assert parts(Case(rows)) == {"compute": 1.0, "wait": 3.0, "exposed dp": 2.0, "optimizer": 1.0}


def test_a_gap_without_an_awaited_communication_is_wait() -> None:
    rows = (Row(FORWARD, 0, 1), Row(BACKWARD, 4, 5, 0))
    assert parts(Case(rows, staged=True)) == {"compute": 2.0, "wait": 3.0}


def test_another_ranks_communication_explains_no_gap() -> None:
    rows = (Row(receive(), 1, 4, -1, RECEIVE, rank=1), Row(FORWARD, 4, 5, 0))
    assert parts(Case(rows, (0, 1), staged=True)) == {"compute": 1.0, "wait": 4.0}


def test_a_rank_that_does_nothing_waits() -> None:
    rows = (Row(FORWARD, 0, 3),)
    assert parts(Case(rows, (0, 1)), 1) == {"wait": 3.0}
    assert parts(Case(rows, (0, 1), staged=True), 1) == {"bubble cool-down": 3.0}


def test_an_empty_trace_has_no_seconds() -> None:
    assert parts(Case(())) == {}


def test_the_mean_counts_every_rank_that_a_class_stands_for() -> None:
    """Ranks 0, 2 and 3 compute 4 s, rank 1 computes 8 s and is alone: mean compute (3 x 4 + 8) / 4 = 5."""
    answer = folded(Case((Row(FORWARD, 0, 4), Row(FORWARD, 0, 8, rank=1)), (0, 1, 0, 0)))
    assert answer.ranks.tolist() == [0, 1]
    assert answer.weights.tolist() == [3, 1]
    assert nonzero(answer.mean_seconds()) == {"compute": 5.0, "wait": 3.0}
    assert answer.rank_seconds(3) == answer.rank_seconds(0)
    assert answer.category_total(TimeCategory.COMPUTE, TimeCategory.WAIT) == 8.0
    assert answer.category_total(*BUBBLE_CATEGORIES) == 0.0


def test_the_names_are_the_parts_in_order() -> None:
    assert list(folded(Case((Row(FORWARD, 0, 4),))).mean_seconds()) == [part.value for part in TIME_CATEGORIES]
    assert [part.index for part in TIME_CATEGORIES] == np.arange(len(TIME_CATEGORIES)).tolist()
