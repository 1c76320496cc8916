"""Which groups reduce expert gradients, how many bytes, and the gradient norm of MoE models.

A model of four layers, the first dense, the others with 8 experts of 2 x 64 x 128 weights (GELU). A parameter
is 2 bytes where it is gathered and 4 where its gradient is reduced.
"""

from dataclasses import replace
from math import prod

import pytest

from clustersim.model.layer_stack import LayerGroup, MlpType, MoeMlp
from clustersim.model.offload import Offload, OptimizerOffload
from clustersim.model.operators import EXPERTS
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard, Zero1, Zero2
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import (
    DP_GROUP,
    DP_REPLICATE_GROUP,
    DP_SHARD_GROUP,
    EDP_GROUP,
    EDP_REPLICATE_GROUP,
    EDP_SHARD_GROUP,
    EXPERT_MODEL_PARALLEL_GROUP,
    MODEL_PARALLEL_GROUP,
    SHARDED_REPLICA_GROUP,
    WORLD_GROUP,
)
from clustersim.program.task import CollectiveType, CommOp, HostOp
from clustersim.schedules.zero_bubble import ZeroBubble
from tests.lowering.plans import SMALL, TRAINING, collectives, lower_plan, make_plan

ALL_EXPERTS = 8 * 2 * 64 * 128
MOE_MLP = MoeMlp(8, 2, 128, MlpType.GELU)
DENSE_SPEC = SMALL.stack[0].spec
MOE_MODEL = replace(SMALL, stack=(LayerGroup(DENSE_SPEC, 1), LayerGroup(replace(DENSE_SPEC, mlp=MOE_MLP), 3)))
DATA_PARALLEL_COLLECTIVES = CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER


def issued_collectives(layout: Layout, pipeline_rank: int = 0, **training: object) -> list[CommOp]:
    plan = make_plan(layout, replace(TRAINING, global_batch=layout.dp * 2, **training), MOE_MODEL)
    return collectives(lower_plan(plan).programs[pipeline_rank])


def payload_by_collective(comm_ops: list[CommOp], comm_group: str) -> dict[CollectiveType, float]:
    """Payload bytes in groups of a kind, by collective."""
    group_ops = [comm_op for comm_op in comm_ops if comm_op.comm_group == comm_group]
    return {
        kind: total
        for kind in DATA_PARALLEL_COLLECTIVES
        if (total := sum(group_op.payload for group_op in group_ops if group_op.collective is kind))
    }


@pytest.mark.parametrize(("ep", "etp", "replicas"), [(2, 1, 4), (4, 1, 2), (2, 2, 2), (1, 2, 4)])
def test_expert_gradients_are_reduced_over_their_replicas(ep: int, etp: int, replicas: int) -> None:
    layout = Layout(dp=8, ep=ep, etp=etp, data=DdpStrategy())
    comm_ops = issued_collectives(layout, gradient_clipping=False)
    assert layout.group_size(EDP_GROUP) == replicas
    assert payload_by_collective(comm_ops, EDP_GROUP.name) == {
        CollectiveType.ALL_REDUCE: 3 * 4 * ALL_EXPERTS / (ep * etp)
    }
    dense = make_plan(layout, model=MOE_MODEL).parameter_count(
        make_plan(layout, model=MOE_MODEL).stages[0]
    ) - 3 * ALL_EXPERTS // (ep * etp)
    assert payload_by_collective(comm_ops, DP_GROUP.name) == {CollectiveType.ALL_REDUCE: 4 * dense}


def test_experts_without_replicas_are_not_reduced() -> None:
    assert payload_by_collective(issued_collectives(Layout(dp=8, ep=8, data=DdpStrategy())), EDP_GROUP.name) == {}


def test_zero1_scatters_and_gathers_experts_over_their_replicas() -> None:
    comm_ops = issued_collectives(Layout(dp=8, ep=2, data=Zero1()))
    experts = 3 * ALL_EXPERTS / 2
    assert payload_by_collective(comm_ops, EDP_GROUP.name) == {
        CollectiveType.REDUCE_SCATTER: 4 * experts,
        CollectiveType.ALL_GATHER: 2 * experts,
    }


def test_fsdp_shards_both_parameter_groups_over_their_ranks() -> None:
    """Two microbatches, each gathered for forward and for backward and reduced."""
    comm_ops = issued_collectives(Layout(dp=8, ep=2, data=FullyShard()))
    experts = 3 * ALL_EXPERTS / 2
    assert payload_by_collective(comm_ops, EDP_GROUP.name) == {
        CollectiveType.REDUCE_SCATTER: 2 * 4 * experts,
        CollectiveType.ALL_GATHER: 2 * 2 * 2 * experts,
    }


def test_hybrid_sharding_has_replicas_of_both_groups() -> None:
    """8 ranks are 2 copies of 4 ranks; with ep 2 an expert is sharded over 2 ranks of a copy."""
    layout = Layout(dp=8, ep=2, data=FullyShard(shard=4))
    sizes = [
        layout.group_size(comm_group)
        for comm_group in (DP_SHARD_GROUP, DP_REPLICATE_GROUP, EDP_SHARD_GROUP, EDP_REPLICATE_GROUP)
    ]
    assert sizes == [4, 2, 2, 2]
    comm_ops = issued_collectives(layout)
    experts = 3 * ALL_EXPERTS / 2
    assert payload_by_collective(comm_ops, EDP_SHARD_GROUP.name)[CollectiveType.REDUCE_SCATTER] == 2 * 4 * experts
    assert payload_by_collective(comm_ops, EDP_REPLICATE_GROUP.name) == {CollectiveType.ALL_REDUCE: 2 * 4 * experts / 2}


