"""What blocks send: a parallel one is one sharded region, so it sums once forward, and backward once for each norm."""

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

WHOLE, SPLIT = Layout(tp=2), Layout(tp=2, sequence_parallel=True)
SUMS = {BlockForm.PRE_NORM: (2, 2), BlockForm.POST_NORM: (2, 2), BlockForm.SANDWICH: (2, 2)}
SUMS |= {BlockForm.PARALLEL: (1, 1), BlockForm.PARALLEL_NORMS: (1, 2)}


def sent(operations: list[Operation]) -> list[CommOp]:
    return [operation.comm_op for operation in operations if operation.comm_op is not None]


def passes(block: BlockForm, layout: Layout) -> tuple[list[Operation], list[Operation], list[Operation]]:
    """Forward, backward, and backward in halves."""
    plan = Plan(resize_model(SMALL, block=block), Training(32, 1), layout)
    (spec,) = plan.model.distinct_specs
    layer, sharding = plan.layer_by_spec[spec], plan.layer_sharding(spec)
    halves = [*input_gradient_operations(layer, sharding), *weight_gradient_operations(layer, sharding)]
    return forward_operations(layer, sharding), backward_operations(layer, sharding), halves


@pytest.mark.parametrize("block", BlockForm)
def test_sums_of_a_layer(block: BlockForm) -> None:
    ahead, back, halves = (sent(item) for item in passes(block, WHOLE))
    assert [comm_op.collective for comm_op in ahead] == [CollectiveType.ALL_REDUCE] * SUMS[block][0]
    assert [element.collective for element in back] == [CollectiveType.ALL_REDUCE] * SUMS[block][1]
    assert halves == back
    assert {entry.payload for entry in (*ahead, *back)} == {32 * 64 * 2}


@pytest.mark.parametrize("block", BlockForm)
def test_gathers_and_scatters_under_sequence_parallelism(block: BlockForm) -> None:
    """Forward gathers what each norm made and scatters sums; backward the reverse, and gathers inputs again."""
    ahead, back, halves = (sent(item) for item in passes(block, SPLIT))
    sums, inputs = SUMS[block]
    kinds = [CollectiveType.ALL_GATHER] * inputs + [CollectiveType.REDUCE_SCATTER] * sums
    assert sorted(comm_op.collective.value for comm_op in ahead) == sorted(kind.value for kind in kinds)
    names = sorted(element.name for element in back)
    expected = ["gather input again"] * inputs + ["gather output gradient"] * sums + ["reduce input gradient"] * inputs
    assert names == expected
    assert sorted(half.name for half in halves) == expected


def test_a_parallel_block_gathers_its_input_before_the_mlps_weights_need_it() -> None:
    _, back, _ = passes(BlockForm.PARALLEL, SPLIT)
    names = [part.name for operation in back for part in (operation.comm_op, operation.kernel) if part is not None]
    assert names.index("gather input again") < names.index("mlp.up.weight_gradient")
    assert names.index("reduce input gradient") > names.index("block.gradient_sum")


@pytest.mark.parametrize("block", BlockForm)
@pytest.mark.parametrize("layout", [WHOLE, SPLIT], ids=["whole", "split"])
def test_every_gradient_is_complete_once(block: BlockForm, layout: Layout) -> None:
    plan = Plan(resize_model(SMALL, block=block), Training(32, 1), layout)
    (layer,) = plan.layer_by_spec.values()
    _, _, halves = passes(block, layout)
    assert sum(operation.gradient_count for operation in halves) == layer.parameter_count


@pytest.mark.parametrize("block", BlockForm)
def test_selective_operations_run_a_sharded_input_again(block: BlockForm) -> None:
    """Torchtitan's `op`: products are kept by turns, so inputs are gathered again wherever a product is run again."""
    plan = Plan(resize_model(SMALL, block=block), Training(32, 1), SPLIT)
    (spec,) = plan.model.distinct_specs
    again = recomputed_operations(plan.layer_by_spec[spec], plan.layer_sharding(spec), early_stop=False)
    assert len(sent(again)) == SUMS[block][1]


def test_a_window_leaves_the_ring_as_it_is() -> None:
    """No framework drops blocks of keys from the ring: all of them travel."""
    layout = Layout(cp=2)
    full, narrow = (Plan(resize_model(SMALL, window=window), Training(32, 1), layout) for window in (None, 4))
    rings = []
    for plan in (full, narrow):
        (spec,) = plan.model.distinct_specs
        rings.append(sent(forward_operations(plan.layer_by_spec[spec], plan.layer_sharding(spec))))
    assert rings[0] == rings[1]
    assert replace(rings[0][0], payload=0.0).collective is CollectiveType.SHIFT


EVERY = (LoraTarget.Q, LoraTarget.K, LoraTarget.V, LoraTarget.O, LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN)


@pytest.mark.parametrize("targets", [EVERY, (LoraTarget.Q,), (LoraTarget.UP,), (LoraTarget.O, LoraTarget.DOWN)])
@pytest.mark.parametrize("layout", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("form", BlockForm)
def test_adapters_beside_any_block(form: BlockForm, layout: Layout, targets: tuple[LoraTarget, ...]) -> None:
    """The block's own sums are as ever; adapters keep their inputs whole, so no input is gathered again."""
    training = Training(32, 1, lora=Lora(4, targets, alpha=8.0))
    plan = Plan(resize_model(SMALL, block=form), training, layout)
    (spec,) = plan.model.distinct_specs
    layer, sharding = plan.layer_by_spec[spec], plan.layer_sharding(spec)
    for operations, sums in zip(
        (forward_operations(layer, sharding), backward_operations(layer, sharding)), SUMS[form], strict=True
    ):
        names = [comm_op.name for comm_op in sent(operations) if "adapter" not in comm_op.name]
        assert sum(name.startswith("reduce") for name in names) == sums
        assert "gather input again" not in names
    halves = [*input_gradient_operations(layer, sharding), *weight_gradient_operations(layer, sharding)]
    for operations in (halves, backward_operations(layer, sharding)):
        assert sum(operation.gradient_count for operation in operations) == sum(
            operator.gradient_count for operator in layer.operators
        )
    if layout is SPLIT:
        gathers = [item for item in sent(forward_operations(layer, sharding)) if item.name == "gather input"]
        assert len(gathers) == SUMS[form][1]
