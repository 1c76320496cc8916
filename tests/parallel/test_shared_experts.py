"""Overlap of shared experts with token dispatch: which matmul is overlapped with which collective."""

from dataclasses import replace
from functools import partial

import pytest

from clustersim import Scenario
from clustersim.build import build_plan
from clustersim.model.kernels import Kernel
from clustersim.model.layer_stack import MoeMlp
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor_parallel import (
    backward_operations,
    forward_operations,
    input_gradient_operations,
    recomputed_forward,
)
from clustersim.program.task import CommOp, CommOverlap, Operation
from tests.parallel.operation_listing import comparable_operations


def moe_plan(*, overlap: bool, tp: int = 1) -> Plan:
    layout = {"ep": 4, "tp": tp, "etp": 1, "sequence_parallel": tp > 1, "moe_shared_expert_overlap": overlap}
    training = {"sequence": 1024, "global_batch": 16}
    mapping = {"model": "deepseek-v2-lite", "cluster": {"name": "dgx-h100", "gpus": 8}, "framework": "ideal"}
    return build_plan(Scenario.from_mapping({**mapping, "layout": layout, "training": training}))


def moe_layer_operations(plan: Plan, builder) -> list[Operation]:
    (spec,) = (layer_spec for layer_spec in plan.layer_by_spec if isinstance(layer_spec.mlp, MoeMlp))
    return builder(plan.layer_by_spec[spec], plan.layer_sharding(spec))


def operation_names(operations: list[Operation]) -> list[tuple[str, ...]]:
    """Names of what each operation runs."""
    operation_names: list[tuple[str, ...]] = []
    for operation in operations:
        match operation.body:
            case CommOverlap(comm_op=comm_op, kernel=kernel):
                operation_names.append((comm_op.name, kernel.name))
            case body:
                operation_names.append((body.name,))
    return operation_names


@pytest.mark.parametrize(
    ("direction", "tp", "dispatch_kernel", "combine_kernel"),
    [
        (forward_operations, 1, "up", "down"), (forward_operations, 2, "up", "down"),
        (backward_operations, 1, "down", "up"),
        (input_gradient_operations, 1, "down", "up"), (input_gradient_operations, 2, "down", "up"),
        (backward_operations, 2, "down", "activation"),
    ],
)  # fmt: skip
def test_shared_expert_matmuls_overlap_dispatch_and_combine(direction, tp, dispatch_kernel, combine_kernel) -> None:
    """Matmul gradients that overlap tensor-parallel collectives overlap no other, so the activation's kernel does."""
    pairs = [
        operation_name
        for operation_name in operation_names(moe_layer_operations(moe_plan(overlap=True, tp=tp), direction))
        if len(operation_name) == 2
    ]
    hidden = {comm_name: kernel.split(".")[1] for comm_name, kernel in pairs if kernel.startswith("shared")}
    tokens = {name: kernel for name, kernel in hidden.items() if name.endswith("tokens")}
    assert tokens == {"dispatch tokens": dispatch_kernel, "combine tokens": combine_kernel}


RECOMPUTED_FORWARD = [partial(recomputed_forward, early_stop=item) for item in (False, True)]


@pytest.mark.parametrize(
    "direction", [forward_operations, backward_operations, input_gradient_operations, *RECOMPUTED_FORWARD]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_overlap_keeps_every_kernel_and_comm_op(direction, tp: int) -> None:
    separate, overlapped = (moe_layer_operations(moe_plan(overlap=item, tp=tp), direction) for item in (False, True))
    assert sorted(_kernels_and_comm_ops(overlapped), key=repr) == sorted(_kernels_and_comm_ops(separate), key=repr)
    assert sum(operation.gradient_count for operation in overlapped) == sum(
        element.gradient_count for element in separate
    )


def _kernels_and_comm_ops(operations: list[Operation]) -> list[Kernel | CommOp]:
    items: list[Kernel | CommOp] = []
    for operation in operations:
        items += [operation.kernel] if operation.kernel is not None else []
        items += [operation.comm_op] if operation.comm_op is not None else []
    return items


def test_without_expert_parallelism_the_overlap_setting_has_no_effect() -> None:
    base = moe_plan(overlap=True)
    without_ep = replace(base, layout=replace(base.layout, ep=1))
    without_overlap = replace(without_ep, layout=replace(without_ep.layout, moe_shared_expert_overlap=False))
    first, second = (
        comparable_operations(moe_layer_operations(plan, forward_operations)) for plan in (without_ep, without_overlap)
    )
    assert first == second
