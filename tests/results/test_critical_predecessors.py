"""What a row waited for, where several things end together."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.program.task import Stream
from clustersim.results.critical_predecessors import TIE_TOLERANCE, PredecessorLookup
from clustersim.results.time_breakdown import compute_breakdown
from tests.results.trace_cases import BACKWARD, FORWARD, Case, Row, collective, nonzero, receive

BIT = 1e-15


def waiting(message: float, gather: float, cause: int, *, first: int = 1) -> Case:
    """A backward that waits for a message and a gathering, tasks 1 and 2; first: which it names first."""
    after = (first, 3 - first)
    begin = max(message, gather)
    return Case(
        (
            Row(FORWARD, 0.0, 1.0),
            Row(receive("pp_previous"), 2.0, message, stream=Stream.RECEIVE),
            Row(collective("dp"), 1.0, gather, stream=Stream.DP),
            Row(replace(BACKWARD, depends_on=after), begin, begin + 1.0, cause),
        )
    )


@pytest.mark.parametrize("late", [-BIT, 0.0, BIT])
@pytest.mark.parametrize("cause", [1, 2])
@pytest.mark.parametrize("first", [1, 2])
def test_of_two_that_end_together_the_first_that_is_named_is_the_cause(late: float, cause: int, first: int) -> None:
    case = waiting(4.0 + late, 4.0, cause, first=first)
    assert PredecessorLookup.from_trace(case.joined)(np.arange(4)).tolist()[3] == first


@pytest.mark.parametrize("first", [1, 2])
def test_what_ended_before_is_no_cause(first: int) -> None:
    """The makespan is 5 s; 1e-9 of it apart is apart."""
    apart = 6.0 * TIE_TOLERANCE
    assert PredecessorLookup.from_trace(waiting(4.0, 4.0 - apart, 1, first=first).joined)(np.array([3])).tolist() == [1]
    assert PredecessorLookup.from_trace(waiting(4.0 - apart, 4.0, 2, first=first).joined)(np.array([3])).tolist() == [2]


def test_what_ended_elsewhere_stays_the_cause() -> None:
    """Nothing of the rank's own ended when it began: the trace knows who did."""
    case = waiting(3.0, 2.0, 0)
    later = Case((*case.rows[:3], Row(replace(BACKWARD, depends_on=(1, 2)), 4.0, 5.0, 0)))
    assert PredecessorLookup.from_trace(later.joined)(np.array([3, 0])).tolist() == [0, -1]


def test_the_breakdown_is_the_same_whichever_ended_last() -> None:
    """3 s of waiting for a message that moved for 2 of them, or for a gathering that moved for all 3."""
    parts = [
        {
            name: round(seconds, 9)
            for name, seconds in nonzero(compute_breakdown(case.joined, case.timing_of).rank_seconds(0)).items()
        }
        for case in (waiting(4.0 + BIT, 4.0, 1), waiting(4.0, 4.0 + BIT, 2))
    ]
    assert parts[0] == parts[1]
    assert parts[0]["exposed pp"] == 2.0
