"""Communication of block forms.

A parallel block is one sharded region, so it is reduced once forward, and backward once per norm.
"""

from dataclasses import replace

import pytest

from clustersim.model.layer_stack import BlockForm
from clustersim.model.lora import Lora, LoraTarget
from clustersim.model.training import Training
from clustersim.model.transformer import resize_model
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor_parallel import (
    backward_operations,
    forward_operations,
    input_gradient_operations,
    recomputed_operations,
    weight_gradient_operations,
)
from clustersim.program.task import CollectiveType, CommOp, Operation
from tests.parallel.test_tensor_parallel import SMALL

TENSOR_PARALLEL, SEQUENCE_PARALLEL = Layout(tp=2), Layout(tp=2, sequence_parallel=True)
REDUCTION_COUNTS = {BlockForm.PRE_NORM: (2, 2), BlockForm.POST_NORM: (2, 2), BlockForm.SANDWICH: (2, 2)}
REDUCTION_COUNTS |= {BlockForm.PARALLEL: (1, 1), BlockForm.PARALLEL_NORMS: (1, 2), BlockForm.PARALLEL_FUSED: (1, 1)}


def comm_ops(operations: list[Operation]) -> list[CommOp]:
    return [operation.comm_op for operation in operations if operation.comm_op is not None]


def layer_operations(block: BlockForm, layout: Layout) -> tuple[list[Operation], list[Operation], list[Operation]]:
    """Forward, backward, and backward split into input and weight gradients."""
    plan = Plan(resize_model(SMALL, block=block), Training(32, 1), layout)
    (spec,) = plan.model.distinct_specs
    layer, sharding = plan.layer_by_spec[spec], plan.layer_sharding(spec)
    split_backward = [*input_gradient_operations(layer, sharding), *weight_gradient_operations(layer, sharding)]
    return forward_operations(layer, sharding), backward_operations(layer, sharding), split_backward


@pytest.mark.parametrize("block", BlockForm)
def test_all_reduces_of_a_layer(block: BlockForm) -> None:
    forward, backward, split_backward = (
        comm_ops(layer_operation) for layer_operation in layer_operations(block, TENSOR_PARALLEL)
    )
    assert [comm_op.collective for comm_op in forward] == [CollectiveType.ALL_REDUCE] * REDUCTION_COUNTS[block][0]
    assert [item.collective for item in backward] == [CollectiveType.ALL_REDUCE] * REDUCTION_COUNTS[block][1]
    assert split_backward == backward
    assert {element.payload for element in (*forward, *backward)} == {32 * 64 * 2}


@pytest.mark.parametrize("block", BlockForm)
def test_gathers_and_scatters_under_sequence_parallelism(block: BlockForm) -> None:
    """Forward gathers the output of each norm and scatters sums; backward the reverse, and gathers inputs again."""
    forward, backward, split_backward = (
        comm_ops(layer_operation) for layer_operation in layer_operations(block, SEQUENCE_PARALLEL)
    )
    scatter_count, gather_count = REDUCTION_COUNTS[block]
    kinds = [CollectiveType.ALL_GATHER] * gather_count + [CollectiveType.REDUCE_SCATTER] * scatter_count
    assert sorted(comm_op.collective.value for comm_op in forward) == sorted(kind.value for kind in kinds)
    names = sorted(item.name for item in backward)
    expected = (
        ["gather input again"] * gather_count
        + ["gather output gradient"] * scatter_count
        + ["reduce input gradient"] * gather_count
    )
    assert names == expected
    assert sorted(element.name for element in split_backward) == expected


def test_a_parallel_block_gathers_its_input_before_the_mlp_weight_gradient() -> None:
    _, backward, _ = layer_operations(BlockForm.PARALLEL, SEQUENCE_PARALLEL)
    names = [item.name for operation in backward for item in (operation.comm_op, operation.kernel) if item is not None]
    assert names.index("gather input again") < names.index("mlp.up.weight_gradient")
    assert names.index("reduce input gradient") > names.index("block.gradient_sum")


