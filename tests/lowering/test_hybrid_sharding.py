"""Hybrid sharding: weights are cut over some of the ranks that hold them and equal on the rest.

A rank sends what `ROUNDS` times the buffer says, a part (n - 1) / n of it, for each collective.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.model.framework import Framework
from clustersim.model.transformer import head_parameter_count, parameter_count
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    ReductionFrequency,
    Zero1,
    Zero2,
    with_shard_size,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DP_GROUP, DP_REPLICATE_GROUP, DP_SHARD_GROUP
from clustersim.program.task import CollectiveType, CommOp
from tests.conftest import examples
from tests.lowering.plans import SMALL, TRAINING, collectives, lowered, planned, told

ALL, HEAD = parameter_count(SMALL), head_parameter_count(SMALL)


def exchanges(layout: Layout, microbatches: int = 1) -> list[CommOp]:
    training = replace(TRAINING, global_batch=layout.dp * microbatches, gradient_clipping=False)
    (only,) = lowered(planned(layout, training)).programs
    return collectives(only)


def moved(found: list[CommOp]) -> dict[tuple[str, CollectiveType], float]:
    """Bytes of payload by role and collective."""
    total: dict[tuple[str, CollectiveType], float] = {}
    for comm_op in found:
        key = comm_op.comm_group, comm_op.collective
        total[key] = total.get(key, 0.0) + comm_op.payload
    return total


@pytest.mark.parametrize(("cp", "shard"), [(1, 4), (2, 4), (2, 8), (1, 8)])
def test_what_hsdp_moves_by_hand(cp: int, shard: int) -> None:
    """2 bytes a parameter are gathered for forward and again for backward, but for the head's; 4 are scattered within.

    A part of these is summed across.
    """
    layout = Layout(cp=cp, dp=16 // cp, data=FullyShard(shard=shard))
    assert moved(exchanges(layout)) == {
        (DP_SHARD_GROUP.name, CollectiveType.ALL_GATHER): 2 * (2 * ALL - HEAD),
        (DP_SHARD_GROUP.name, CollectiveType.REDUCE_SCATTER): 4 * ALL,
        (DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE): 4 * ALL / shard,
    }
    assert (layout.group_size(DP_SHARD_GROUP), layout.group_size(DP_REPLICATE_GROUP)) == (shard, 16 // shard)


def test_megatrons_optimizer_instances_gather_and_scatter_within_and_sum_across() -> None:
    layout = Layout(dp=8, data=Zero1(shard=2))
    assert moved(exchanges(layout, microbatches=3)) == {
        (DP_SHARD_GROUP.name, CollectiveType.ALL_GATHER): 2 * ALL,
        (DP_SHARD_GROUP.name, CollectiveType.REDUCE_SCATTER): 4 * ALL,
        (DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE): 4 * ALL / 2,
    }


def test_mics_sums_across_replicas_once_and_fsdp_after_every_microbatch() -> None:
    once = moved(
        exchanges(Layout(dp=8, data=FullyShard(shard=2, all_reduce=ReductionFrequency.LAST_MICROBATCH)), microbatches=3)
    )
    each = moved(exchanges(Layout(dp=8, data=FullyShard(shard=2)), microbatches=3))
    across = DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE
    assert (once.pop(across), each.pop(across)) == (4 * ALL / 2, 3 * 4 * ALL / 2)
    assert once == each


def test_secondary_shards_serve_backward_and_nothing_else() -> None:
    """ZeRO++ (arXiv:2306.10209, section 3.2): forward and gradients span all ranks, backward gathers within."""
    assert moved(exchanges(Layout(dp=8, data=FullyShard(secondary=2)), microbatches=2)) == {
        (DP_GROUP.name, CollectiveType.ALL_GATHER): 2 * 2 * ALL,
        (DP_SHARD_GROUP.name, CollectiveType.ALL_GATHER): 2 * 2 * (ALL - HEAD),
        (DP_GROUP.name, CollectiveType.REDUCE_SCATTER): 2 * 4 * ALL,
    }


@pytest.mark.parametrize("data", [FullyShard(shard=2), Zero1(shard=2), FullyShard(secondary=2), Zero2(shard=2)])
def test_memory_by_hand(data: DataParallelStrategy) -> None:
    """Parameters (2 bytes), gradients (4) and optimizer states (12) are cut over two of eight ranks.

    With secondary shards they are cut over all, beside a second copy of the parameters over two.
    """
    plan = planned(Layout(dp=8, data=data), replace(TRAINING, global_batch=8))
    held = Footprint(plan, Framework(1.0, 0.0), 0.0).resident_bytes(0)
    cut = 8 if data.secondary else 2
    copied = 2 * ALL / 2 if data.secondary else 0
    expected = [size * ALL / (cut if data.zero_stage >= stage else 1) for stage, size in ((3, 2), (2, 4), (1, 12))]
    found = [held[item] for item in (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)]
    assert found == pytest.approx([expected[0] + copied, *expected[1:]])


SHARDED = st.sampled_from([Zero1(), Zero1(overlap=False), Zero2(), FullyShard(), FullyShard(copies=True, prefetch=2)])
BOUNDS = st.tuples(st.sampled_from([1, 2]), st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.integers(1, 3))


@examples(40)
@given(SHARDED, BOUNDS)
def test_one_replica_is_the_strategy_that_cuts_weights_over_all(
    data: DataParallelStrategy, bounds: tuple[int, int, int, int]
) -> None:
    cp, dp, pp, microbatches = bounds
    training = replace(TRAINING, global_batch=dp * microbatches)
    plain = planned(Layout(cp=cp, dp=dp, pp=pp, data=data), training)
    hybrid = planned(Layout(cp=cp, dp=dp, pp=pp, data=with_shard_size(data, cp * dp)), training)
    one, other = lowered(plain), lowered(hybrid)
    assert told(one) == told(other)
    assert {name: group.members.tolist() for name, group in one.groups.items()} == {
        name: process_groups.members.tolist() for name, process_groups in other.groups.items()
    }
    frame = Framework(1.0, 1e6), 1e6
    footprints = (Footprint(plan, *frame) for plan in (plain, hybrid))
    assert len({str(footprint.resident_bytes(pp - 1)) for footprint in footprints}) == 1


@examples(30)
@given(SHARDED, st.sampled_from([2, 4]), st.integers(1, 3))
def test_one_shard_is_ddp(data: DataParallelStrategy, dp: int, microbatches: int) -> None:
    """Nothing is gathered, gradients are all-reduced as often as the strategy reduces them, and memory is DDP's."""
    training = replace(TRAINING, global_batch=dp * microbatches, gradient_clipping=False)
    plan = planned(Layout(dp=dp, data=with_shard_size(data, 1)), training)
    ddp = replace(plan, layout=replace(plan.layout, data=DdpStrategy()))
    (only,) = lowered(plan).programs
    often = microbatches if data.zero_stage > 1 else 1
    assert moved(collectives(only)) == {(DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE): often * 4 * ALL}
    uses = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER, MemoryCategory.GATHERED)
    one, other = (Footprint(item, Framework(1.0, 0.0), 0.0).resident_bytes(0) for item in (plan, ddp))
    assert [one[use] for use in uses] == [other[use] for use in uses]


