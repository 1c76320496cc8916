"""Hybrid sharding: weights are sharded over some of the ranks that hold them and replicated on the others.

A rank sends what `RING_PASSES` times the buffer says, (n - 1) / n of it, for each collective.
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
from tests.lowering.plans import SMALL, TRAINING, collectives, comparable_tasks, lower_plan, make_plan

ALL_PARAMETERS, HEAD_PARAMETERS = parameter_count(SMALL), head_parameter_count(SMALL)


def comm_ops_of(layout: Layout, microbatches: int = 1) -> list[CommOp]:
    training = replace(TRAINING, global_batch=layout.dp * microbatches, gradient_clipping=False)
    (rank_program,) = lower_plan(make_plan(layout, training)).programs
    return collectives(rank_program)


def payload_by_group_and_collective(comm_ops: list[CommOp]) -> dict[tuple[str, CollectiveType], float]:
    """Payload bytes by comm group and collective."""
    total: dict[tuple[str, CollectiveType], float] = {}
    for comm_op in comm_ops:
        key = comm_op.comm_group, comm_op.collective
        total[key] = total.get(key, 0.0) + comm_op.payload
    return total


@pytest.mark.parametrize(("cp", "shard"), [(1, 4), (2, 4), (2, 8), (1, 8)])
def test_hsdp_bytes_by_hand(cp: int, shard: int) -> None:
    """2 bytes a parameter are gathered for forward and for backward, except the head's; 4 are scattered within.

    1 / shard of these is all-reduced across replicas.
    """
    layout = Layout(cp=cp, dp=16 // cp, data=FullyShard(shard=shard))
    assert payload_by_group_and_collective(comm_ops_of(layout)) == {
        (DP_SHARD_GROUP.name, CollectiveType.ALL_GATHER): 2 * (2 * ALL_PARAMETERS - HEAD_PARAMETERS),
        (DP_SHARD_GROUP.name, CollectiveType.REDUCE_SCATTER): 4 * ALL_PARAMETERS,
        (DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE): 4 * ALL_PARAMETERS / shard,
    }
    assert (layout.group_size(DP_SHARD_GROUP), layout.group_size(DP_REPLICATE_GROUP)) == (shard, 16 // shard)


def test_megatron_instances_gather_and_scatter_within_and_reduce_across() -> None:
    layout = Layout(dp=8, data=Zero1(shard=2))
    assert payload_by_group_and_collective(comm_ops_of(layout, microbatches=3)) == {
        (DP_SHARD_GROUP.name, CollectiveType.ALL_GATHER): 2 * ALL_PARAMETERS,
        (DP_SHARD_GROUP.name, CollectiveType.REDUCE_SCATTER): 4 * ALL_PARAMETERS,
        (DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE): 4 * ALL_PARAMETERS / 2,
    }


def test_mics_all_reduces_once_and_fsdp_after_all_microbatches() -> None:
    mics = payload_by_group_and_collective(
        comm_ops_of(
            Layout(dp=8, data=FullyShard(shard=2, all_reduce=ReductionFrequency.LAST_MICROBATCH)), microbatches=3
        )
    )
    fsdp = payload_by_group_and_collective(comm_ops_of(Layout(dp=8, data=FullyShard(shard=2)), microbatches=3))
    across = DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE
    assert (mics.pop(across), fsdp.pop(across)) == (4 * ALL_PARAMETERS / 2, 3 * 4 * ALL_PARAMETERS / 2)
    assert mics == fsdp


def test_secondary_shards_serve_backward_and_nothing_else() -> None:
    """ZeRO++ (arXiv:2306.10209, section 3.2): forward and gradients span all ranks, backward gathers within."""
    assert payload_by_group_and_collective(
        comm_ops_of(Layout(dp=8, data=FullyShard(zero_hpz_partition_size=2)), microbatches=2)
    ) == {
        (DP_GROUP.name, CollectiveType.ALL_GATHER): 2 * 2 * ALL_PARAMETERS,
        (DP_SHARD_GROUP.name, CollectiveType.ALL_GATHER): 2 * 2 * (ALL_PARAMETERS - HEAD_PARAMETERS),
        (DP_GROUP.name, CollectiveType.REDUCE_SCATTER): 2 * 4 * ALL_PARAMETERS,
    }


@pytest.mark.parametrize(
    "data", [FullyShard(shard=2), Zero1(shard=2), FullyShard(zero_hpz_partition_size=2), Zero2(shard=2)]
)
def test_memory_by_hand(data: DataParallelStrategy) -> None:
    """Parameters (2 bytes), gradients (4) and optimizer states (12) are sharded over two of eight ranks.

    With secondary shards they are sharded over all, plus a second copy of the parameters over two.
    """
    plan = make_plan(Layout(dp=8, data=data), replace(TRAINING, global_batch=8))
    resident = Footprint(plan, Framework(1.0, 0.0), 0.0).resident_bytes(0)
    shard_count = 8 if data.zero_hpz_partition_size else 2
    secondary_bytes = 2 * ALL_PARAMETERS / 2 if data.zero_hpz_partition_size else 0
    expected = [
        size * ALL_PARAMETERS / (shard_count if data.zero_stage >= stage else 1)
        for stage, size in ((3, 2), (2, 4), (1, 12))
    ]
    actual = [
        resident[item] for item in (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
    ]
    assert actual == pytest.approx([expected[0] + secondary_bytes, *expected[1:]])


SHARDED = st.sampled_from([Zero1(), Zero1(overlap=False), Zero2(), FullyShard(), FullyShard(copies=True, prefetch=2)])
BOUNDS = st.tuples(st.sampled_from([1, 2]), st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.integers(1, 3))


@examples(40)
@given(SHARDED, BOUNDS)
def test_hybrid_with_one_replica_equals_full_sharding(
    data: DataParallelStrategy, bounds: tuple[int, int, int, int]
) -> None:
    cp, dp, pp, microbatches = bounds
    training = replace(TRAINING, global_batch=dp * microbatches)
    plain = make_plan(Layout(cp=cp, dp=dp, pp=pp, data=data), training)
    hybrid = make_plan(Layout(cp=cp, dp=dp, pp=pp, data=with_shard_size(data, cp * dp)), training)
    plain_program, hybrid_program = lower_plan(plain), lower_plan(hybrid)
    assert comparable_tasks(plain_program) == comparable_tasks(hybrid_program)
    assert {name: group.members.tolist() for name, group in plain_program.groups.items()} == {
        name: process_groups.members.tolist() for name, process_groups in hybrid_program.groups.items()
    }
    footprint_arguments = Framework(1.0, 1e6), 1e6
    footprints = (Footprint(plan, *footprint_arguments) for plan in (plain, hybrid))
    assert len({str(footprint.resident_bytes(pp - 1)) for footprint in footprints}) == 1


@examples(30)
@given(SHARDED, st.sampled_from([2, 4]), st.integers(1, 3))
def test_hybrid_with_one_shard_equals_ddp(data: DataParallelStrategy, dp: int, microbatches: int) -> None:
    """Nothing is gathered, gradients are all-reduced as often as the strategy reduces them, and memory is DDP's."""
    training = replace(TRAINING, global_batch=dp * microbatches, gradient_clipping=False)
    plan = make_plan(Layout(dp=dp, data=with_shard_size(data, 1)), training)
    ddp = replace(plan, layout=replace(plan.layout, data=DdpStrategy()))
    (rank_program,) = lower_plan(plan).programs
    reduction_count = microbatches if data.zero_stage > 1 else 1
    assert payload_by_group_and_collective(collectives(rank_program)) == {
        (DP_REPLICATE_GROUP.name, CollectiveType.ALL_REDUCE): reduction_count * 4 * ALL_PARAMETERS
    }
    uses = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER, MemoryCategory.GATHERED)
    hybrid_resident, ddp_resident = (
        Footprint(item, Framework(1.0, 0.0), 0.0).resident_bytes(0) for item in (plan, ddp)
    )
    assert [hybrid_resident[use] for use in uses] == [ddp_resident[use] for use in uses]


