"""The critical path split into sections, by hand and in any scenario."""

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
from tests.results.random_trace_cases import trace_cases
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    OPTIMIZER_STEP,
    SpanEvent,
    TraceCase,
    collective_task,
    receive_task,
)
from tests.strategies import scenarios

DATA, RECEIVE = Stream.DP, Stream.RECEIVE


def path_sections(case: TraceCase) -> CriticalPathSections:
    return split_critical_path(case.trace_table, find_critical_path(case.trace), case.segment_timing)


def check_sections(sections: CriticalPathSections, makespan: float) -> None:
    """Sections and intervals are contiguous from 0 to the makespan, and so are the categories."""
    tolerance = {"rel": 1e-9, "abs": 1e-9 * (1 + makespan)}
    for start, end in (
        ([section.start for section in sections.sections], [section.end for section in sections.sections]),
        (sections.intervals.start.tolist(), sections.intervals.end.tolist()),
    ):
        assert [0.0, *end] == pytest.approx([*start, makespan], **tolerance)
    assert sections.category_seconds.sum() == pytest.approx(makespan, **tolerance)
    assert (np.diff([section.rank for section in sections.sections]) != 0).all()


@given(trace_cases().filter(lambda case: len(case.events) > 0 and case.trace.makespan > 0))
def test_sections_tile_the_step_of_any_trace(case: TraceCase) -> None:
    check_sections(path_sections(case), case.trace.makespan)


@given(scenarios())
@examples(12)
def test_sections_tile_the_steps_of_any_scenario(scenario: Scenario) -> None:
    result = simulate(scenario)
    trace_table = build_trace_table(result.trace, result.program, scenario.steps)
    check_sections(
        split_critical_path(trace_table, result.critical_path, result.cost.time_segment), result.trace.makespan
    )


def test_a_message_starts_a_section() -> None:
    """Rank 0 runs forward; rank 1 receives it, runs forward and backward, then waits for a second, and finishes."""
    case = TraceCase(
        (
            SpanEvent(FORWARD, 0, 2),
            SpanEvent(receive_task(), 2, 3, 0, RECEIVE, rank=1),
            SpanEvent(FORWARD, 3, 5, 1, rank=1),
            SpanEvent(BACKWARD, 5, 9, 2, rank=1),
            SpanEvent(OPTIMIZER_STEP, 10, 11, 3, rank=1),
        ),
        (0, 1),
        has_pipeline=True,
    )
    first, second = path_sections(case).sections
    assert (first.rank, first.start, first.end, first.link) == (0, 0.0, 2.0, PathLink.BEGINNING)
    assert (second.rank, second.start, second.end, second.link) == (1, 2.0, 11.0, PathLink.MESSAGE)
    assert second.passes == (MicrobatchRange(ActionKind.FORWARD, 0, 0), MicrobatchRange(ActionKind.BACKWARD, 0, 0))
    assert second.other_names == ("kernels",)
    category_seconds = dict(
        zip(
            [category.value for category in TIME_CATEGORIES],
            path_sections(case).category_seconds.sum(axis=0).tolist(),
            strict=True,
        )
    )
    assert {name: value for name, value in category_seconds.items() if value} == {
        "compute": 8.0, "exposed pp": 1.0, "wait": 1.0, "optimizer": 1.0,
    }  # fmt: skip


def test_the_path_continues_from_the_last_member_of_a_collective() -> None:
    case = TraceCase((SpanEvent(FORWARD, 0, 2, rank=1), SpanEvent(collective_task("dp"), 2, 3, 0, DATA)), (0, 1))
    assert [(section.rank, section.link) for section in path_sections(case).sections] == [
        (1, PathLink.BEGINNING),
        (0, PathLink.GROUP),
    ]


def test_intervals_change_with_the_rank_and_the_dominant_category() -> None:
    case = TraceCase(
        (SpanEvent(FORWARD, 0, 2), SpanEvent(FORWARD, 2, 4, 0), SpanEvent(collective_task("dp"), 5, 6, 1, DATA))
    )
    intervals = path_sections(case).intervals
    names = [TIME_CATEGORIES[index].value for index in intervals.category.tolist()]
    assert list(zip(names, intervals.start.tolist(), intervals.end.tolist(), strict=True)) == [
        ("compute", 0.0, 4.0), ("wait", 4.0, 5.0), ("exposed dp", 5.0, 6.0),
    ]  # fmt: skip
