"""Bytes on links: closed forms of rings and messages, and conservation laws."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.collectives.library_files import load_library
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp
from clustersim.results.link_volumes import MeteredCollectiveCost
from clustersim.results.network_utilization import NetworkUtilization, network_utilization
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.trace_table import build_trace_table
from clustersim.results.transfer_events import spread_over_time
from tests.conftest import examples
from tests.laws.test_shared_network import contended_scenarios
from tests.strategies import scenarios


def metered_cost(cluster: str, gpus: int, group_members: list[list[int]], algorithm: str) -> MeteredCollectiveCost:
    loaded = load_cluster(cluster, gpu_count=gpus)
    groups = {"tp": ProcessGroups("tp", np.array(group_members))}
    overrides = NcclOverrides(forced=dict.fromkeys(CollectiveType, algorithm))
    return MeteredCollectiveCost(loaded.fabric, overrides.apply_to(load_library(loaded.library)), groups)


@pytest.mark.parametrize(
    ("kind", "ring_passes"),
    [(CollectiveType.ALL_GATHER, 1), (CollectiveType.REDUCE_SCATTER, 1), (CollectiveType.ALL_REDUCE, 2)],
)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_within_a_node_has_the_textbook_nvlink_volume(kind: CollectiveType, ring_passes: int, size: int) -> None:
    """Every member sends (n - 1) / n of the payload, twice that for all-reduce; each byte crosses two links."""
    members = np.arange(8).reshape(-1, size).tolist()
    carried = metered_cost("dgx-h100", 8, members, "ring").link_volumes(CommOp("x", kind, "tp", 1e6))
    sent = ring_passes * (size - 1)
    assert carried.sent_fraction == pytest.approx([sent] * (8 // size))
    assert carried.crossing_fraction[:, LINK_KINDS.index(LinkKind.NVLINK)] == pytest.approx(carried.sent_fraction)
    assert carried.crossing_fraction.sum() == pytest.approx(carried.sent_fraction.sum()), "nothing crosses another tier"
    assert np.bincount(carried.group_index, carried.fraction) == pytest.approx([2 * sent] * (8 // size))
    assert np.bincount(carried.link_id, carried.fraction) == pytest.approx([sent / size] * 16)


def test_a_ring_of_one_rail_over_two_nodes_uses_nics_and_no_nvlink() -> None:
    carried = metered_cost("dgx-h100", 16, [[0, 8]], "ring").link_volumes(
        CommOp("x", CollectiveType.ALL_GATHER, "tp", 1e6)
    )
    assert carried.sent_fraction.tolist() == [1.0]
    crossed = {LINK_KINDS[tier] for tier in np.flatnonzero(carried.crossing_fraction[0]).tolist()}
    assert crossed == {LinkKind.PCIE, LinkKind.NIC}, "they share the leaf of their rail"


def test_a_group_of_one_carries_nothing() -> None:
    carried = metered_cost("dgx-h100", 2, [[0], [1]], "ring").link_volumes(
        CommOp("x", CollectiveType.ALL_GATHER, "tp", 1e6)
    )
    assert carried.sent_fraction.tolist() == [0.0, 0.0]
    assert not len(carried.link_id)


def test_comm_ops_that_differ_only_in_payload_share_their_link_shares() -> None:
    meter = metered_cost("dgx-h100", 8, [list(range(8))], "ring")
    first, second = (meter.link_volumes(CommOp("x", CollectiveType.ALL_GATHER, "tp", size)) for size in (1e6, 2e9))
    assert first is second


def utilization(result: SimulationResult, bin_count: int = 50) -> NetworkUtilization | None:
    cluster, settings = result.scenario.cluster, result.scenario.cost
    groups = result.program.groups
    volumes = MeteredCollectiveCost(
        cluster.fabric, settings.nccl_overrides.apply_to(load_library(cluster.library)), groups
    )
    return network_utilization(
        build_trace_table(result.trace, result.program, result.scenario.steps), cluster.fabric, volumes, bin_count
    )


def require_utilization(result: SimulationResult) -> NetworkUtilization:
    network = utilization(result)
    assert network is not None
    return network


@cache
def cached_scenario(**changes: Any) -> Scenario:
    cluster = {"name": "dgx-h100", "gpus": changes.pop("gpus", 16)}
    training = {"sequence": 1024, "global_batch": 16, "microbatch": 1}
    cost = {"symmetry": changes.pop("symmetry", "auto"), "network": changes.pop("network", "uncontended")}
    steps = changes.pop("steps", 1)
    return Scenario.from_mapping(
        {
            "model": "llama3-8b",
            "cluster": cluster,
            "layout": changes,
            "training": training,
            "cost": cost,
            "steps": steps,
        }
    )


def tier_bytes(network: NetworkUtilization) -> dict[LinkKind, float]:
    """Total bytes that links of each tier carry in the run."""
    bin_count = len(network.tiers[0].utilization_over_time)
    return {
        tier.kind: float(tier.utilization_over_time.sum()) * tier.capacity * network.makespan / bin_count
        for tier in network.tiers
    }


def test_p2p_messages_count_once_per_hop() -> None:
    result = simulate(cached_scenario(pp=2, tp=8))
    network, training = require_utilization(result), result.scenario.training
    axis = {axis_traffic.axis: axis_traffic for axis_traffic in network.axis_traffic}["pp"]
    tokens = training.global_batch * training.sequence
    message_bytes = tokens * result.scenario.model.hidden * 2.0  # BF16, once forward and once backward
    assert axis.sent_bytes == pytest.approx(2 * message_bytes), (
        "of the tensor-parallel group each member sends its part"
    )
    crossed = {tier.kind for tier, amount in zip(network.tiers, axis.tier_bytes, strict=True) if amount}
    assert crossed == {LinkKind.PCIE, LinkKind.NIC}
    assert tier_bytes(network)[LinkKind.NIC] == pytest.approx(
        2
        * sum(
            item.tier_bytes[[tier.kind for tier in network.tiers].index(LinkKind.NIC)] for item in network.axis_traffic
        )
    )


def test_data_parallel_volume_is_the_textbook_ring_volume() -> None:
    """A ring all-reduce of all gradients: 2 (n - 1) / n of four bytes a parameter, from each of n ranks."""
    scenario = cached_scenario(dp=8, gpus=8)
    mapping = {**scenario.raw_mapping, "cost": {"collectives": {"all_reduce": "ring"}}, "model": "gpt2-small"}
    result = simulate(Scenario.from_mapping(mapping))
    exchanged = {comm_op for program in result.program.programs for comm_op in program.comm_ops}
    assert {comm_op.collective for comm_op in exchanged} == {CollectiveType.ALL_REDUCE}
    payload = sum(task.comm_op.payload for task in result.program.programs[0].tasks if hasattr(task, "comm_op"))
    (axis,) = require_utilization(result).axis_traffic
    assert axis.axis == "dp"
    assert axis.sent_bytes / 8 == pytest.approx(2 * 7 / 8 * payload)


def test_folded_ranks_count_as_all_ranks() -> None:
    folded, unfolded = (
        require_utilization(simulate(cached_scenario(tp=2, pp=2, dp=4, symmetry=symmetry)))
        for symmetry in ("auto", "off")
    )
    assert_same_utilization(folded, unfolded)


def assert_same_utilization(left: NetworkUtilization, right: NetworkUtilization) -> None:
    assert [tier.kind for tier in left.tiers] == [tier.kind for tier in right.tiers]
    for tier, right_tier in zip(left.tiers, right.tiers, strict=True):
        assert tier.utilization_over_time == pytest.approx(right_tier.utilization_over_time, rel=1e-6, abs=1e-9)
        assert tier.max_link_utilization == pytest.approx(right_tier.max_link_utilization)
    left_axes, right_axes = ({axis.axis: axis for axis in answer.axis_traffic} for answer in (left, right))
    assert left_axes.keys() == right_axes.keys()
    for name, axis in left_axes.items():
        assert axis.sent_bytes == pytest.approx(right_axes[name].sent_bytes)
        assert axis.tier_bytes == pytest.approx(right_axes[name].tier_bytes)
    assert [busiest_link.link for busiest_link in left.busiest_links] == [
        busy_link.link for busy_link in right.busiest_links
    ]
    assert [item.equivalent_count for item in left.busiest_links] == [
        element.equivalent_count for element in right.busiest_links
    ]


def test_contention_keeps_the_bytes_and_no_link_exceeds_its_capacity() -> None:
    uncontended, shared = (
        require_utilization(simulate(cached_scenario(pp=2, dp=8, network=kind))) for kind in ("uncontended", "shared")
    )
    for axis, shared_axis in zip(uncontended.axis_traffic, shared.axis_traffic, strict=True):
        assert axis.sent_bytes == pytest.approx(shared_axis.sent_bytes)
        assert axis.tier_bytes == pytest.approx(shared_axis.tier_bytes)
    assert all(tier.max_link_utilization <= 1.0 for tier in shared.tiers)
    assert all(busiest_link.utilization <= 1.0 for busiest_link in shared.busiest_links)


def test_bytes_per_step_do_not_depend_on_the_step_count() -> None:
    one, three = (require_utilization(simulate(cached_scenario(pp=2, dp=8, steps=steps))) for steps in (1, 3))
    for axis, three_step_axis in zip(one.axis_traffic, three.axis_traffic, strict=True):
        assert axis.sent_bytes == pytest.approx(three_step_axis.sent_bytes)
    assert tier_bytes(three)[LinkKind.NIC] == pytest.approx(3 * tier_bytes(one)[LinkKind.NIC])


def test_one_rank_uses_no_network() -> None:
    one = {"layout": {}, "cluster": {"name": "dgx-h100", "gpus": 1}, "model": "gpt2-small"}
    assert utilization(simulate(Scenario.from_mapping({**cached_scenario(dp=8, gpus=8).raw_mapping, **one}))) is None


def test_unused_gpus_add_no_capacity() -> None:
    result, fabric = simulate(cached_scenario(tp=8, gpus=8)), load_cluster("dgx-h100", gpu_count=16).fabric
    trace_table = build_trace_table(result.trace, result.program)
    network = network_utilization(
        trace_table, fabric, MeteredCollectiveCost(fabric, load_library("nccl"), result.program.groups)
    )
    assert network is not None
    ports = {tier.kind: tier for tier in network.tiers}[LinkKind.NVLINK]
    assert ports.link_count == 2 * 8
    assert ports.capacity == pytest.approx(2 * 8 * 450e9)
    assert ports.mean_utilization == pytest.approx(
        {tier.kind: tier for tier in require_utilization(result).tiers}[LinkKind.NVLINK].mean_utilization
    )


@examples(15)
@given(scenarios())
def test_folding_and_contention_keep_every_byte(scenario: Scenario) -> None:
    result = simulate(scenario)
    network = utilization(result)
    unfolded = utilization(
        simulate(replace(scenario, cost=replace(scenario.cost, symmetry=type(scenario.cost.symmetry).OFF)))
    )
    if network is None or unfolded is None:
        assert network is unfolded
        return
    assert_same_utilization(network, unfolded)
    assert sum(axis_traffic.tier_bytes.sum() for axis_traffic in network.axis_traffic) > 0
    for axis in network.axis_traffic:
        assert (axis.tier_bytes <= axis.sent_bytes * (1 + 1e-9)).all()


@examples(15)
@given(contended_scenarios())
def test_no_link_of_a_shared_network_is_utilized_above_one(scenario: Scenario) -> None:
    network = utilization(simulate(scenario))
    assert network is None or all(tier.max_link_utilization <= 1.0 + 1e-9 for tier in network.tiers)


SPANS = st.lists(
    st.tuples(st.integers(0, 63), st.integers(1, 64), st.floats(0, 1e12)).map(
        lambda span: (span[0] / 6.4, min(span[0] + span[1], 64) / 6.4, span[2])
    ),
    min_size=1,
    max_size=8,
)


@examples(60)
@given(SPANS, st.integers(1, 40))
def test_spreading_keeps_amounts_and_bins_add_up(spans: list[tuple[float, float, float]], bins: int) -> None:
    start, end, amount = map(np.array, zip(*spans, strict=True))
    fine = spread_over_time(start, end, amount, 10.0 / (4 * bins), 4 * bins)
    coarse = spread_over_time(start, end, amount, 10.0 / bins, bins)
    assert coarse.sum() == pytest.approx(amount.sum(), rel=1e-9)
    assert fine.reshape(bins, 4).sum(axis=1) == pytest.approx(coarse, rel=1e-6, abs=1e-6 * amount.max())
