"""Groups of parameters: each is gathered, reduced, updated and held as its own roles say.

A plan with two groups is made by hand: the MLPs' weights are held by fewer ranks than the others, as experts are.
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
from tests.lowering.plans import SMALL, TRAINING, collectives, data_words, lowered

MLP = "mlp"
LAYOUT = Layout(dp=2, cp=2)
IN_MLPS = 4 * (2 * 64 * 128 + 128 + 64)  # four layers: two matrices and their biases
IN_ALL = IN_MLPS + 4 * (4 * 64 * 64 + 4 * 64 + 2 * 2 * 64) + (256 + 64) * 64 + 2 * 64 + 256 * 64


class TwoGroups(Plan):
    """MLPs are a group of their own, over the context-parallel ranks; the rest is over all four."""

    @cached_property
    def layer_by_spec(self) -> dict[LayerSpec, LayerOperators]:
        return {
            spec: replace(layer_operators, operators=_marked(layer_operators))
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


class Hybrid(Plan):
    """All weights are sharded over two ranks, and equal on two such pairs."""

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        formats = self.training.recipe.weight_formats
        return (ParameterGroup(DENSE, formats, CP_GROUP, DP_GROUP, shard_count=2, replica_count=2),)


def _marked(layer: LayerOperators) -> tuple:
    linears = ("mlp.up", "mlp.down")
    return tuple(
        replace(operator, parameter_group=MLP) if operator.name in linears else operator for operator in layer.operators
    )


def program(kind: type[Plan], data: DataParallelStrategy, microbatches: int = 1) -> RankProgram:
    training = replace(TRAINING, global_batch=2 * microbatches, gradient_clipping=False)
    (only,) = lowered(kind(SMALL, training, replace(LAYOUT, data=data))).programs
    return only


def moved(program: RankProgram, collective: CollectiveType) -> dict[str, float]:
    """Bytes of payload by role."""
    found: dict[str, float] = {}
    for exchange in collectives(program):
        if exchange.collective is collective:
            found[exchange.comm_group] = found.get(exchange.comm_group, 0) + exchange.payload
    return found


STRATEGIES = [
    DdpStrategy(), DdpStrategy(bucket=5e4), DdpStrategy(overlap=False),
    Zero1(), Zero1(bucket=5e4), Zero1(overlap=False), Zero2(bucket=5e4), Zero2(overlap=False),
    FullyShard(), FullyShard(prefetch=2), FullyShard(overlap=False),
]  # fmt: skip


@pytest.mark.parametrize("data", STRATEGIES)
def test_each_groups_gradients_are_reduced_once_over_its_own_role(data: DataParallelStrategy) -> None:
    kind = CollectiveType.REDUCE_SCATTER if data.zero_stage else CollectiveType.ALL_REDUCE
    assert moved(program(TwoGroups, data), kind) == {"dp": 4 * (IN_ALL - IN_MLPS), "cp": 4 * IN_MLPS}


@pytest.mark.parametrize("data", [item for item in STRATEGIES if item.stage])
def test_each_groups_parameters_are_gathered_over_its_own_role(data: DataParallelStrategy) -> None:
    """Once a step; with stage 3 again for backward, but for the head's, which follows at once."""
    again = 2 if isinstance(data, FullyShard) else 1
    head = (256 * 64 + 2 * 64) * (again - 1)
    dense = again * (IN_ALL - IN_MLPS) - head
    assert moved(program(TwoGroups, data), CollectiveType.ALL_GATHER) == {"dp": 2 * dense, "cp": 2 * again * IN_MLPS}


@pytest.mark.parametrize("data", STRATEGIES)
def test_a_step_waits_for_every_reduction(data: DataParallelStrategy) -> None:
    only = program(TwoGroups, data)
    reductions = {
        number
        for number, task in enumerate(only.tasks)
        if isinstance(task, CollectiveTask) and task.comm_op.collective is not CollectiveType.ALL_GATHER
    }
    optimizer = next(task for task in only.tasks if getattr(getattr(task, "segment", None), "name", "") == "optimizer")
    assert reductions == set(optimizer.depends_on)


