"""Who reduces the gradients of experts with whom, and how much; who hears the norm of all gradients.

A model of four layers, the first dense, the others with 8 experts of 2 x 64 x 128 weights (GELU). A parameter is 2
bytes where it is gathered and 4 where its gradient is reduced.
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
from tests.lowering.plans import SMALL, TRAINING, collectives, lowered, planned

ALL_EXPERTS = 8 * 2 * 64 * 128
MIXTURE = MoeMlp(8, 2, 128, MlpType.GELU)
DENSE = SMALL.stack[0].spec
MIXED = replace(SMALL, stack=(LayerGroup(DENSE, 1), LayerGroup(replace(DENSE, mlp=MIXTURE), 3)))
REDUCING = CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER


def sent(layout: Layout, pipeline_rank: int = 0, **training: object) -> list[CommOp]:
    plan = planned(layout, replace(TRAINING, global_batch=layout.dp * 2, **training), MIXED)
    return collectives(lowered(plan).programs[pipeline_rank])


def moved(found: list[CommOp], role: str) -> dict[CollectiveType, float]:
    """Bytes of payload in groups of a role."""
    mine = [comm_op for comm_op in found if comm_op.comm_group == role]
    return {
        kind: total for kind in REDUCING if (total := sum(item.payload for item in mine if item.collective is kind))
    }


@pytest.mark.parametrize(("ep", "etp", "replicas"), [(2, 1, 4), (4, 1, 2), (2, 2, 2), (1, 2, 4)])
def test_gradients_of_experts_are_summed_over_their_own_replicas(ep: int, etp: int, replicas: int) -> None:
    layout = Layout(dp=8, ep=ep, etp=etp, data=DdpStrategy())
    found = sent(layout, gradient_clipping=False)
    assert layout.group_size(EDP_GROUP) == replicas
    assert moved(found, EDP_GROUP.name) == {CollectiveType.ALL_REDUCE: 3 * 4 * ALL_EXPERTS / (ep * etp)}
    dense = planned(layout, model=MIXED).parameter_count(planned(layout, model=MIXED).stages[0]) - 3 * ALL_EXPERTS // (
        ep * etp
    )
    assert moved(found, DP_GROUP.name) == {CollectiveType.ALL_REDUCE: 4 * dense}


def test_experts_of_all_ranks_have_no_replica_and_nothing_to_reduce() -> None:
    assert moved(sent(Layout(dp=8, ep=8, data=DdpStrategy())), EDP_GROUP.name) == {}


def test_zero1_scatters_and_gathers_experts_over_their_replicas() -> None:
    found = sent(Layout(dp=8, ep=2, data=Zero1()))
    experts = 3 * ALL_EXPERTS / 2
    assert moved(found, EDP_GROUP.name) == {
        CollectiveType.REDUCE_SCATTER: 4 * experts,
        CollectiveType.ALL_GATHER: 2 * experts,
    }


def test_fsdp_cuts_both_groups_of_weights_over_their_own_ranks() -> None:
    """Two microbatches, each gathered for forward and for backward and reduced."""
    found = sent(Layout(dp=8, ep=2, data=FullyShard()))
    experts = 3 * ALL_EXPERTS / 2
    assert moved(found, EDP_GROUP.name) == {
        CollectiveType.REDUCE_SCATTER: 2 * 4 * experts,
        CollectiveType.ALL_GATHER: 2 * 2 * 2 * experts,
    }


def test_hybrid_sharding_has_replicas_of_both_groups() -> None:
    """8 ranks are 2 copies of 4 ranks; with ep 2 an expert is cut over 2 ranks of a copy."""
    layout = Layout(dp=8, ep=2, data=FullyShard(shard=4))
    sizes = [
        layout.group_size(role) for role in (DP_SHARD_GROUP, DP_REPLICATE_GROUP, EDP_SHARD_GROUP, EDP_REPLICATE_GROUP)
    ]
    assert sizes == [4, 2, 2, 2]
    found = sent(layout)
    experts = 3 * ALL_EXPERTS / 2
    assert moved(found, EDP_SHARD_GROUP.name)[CollectiveType.REDUCE_SCATTER] == 2 * 4 * experts
    assert moved(found, EDP_REPLICATE_GROUP.name) == {CollectiveType.ALL_REDUCE: 2 * 4 * experts / 2}


def test_a_stage_without_experts_sends_nothing_of_them() -> None:
    """Megatron-LM has no buffer of experts where there are none; the first of four stages is dense."""
    for data in (DdpStrategy(), DdpStrategy(overlap=False), Zero1(), Zero1(overlap=False), FullyShard()):
        layout = Layout(dp=4, pp=4, ep=2, data=data)
        assert not moved(sent(layout), EDP_GROUP.name), data
        assert moved(sent(layout, 1), EDP_GROUP.name), data


def test_buckets_of_experts_hold_experts_only_and_are_as_large_as_those_of_dense_weights() -> None:
    """Megatron-LM: a million elements for each data-parallel rank of dense weights, or 40 million if that is more."""
    found = [
        comm_op
        for comm_op in sent(Layout(dp=8, ep=2, data=DdpStrategy(bucket=4.0 * 100_000)))
        if comm_op.comm_group == "edp"
    ]
    one = 4 * ALL_EXPERTS / 2 / 2  # a matrix of the four experts on a rank
    assert [item.payload for item in found] == [4 * one, 2 * one]


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
def test_the_norm_is_summed_over_one_copy_of_each_group_of_weights(layout: Layout, roles: dict[object, int]) -> None:
    """Without sharding a copy of all experts is on other ranks than one of the dense weights (Megatron-LM)."""
    norms = [
        comm_op.comm_group
        for rank in range(layout.pp)
        for comm_op in sent(layout, rank)
        if comm_op.name == "gradient norm"
    ]
    assert norms == [role.name for role in roles] * layout.pp
    assert {role: layout.group_size(role) for role in roles} == roles


def test_zero_bubble_sums_squares_of_experts_over_their_parts_before_they_are_handed_on() -> None:
    layout = Layout(tp=2, dp=2, pp=2, ep=4, etp=1, sequence_parallel=True)
    plan = planned(layout, replace(TRAINING, global_batch=4), MIXED)
    program = lowered(plan, ZeroBubble(1)).programs[0]
    (block,) = {
        task.segment for task in program.tasks if getattr(getattr(task, "segment", None), "name", "") == "gradient norm"
    }
    assert [comm_op.comm_group for comm_op in block.comm_ops] == ["tp", "etp_ep"]


@pytest.mark.parametrize(
    ("ep", "etp", "tp"), [(1, 1, 1), (4, 1, 1), (2, 2, 1), (8, 1, 2), (2, 4, 2), (1, 1, 2), (1, 4, 2)]
)
@pytest.mark.parametrize("counts", [(1, 3), (2, 2), (3, 1)])
def test_all_ranks_together_hold_every_expert_as_often_as_there_are_replicas(
    ep: int, etp: int, tp: int, counts: tuple[int, int]
) -> None:
    layout = Layout(tp=tp, dp=8, pp=2, ep=ep, etp=etp, sequence_parallel=tp > 1, layers_per_stage=counts)
    plan = planned(layout, model=MIXED)
    held = sum(plan.parameter_count(stage, EXPERTS) for stage in plan.stages) * layout.world_size // layout.pp
    replicas = layout.group_size(EDP_GROUP if layout.has_expert_mesh else DP_GROUP)
    assert held == 3 * ALL_EXPERTS * replicas
    assert replicas == prod((layout.tp, layout.dp)) // (ep * etp)


@pytest.mark.parametrize(("ep", "shards"), [(1, 8), (2, 4), (8, 1)])
def test_gradients_of_all_weights_go_to_the_host_whoever_reduces_them(ep: int, shards: int) -> None:
    """ZeRO-2 leaves a part of them here; of experts that no other rank has, all are here."""
    layout = Layout(dp=8, ep=ep, data=Zero2())
    offload = Offload(states=OptimizerOffload(gradients=True))
    plan = planned(layout, replace(TRAINING, global_batch=8, gradient_clipping=False, offload=offload), MIXED)
    hosts = [collective for collective in collectives(lowered(plan).programs[0]) if isinstance(collective, HostOp)]
    experts = 3 * ALL_EXPERTS / ep
    dense = plan.parameter_count(plan.stages[0]) - experts
    left = sum(host.payload for host in hosts if host.name == "offload gradients")
    assert left == pytest.approx(4 * (dense / 8 + experts / shards))
