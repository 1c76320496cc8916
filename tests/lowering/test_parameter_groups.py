"""Parameter groups: each is gathered, reduced, updated and held as its process groups define.

A plan with two groups is built by hand: the MLPs' weights are held by fewer ranks than the others, as experts
are.
"""

from dataclasses import replace
from functools import cached_property

import pytest

from clustersim.common.dtypes import DType
from clustersim.lowering.training_step import lower_step
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.model.framework import Framework
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.operators import DENSE, LayerOperators
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard, Zero1, Zero2
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import CP_GROUP, DP_GROUP
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from tests.lowering.plans import SMALL, TRAINING, collectives, data_parallel_task_names, lower_plan

MLP = "mlp"
LAYOUT = Layout(dp=2, cp=2)
MLP_PARAMETERS = 4 * (2 * 64 * 128 + 128 + 64)  # four layers: two matrices and their biases
ALL_PARAMETERS = MLP_PARAMETERS + 4 * (4 * 64 * 64 + 4 * 64 + 2 * 2 * 64) + (256 + 64) * 64 + 2 * 64 + 256 * 64


class TwoGroupsPlan(Plan):
    """MLPs are a group of their own, over the context-parallel ranks; all others are over all four ranks."""

    @cached_property
    def layer_by_spec(self) -> dict[LayerSpec, LayerOperators]:
        return {
            spec: replace(layer_operators, operators=_operators_with_mlp_group(layer_operators))
            for spec, layer_operators in super().layer_by_spec.items()
        }

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        formats = self.training.recipe.weight_formats
        if self.layout.data.zero_stage:
            dense = ParameterGroup(DENSE, formats, shard_group=DP_GROUP, shard_count=4)
            return dense, ParameterGroup(MLP, formats, shard_group=CP_GROUP, shard_count=2)
        dense = ParameterGroup(DENSE, formats, replicate_group=DP_GROUP, replica_count=4)
        return dense, ParameterGroup(MLP, formats, replicate_group=CP_GROUP, replica_count=2)


class HybridShardPlan(Plan):
    """All weights are sharded over two ranks, and replicated on two such pairs."""

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        formats = self.training.recipe.weight_formats
        return (ParameterGroup(DENSE, formats, CP_GROUP, DP_GROUP, shard_count=2, replica_count=2),)


def _operators_with_mlp_group(layer: LayerOperators) -> tuple:
    linears = ("mlp.up", "mlp.down")
    return tuple(
        replace(operator, parameter_group=MLP) if operator.name in linears else operator for operator in layer.operators
    )


def rank_program(kind: type[Plan], data: DataParallelStrategy, microbatches: int = 1) -> RankProgram:
    training = replace(TRAINING, global_batch=2 * microbatches, gradient_clipping=False)
    (lowered_program,) = lower_plan(kind(SMALL, training, replace(LAYOUT, data=data))).programs
    return lowered_program


def payload_by_group(program: RankProgram, collective: CollectiveType) -> dict[str, float]:
    """Payload bytes by comm group."""
    payloads: dict[str, float] = {}
    for comm_op in collectives(program):
        if comm_op.collective is collective:
            payloads[comm_op.comm_group] = payloads.get(comm_op.comm_group, 0) + comm_op.payload
    return payloads


STRATEGIES = [
    DdpStrategy(), DdpStrategy(bucket=5e4), DdpStrategy(overlap=False),
    Zero1(), Zero1(bucket=5e4), Zero1(overlap=False), Zero2(bucket=5e4), Zero2(overlap=False),
    FullyShard(), FullyShard(prefetch=2), FullyShard(overlap=False),
]  # fmt: skip


@pytest.mark.parametrize("data", STRATEGIES)
def test_group_gradients_are_reduced_once_over_their_comm_group(data: DataParallelStrategy) -> None:
    kind = CollectiveType.REDUCE_SCATTER if data.zero_stage else CollectiveType.ALL_REDUCE
    assert payload_by_group(rank_program(TwoGroupsPlan, data), kind) == {
        "dp": 4 * (ALL_PARAMETERS - MLP_PARAMETERS),
        "cp": 4 * MLP_PARAMETERS,
    }


@pytest.mark.parametrize("data", [item for item in STRATEGIES if item.zero_stage])
def test_group_parameters_are_gathered_over_their_comm_group(data: DataParallelStrategy) -> None:
    """Once a step; with stage 3 again for backward, except the head's, which follows directly."""
    gather_count = 2 if isinstance(data, FullyShard) else 1
    head = (256 * 64 + 2 * 64) * (gather_count - 1)
    dense = gather_count * (ALL_PARAMETERS - MLP_PARAMETERS) - head
    assert payload_by_group(rank_program(TwoGroupsPlan, data), CollectiveType.ALL_GATHER) == {
        "dp": 2 * dense,
        "cp": 2 * gather_count * MLP_PARAMETERS,
    }


@pytest.mark.parametrize("data", STRATEGIES)
def test_a_step_waits_for_every_reduction(data: DataParallelStrategy) -> None:
    lowered_program = rank_program(TwoGroupsPlan, data)
    reductions = {
        task_id
        for task_id, task in enumerate(lowered_program.tasks)
        if isinstance(task, CollectiveTask) and task.comm_op.collective is not CollectiveType.ALL_GATHER
    }
    optimizer = next(
        task for task in lowered_program.tasks if getattr(getattr(task, "segment", None), "name", "") == "optimizer"
    )
    assert reductions == set(optimizer.depends_on)


