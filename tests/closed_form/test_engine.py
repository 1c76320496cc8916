"""Tensor and context parallelism and unequal groups, through lowering and engine, against closed forms.

L layers of forward f and backward b; embedding, head and optimizer are free.
"""

from dataclasses import replace

import pytest

from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard, Zero1, Zero2
from clustersim.parallel.layout import Layout
from clustersim.schedules.one_f_one_b import OneFOneB
from tests.closed_form.fixed_durations import FixedDurations, Step

FORWARD, BACKWARD = 1.0, 2.0
WORK = FORWARD + BACKWARD
LAYERS = 4


@pytest.mark.parametrize("dp", [1, 3])
def test_tensor_parallelism_has_two_all_reduces_per_layer_and_pass(dp: int) -> None:
    """Forward: after attention, after the MLP, and after the embedding, so (2 L + 1) c.

    Backward: for attention, the MLP and the head, so (2 L + 1) c; they overlap weight gradients, which are free
    here and hide nothing.
    """
    cost = FixedDurations(FORWARD, BACKWARD, comm_seconds={"reduce output": 0.25, "reduce input gradient": 0.5})
    expected = LAYERS * WORK + (2 * LAYERS + 1) * (0.25 + 0.5)
    assert Step(LAYERS, Layout(tp=2, dp=dp)).step_seconds(cost) == expected


def test_sequence_parallelism_gathers_and_scatters_at_every_boundary() -> None:
    """Forward gathers before attention, MLP and head, and scatters after embedding, attention and MLP: 2 L + 1 each.

    Backward the reverse, and gathers the saved inputs of attention, MLP and head once more: 3 times 2 L + 1.
    """
    names = ("gather input", "reduce output", "gather output gradient", "reduce input gradient", "gather input again")
    seconds = dict(zip(names, (0.5, 0.25, 0.125, 1.0, 2.0), strict=True))
    step = Step(LAYERS, Layout(tp=2, sequence_parallel=True))
    expected = LAYERS * WORK + (2 * LAYERS + 1) * sum(seconds.values())
    assert step.step_seconds(FixedDurations(FORWARD, BACKWARD, comm_seconds=seconds)) == expected


@pytest.mark.parametrize("ring", [0.5, 1.0, 4.0])
def test_context_parallelism_overlaps_its_ring_with_attention(ring: float) -> None:
    """With cp = 2, one half of the keys is local, the other arrives during attention on it: max(f, c + f / 2).

    So for each layer, with b in place of f in backward.
    """
    cost = FixedDurations(FORWARD, BACKWARD, comm_seconds={"ring of keys and values": ring})
    expected = LAYERS * sum(max(work, ring + work / 2) for work in (FORWARD, BACKWARD))
    assert Step(LAYERS, Layout(cp=2)).step_seconds(cost) == expected


@pytest.mark.parametrize("data", [DdpStrategy(bucket=1.0), Zero1(bucket=1.0), Zero2(), FullyShard()])
@pytest.mark.parametrize("dp", [1, 2])
def test_activation_shards_are_gathered_once_by_the_next_stage(dp: int, data: DataParallelStrategy) -> None:
    """Without sequence parallelism each of tp ranks sends a shard; the next stage gathers them once per direction.

    Into however many segments data parallelism splits the pass, only the first of them gathers.
    """
    cost = FixedDurations(FORWARD, BACKWARD, comm_seconds={"gather stage input": 0.5})
    step = Step(LAYERS, Layout(tp=2, pp=2, dp=dp, data=data), OneFOneB())
    assert step.step_seconds(cost) == LAYERS * WORK + 2 * 0.5
    parallel = replace(step, layout=replace(step.layout, sequence_parallel=True))
    assert parallel.step_seconds(cost) == LAYERS * WORK


@pytest.mark.parametrize(("first", "last"), [(1.0, 1.0), (1.0, 9.0), (0.0, 4.0)])
def test_stages_reduce_at_different_speeds_and_times(first: float, last: float) -> None:
    """1F1B of 2 ranks: the last stage ends at F + m (F + B), the first at (m + 1)(F + B); each then reduces."""
    layout = Layout(dp=2, pp=2, data=DdpStrategy(overlap=False))
    step = Step(LAYERS, layout, OneFOneB(), microbatches=3)
    durations = FixedDurations(FORWARD, BACKWARD, comm_seconds={"reduce gradients": lambda _: [first, last]})
    first_stage_end, last_stage_end = (3 * WORK + FORWARD) * 2, 4 * WORK * 2
    assert step.step_seconds(durations) == max(last_stage_end + first, first_stage_end + last)


def test_a_slow_tp_group_delays_the_replicas_it_reduces_with() -> None:
    """Of two replicas the second one's all-reduces take 2 s instead of 1: both wait for it before they reduce."""
    layout = Layout(tp=2, dp=2, data=DdpStrategy(overlap=False))
    step = Step(LAYERS, layout)
    durations = FixedDurations(
        FORWARD,
        BACKWARD,
        comm_seconds={"reduce output": lambda _: [1.0, 2.0], "reduce gradients": lambda _: [5.0, 5.0]},
    )
    trace = step.run(durations)
    assert trace.simulated_ranks.tolist() == [0, 2], "one rank of each replica"
    work = LAYERS * WORK + (2 * LAYERS + 1) * 2.0
    assert step.step_seconds(durations) == work + 5.0
    reduction = trace.rank_events(0, stream=1)
    assert (trace.ready[reduction].tolist(), trace.start[reduction].tolist()) == ([work - 9.0], [work])
