"""Which dependency an event waited for, where several end at the same time."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.program.task import Stream
from clustersim.results.critical_predecessors import TIE_TOLERANCE, PredecessorLookup
from clustersim.results.time_breakdown import compute_breakdown
from tests.results.trace_cases import BACKWARD, FORWARD, SpanEvent, TraceCase, collective_task, nonzero, receive_task

ROUNDING = 1e-15


def waiting_case(message_end: float, gather_end: float, cause: int, *, first: int = 1) -> TraceCase:
    """A backward that waits for a message and a gather, tasks 1 and 2; first: the dependency that it lists first."""
    dependencies = (first, 3 - first)
    start = max(message_end, gather_end)
    return TraceCase(
        (
            SpanEvent(FORWARD, 0.0, 1.0),
            SpanEvent(receive_task("pp_previous"), 2.0, message_end, stream=Stream.RECEIVE),
            SpanEvent(collective_task("dp"), 1.0, gather_end, stream=Stream.DP),
            SpanEvent(replace(BACKWARD, depends_on=dependencies), start, start + 1.0, cause),
        )
    )


@pytest.mark.parametrize("late", [-ROUNDING, 0.0, ROUNDING])
@pytest.mark.parametrize("cause", [1, 2])
@pytest.mark.parametrize("first", [1, 2])
def test_of_tied_dependencies_the_first_listed_is_the_predecessor(late: float, cause: int, first: int) -> None:
    case = waiting_case(4.0 + late, 4.0, cause, first=first)
    assert PredecessorLookup.from_trace(case.trace_table)(np.arange(4)).tolist()[3] == first


@pytest.mark.parametrize("first", [1, 2])
def test_a_dependency_that_ended_earlier_is_not_the_predecessor(first: int) -> None:
    """The makespan is 5 s; a gap of more than 1e-9 of it is no tie."""
    gap = 6.0 * TIE_TOLERANCE
    assert PredecessorLookup.from_trace(waiting_case(4.0, 4.0 - gap, 1, first=first).trace_table)(
        np.array([3])
    ).tolist() == [1]
    assert PredecessorLookup.from_trace(waiting_case(4.0 - gap, 4.0, 2, first=first).trace_table)(
        np.array([3])
    ).tolist() == [2]


def test_a_predecessor_on_another_rank_is_kept() -> None:
    """No dependency on the rank ended when the event started, so the predecessor recorded in the trace stays."""
    case = waiting_case(3.0, 2.0, 0)
    later_case = TraceCase((*case.events[:3], SpanEvent(replace(BACKWARD, depends_on=(1, 2)), 4.0, 5.0, 0)))
    assert PredecessorLookup.from_trace(later_case.trace_table)(np.array([3, 0])).tolist() == [0, -1]


def test_the_breakdown_does_not_depend_on_how_ties_are_broken() -> None:
    """3 s of waiting for a message transferred in 2 s of them, or for a gather transferred in all 3."""
    breakdowns = [
        {
            name: round(seconds, 9)
            for name, seconds in nonzero(
                compute_breakdown(case.trace_table, case.segment_timing).rank_seconds(0)
            ).items()
        }
        for case in (waiting_case(4.0 + ROUNDING, 4.0, 1), waiting_case(4.0, 4.0 + ROUNDING, 2))
    ]
    assert breakdowns[0] == breakdowns[1]
    assert breakdowns[0]["exposed pp"] == 2.0
