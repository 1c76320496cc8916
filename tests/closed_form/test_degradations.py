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
from tests.closed_form.degraded_step import DegradedStep, StepRun
from tests.closed_form.fixed_durations import FixedDurations, Step

F, B, OPTIMIZER, REDUCTION = 1.0, 2.0, 0.5, 3.0
LAYERS = 4
WORK = LAYERS * (F + B)
DURATIONS = FixedDurations(F, B, optimizer=OPTIMIZER, comm_seconds={"reduce gradients": REDUCTION})
NO_OVERLAP_DDP = DdpStrategy(overlap=False)
"""Gradients are reduced in one collective after backward."""


def wait_seconds(run: StepRun, rank: int) -> float:
    """Seconds in which a rank waits for others, bubbles included."""
    categories = run.nonzero_categories(rank)
    return sum(categories.get(name, 0.0) for name in ("wait", *(bubble.value for bubble in BUBBLE_CATEGORIES)))


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_dp_rank_sets_the_step_and_the_others_wait(speed: float, ranks: int) -> None:
    """The slow rank computes L (f + b)/s, all reduce for r, and its optimizer takes o/s.

    Another computes L (f + b) and waits for the slow one before the reduction and, since the step ends with the
    slow one's optimizer, after its own: in total the difference of their work. The critical path is the slow
    rank's.
    """
    run = DegradedStep(Step(LAYERS, Layout(dp=ranks, data=NO_OVERLAP_DDP)), DURATIONS, {1: speed}).checked_run
    assert run.seconds == pytest.approx((WORK + OPTIMIZER) / speed + REDUCTION)
    slow_categories = {"compute": WORK / speed, "optimizer": OPTIMIZER / speed, "exposed dp": REDUCTION}
    assert run.nonzero_categories(1) == pytest.approx(slow_categories)
    nominal_categories = {"compute": WORK, "optimizer": OPTIMIZER, "exposed dp": REDUCTION}
    assert run.nonzero_categories(0) == pytest.approx(
        {**nominal_categories, "wait": (WORK + OPTIMIZER) * (1 / speed - 1)}
    )
    assert run.breakdown.mean_seconds()["wait"] == pytest.approx(wait_seconds(run, 0) * (ranks - 1) / ranks)
    assert run.path == pytest.approx(slow_categories)
    assert 1 in run.path_ranks
    assert run.classes.count == 2


def test_two_slow_ranks_cost_no_more_than_the_slower() -> None:
    one_slow = DegradedStep(Step(LAYERS, Layout(dp=4, data=NO_OVERLAP_DDP)), DURATIONS, {3: 0.5}).checked_run
    two_slow = DegradedStep(Step(LAYERS, Layout(dp=4, data=NO_OVERLAP_DDP)), DURATIONS, {3: 0.5, 1: 0.8}).checked_run
    assert two_slow.seconds == one_slow.seconds
    assert wait_seconds(two_slow, 1) == pytest.approx((WORK + OPTIMIZER) * (1 / 0.5 - 1 / 0.8))


def test_the_tp_peer_of_a_slow_rank_waits_inside_segments() -> None:
    """Two ranks that synchronize in every layer run at the slow one's speed, except the optimizers at the end."""
    run = DegradedStep(Step(LAYERS, Layout(tp=2)), DURATIONS, {0: 0.5}).checked_run
    assert run.seconds == 2 * (WORK + OPTIMIZER)
    assert run.trace.waited[run.trace.rank == 1].sum() == pytest.approx(WORK)
    assert not run.trace.waited[run.trace.rank == 0].any()
    assert run.nonzero_categories(1) == pytest.approx(
        {"compute": WORK, "optimizer": OPTIMIZER, "wait": WORK + OPTIMIZER}
    )


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("dp", "tp", "cp", "pp")])
def test_a_slow_rank_slows_its_tensor_parallel_group(order: tuple[str, ...]) -> None:
    """Its TP peer synchronizes with it in every layer, so both run at half speed; the peer waits inside segments.

    The other TP group waits for them at the gradient reduction.
    """
    layout = Layout(tp=2, dp=2, order=order, data=NO_OVERLAP_DDP)
    run = DegradedStep(Step(LAYERS, layout), DURATIONS, {0: 0.5}).checked_run
    tp_peer = int(run.program.groups["tp"].members[0][1])
    assert run.seconds == pytest.approx(2 * (WORK + OPTIMIZER) + REDUCTION)
    wait_in_segments = run.trace.waited[run.trace.rank == tp_peer].sum()
    # nothing takes time after the last TP sync of the last layer's backward, so all of it is inside segments
    assert wait_in_segments == pytest.approx(WORK)
    assert not run.trace.waited[run.trace.rank != tp_peer].any()
    for rank in set(range(4)) - {0}:
        assert run.nonzero_categories(rank)["wait"] == pytest.approx(WORK + OPTIMIZER)
    assert "wait" not in run.nonzero_categories(0)


