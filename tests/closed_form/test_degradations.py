"""Slow ranks and jitter in lowered training steps, against closed forms."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import pytest

from clustersim.cost.jitter import Jitter
from clustersim.parallel.data_parallel_strategy import DdpStrategy, Zero1
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import PIPELINE, TENSOR
from clustersim.program.task import ComputeTask
from clustersim.results.time_categories import BUBBLE_CATEGORIES
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from tests.closed_form.degraded_step import Disturbed, Ran
from tests.closed_form.fixed_durations import Fixed, Step

F, B, OPTIMIZER, REDUCTION = 1.0, 2.0, 0.5, 3.0
LAYERS = 4
WORK = LAYERS * (F + B)
FIXED = Fixed(F, B, optimizer=OPTIMIZER, exchanges={"reduce gradients": REDUCTION})
AT_END = DdpStrategy(overlap=False)
"""Gradients are reduced in one piece behind the backward."""


def waited(ran: Ran, rank: int) -> float:
    """Seconds in which a rank waits for others, bubbles included."""
    parts = ran.of(rank)
    return sum(parts.get(name, 0.0) for name in ("wait", *(part.value for part in BUBBLE_CATEGORIES)))


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_rank_in_data_parallelism_sets_the_step_and_all_others_wait_the_difference(
    speed: float, ranks: int
) -> None:
    """It works L (f + b)/s, all reduce for r, and its optimizer takes o/s.

    Another works L (f + b) and waits for the slow one before the reduction and, since the step ends with the slow
    one's optimizer, behind its own: the difference of their work in all. The critical path is the slow rank's.
    """
    ran = Disturbed(Step(LAYERS, Layout(dp=ranks, data=AT_END)), FIXED, {1: speed}).ran
    assert ran.seconds == pytest.approx((WORK + OPTIMIZER) / speed + REDUCTION)
    slow = {"compute": WORK / speed, "optimizer": OPTIMIZER / speed, "exposed dp": REDUCTION}
    assert ran.of(1) == pytest.approx(slow)
    usual = {"compute": WORK, "optimizer": OPTIMIZER, "exposed dp": REDUCTION}
    assert ran.of(0) == pytest.approx({**usual, "wait": (WORK + OPTIMIZER) * (1 / speed - 1)})
    assert ran.breakdown.mean_seconds()["wait"] == pytest.approx(waited(ran, 0) * (ranks - 1) / ranks)
    assert ran.path == pytest.approx(slow)
    assert 1 in ran.path_ranks
    assert ran.classes.count == 2


def test_two_slow_ranks_cost_no_more_than_the_slower() -> None:
    one = Disturbed(Step(LAYERS, Layout(dp=4, data=AT_END)), FIXED, {3: 0.5}).ran
    two = Disturbed(Step(LAYERS, Layout(dp=4, data=AT_END)), FIXED, {3: 0.5, 1: 0.8}).ran
    assert two.seconds == one.seconds
    assert waited(two, 1) == pytest.approx((WORK + OPTIMIZER) * (1 / 0.5 - 1 / 0.8))


def test_the_partner_of_a_slow_rank_waits_inside_its_blocks() -> None:
    """Two ranks that meet in every layer: both end at the slow one's pace, but for optimizers, behind all meetings."""
    ran = Disturbed(Step(LAYERS, Layout(tp=2)), FIXED, {0: 0.5}).ran
    assert ran.seconds == 2 * (WORK + OPTIMIZER)
    assert ran.trace.waited[ran.trace.rank == 1].sum() == pytest.approx(WORK)
    assert not ran.trace.waited[ran.trace.rank == 0].any()
    assert ran.of(1) == pytest.approx({"compute": WORK, "optimizer": OPTIMIZER, "wait": WORK + OPTIMIZER})


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("dp", "tp", "cp", "pp")])
def test_a_slow_rank_slows_its_whole_tensor_parallel_group(order: tuple[str, ...]) -> None:
    """Its partner meets it in every layer, so both go at its pace: each half as long, the partner waits inside.

    The other group waits for them at the reduction, which joins it with both of them.
    """
    layout = Layout(tp=2, dp=2, order=order, data=AT_END)
    ran = Disturbed(Step(LAYERS, layout), FIXED, {0: 0.5}).ran
    partner = int(ran.program.groups["tp"].members[0][1])
    assert ran.seconds == pytest.approx(2 * (WORK + OPTIMIZER) + REDUCTION)
    inside = ran.trace.waited[ran.trace.rank == partner].sum()
    # behind the last meeting of the last layer's backward nothing takes time, so all of it is inside blocks
    assert inside == pytest.approx(WORK)
    assert not ran.trace.waited[ran.trace.rank != partner].any()
    for rank in set(range(4)) - {0}:
        assert ran.of(rank)["wait"] == pytest.approx(WORK + OPTIMIZER)
    assert "wait" not in ran.of(0)


