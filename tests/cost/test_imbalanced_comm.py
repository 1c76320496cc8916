"""Exchanges and kernels of ranks with unlike many rows take what even ones take that are as full."""

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
from tests.laws.test_expert_loads import loaded

ACROSS = {"ep": 16}  # one group of 16 ranks on two nodes, an expert each
ROOFLINE = Roofline(load_accelerator("h100-sxm-80gb"))


def costs(scenario: Scenario) -> tuple[ImbalancedComm, CollectiveCost, list[CommOp]]:
    """What times exchanges with loads and without them, and those of the step that have one."""
    program = build_simulation(scenario).program
    even = CollectiveCost(scenario.cluster.fabric, resolved_library(scenario), program.groups)
    exchanges = [comm_op for comm_op in program.comm_ops if comm_op.load_index is not None]
    return ImbalancedComm(even, program, scenario.cluster.fabric), even, exchanges


def test_collectives_of_the_library_wait_for_the_fullest_rank() -> None:
    """Its port brings in twice the mean."""
    uneven, even, exchanges = costs(loaded([2, 0.5, 0.5, *[1] * 13], ACROSS))
    assert {exchange.name for exchange in exchanges} >= {"dispatch tokens", "combine tokens", "dispatch probabilities"}
    for comm_op in exchanges:
        doubled = replace(comm_op, payload=2 * comm_op.payload, load_index=None)
        np.testing.assert_array_equal(uneven.time_comm_op(comm_op).seconds, even.time_comm_op(doubled).seconds)
        mine, other = uneven.link_demand(comm_op), even.link_demand(doubled)
        np.testing.assert_array_equal(mine.transfer, other.transfer)
        assert mine.link_loads is other.link_loads


@pytest.mark.parametrize("way", [TokenDispatcher.DEEPEP, TokenDispatcher.HYBRIDEP])
def test_a_nodes_ports_share_what_is_passed_on_there(way: TokenDispatcher) -> None:
    """Where the network is slow: with as many rows on both nodes it carries what it does if all ranks are alike."""
    alike, one_node = [1.5, 0.5, *[1] * 14], [*[1.5] * 8, *[0.5] * 8]
    slow = "cluster={name: dgx-h100, gpus: 16, node: {nic: {bandwidth: 25 Gbit/s}}}"
    for rows, times in ((alike, 1.0), (one_node, 1.5)):
        uneven, even, exchanges = costs(loaded(rows, ACROSS, way).with_overrides(slow))
        (dispatch,) = [
            exchange for exchange in exchanges if exchange.collective.is_token_routing and exchange.host_sync
        ]
        expected = even.time_comm_op(replace(dispatch, payload=times * dispatch.payload, load_index=None)).seconds
        np.testing.assert_array_equal(uneven.time_comm_op(dispatch).seconds, expected)


def test_the_fullest_rank_counts_where_nvlink_does() -> None:
    """On one node everything is passed on over it."""
    uneven, even, exchanges = costs(
        loaded([1.5] * 2 + [0.5] * 2 + [1] * 12, {"ep": 8, "pp": 2}, TokenDispatcher.DEEPEP)
    )
    for exchange in exchanges:
        more = replace(exchange, payload=1.5 * exchange.payload, load_index=None)
        np.testing.assert_array_equal(uneven.time_comm_op(exchange).seconds, even.time_comm_op(more).seconds)


def test_all_gathers_bring_all_tokens_to_all() -> None:
    """So they do not depend on who has them."""
    program = build_simulation(loaded([2, 0.5, 0.5, *[1] * 13], ACROSS, TokenDispatcher.ALL_GATHER)).program
    assert not [comm_op for comm_op in program.comm_ops if comm_op.load_index is not None]
    assert len(program.expert_loads.factors)


def routed_kernels(plan: Plan, load: float) -> list[Kernel]:
    """The kernels on the experts' ranks of a rank with so many times the mean rows."""
    spec = plan.model.distinct_specs[-1]
    found = transformer_layer(plan.model, spec, plan.training, replace(plan.layer_shard, load_factor=load))
    operators = [operator for operator in found.operators if operator.region is ParallelRegion.EXPERT]
    return [kernel for item in operators for kernel in (*item.forward, *item.input_gradient, *item.weight_gradient)]


@given(st.integers(16, 140), st.sampled_from(TokenDispatcher), st.sampled_from(["pytorch", "megatron"]))
@examples(60)
def test_a_kernel_over_more_rows_is_the_one_of_a_rank_that_has_as_many(
    step: int, way: TokenDispatcher, name: str
) -> None:
    """Up to where every token would come, which is the most (about 2.2 times the mean of these)."""
    scenario = loaded("balanced", {"ep": 4}, way).with_overrides(f"framework={name}")
    plan = build_plan(scenario)
    mean, own = routed_kernels(plan, 1.0), routed_kernels(plan, step / 64)
    source = ImbalancedKernels(ROOFLINE)
    assert len(mean) == len(own) > 0
    for before, after in zip(mean, own, strict=True):
        more = before.scale_rows(step / 64)
        assert more.flops == pytest.approx(after.flops, rel=0.03)
        assert more.bytes == pytest.approx(after.bytes, rel=0.03)
        assert source.time_kernel(before, step / 64).seconds == pytest.approx(
            ROOFLINE.time_kernel(after).seconds, rel=0.03
        )


def test_between_64ths_times_are_straight_lines() -> None:
    (kernel, *_) = routed_kernels(build_plan(loaded("balanced", {"ep": 4})), 1.0)
    source = ImbalancedKernels(ROOFLINE)
    assert source.time_kernel(kernel, 1.0) == ROOFLINE.time_kernel(kernel)
    below, above = (source.time_kernel(kernel, step / 64).seconds for step in (70, 71))
    assert source.time_kernel(kernel, 70.25 / 64).seconds == pytest.approx(0.75 * below + 0.25 * above, rel=1e-12)