@pytest.mark.parametrize("microbatches", [1, 2, 6])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_slow_rank_slows_its_pipeline_replica(microbatches: int, stage: int) -> None:
    """Two replicas of two stages with two GPUs each; one GPU in one stage is at half speed.

    That stage takes 2 (F + B) a microbatch, F and B through its two layers, the other F + B. So the replica runs
    like a pipeline with a slow stage; the other replica waits for it at the reductions.
    """
    layout = Layout(tp=2, dp=2, pp=2, data=NO_OVERLAP_DDP)
    step = Step(LAYERS, layout, OneFOneB(), microbatches)
    slow_rank = int(np.flatnonzero(step.program.program_index == stage)[0])
    run = DegradedStep(step, FixedDurations(F, B), {slow_rank: 0.5}).checked_run
    single_pipeline = DegradedStep(
        Step(LAYERS, Layout(pp=2), OneFOneB(), microbatches), FixedDurations(F, B), {stage: 0.5}
    ).checked_run
    assert run.seconds == pytest.approx(single_pipeline.seconds)
    nominal = DegradedStep(Step(LAYERS, Layout(pp=2), OneFOneB(), microbatches), FixedDurations(F, B)).checked_run
    replica = set(layout.mesh.groups_along(TENSOR, PIPELINE)[0].tolist())
    assert slow_rank in replica
    for rank in set(range(8)) - replica:
        assert wait_seconds(run, rank) == pytest.approx(run.seconds - nominal.seconds + wait_seconds(nominal, 0))


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()])
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_a_slow_stage_bounds_the_pipeline(schedule: Schedule, ranks: int, slow: int, microbatches: int) -> None:
    """Only the slow stage counts, with m s (F + B), and what it must wait for: stage i of p.

    Its first forward comes after i F of the stages before it, and behind its last backward i B follow. Between its last
    forward and its first backward GPipe has (p - 1 - i)(F + B) of the stages behind it, so idle for p - 1 in all.
    In 1F1B a stage j begins its first backward after min(m, p - j) forwards. So before the slow one's first backward,
    its last forward must pass those stages behind it that need as many: j <= p - m. The others have been through while
    it did another forward (s F = 16 is longer than all they do). So it is idle for i, but at least p - m, stages.
    """
    slowness = 16.0
    step = Step(ranks, Layout(pp=ranks), schedule, microbatches)
    run = DegradedStep(step, FixedDurations(F, B), {slow: 1 / slowness}).checked_run
    idle = max(slow, ranks - microbatches) if isinstance(schedule, OneFOneB) else ranks - 1
    assert run.seconds == pytest.approx(idle * (F + B) + microbatches * slowness * (F + B))
    assert wait_seconds(run, slow) == pytest.approx(idle * (F + B))
    for rank in set(range(ranks)) - {slow}:
        assert wait_seconds(run, rank) == pytest.approx(run.seconds - microbatches * (F + B))
        assert "wait" not in run.nonzero_categories(rank), "what stages wait for each other is bubble"


@dataclass(frozen=True)
class RankClassCase:
    """A layout, the slow rank, and the expected classes of equivalent ranks."""

    layout: Layout
    slow_rank: int
    classes: list[list[int]]