@pytest.mark.parametrize("microbatches", [1, 2, 6])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_slow_rank_slows_its_whole_pipeline_replica(microbatches: int, stage: int) -> None:
    """Of two replicas of two stages, two GPUs each, one GPU in one stage is at half speed.

    That stage takes 2 (F + B) a microbatch, F and B through its two layers, the other F + B. So the replica runs as a
    pipeline with a slow stage does; the other replica waits for it at the reductions.
    """
    layout = Layout(tp=2, dp=2, pp=2, data=AT_END)
    step = Step(LAYERS, layout, OneFOneB(), microbatches)
    slow = int(np.flatnonzero(step.program.program_index == stage)[0])
    ran = Disturbed(step, Fixed(F, B), {slow: 0.5}).ran
    alone = Disturbed(Step(LAYERS, Layout(pp=2), OneFOneB(), microbatches), Fixed(F, B), {stage: 0.5}).ran
    assert ran.seconds == pytest.approx(alone.seconds)
    usual = Disturbed(Step(LAYERS, Layout(pp=2), OneFOneB(), microbatches), Fixed(F, B)).ran
    replica = set(layout.mesh.groups_along(TENSOR, PIPELINE)[0].tolist())
    assert slow in replica
    for rank in set(range(8)) - replica:
        assert waited(ran, rank) == pytest.approx(ran.seconds - usual.seconds + waited(usual, 0))


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()])
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_a_slow_stage_sets_the_pace_of_a_pipeline(schedule: Schedule, ranks: int, slow: int, microbatches: int) -> None:
    """Only the slow stage counts, with m s (F + B), and what it must wait for: stage i of p.

    Its first forward comes after i F of the stages before it, and behind its last backward i B follow. Between its last
    forward and its first backward GPipe has (p - 1 - i)(F + B) of the stages behind it, so idle for p - 1 in all.
    In 1F1B a stage j begins its first backward after min(m, p - j) forwards. So before the slow one's first backward,
    its last forward must pass those stages behind it that need as many: j <= p - m. The others have been through while
    it did another forward (s F = 16 is longer than all they do). So it is idle for i, but at least p - m, stages.
    """
    slowness = 16.0
    step = Step(ranks, Layout(pp=ranks), schedule, microbatches)
    ran = Disturbed(step, Fixed(F, B), {slow: 1 / slowness}).ran
    idle = max(slow, ranks - microbatches) if isinstance(schedule, OneFOneB) else ranks - 1
    assert ran.seconds == pytest.approx(idle * (F + B) + microbatches * slowness * (F + B))
    assert waited(ran, slow) == pytest.approx(idle * (F + B))
    for rank in set(range(ranks)) - {slow}:
        assert waited(ran, rank) == pytest.approx(ran.seconds - microbatches * (F + B))
        assert "wait" not in ran.of(rank), "what stages wait for each other is bubble"


@dataclass(frozen=True)
class Split:
    """A layout, the slow rank, and in which classes the ranks then are."""

    layout: Layout
    slow: int
    classes: list[list[int]]