@pytest.mark.parametrize("block", BlockForm)
@pytest.mark.parametrize("layout", [TENSOR_PARALLEL, SEQUENCE_PARALLEL], ids=["whole", "split"])
def test_every_gradient_is_complete_once(block: BlockForm, layout: Layout) -> None:
    plan = Plan(resize_model(SMALL, block=block), Training(32, 1), layout)
    (layer,) = plan.layer_by_spec.values()
    _, _, split_backward = layer_operations(block, layout)
    assert sum(operation.gradient_count for operation in split_backward) == layer.parameter_count


@pytest.mark.parametrize("block", BlockForm)
def test_selective_op_recompute_gathers_sharded_inputs_again(block: BlockForm) -> None:
    """Torchtitan's `op`: every second matmul is kept, so inputs are gathered again wherever a matmul is recomputed."""
    plan = Plan(resize_model(SMALL, block=block), Training(32, 1), SEQUENCE_PARALLEL)
    (spec,) = plan.model.distinct_specs
    recomputed = recomputed_operations(plan.layer_by_spec[spec], plan.layer_sharding(spec), early_stop=False)
    assert len(comm_ops(recomputed)) == REDUCTION_COUNTS[block][1]


def test_a_sliding_window_does_not_change_the_cp_ring() -> None:
    """No framework drops key blocks from the ring: all of them are sent."""
    layout = Layout(cp=2)
    full, windowed = (Plan(resize_model(SMALL, window=window), Training(32, 1), layout) for window in (None, 4))
    rings = []
    for plan in (full, windowed):
        (spec,) = plan.model.distinct_specs
        rings.append(comm_ops(forward_operations(plan.layer_by_spec[spec], plan.layer_sharding(spec))))
    assert rings[0] == rings[1]
    assert replace(rings[0][0], payload=0.0).collective is CollectiveType.SHIFT


ALL_TARGETS = (LoraTarget.Q, LoraTarget.K, LoraTarget.V, LoraTarget.O, LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN)


@pytest.mark.parametrize("targets", [ALL_TARGETS, (LoraTarget.Q,), (LoraTarget.UP,), (LoraTarget.O, LoraTarget.DOWN)])
@pytest.mark.parametrize("layout", [TENSOR_PARALLEL, SEQUENCE_PARALLEL], ids=["whole", "split"])
@pytest.mark.parametrize("form", BlockForm)
def test_lora_with_any_block_form(form: BlockForm, layout: Layout, targets: tuple[LoraTarget, ...]) -> None:
    """The block's reductions are unchanged; adapters keep full inputs, so no input is gathered again."""
    training = Training(32, 1, lora=Lora(4, targets, alpha=8.0))
    plan = Plan(resize_model(SMALL, block=form), training, layout)
    (spec,) = plan.model.distinct_specs
    layer, sharding = plan.layer_by_spec[spec], plan.layer_sharding(spec)
    for operations, reduction_count in zip(
        (forward_operations(layer, sharding), backward_operations(layer, sharding)), REDUCTION_COUNTS[form], strict=True
    ):
        names = [comm_op.name for comm_op in comm_ops(operations) if "adapter" not in comm_op.name]
        assert sum(name.startswith("reduce") for name in names) == reduction_count
        assert "gather input again" not in names
    split_backward = [*input_gradient_operations(layer, sharding), *weight_gradient_operations(layer, sharding)]
    for operations in (split_backward, backward_operations(layer, sharding)):
        assert sum(operation.gradient_count for operation in operations) == sum(
            operator.gradient_count for operator in layer.operators
        )
    if layout is SEQUENCE_PARALLEL:
        gathers = [item for item in comm_ops(forward_operations(layer, sharding)) if item.name == "gather input"]
        assert len(gathers) == REDUCTION_COUNTS[form][1]