RANK_CLASS_CASES = {
    "nobody is slow": RankClassCase(Layout(dp=4, pp=2), -1, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "data x pipeline": RankClassCase(Layout(dp=4, pp=2), 2, [[0, 1, 3], [2], [4, 5, 7], [6]]),
    "data x pipeline, the other stage": RankClassCase(Layout(dp=4, pp=2), 5, [[0, 2, 3], [1], [4, 6, 7], [5]]),
    "data x tensor": RankClassCase(Layout(dp=4, tp=2), 2, [[0, 4, 6], [1, 5, 7], [2], [3]]),
    "data x context": RankClassCase(Layout(dp=4, cp=2), 2, [[0, 1, 4, 5, 6, 7], [2], [3]]),
    "one replica": RankClassCase(Layout(tp=2, pp=2), 3, [[0], [1], [2], [3]]),
}


@pytest.mark.parametrize("case", RANK_CLASS_CASES)
def test_a_slow_rank_splits_only_the_rank_classes_it_affects(case: str) -> None:
    """The slow rank; its peers in the replica; and all others, one class per position in a replica.

    DP groups connect equal positions of all replicas, so the others of one position all synchronize with the slow
    rank (or its neighbour) in the same way. CP ranks reduce gradients together, so they are all in one group, and
    those of the other replicas are equivalent.
    """
    expected = RANK_CLASS_CASES[case]
    speeds = {} if expected.slow_rank < 0 else {expected.slow_rank: 0.5}
    labels = DegradedStep(Step(LAYERS, expected.layout, microbatches=2), DURATIONS, speeds).run().classes.rank_colours
    rank_classes = sorted(np.flatnonzero(labels == label).tolist() for label in set(labels.tolist()))
    assert rank_classes == expected.classes


def test_ranks_not_connected_to_a_slow_rank_stay_folded() -> None:
    """Without communication between replicas, only the slow rank's replica is distinguished from the others."""
    step = Step(LAYERS, Layout(pp=2), microbatches=2)
    assert DegradedStep(step, DURATIONS, {0: 0.5}).run().classes.count == 2


EXPECTED_MAXIMUM = {2: 0.5642, 8: 1.4236, 32: 2.0697}
"""Of n standard normal draws (Harter, "Expected values of normal order statistics", Biometrika 48, 1961, table 1)."""


@pytest.mark.parametrize("ranks", sorted(EXPECTED_MAXIMUM))
def test_jitter_costs_the_expected_maximum_over_ranks(ranks: int) -> None:
    """Jitter of σ on every kernel makes a rank's work of a step normal, with mean W and deviation σ √(Σ d²).

    All ranks synchronize once a step, so a step takes W + r plus the largest of n deviations, on average; its
    mean over N steps errs by about their deviation (at most 1) over √N. The optimizer takes no time here.
    """
    std, steps = 0.05, 150
    durations = FixedDurations(F, B, comm_seconds={"reduce gradients": REDUCTION})
    step = Step(LAYERS, Layout(dp=ranks, data=NO_OVERLAP_DDP))
    run = DegradedStep(step, durations, steps=steps, jitter=Jitter(std, seed=3)).run()
    deviation = std * sqrt(LAYERS * (F**2 + B**2))
    expected = WORK + REDUCTION + EXPECTED_MAXIMUM[ranks] * deviation
    assert run.times.mean() == pytest.approx(expected, abs=4 * deviation / sqrt(steps))
    mean = run.breakdown.mean_seconds()
    assert mean["wait"] == pytest.approx(EXPECTED_MAXIMUM[ranks] * deviation, abs=4 * deviation / sqrt(steps))


def test_a_rank_without_peers_takes_the_sum_of_its_kernels() -> None:
    """Each kernel is multiplied by the jitter factor at its index in the program of all steps."""
    jitter = Jitter(0.1, seed=2)
    run = DegradedStep(Step(LAYERS), FixedDurations(F, B), steps=20, jitter=jitter).run()
    (rank_program,) = run.program.programs
    factors = jitter.rank_factors(0, rank_program.operation_offsets[-1])
    kernels = [
        run.cost.time_segment(0, task.segment).kernel_seconds
        for task in rank_program.tasks
        if isinstance(task, ComputeTask)
    ]
    assert run.seconds == pytest.approx(float(np.concatenate(kernels) @ factors))


def test_zero_1_gathers_wait_for_the_slow_rank_of_the_previous_step() -> None:
    """ZeRO-1 with overlap gathers parameters at the start of a step, when the slow rank's optimizer is done.

    Two ranks, one at half speed, whose step takes 2 (W + o) + r + g: the other waits W + o in each.
    """
    durations = FixedDurations(
        F, B, optimizer=OPTIMIZER, comm_seconds={"reduce gradients": REDUCTION, "gather parameters": 1.0}
    )
    step = Step(LAYERS, Layout(dp=2, data=Zero1(bucket=1e9)))
    run = DegradedStep(step, durations, {1: 0.5}, steps=3).checked_run
    step_seconds = 2 * (WORK + OPTIMIZER) + REDUCTION + 1.0
    assert run.times.tolist() == pytest.approx([step_seconds] * 3)
    assert run.nonzero_categories(0)["wait"] == pytest.approx(WORK + OPTIMIZER)
    assert run.path == pytest.approx(run.nonzero_categories(1))


def test_the_next_step_overlaps_the_slow_stage_of_this_one() -> None:
    """Two stages of F = 2, B = 4 and optimizers of 6 s; the last one at half speed: 4, 8 and 12 s.

    The first step takes F + 24: the last stage waits for one forward, then works without a pause. The first stage's
    backward ends at 18 and its optimizer at 24, so its next forward ends at 26, just as the last stage's optimizer
    does: every further step takes 24.
    """
    durations = FixedDurations(F, B, optimizer=6.0)
    run = DegradedStep(Step(LAYERS, Layout(pp=2)), durations, {1: 0.5}, steps=3).checked_run
    assert run.times.tolist() == pytest.approx([26.0, 24.0, 24.0])
