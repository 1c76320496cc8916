"""DTensor's collectives on the second dimension: one copy of the whole activation for each."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.overheads import NO_OVERHEADS
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor_parallel import (
    backward_operations,
    forward_operations,
    input_gradient_operations,
    recomputed_forward,
    recomputed_operations,
    weight_gradient_operations,
)
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, Operation
from tests.parallel.operation_listing import comparable_operations

MODEL, SEQUENCE = load_preset("llama3-8b"), 1024
LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 8]),
    sequence_parallel=st.booleans(),
    async_tensor_model_parallel_allreduce=st.booleans(),
)
LOCAL = "gather input again"  # of an input that DTensor keeps whole, so that nothing is gathered again


def passes(layout: Layout, *, copies: bool) -> list[list[Operation]]:
    """Operations of all passes of a layer."""
    training = Training(SEQUENCE, 2, microbatch=2, overheads=replace(NO_OVERHEADS, tensor_parallel_copies=copies))
    plan = Plan(MODEL, training, layout)
    spec = MODEL.distinct_specs[0]
    layer, sharding = plan.layer_by_spec[spec], plan.layer_sharding(spec)
    return [
        forward_operations(layer, sharding),
        backward_operations(layer, sharding),
        recomputed_forward(layer, sharding, early_stop=False),
        recomputed_operations(layer, sharding, early_stop=False),
        input_gradient_operations(layer, sharding),
        weight_gradient_operations(layer, sharding),
    ]


def is_copy(operation: Operation) -> bool:
    return operation.kernel is not None and operation.kernel.name.endswith(".copy")


def collective_of(operation: Operation) -> CommOp | None:
    return operation.body.comm_op if isinstance(operation.body, CommOverlap) else operation.comm_op


@given(LAYOUTS)
def test_gathers_are_copied_behind_and_scatters_before(layout: Layout) -> None:
    """2 x 1,024 tokens of 4,096 elements in bf16, read and written: 2 x 16.8 MB; nothing else changes."""
    for plain, copied in zip(passes(layout, copies=False), passes(layout, copies=True), strict=True):
        others = [operation for operation in copied if not is_copy(operation)]
        assert comparable_operations(others) == comparable_operations(plain)
        expected = 0
        for index, operation in enumerate(copied):
            comm_op = collective_of(operation)
            if comm_op is None or comm_op.name == LOCAL:
                continue
            neighbour = {CollectiveType.ALL_GATHER: index + 1, CollectiveType.REDUCE_SCATTER: index - 1}
            if comm_op.collective in neighbour:
                copy = copied[neighbour[comm_op.collective]].kernel
                assert isinstance(copy, Kernel)
                assert copy.kind is KernelKind.COPY
                assert copy.bytes == 2 * 2 * SEQUENCE * MODEL.hidden * 2 == 2 * comm_op.payload
                expected += 1
        assert sum(map(is_copy, copied)) == expected


@given(st.sampled_from([2, 8]))
def test_a_layer_has_four_copies_in_forward_and_in_backward(tp: int) -> None:
    """Attention and MLP: an input gathered and an output scattered each, and their gradients vice versa."""
    forward, backward, *_ = passes(Layout(tp=tp, sequence_parallel=True), copies=True)
    assert [sum(map(is_copy, operations)) for operations in (forward, backward)] == [4, 4]


def test_without_sequence_parallelism_or_with_fused_collectives_nothing_is_copied() -> None:
    """All-reduces keep the shape; the kernels of asynchronous tensor parallelism read tensors as they are."""
    for layout in (Layout(tp=2), Layout(tp=2, sequence_parallel=True, tp_comm_overlap=True)):
        assert not any(is_copy(operation) for operations in passes(layout, copies=True) for operation in operations)