def test_a_stage_without_experts_sends_nothing_of_them() -> None:
    """Megatron-LM has no buffer of experts where there are none; the first of four stages is dense."""
    for data in (DdpStrategy(), DdpStrategy(overlap=False), Zero1(), Zero1(overlap=False), FullyShard()):
        layout = Layout(dp=4, pp=4, ep=2, data=data)
        assert not payload_by_collective(issued_collectives(layout), EDP_GROUP.name), data
        assert payload_by_collective(issued_collectives(layout, 1), EDP_GROUP.name), data


def test_expert_buckets_are_separate_and_as_large_as_dense_ones() -> None:
    """Megatron-LM: a million elements for each data-parallel rank of dense weights, or 40 million if that is more."""
    expert_ops = [
        issued_collective
        for issued_collective in issued_collectives(Layout(dp=8, ep=2, data=DdpStrategy(bucket=4.0 * 100_000)))
        if issued_collective.comm_group == "edp"
    ]
    matrix_bytes = 4 * ALL_EXPERTS / 2 / 2  # a matrix of the four experts on a rank
    assert [expert_op.payload for expert_op in expert_ops] == [4 * matrix_bytes, 2 * matrix_bytes]


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        (Layout(dp=8, ep=4), {MODEL_PARALLEL_GROUP: 1, EXPERT_MODEL_PARALLEL_GROUP: 4}),
        (
            Layout(tp=2, dp=4, pp=2, ep=4, etp=1, sequence_parallel=True),
            {MODEL_PARALLEL_GROUP: 4, EXPERT_MODEL_PARALLEL_GROUP: 8},
        ),
        (Layout(dp=8), {MODEL_PARALLEL_GROUP: 1}),
        (Layout(dp=8, ep=4, data=Zero1()), {WORLD_GROUP: 8}),
        (Layout(dp=8, ep=2, data=Zero1(shard=4)), {SHARDED_REPLICA_GROUP: 4}),
    ],
)
def test_the_gradient_norm_is_reduced_over_one_copy_of_all_weights(layout: Layout, roles: dict[object, int]) -> None:
    """Without sharding, a copy of all experts spans other ranks than one of the dense weights (Megatron-LM)."""
    norms = [
        issued_collective.comm_group
        for rank in range(layout.pp)
        for issued_collective in issued_collectives(layout, rank)
        if issued_collective.name == "gradient norm"
    ]
    assert norms == [comm_group.name for comm_group in roles] * layout.pp
    assert {comm_group: layout.group_size(comm_group) for comm_group in roles} == roles


def test_zero_bubble_reduces_the_norm_over_expert_shards_first() -> None:
    layout = Layout(tp=2, dp=2, pp=2, ep=4, etp=1, sequence_parallel=True)
    plan = make_plan(layout, replace(TRAINING, global_batch=4), MOE_MODEL)
    program = lower_plan(plan, ZeroBubble(1)).programs[0]
    (segment,) = {
        task.segment for task in program.tasks if getattr(getattr(task, "segment", None), "name", "") == "gradient norm"
    }
    assert [comm_op.comm_group for comm_op in segment.comm_ops] == ["tp", "etp_ep"]


@pytest.mark.parametrize(
    ("ep", "etp", "tp"), [(1, 1, 1), (4, 1, 1), (2, 2, 1), (8, 1, 2), (2, 4, 2), (1, 1, 2), (1, 4, 2)]
)
@pytest.mark.parametrize("counts", [(1, 3), (2, 2), (3, 1)])
def test_all_ranks_hold_as_many_copies_of_experts_as_replicas(
    ep: int, etp: int, tp: int, counts: tuple[int, int]
) -> None:
    layout = Layout(tp=tp, dp=8, pp=2, ep=ep, etp=etp, sequence_parallel=tp > 1, layers_per_stage=counts)
    plan = make_plan(layout, model=MOE_MODEL)
    held_parameters = (
        sum(plan.parameter_count(stage, EXPERTS) for stage in plan.stages) * layout.world_size // layout.pp
    )
    replicas = layout.group_size(EDP_GROUP if layout.has_expert_mesh else DP_GROUP)
    assert held_parameters == 3 * ALL_EXPERTS * replicas
    assert replicas == prod((layout.tp, layout.dp)) // (ep * etp)


@pytest.mark.parametrize(("ep", "shards"), [(1, 8), (2, 4), (8, 1)])
def test_all_gradients_are_offloaded_to_the_host(ep: int, shards: int) -> None:
    """ZeRO-2 leaves a shard of them here; gradients of experts without replicas are all here."""
    layout = Layout(dp=8, ep=ep, data=Zero2())
    offload = Offload(states=OptimizerOffload(gradients=True))
    plan = make_plan(layout, replace(TRAINING, global_batch=8, gradient_clipping=False, offload=offload), MOE_MODEL)
    host_ops = [
        collective for collective in collectives(lower_plan(plan).programs[0]) if isinstance(collective, HostOp)
    ]
    experts = 3 * ALL_EXPERTS / ep
    dense = plan.parameter_count(plan.stages[0]) - experts
    offloaded_bytes = sum(host_op.payload for host_op in host_ops if host_op.name == "offload gradients")
    assert offloaded_bytes == pytest.approx(4 * (dense / 8 + experts / shards))
