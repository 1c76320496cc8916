"""Breakdowns of full pipelines against closed forms.

A dry run of a schedule with forward f = 1 and backward b = 2 and messages that take no time gives the trace.
Every rank works m (f + b), so with the step at (m + p - 1)(f + b) every rank idles (p - 1)(f + b); only its
phases differ.
"""

import numpy as np
import pytest

from clustersim.program.action import Action, ActionKind
from clustersim.program.task import ComputeTask, Operation, ReceiveTask, Segment, Stream, WorkType
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.utilization import bubble_fraction
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.validation import dry_run
from tests.results.trace_cases import KERNEL, SpanEvent, TraceCase, comm_op

F = ActionKind.FORWARD
SEGMENTS = {kind: Segment(kind.value, (Operation(KERNEL, WorkType.FORWARD),)) for kind in ActionKind}
SECONDS = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}
SHAPES = [(2, 2), (3, 6), (4, 8), (5, 10)]


def dry_run_breakdown(schedule: Schedule, ranks: int, microbatches: int) -> TimeBreakdown:
    """Run the schedule; each action waits for a zero-length message from the previous (or next) stage."""
    order = schedule.order(ranks, microbatches)
    last_stage = ranks * schedule.placement(ranks).max_chunks - 1
    ends = dry_run(order).end_times
    end_times = {
        action: end
        for actions, rank_ends in zip(order, ends, strict=True)
        for action, end in zip(actions, rank_ends, strict=True)
    }
    events: list[SpanEvent] = []
    for rank, actions in enumerate(order):
        for action in actions:
            stage_offset = -1 if action.kind is F else 1
            source = Action(action.stage + stage_offset, action.kind, action.microbatch)
            predecessor = -1
            if 0 <= source.stage <= last_stage:
                predecessor = len(events)
                receive = ReceiveTask(comm_op("pp_next"), source)
                events.append(SpanEvent(receive, end_times[source], end_times[source], -1, Stream.RECEIVE, rank))
            task = ComputeTask(SEGMENTS[action.kind], action=action)
            events.append(
                SpanEvent(task, end_times[action] - SECONDS[action.kind], end_times[action], predecessor, rank=rank)
            )
    case = TraceCase(tuple(events), tuple(range(ranks)), has_pipeline=True)
    return compute_breakdown(case.trace_table, case.segment_timing)


def bubble_phases(breakdown: TimeBreakdown, rank: int) -> tuple[float, float, float]:
    category_seconds = breakdown.rank_seconds(rank)
    return category_seconds["bubble warm-up"], category_seconds["bubble steady"], category_seconds["bubble cool-down"]


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_gpipe_bubbles_by_rank(ranks: int, microbatches: int) -> None:
    """The phases of GPipe's idle time.

    Rank r waits r f for its first forward, (p - 1 - r)(f + b) for the wave to go down and come back, and r b at the
    end for the ranks before it. Nothing waits in between.
    """
    breakdown = dry_run_breakdown(GPipe(), ranks, microbatches)
    for rank in range(ranks):
        ranks_after = ranks - 1 - rank
        assert bubble_phases(breakdown, rank) == pytest.approx((rank * 1 + ranks_after * 3, 0, rank * 2))


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_1f1b_bubbles_on_the_first_and_last_rank(ranks: int, microbatches: int) -> None:
    """The phases of 1F1B's idle time where they are simple.

    The last rank waits (p - 1) f, then works without gaps, and (p - 1) b are left at the end. The first rank
    starts at 0, runs p forwards and waits until its first gradient has come up through p - 1 ranks, at p f + (p
    - 1) b + b.
    """
    breakdown = dry_run_breakdown(OneFOneB(), ranks, microbatches)
    assert bubble_phases(breakdown, ranks - 1) == pytest.approx((ranks - 1, 0, 2 * (ranks - 1)))
    warmup, steady, cooldown = bubble_phases(breakdown, 0)
    assert warmup == pytest.approx(2 * (ranks - 1))
    assert steady + cooldown == pytest.approx(ranks - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), Interleaved(2), Interleaved(3)])
def test_the_bubble_fraction_is_the_closed_form_on_every_rank(
    schedule: Schedule, ranks: int, microbatches: int
) -> None:
    """(p - 1)/(v m) of the ideal time is (p - 1)/(v m + p - 1) of the step, and nothing else idles."""
    breakdown = dry_run_breakdown(schedule, ranks, microbatches)
    expected = (ranks - 1) / (schedule.placement(ranks).max_chunks * microbatches + ranks - 1)
    assert bubble_fraction(breakdown) == pytest.approx(expected)
    idle = [sum(bubble_phases(breakdown, rank)) for rank in range(ranks)]
    assert np.allclose(idle, (ranks - 1) * 3)
    assert breakdown.mean_seconds()["wait"] == pytest.approx(0, abs=1e-12)
