"""Pipelines through lowering and engine, against closed forms.

p ranks, m microbatches, v chunks; F and B are the seconds of one microbatch through all layers of a rank,
forward and backward.
"""

from dataclasses import replace

import pytest

from clustersim.model.training import FullRecompute, Recompute, SelectiveRecompute
from clustersim.parallel.layout import Layout
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from tests.closed_form.fixed_durations import MODEL, FixedDurations, Step

SHAPES = [(1, 3), (2, 1), (2, 4), (3, 2), (4, 4), (4, 8)]
FORWARD, BACKWARD = 1.0, 2.5
DURATIONS = FixedDurations(FORWARD, BACKWARD)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()])
def test_gpipe_and_1f1b(schedule: Schedule, ranks: int, microbatches: int) -> None:
    """Both last (m + p - 1)(F + B).

    GPipe: the last rank begins after p - 1 forwards and runs m of them; then backwards come up in the same way, so
    (p - 1 + m) F + (m + p - 1) B. 1F1B: the last rank begins at (p - 1) F, works without a pause for m (F + B), and its
    last gradient takes (p - 1) B up to the first rank. (Nowhere else is there a longer chain: Huang et al. 2019;
    Narayanan et al. 2021, section 2.2.1.)
    """
    step = Step(2 * ranks, Layout(pp=ranks), schedule, microbatches)
    assert step.step_seconds(DURATIONS) == (microbatches + ranks - 1) * 2 * (FORWARD + BACKWARD)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 6), (3, 3), (4, 8)])
@pytest.mark.parametrize("chunks", [2, 3])
def test_the_interleaved_bubble_is_a_vth_of_the_1f1b_bubble(chunks: int, ranks: int, microbatches: int) -> None:
    """Passes of one chunk last F/v and B/v, so filling and draining the pipeline takes a v-th.

    The bubble is (p - 1)(F + B)/v, which is (p - 1)/(v m) of the ideal m (F + B) (Narayanan et al. 2021, 2.2.2).
    """
    step = Step(2 * ranks * chunks, Layout(pp=ranks), Interleaved(chunks), microbatches)
    chunk = 2 * (FORWARD + BACKWARD)
    ideal = microbatches * chunks * chunk
    assert step.step_seconds(DURATIONS) == ideal + (ranks - 1) * chunk
    assert (step.step_seconds(DURATIONS) - ideal) / ideal == pytest.approx((ranks - 1) / (chunks * microbatches))


@pytest.mark.parametrize("microbatches", [1, 5])
def test_the_slowest_stage_bounds_the_pipeline(microbatches: int) -> None:
    """GPipe with unequal stages F_i: each microbatch after the first takes one slowest stage more.

    The last rank's forwards end at sum F_i + (m - 1) max F_i. Backward is the same pipeline in reverse.
    """
    layers_per_stage = (1, 4, 2)
    step = Step(7, Layout(pp=3, layers_per_stage=layers_per_stage), GPipe(), microbatches)
    layers = sum(layers_per_stage) + (microbatches - 1) * max(layers_per_stage)
    assert step.step_seconds(DURATIONS) == layers * (FORWARD + BACKWARD)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("sending", "microbatches"), [(0.25, 4), (1.0, 4), (3.0, 4), (3.0, 1)])
def test_sends_overlapping_compute(ranks: int, sending: float, microbatches: int) -> None:
    """GPipe whose messages take s and overlap the sender's compute.

    The first microbatch takes p F + (p - 1) s to the end of the pipeline. After it they arrive one every max(F,
    s), the rate of the slower of compute and link. Backward likewise with B.
    """
    step = Step(ranks, Layout(pp=ranks), GPipe(), microbatches)
    durations = FixedDurations(FORWARD, BACKWARD, comm_seconds={"activations": sending, "gradients": sending})
    pass_seconds = [
        ranks * seconds + (ranks - 1) * sending + (microbatches - 1) * max(seconds, sending)
        for seconds in (FORWARD, BACKWARD)
    ]
    assert step.step_seconds(durations) == sum(pass_seconds)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("sending", "microbatches"), [(0.25, 4), (3.0, 4), (3.0, 1)])
def test_blocking_sends(ranks: int, sending: float, microbatches: int) -> None:
    """GPipe whose sender waits until its message is gone (overlap_p2p_comm off).

    A rank that sends is busy F + s for each microbatch, so the last microbatch reaches the last rank, which sends
    nothing forward, after (p - 1 + m - 1)(F + s), and F later all forwards are done. Backward alike:
    (m + p - 1)(F + B) + 2 (m + p - 2) s.
    """
    step = Step(ranks, Layout(pp=ranks, overlap_p2p_comm=False), GPipe(), microbatches)
    durations = FixedDurations(FORWARD, BACKWARD, comm_seconds={"activations": sending, "gradients": sending})
    waves = microbatches + ranks - 1
    assert step.step_seconds(durations) == waves * (FORWARD + BACKWARD) + 2 * (waves - 1) * sending