SPLITS = {
    "nobody is slow": Split(Layout(dp=4, pp=2), -1, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "data x pipeline": Split(Layout(dp=4, pp=2), 2, [[0, 1, 3], [2], [4, 5, 7], [6]]),
    "data x pipeline, the other stage": Split(Layout(dp=4, pp=2), 5, [[0, 2, 3], [1], [4, 6, 7], [5]]),
    "data x tensor": Split(Layout(dp=4, tp=2), 2, [[0, 4, 6], [1, 5, 7], [2], [3]]),
    "data x context": Split(Layout(dp=4, cp=2), 2, [[0, 1, 4, 5, 6, 7], [2], [3]]),
    "one replica": Split(Layout(tp=2, pp=2), 3, [[0], [1], [2], [3]]),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_slow_rank_splits_the_classes_that_can_feel_it_and_no_others(case: str) -> None:
    """The slow rank; those that meet it in their replica; and, one for each place in a replica, all others.

    Data-parallel groups join equal places of all replicas, so the others of one place all meet the slow rank (or its
    neighbour) in the same way. Context-parallel ranks reduce gradients together, so they are all in one group, and
    those of the other replicas are alike.
    """
    split = SPLITS[case]
    speeds = {} if split.slow < 0 else {split.slow: 0.5}
    colour = Disturbed(Step(LAYERS, split.layout, microbatches=2), FIXED, speeds).run().classes.rank_colours
    found = sorted(np.flatnonzero(colour == item).tolist() for item in set(colour.tolist()))
    assert found == split.classes


def test_ranks_that_a_slow_rank_cannot_reach_stay_folded() -> None:
    """Without any exchange between replicas, only its own are told apart from the others."""
    step = Step(LAYERS, Layout(pp=2), microbatches=2)
    assert Disturbed(step, FIXED, {0: 0.5}).run().classes.count == 2


EXPECTED_MAXIMUM = {2: 0.5642, 8: 1.4236, 32: 2.0697}
"""Of n standard normal draws (Harter, "Expected values of normal order statistics", Biometrika 48, 1961, table 1)."""


@pytest.mark.parametrize("ranks", sorted(EXPECTED_MAXIMUM))
def test_many_ranks_wait_for_the_slowest_of_the_moment(ranks: int) -> None:
    """Jitter of σ on every kernel makes a rank's work of a step normal, with mean W and deviation σ √(Σ d²).

    All ranks meet once a step, so a step takes W + r plus the largest of n deviations, on average; its mean over N
    steps errs by about their deviation (at most 1) over √N. The optimizer takes no time here.
    """
    std, steps = 0.05, 150
    fixed = Fixed(F, B, exchanges={"reduce gradients": REDUCTION})
    step = Step(LAYERS, Layout(dp=ranks, data=AT_END))
    ran = Disturbed(step, fixed, steps=steps, jitter=Jitter(std, seed=3)).run()
    deviation = std * sqrt(LAYERS * (F**2 + B**2))
    expected = WORK + REDUCTION + EXPECTED_MAXIMUM[ranks] * deviation
    assert ran.times.mean() == pytest.approx(expected, abs=4 * deviation / sqrt(steps))
    mean = ran.breakdown.mean_seconds()
    assert mean["wait"] == pytest.approx(EXPECTED_MAXIMUM[ranks] * deviation, abs=4 * deviation / sqrt(steps))


def test_a_rank_that_meets_nobody_works_the_sum_of_its_own_kernels() -> None:
    """Each multiplied by the factor of its place in the program of all steps."""
    jitter = Jitter(0.1, seed=2)
    ran = Disturbed(Step(LAYERS), Fixed(F, B), steps=20, jitter=jitter).run()
    (own,) = ran.program.programs
    factors = jitter.rank_factors(0, own.operation_offsets[-1])
    kernels = [
        ran.cost.time_segment(0, task.segment).kernel_seconds for task in own.tasks if isinstance(task, ComputeTask)
    ]
    assert ran.seconds == pytest.approx(float(np.concatenate(kernels) @ factors))


def test_zero_gathers_wait_for_the_slow_rank_of_the_step_before() -> None:
    """ZeRO-1 with overlap gathers parameters at the start of a step, when the slow rank's optimizer is done.

    Two ranks, one at half speed, whose step takes 2 (W + o) + r + g: the other waits W + o in each.
    """
    fixed = Fixed(F, B, optimizer=OPTIMIZER, exchanges={"reduce gradients": REDUCTION, "gather parameters": 1.0})
    step = Step(LAYERS, Layout(dp=2, data=Zero1(bucket=1e9)))
    ran = Disturbed(step, fixed, {1: 0.5}, steps=3).ran
    each = 2 * (WORK + OPTIMIZER) + REDUCTION + 1.0
    assert ran.times.tolist() == pytest.approx([each] * 3)
    assert ran.of(0)["wait"] == pytest.approx(WORK + OPTIMIZER)
    assert ran.path == pytest.approx(ran.of(1))


def test_the_next_step_begins_while_a_slow_stage_ends_this_one() -> None:
    """Two stages of F = 2, B = 4 and optimizers of 6 s; the last one at half speed: 4, 8 and 12 s.

    The first step takes F + 24: the last stage waits for one forward, then works without a pause. The first stage's
    backward ends at 18 and its optimizer at 24, so its next forward ends at 26, just as the last stage's optimizer
    does: every further step takes 24.
    """
    fixed = Fixed(F, B, optimizer=6.0)
    ran = Disturbed(Step(LAYERS, Layout(pp=2)), fixed, {1: 0.5}, steps=3).ran
    assert ran.times.tolist() == pytest.approx([26.0, 24.0, 24.0])
