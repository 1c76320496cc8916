"""Breakdowns of whole pipelines against closed forms.

A dry run of a schedule with forward f = 1 and backward b = 2 and messages that take no time gives the trace. Every rank
works m (f + b), so with the step at (m + p - 1)(f + b) every rank idles (p - 1)(f + b); only its phases differ.
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
from tests.results.trace_cases import KERNEL, Case, Row, exchange

F = ActionKind.FORWARD
BLOCKS = {kind: Segment(kind.value, (Operation(KERNEL, WorkType.FORWARD),)) for kind in ActionKind}
SECONDS = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}
SHAPES = [(2, 2), (3, 6), (4, 8), (5, 10)]


def folded(schedule: Schedule, ranks: int, microbatches: int) -> TimeBreakdown:
    """Run the schedule; each action waits for a message of no length from the stage before (or behind) it."""
    order = schedule.order(ranks, microbatches)
    last = ranks * schedule.placement(ranks).max_chunks - 1
    ends = dry_run(order).end_times
    done = {action: end for row, when in zip(order, ends, strict=True) for action, end in zip(row, when, strict=True)}
    rows: list[Row] = []
    for rank, actions in enumerate(order):
        for action in actions:
            step = -1 if action.kind is F else 1
            source = Action(action.stage + step, action.kind, action.microbatch)
            cause = -1
            if 0 <= source.stage <= last:
                cause = len(rows)
                receive = ReceiveTask(exchange("pp_next"), source)
                rows.append(Row(receive, done[source], done[source], -1, Stream.RECEIVE, rank))
            task = ComputeTask(BLOCKS[action.kind], action=action)
            rows.append(Row(task, done[action] - SECONDS[action.kind], done[action], cause, rank=rank))
    case = Case(tuple(rows), tuple(range(ranks)), staged=True)
    return compute_breakdown(case.joined, case.timing_of)


def bubbles(answer: TimeBreakdown, rank: int) -> tuple[float, float, float]:
    parts = answer.rank_seconds(rank)
    return parts["bubble warm-up"], parts["bubble steady"], parts["bubble cool-down"]


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_gpipe_bubbles_by_rank(ranks: int, microbatches: int) -> None:
    """The phases of GPipe's idle time.

    Rank r waits r f for its first forward, (p - 1 - r)(f + b) for the wave to go down and come back, and r b at the
    end for the ranks before it. Nothing waits in between.
    """
    answer = folded(GPipe(), ranks, microbatches)
    for rank in range(ranks):
        after = ranks - 1 - rank
        assert bubbles(answer, rank) == pytest.approx((rank * 1 + after * 3, 0, rank * 2))


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_1f1b_bubbles_on_the_outer_ranks(ranks: int, microbatches: int) -> None:
    """The phases of 1F1B's idle time where they are simple.

    The last rank waits (p - 1) f, then works through, and (p - 1) b are left at the end. The first rank starts at 0,
    runs p forwards and waits until its first gradient has come up through p - 1 ranks, at p f + (p - 1) b + b.
    """
    answer = folded(OneFOneB(), ranks, microbatches)
    assert bubbles(answer, ranks - 1) == pytest.approx((ranks - 1, 0, 2 * (ranks - 1)))
    warmup, steady, cooldown = bubbles(answer, 0)
    assert warmup == pytest.approx(2 * (ranks - 1))
    assert steady + cooldown == pytest.approx(ranks - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), Interleaved(2), Interleaved(3)])
def test_the_bubble_is_the_closed_form_on_every_rank(schedule: Schedule, ranks: int, microbatches: int) -> None:
    """(p - 1)/(v m) of the ideal time is (p - 1)/(v m + p - 1) of the step, and nothing else idles."""
    answer = folded(schedule, ranks, microbatches)
    expected = (ranks - 1) / (schedule.placement(ranks).max_chunks * microbatches + ranks - 1)
    assert bubble_fraction(answer) == pytest.approx(expected)
    idle = [sum(bubbles(answer, rank)) for rank in range(ranks)]
    assert np.allclose(idle, (ranks - 1) * 3)
    assert answer.mean_seconds()["wait"] == pytest.approx(0, abs=1e-12)