def test_the_gradient_norm_is_reduced_over_one_sharded_copy() -> None:
    """Tp 2, four shards, pp 2: one copy of the gradients is on 16 of 32 ranks."""
    layout = Layout(tp=2, dp=8, pp=2, data=Zero1(shard=4))
    program = lower_plan(make_plan(layout, replace(TRAINING, global_batch=16)))
    (norm,) = {
        collective.comm_group for collective in collectives(program.programs[0]) if collective.name == "gradient norm"
    }
    groups = program.groups[norm].members
    assert groups.shape == (2, 16)
    assert groups[0].tolist() == [*range(8), *range(16, 24)]


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("pp", "dp", "tp", "cp"), ("dp", "pp", "cp", "tp")])
def test_shards_are_contiguous_on_the_data_parallel_axis(order: tuple[str, ...]) -> None:
    """Groups of both factors of the axis cover those of the full one, and every rank is in one of each."""
    layout = Layout(tp=2, cp=2, dp=4, pp=2, order=order, data=FullyShard(shard=4))
    hybrid, dense = layout.meshes[DP_SHARD_GROUP.mesh], layout.mesh
    within, across = (hybrid.groups_along(*comm_group.axes) for comm_group in (DP_SHARD_GROUP, DP_REPLICATE_GROUP))
    full_groups = {frozenset(group) for group in dense.groups_along(*DP_GROUP.axes).tolist()}
    for group in full_groups:
        inner = [set(item) for item in within.tolist() if set(item) <= group]
        outer = [set(element) for element in across.tolist() if set(element) <= group]
        assert set().union(*inner) == set().union(*outer) == group
        assert all(len(shard_group & replica_group) == 1 for shard_group in inner for replica_group in outer)
    stride = dense.groups_along(DP_GROUP.axes[1])[0]
    assert {int(entry) for entry in stride[:2]} <= next(set(group) for group in within.tolist() if stride[0] in group)