INTERLEAVED = [(ranks, chunks, times * ranks) for ranks in range(2, 7) for chunks in (2, 3) for times in (1, 2, 3)]


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), INTERLEAVED)
def test_batched_sends_neither_deadlock_nor_add_time_by_themselves(ranks: int, chunks: int, microbatches: int) -> None:
    """Interleaved without overlap_p2p_comm: a forward's output leaves with the next backward's gradient.

    In the steady phase a forward's reader has a backward of its own to do first, so where messages take no time the
    bubble stays (p - 1)(F + B)/v. Messages that take time make the step longer than with overlap, by at most what all
    of them take one after the other on every rank.
    """
    with_overlap, without_overlap = (
        Step(ranks * chunks, Layout(pp=ranks, overlap_p2p_comm=overlap), Interleaved(chunks), microbatches)
        for overlap in (True, False)
    )
    ideal = (microbatches * chunks + ranks - 1) * (FORWARD + BACKWARD)
    assert without_overlap.run(DURATIONS).makespan == ideal
    slow_messages = replace(DURATIONS, comm_seconds={"activations": 0.25, "gradients": 0.25})
    messages = 2 * (chunks * ranks - 1) * microbatches
    assert (
        with_overlap.run(slow_messages).makespan
        <= without_overlap.run(slow_messages).makespan
        <= ideal + 0.25 * messages
    )


def test_1f1b_with_slow_messages_on_two_ranks() -> None:
    """P = 2, m = 3, F = 1, B = 2, messages take 1 beside compute.

    Rank 1 receives at 2, runs 1F0 2-3, 1B0 3-5, 1F1 5-6, 1B1 6-8, 1F2 8-9, 1B2 9-11. Gradients arrive at rank 0 at 6, 9
    and 12. Rank 0: 0F0 0-1, 0F1 1-2, 0B0 6-8, 0F2 8-9, 0B1 9-11, 0B2 12-14. But 0F2 leaves at 9 and arrives at 10, not
    at 8: 1F2 10-11, 1B2 11-13, its gradient arrives at 14, 0B2 14-16.
    """
    step = Step(2, Layout(pp=2), OneFOneB(), 3)
    durations = FixedDurations(1.0, 2.0, comm_seconds={"activations": 1.0, "gradients": 1.0})
    trace = step.run(durations)
    compute_ends = [trace.end[trace.rank_events(rank, stream=0)].tolist() for rank in (0, 1)]
    assert compute_ends[0][:-1] == [1.0, 2.0, 8.0, 9.0, 11.0, 16.0]
    assert compute_ends[1][:-1] == [3.0, 5.0, 6.0, 8.0, 11.0, 13.0]
    assert trace.makespan == 16.0


@pytest.mark.parametrize(
    ("recompute", "layers_again"),
    [(FullRecompute(), 2), (FullRecompute(1), 1), (FullRecompute(9), 2), (SelectiveRecompute(), 2)],
)
def test_recomputed_layers_run_forward_again_before_their_backward(recompute: Recompute, layers_again: int) -> None:
    """A rank of two layers is busy 2 (F + B) + (layers run again) F for each microbatch."""
    step = Step(4, Layout(pp=2), GPipe(), 3, training={"recompute": recompute})
    assert step.step_seconds(DURATIONS) == (3 + 2 - 1) * (2 * (FORWARD + BACKWARD) + layers_again * FORWARD)


def test_the_gradient_norm_waits_for_the_slowest_stage() -> None:
    """Clipping all-reduces the norm over the replica, then every rank updates: n + o after the last backward.

    The norm and the update are one kernel of the optimizer's kind each, so 2 o.
    """
    step = Step(4, Layout(pp=2), OneFOneB(), 4, training={"gradient_clipping": True})
    durations = FixedDurations(FORWARD, BACKWARD, optimizer=0.5, comm_seconds={"gradient norm": 3.0})
    assert step.step_seconds(durations) == (4 + 2 - 1) * 2 * (FORWARD + BACKWARD) + 3.0 + 2 * 0.5


@pytest.mark.parametrize("microbatches", [1, 4])
def test_tied_embedding_gradients_are_reduced_after_both_end_stages(microbatches: int) -> None:
    """The first rank is done last; the ranks between do not take part and wait for nobody."""
    tied = replace(MODEL, tied_embeddings=True)
    step = Step(3, Layout(pp=3), OneFOneB(), microbatches, model=tied)
    durations = FixedDurations(FORWARD, BACKWARD, optimizer=0.5, comm_seconds={"reduce tied embedding": 3.0})
    work = (microbatches + 2) * (FORWARD + BACKWARD)
    trace = step.run(durations)
    rank_ends = [float(trace.end[trace.rank_events(rank)].max()) for rank in range(3)]
    assert rank_ends == [work + 3.5, work - BACKWARD + 0.5, work + 3.5]