@pytest.mark.parametrize("data", [DdpStrategy(), Zero1(), Zero2(), FullyShard()])
def test_memory_is_sharded_over_the_ranks_of_the_group(data: DataParallelStrategy) -> None:
    resident = Footprint(
        TwoGroupsPlan(SMALL, TRAINING, replace(LAYOUT, data=data)), Framework(1.0, 0.0), 0.0
    ).resident_bytes(0)

    def expected_bytes(stage: int, width: int) -> float:
        dense, mlp = (4, 2) if data.zero_stage >= stage else (1, 1)
        return width * ((ALL_PARAMETERS - MLP_PARAMETERS) / dense + MLP_PARAMETERS / mlp)

    assert resident[MemoryCategory.PARAMETERS] == expected_bytes(3, 2)
    assert resident[MemoryCategory.GRADIENTS] == expected_bytes(2, 4)
    assert resident[MemoryCategory.OPTIMIZER] == expected_bytes(1, 12)


@pytest.mark.parametrize(("data", "dense", "mlp"), [(DdpStrategy(), 1, 1), (Zero1(), 4, 2), (FullyShard(), 4, 2)])
def test_a_rank_updates_its_shard_of_all_groups(data: DataParallelStrategy, dense: int, mlp: int) -> None:
    lowered_program = rank_program(TwoGroupsPlan, data)
    (optimizer,) = (
        task.segment
        for task in lowered_program.tasks
        if isinstance(task, ComputeTask) and task.segment.name == "optimizer"
    )
    updated = [operation.kernel.shape.elements for operation in optimizer.operations if operation.kernel]
    assert updated == [(ALL_PARAMETERS - MLP_PARAMETERS) / dense + MLP_PARAMETERS / mlp]


class SingleRankMlpPlan(TwoGroupsPlan):
    """The MLPs' weights are on one rank only: they are not communicated."""

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        dense, _ = super().parameter_groups
        return dense, ParameterGroup(MLP, self.training.recipe.weight_formats)


@pytest.mark.parametrize("data", STRATEGIES)
def test_an_unsharded_unreplicated_group_is_not_communicated(data: DataParallelStrategy) -> None:
    lowered_program = rank_program(SingleRankMlpPlan, data)
    kind = CollectiveType.REDUCE_SCATTER if data.zero_stage else CollectiveType.ALL_REDUCE
    assert payload_by_group(lowered_program, kind) == {"dp": 4 * (ALL_PARAMETERS - MLP_PARAMETERS)}
    assert set(payload_by_group(lowered_program, CollectiveType.ALL_GATHER)) <= {"dp"}
    assert all(task_id >= 0 for task in lowered_program.tasks for task_id in task.depends_on)


def test_groups_of_different_formats_have_separate_optimizer_kernels() -> None:
    class Bf16MomentsPlan(TwoGroupsPlan):
        @cached_property
        def parameter_groups(self) -> tuple[ParameterGroup, ...]:
            dense, mlp = super().parameter_groups
            return dense, replace(mlp, formats=replace(mlp.formats, moments=DType.BF16))

    lowered_program = rank_program(Bf16MomentsPlan, Zero1())
    (optimizer,) = (
        task.segment
        for task in lowered_program.tasks
        if isinstance(task, ComputeTask) and task.segment.name == "optimizer"
    )
    updated = {
        operation.kernel.shape.formats[1]: operation.kernel.shape.elements
        for operation in optimizer.operations
        if operation.kernel
    }
    assert updated == {DType.FP32: (ALL_PARAMETERS - MLP_PARAMETERS) / 4, DType.BF16: MLP_PARAMETERS / 2}


def test_hybrid_shards_are_reduce_scattered_then_all_reduced() -> None:
    """Hybrid sharding: reduce-scatter within the shards, then an all-reduce of this rank's half across replicas."""
    lowered_program = rank_program(HybridShardPlan, FullyShard())
    reductions = [
        collective
        for collective in collectives(lowered_program)
        if collective.collective is not CollectiveType.ALL_GATHER
    ]
    within_shards, across_replicas = reductions[::2], reductions[1::2]
    assert {within_shard.collective for within_shard in within_shards} == {CollectiveType.REDUCE_SCATTER}
    assert {across_replica.collective for across_replica in across_replicas} == {CollectiveType.ALL_REDUCE}
    assert [comm_op.payload / 2 for comm_op in within_shards] == [item.payload for item in across_replicas]
    assert sum(element.payload for element in within_shards) == 4 * ALL_PARAMETERS
    assert [replace(entry, comm_group="cp") for entry in within_shards] == within_shards
    for task_id, task in enumerate(lowered_program.tasks):
        if isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.ALL_REDUCE:
            assert task.depends_on == (task_id - 1,)


def test_gradients_are_reduced_in_the_last_backward_of_the_order() -> None:
    """Not in that of the highest microbatch: a schedule may run microbatches in any order."""
    training = replace(TRAINING, global_batch=4, gradient_clipping=False)
    kinds = (ActionKind.FORWARD, 0), (ActionKind.FORWARD, 1), (ActionKind.BACKWARD, 1), (ActionKind.BACKWARD, 0)
    order = (tuple(Action(0, kind, microbatch) for kind, microbatch in kinds),)
    (lowered_program,) = lower_step(Plan(SMALL, training, Layout(dp=2, data=DdpStrategy(bucket=1e12))), order).programs
    assert data_parallel_task_names(lowered_program)[:5] == ["F0", "F1", "B1", "B0", "reduce gradients"]
