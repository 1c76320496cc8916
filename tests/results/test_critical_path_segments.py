"""The critical path cut into pieces, by hand and in any scenario."""

import numpy as np
import pytest
from hypothesis import given

from clustersim import Scenario, simulate
from clustersim.program.action import ActionKind
from clustersim.program.task import Stream
from clustersim.results.critical_path import find_critical_path
from clustersim.results.critical_path_segments import (
    CriticalPathSections,
    MicrobatchRange,
    PathLink,
    split_critical_path,
)
from clustersim.results.time_categories import TIME_CATEGORIES
from clustersim.results.trace_table import build_trace_table
from tests.conftest import examples
from tests.results.random_trace_cases import cases
from tests.results.trace_cases import BACKWARD, FORWARD, STEP, Case, Row, collective, receive
from tests.strategies import scenarios

DATA, RECEIVE = Stream.DP, Stream.RECEIVE


def cut(case: Case) -> CriticalPathSections:
    return split_critical_path(case.joined, find_critical_path(case.trace), case.timing_of)


def check(found: CriticalPathSections, makespan: float) -> None:
    """Pieces and legs follow each other from 0 to the makespan, and so do the parts."""
    close = {"rel": 1e-9, "abs": 1e-9 * (1 + makespan)}
    for start, end in (
        ([piece.start for piece in found.sections], [piece.end for piece in found.sections]),
        (found.intervals.start.tolist(), found.intervals.end.tolist()),
    ):
        assert [0.0, *end] == pytest.approx([*start, makespan], **close)
    assert found.category_seconds.sum() == pytest.approx(makespan, **close)
    assert (np.diff([piece.rank for piece in found.sections]) != 0).all()


@given(cases().filter(lambda case: len(case.rows) > 0 and case.trace.makespan > 0))
def test_pieces_tile_the_step_in_any_trace(case: Case) -> None:
    check(cut(case), case.trace.makespan)


@given(scenarios())
@examples(12)
def test_pieces_tile_the_steps_of_any_scenario(scenario: Scenario) -> None:
    result = simulate(scenario)
    rows = build_trace_table(result.trace, result.program, scenario.steps)
    check(split_critical_path(rows, result.critical_path, result.cost.time_segment), result.trace.makespan)


def test_a_message_begins_a_piece() -> None:
    """Rank 0 runs forward, rank 1 gets it, runs forward and backward, then waits for a second, and finishes."""
    case = Case(
        (
            Row(FORWARD, 0, 2), Row(receive(), 2, 3, 0, RECEIVE, rank=1), Row(FORWARD, 3, 5, 1, rank=1),
            Row(BACKWARD, 5, 9, 2, rank=1), Row(STEP, 10, 11, 3, rank=1),
        ),
        (0, 1), staged=True,
    )  # fmt: skip
    first, second = cut(case).sections
    assert (first.rank, first.start, first.end, first.link) == (0, 0.0, 2.0, PathLink.BEGINNING)
    assert (second.rank, second.start, second.end, second.link) == (1, 2.0, 11.0, PathLink.MESSAGE)
    assert second.passes == (MicrobatchRange(ActionKind.FORWARD, 0, 0), MicrobatchRange(ActionKind.BACKWARD, 0, 0))
    assert second.other_names == ("kernels",)
    parts = dict(
        zip([part.value for part in TIME_CATEGORIES], cut(case).category_seconds.sum(axis=0).tolist(), strict=True)
    )
    assert {name: value for name, value in parts.items() if value} == {
        "compute": 8.0, "exposed pp": 1.0, "wait": 1.0, "optimizer": 1.0,
    }  # fmt: skip


def test_the_last_member_of_a_collective_hands_the_path_on() -> None:
    case = Case((Row(FORWARD, 0, 2, rank=1), Row(collective("dp"), 2, 3, 0, DATA)), (0, 1))
    assert [(piece.rank, piece.link) for piece in cut(case).sections] == [(1, PathLink.BEGINNING), (0, PathLink.GROUP)]


def test_legs_change_with_the_rank_and_with_what_takes_most() -> None:
    case = Case((Row(FORWARD, 0, 2), Row(FORWARD, 2, 4, 0), Row(collective("dp"), 5, 6, 1, DATA)))
    found = cut(case).intervals
    names = [TIME_CATEGORIES[place].value for place in found.category.tolist()]
    assert list(zip(names, found.start.tolist(), found.end.tolist(), strict=True)) == [
        ("compute", 0.0, 4.0), ("wait", 4.0, 5.0), ("exposed dp", 5.0, 6.0),
    ]  # fmt: skip