def test_the_norm_is_summed_over_one_sharded_copy() -> None:
    """Tp 2, four shards, pp 2: the squares of one copy of the gradients are on 16 of 32 ranks."""
    layout = Layout(tp=2, dp=8, pp=2, data=Zero1(shard=4))
    program = lowered(planned(layout, replace(TRAINING, global_batch=16)))
    (norm,) = {
        collective.comm_group for collective in collectives(program.programs[0]) if collective.name == "gradient norm"
    }
    groups = program.groups[norm].members
    assert groups.shape == (2, 16)
    assert groups[0].tolist() == [*range(8), *range(16, 24)]


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("pp", "dp", "tp", "cp"), ("dp", "pp", "cp", "tp")])
def test_shards_are_neighbours_on_the_data_parallel_axis(order: tuple[str, ...]) -> None:
    """Groups of both parts of the axis cover those of the whole one, and every rank is in one of each."""
    layout = Layout(tp=2, cp=2, dp=4, pp=2, order=order, data=FullyShard(shard=4))
    hybrid, dense = layout.meshes[DP_SHARD_GROUP.mesh], layout.mesh
    within, across = (hybrid.groups_along(*role.axes) for role in (DP_SHARD_GROUP, DP_REPLICATE_GROUP))
    whole = {frozenset(group) for group in dense.groups_along(*DP_GROUP.axes).tolist()}
    for group in whole:
        inner = [set(item) for item in within.tolist() if set(item) <= group]
        outer = [set(element) for element in across.tolist() if set(element) <= group]
        assert set().union(*inner) == set().union(*outer) == group
        assert all(len(one & other) == 1 for one in inner for other in outer)
    stride = dense.groups_along(DP_GROUP.axes[1])[0]
    assert {int(entry) for entry in stride[:2]} <= next(set(each) for each in within.tolist() if stride[0] in each)
