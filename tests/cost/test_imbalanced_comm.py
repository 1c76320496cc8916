"""Collectives and kernels of imbalanced ranks take the time of balanced ones with the same load."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.build import build_plan, build_simulation, resolved_library
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.imbalanced_comm import ImbalancedComm
from clustersim.cost.imbalanced_kernels import ImbalancedKernels
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel
from clustersim.model.layers import transformer_layer
from clustersim.model.operators import ParallelRegion
from clustersim.parallel.plan import Plan
from clustersim.program.task import CommOp, TokenDispatcher
from clustersim.scenario import Scenario
from tests.conftest import examples
from tests.laws.test_expert_loads import scenario_with_load

TWO_NODES = {"ep": 16}  # one group of 16 ranks on two nodes, one expert each
ROOFLINE = Roofline(load_accelerator("h100-sxm-80gb"))


def collective_costs(scenario: Scenario) -> tuple[ImbalancedComm, CollectiveCost, list[CommOp]]:
    """Costs of collectives with and without loads, and the collectives of the step that have a load."""
    program = build_simulation(scenario).program
    balanced = CollectiveCost(scenario.cluster.fabric, resolved_library(scenario), program.groups)
    loaded_ops = [comm_op for comm_op in program.comm_ops if comm_op.load_index is not None]
    return ImbalancedComm(balanced, program, scenario.cluster.fabric), balanced, loaded_ops


def test_library_collectives_wait_for_the_most_loaded_rank() -> None:
    """Its port receives twice the mean."""
    imbalanced, balanced, comm_ops = collective_costs(scenario_with_load([2, 0.5, 0.5, *[1] * 13], TWO_NODES))
    assert {comm_op.name for comm_op in comm_ops} >= {"dispatch tokens", "combine tokens", "dispatch probabilities"}
    for comm_op in comm_ops:
        doubled = replace(comm_op, payload=2 * comm_op.payload, load_index=None)
        np.testing.assert_array_equal(imbalanced.time_comm_op(comm_op).seconds, balanced.time_comm_op(doubled).seconds)
        demand, balanced_demand = imbalanced.link_demand(comm_op), balanced.link_demand(doubled)
        np.testing.assert_array_equal(demand.transfer, balanced_demand.transfer)
        assert demand.link_loads is balanced_demand.link_loads


@pytest.mark.parametrize("dispatcher", [TokenDispatcher.DEEPEP, TokenDispatcher.HYBRIDEP])
def test_a_nodes_ports_share_the_forwarded_tokens(dispatcher: TokenDispatcher) -> None:
    """On a slow network: with equal node totals it takes the balanced time."""
    equal_nodes, one_node = [1.5, 0.5, *[1] * 14], [*[1.5] * 8, *[0.5] * 8]
    slow = "cluster={name: dgx-h100, gpus: 16, node: {nic: {bandwidth: 25 Gbit/s}}}"
    for load, factor in ((equal_nodes, 1.0), (one_node, 1.5)):
        imbalanced, balanced, comm_ops = collective_costs(
            scenario_with_load(load, TWO_NODES, dispatcher).with_overrides(slow)
        )
        (dispatch,) = [comm_op for comm_op in comm_ops if comm_op.collective.is_token_routing and comm_op.host_sync]
        expected = balanced.time_comm_op(replace(dispatch, payload=factor * dispatch.payload, load_index=None)).seconds
        np.testing.assert_array_equal(imbalanced.time_comm_op(dispatch).seconds, expected)


def test_the_most_loaded_rank_decides_within_nvlink() -> None:
    """On one node everything is forwarded over NVLink."""
    imbalanced, balanced, comm_ops = collective_costs(
        scenario_with_load([1.5] * 2 + [0.5] * 2 + [1] * 12, {"ep": 8, "pp": 2}, TokenDispatcher.DEEPEP)
    )
    for comm_op in comm_ops:
        scaled_op = replace(comm_op, payload=1.5 * comm_op.payload, load_index=None)
        np.testing.assert_array_equal(
            imbalanced.time_comm_op(comm_op).seconds, balanced.time_comm_op(scaled_op).seconds
        )


def test_all_gather_dispatch_does_not_depend_on_the_load() -> None:
    """All ranks receive all tokens."""
    program = build_simulation(
        scenario_with_load([2, 0.5, 0.5, *[1] * 13], TWO_NODES, TokenDispatcher.ALL_GATHER)
    ).program
    assert not [comm_op for comm_op in program.comm_ops if comm_op.load_index is not None]
    assert len(program.expert_loads.factors)


def expert_kernels(plan: Plan, load: float) -> list[Kernel]:
    """The expert kernels of a rank whose load is `load` times the mean."""
    spec = plan.model.distinct_specs[-1]
    sharded_layer = transformer_layer(plan.model, spec, plan.training, replace(plan.layer_shard, load_factor=load))
    operators = [operator for operator in sharded_layer.operators if operator.region is ParallelRegion.EXPERT]
    return [kernel for item in operators for kernel in (*item.forward, *item.input_gradient, *item.weight_gradient)]


@given(
    st.integers(16, 140),
    st.sampled_from([kind for kind in TokenDispatcher if kind is not TokenDispatcher.MORI]),
    st.sampled_from(["pytorch", "megatron"]),
)
@examples(60)
def test_a_loaded_kernel_equals_that_of_a_rank_with_as_many_tokens(
    load_64ths: int, dispatcher: TokenDispatcher, name: str
) -> None:
    """Up to the load at which every token comes, the maximum (about 2.2 times the mean here)."""
    scenario = scenario_with_load("balanced", {"ep": 4}, dispatcher).with_overrides(f"framework={name}")
    plan = build_plan(scenario)
    mean, loaded_kernels = expert_kernels(plan, 1.0), expert_kernels(plan, load_64ths / 64)
    source = ImbalancedKernels(ROOFLINE)
    assert len(mean) == len(loaded_kernels) > 0
    for before, after in zip(mean, loaded_kernels, strict=True):
        scaled_kernel = before.scale_rows(load_64ths / 64)
        assert scaled_kernel.flops == pytest.approx(after.flops, rel=0.03)
        assert scaled_kernel.bytes == pytest.approx(after.bytes, rel=0.03)
        assert source.time_kernel(before, load_64ths / 64).seconds == pytest.approx(
            ROOFLINE.time_kernel(after).seconds, rel=0.03
        )


def test_times_are_linear_between_64ths_of_load() -> None:
    (kernel, *_) = expert_kernels(build_plan(scenario_with_load("balanced", {"ep": 4})), 1.0)
    source = ImbalancedKernels(ROOFLINE)
    assert source.time_kernel(kernel, 1.0) == ROOFLINE.time_kernel(kernel)
    below, above = (source.time_kernel(kernel, step / 64).seconds for step in (70, 71))
    assert source.time_kernel(kernel, 70.25 / 64).seconds == pytest.approx(0.75 * below + 0.25 * above, rel=1e-12)
