"""Shared experts beside the way of tokens: which product hides behind which exchange."""

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


def plan(*, beside: bool, tp: int = 1) -> Plan:
    layout = {"ep": 4, "tp": tp, "etp": 1, "sequence_parallel": tp > 1, "overlap_shared_experts": beside}
    training = {"sequence": 1024, "global_batch": 16}
    mapping = {"model": "deepseek-v2-lite", "cluster": {"name": "dgx-h100", "gpus": 8}}
    return build_plan(Scenario.from_mapping({**mapping, "layout": layout, "training": training}))


def operations(of: Plan, way) -> list[Operation]:
    (spec,) = (layer_spec for layer_spec in of.layer_by_spec if isinstance(layer_spec.mlp, MoeMlp))
    return way(of.layer_by_spec[spec], of.layer_sharding(spec))


def names(made: list[Operation]) -> list[tuple[str, ...]]:
    """What each operation runs."""
    found: list[tuple[str, ...]] = []
    for operation in made:
        match operation.body:
            case CommOverlap(comm_op=exchange, kernel=kernel):
                found.append((exchange.name, kernel.name))
            case does:
                found.append((does.name,))
    return found


@pytest.mark.parametrize(
    ("way", "tp", "there", "back"),
    [
        (forward_operations, 1, "up", "down"), (forward_operations, 2, "up", "down"), (backward_operations, 1, "down", "up"),
        (input_gradient_operations, 1, "down", "up"), (input_gradient_operations, 2, "down", "up"),
        (backward_operations, 2, "down", "activation"),
    ],
)  # fmt: skip
def test_products_before_the_activation_hide_one_way_and_those_behind_it_the_other(way, tp, there, back) -> None:
    """A product's gradients that are beside tensor parallelism's exchanges hide no other, so the activation's does."""
    pairs = [item for item in names(operations(plan(beside=True, tp=tp), way)) if len(item) == 2]
    hidden = {exchange: kernel.split(".")[1] for exchange, kernel in pairs if kernel.startswith("shared")}
    tokens = {name: kernel for name, kernel in hidden.items() if name.endswith("tokens")}
    assert tokens == {"dispatch tokens": there, "combine tokens": back}


AGAIN = [partial(recomputed_forward, early_stop=element) for element in (False, True)]


@pytest.mark.parametrize("way", [forward_operations, backward_operations, input_gradient_operations, *AGAIN])
@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_is_run_twice_or_left_out(way, tp: int) -> None:
    apart, beside = (operations(plan(beside=item, tp=tp), way) for item in (False, True))
    assert sorted(_pieces(beside), key=repr) == sorted(_pieces(apart), key=repr)
    assert sum(operation.gradient_count for operation in beside) == sum(element.gradient_count for element in apart)


def _pieces(made: list[Operation]) -> list[Kernel | CommOp]:
    pieces: list[Kernel | CommOp] = []
    for operation in made:
        pieces += [operation.kernel] if operation.kernel is not None else []
        pieces += [operation.comm_op] if operation.comm_op is not None else []
    return pieces


def test_without_tokens_that_travel_nothing_changes() -> None:
    of = plan(beside=True)
    alone = replace(of, layout=replace(of.layout, ep=1))
    apart = replace(alone, layout=replace(alone.layout, overlap_shared_experts=False))
    assert operations(alone, forward_operations) == operations(apart, forward_operations)