@pytest.mark.parametrize("data", [DdpStrategy(), Zero1(), Zero2(), FullyShard()])
def test_memory_is_cut_by_each_groups_own_ranks(data: DataParallelStrategy) -> None:
    held = Footprint(TwoGroups(SMALL, TRAINING, replace(LAYOUT, data=data)), Framework(1.0, 0.0), 0.0).resident_bytes(0)

    def share(stage: int, width: int) -> float:
        dense, mlp = (4, 2) if data.zero_stage >= stage else (1, 1)
        return width * ((IN_ALL - IN_MLPS) / dense + IN_MLPS / mlp)

    assert held[MemoryCategory.PARAMETERS] == share(3, 2)
    assert held[MemoryCategory.GRADIENTS] == share(2, 4)
    assert held[MemoryCategory.OPTIMIZER] == share(1, 12)


@pytest.mark.parametrize(("data", "dense", "mlp"), [(DdpStrategy(), 1, 1), (Zero1(), 4, 2), (FullyShard(), 4, 2)])
def test_a_rank_updates_its_part_of_each_group(data: DataParallelStrategy, dense: int, mlp: int) -> None:
    only = program(TwoGroups, data)
    (optimizer,) = (
        task.segment for task in only.tasks if isinstance(task, ComputeTask) and task.segment.name == "optimizer"
    )
    updated = [operation.kernel.shape.elements for operation in optimizer.operations if operation.kernel]
    assert updated == [(IN_ALL - IN_MLPS) / dense + IN_MLPS / mlp]


class Apart(TwoGroups):
    """The MLPs' weights are on one rank only: nothing of them is communicated."""

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        dense, _ = super().parameter_groups
        return dense, ParameterGroup(MLP, self.training.recipe.weight_formats)


@pytest.mark.parametrize("data", STRATEGIES)
def test_a_group_that_is_whole_and_on_one_rank_is_neither_gathered_nor_reduced(data: DataParallelStrategy) -> None:
    only = program(Apart, data)
    kind = CollectiveType.REDUCE_SCATTER if data.zero_stage else CollectiveType.ALL_REDUCE
    assert moved(only, kind) == {"dp": 4 * (IN_ALL - IN_MLPS)}
    assert set(moved(only, CollectiveType.ALL_GATHER)) <= {"dp"}
    assert all(number >= 0 for task in only.tasks for number in task.depends_on)


def test_groups_in_other_formats_are_updated_by_kernels_of_their_own() -> None:
    class Narrow(TwoGroups):
        @cached_property
        def parameter_groups(self) -> tuple[ParameterGroup, ...]:
            dense, mlp = super().parameter_groups
            return dense, replace(mlp, formats=replace(mlp.formats, moments=DType.BF16))

    only = program(Narrow, Zero1())
    (optimizer,) = (
        task.segment for task in only.tasks if isinstance(task, ComputeTask) and task.segment.name == "optimizer"
    )
    updated = {
        operation.kernel.shape.formats[1]: operation.kernel.shape.elements
        for operation in optimizer.operations
        if operation.kernel
    }
    assert updated == {DType.FP32: (IN_ALL - IN_MLPS) / 4, DType.BF16: IN_MLPS / 2}


def test_what_is_sharded_and_replicated_is_scattered_first_and_then_summed_in_parts() -> None:
    """Hybrid sharding: reduce-scatter inside, then an all-reduce of this rank's half across."""
    only = program(Hybrid, FullyShard())
    reductions = [
        collective for collective in collectives(only) if collective.collective is not CollectiveType.ALL_GATHER
    ]
    inside, across = reductions[::2], reductions[1::2]
    assert {comm_op.collective for comm_op in inside} == {CollectiveType.REDUCE_SCATTER}
    assert {item.collective for item in across} == {CollectiveType.ALL_REDUCE}
    assert [element.payload / 2 for element in inside] == [entry.payload for entry in across]
    assert sum(each.payload for each in inside) == 4 * IN_ALL
    assert [replace(each, comm_group="cp") for each in inside] == inside
    for number, task in enumerate(only.tasks):
        if isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.ALL_REDUCE:
            assert task.depends_on == (number - 1,)


def test_gradients_are_reduced_in_the_backward_that_the_order_has_last() -> None:
    """Not in that of the highest number: a schedule may run microbatches in any order."""
    training = replace(TRAINING, global_batch=4, gradient_clipping=False)
    kinds = (ActionKind.FORWARD, 0), (ActionKind.FORWARD, 1), (ActionKind.BACKWARD, 1), (ActionKind.BACKWARD, 0)
    order = (tuple(Action(0, kind, microbatch) for kind, microbatch in kinds),)
    (only,) = lower_step(Plan(SMALL, training, Layout(dp=2, data=DdpStrategy(bucket=1e12))), order).programs
    assert data_words(only)[:5] == ["F0", "F1", "B1", "B0", "reduce gradients"]
