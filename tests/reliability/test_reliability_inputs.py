"""Inputs of a job simulation: components, checkpoints, intervals, and step times of cluster states."""

import math
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.hardware.failures import FailureComponent, FailureDomain, FailureSlowdown
from clustersim.model.transformer import parameter_count
from clustersim.reliability.checkpoint_cost import (
    build_checkpoint_cost,
    mean_nodes_in_repair,
    mean_time_to_interruption,
    total_work,
)
from clustersim.reliability.cluster_states import ClusterStates
from clustersim.reliability.failure_domains import build_failure_domains
from clustersim.reliability.run_estimate import days_lower_bound, estimate_run
from clustersim.results.memory_check import checkpoint_bytes
from tests.planning.layouts.search_scenarios import search_scenario

TWO_NODES: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 1, "dp": 8, "data": "zero1"},
    "training": {"sequence": 1024, "global_batch": 64},
}


def _scenario_on(cluster: str, gpus: int) -> Scenario:
    training = {"sequence": 1024, "global_batch": gpus}
    return Scenario.from_mapping(
        {**TWO_NODES, "cluster": {"name": cluster, "gpus": gpus}, "layout": {}, "training": training}
    )


def test_component_counts_match_the_cluster() -> None:
    """40 nodes of 8 GPUs and NICs: rails of 32 nodes, so 8 leaf switches for the first 32 and 8 for the others."""
    domains = build_failure_domains(_scenario_on("dgx-h100", 320))
    counts = domains.counts
    assert [counts.count_of(failure_component) for failure_component in FailureComponent] == [
        320,
        40,
        320,
        320,
        16,
        10,
        1,
        0,
        1,
    ]
    assert domains.lost_nodes(FailureDomain.NODE, 5) == (5,)
    assert domains.lost_nodes(FailureDomain.RACK, 5) == (4, 5, 6, 7)
    assert domains.lost_nodes(FailureDomain.LEAF, 5) == tuple(range(32))
    assert domains.lost_nodes(FailureDomain.NOTHING, 5) == ()


def test_nodes_of_an_nvlink_domain_are_one_rack() -> None:
    domains = build_failure_domains(_scenario_on("gb200-nvl72", 144))
    assert (domains.nodes_per_rack, domains.is_nvlink_rack, domains.counts.racks) == (18, True, 2)


@pytest.mark.parametrize(
    "layout", [{"dp": 16}, {"tp": 2, "dp": 8, "data": "zero1"}, {"pp": 2, "dp": 8, "data": "zero1"}]
)
def test_a_checkpoint_has_every_weight_once(layout: dict[str, Any]) -> None:
    """bf16 weights, fp32 master weights and two fp32 moments: 14 bytes of each parameter, for any layout.

    Norms are replicated on tensor-parallel ranks, and counted as often: some thousandths.
    """
    scenario = Scenario.from_mapping({**TWO_NODES, "layout": layout})
    assert checkpoint_bytes(scenario) == pytest.approx(14.0 * parameter_count(scenario.model), rel=0.01)


def test_checkpoint_write_time_is_bytes_over_the_bottleneck_bandwidth() -> None:
    """14 TB over storage of 100 GB/s, or over 2 nodes of 10 GB/s; async writes block only for the copy to the host."""
    settings = {
        "size": "14 TB",
        "bandwidth": "100 GB/s",
        "read_bandwidth": "200 GB/s",
        "overhead": "3 s",
        "write": "sync",
    }
    sync_cost = build_checkpoint_cost(_with_checkpoint(**settings))
    assert (
        sync_cost.block_seconds,
        sync_cost.drain_seconds,
        sync_cost.read_seconds,
        sync_cost.synchronous_seconds,
    ) == (
        143.0,
        0.0,
        70.0,
        143.0,
    )
    assert build_checkpoint_cost(_with_checkpoint(**settings, bandwidth_per_node="10 GB/s")).block_seconds == 703.0
    async_cost = build_checkpoint_cost(
        _with_checkpoint(**{**settings, "write": "async"}, snapshot="1 s", interference=0.1)
    )
    assert async_cost.block_seconds == pytest.approx(1.0 + 14e12 / 16 / _host_bandwidth())
    assert (async_cost.drain_seconds, async_cost.delay_seconds) == (
        143.0,
        pytest.approx(async_cost.block_seconds + 14.3),
    )
    peer_cost = build_checkpoint_cost(
        _with_checkpoint(**{**settings, "write": "peers"}, snapshot="1 s", interference=0.1, stored_every=10)
    )
    assert peer_cost.delay_seconds == pytest.approx(async_cost.block_seconds + 1.43)
    assert peer_cost.build_timeline(5.0).interval == 14.3  # limited by storage bandwidth


def _with_checkpoint(**settings: Any) -> Scenario:
    return Scenario.from_mapping({**TWO_NODES, "reliability": {"checkpoint": settings}})


def _host_bandwidth() -> float:
    host = Scenario.from_mapping(TWO_NODES).cluster.host_memory
    assert host is not None
    return host.device_to_host


def test_rates_add_up_and_repairs_follow_littles_law() -> None:
    """2 nodes at one failure in 10 days, 16 GPUs at one in 80: 0.4 a day; nodes' repairs take 5 days: one at a time."""
    failures = {
        "nodes": {"rate": "1 per 10 node-days", "repair": "5 d"},
        "gpus": {"rate": "1 per 80 gpu-days", "failure_domain": "nothing"},
        "slow": {
            "rate": "1 per gpu-day",
            "effect": "slow",
            "gpu": 0.5,
            "latent_detection": "1 h",
            "failure_domain": "nothing",
        },
    }
    scenario = Scenario.from_mapping(
        {**TWO_NODES, "reliability": {"preset": "rsc-2", "failures": {"any": None, **failures}}}
    )
    domains, reliability = build_failure_domains(scenario), scenario.reliability
    assert mean_time_to_interruption(reliability, domains) == pytest.approx(86400.0 / 0.4)
    assert mean_nodes_in_repair(reliability, domains) == pytest.approx(1.0)


def test_the_step_count_is_rounded_up() -> None:
    scenario = Scenario.from_mapping({**TWO_NODES, "economics": {"tokens": 64 * 1024 * 10 + 1}})
    assert total_work(scenario, 2.0) == (22.0, 64 * 1024 * 10 + 1)


def test_cluster_states_are_simulated_scenarios() -> None:
    """A slow GPU; one node fewer: 4 replicas run 16 microbatches instead of 8, or 8 with half of the batch."""
    scenario = Scenario.from_mapping({**TWO_NODES, "reliability": {"elastic": "keep-batch"}})
    states = ClusterStates(scenario, simulate(scenario))
    baseline = states.healthy.step_time
    name, rate = states(0, FailureSlowdown(0.5))
    slow = simulate(scenario.with_overrides("degradations.slow=[{gpu: 8, speed: 0.5}]"))
    assert (name, rate) == ("a GPU at 50 %", baseline / slow.step_time)
    name, rate = states(1, None)
    four_replicas = ["layout.dp=4", "cluster.gpus=8"]
    assert (name, rate) == ("4 of 8 replicas", baseline / simulate(scenario.with_overrides(four_replicas)).step_time)
    shrunk = scenario.with_overrides("reliability.elastic=shrink-batch")
    half_batch = simulate(shrunk.with_overrides([*four_replicas, "training.global_batch=32"])).step_time
    assert ClusterStates(shrunk, simulate(shrunk))(1, None)[1] == pytest.approx(0.5 * baseline / half_batch)
    assert states(2, None) == ("cannot run", 0.0)
    assert states(0, None) == ("healthy", 1.0)


def test_the_days_lower_bound_is_below_the_estimate() -> None:
    """The bound of the same step time, which omits what follows the last failure but one, and those of shorter ones."""
    scenario = search_scenario("economics.tokens=300B", "reliability.rates=300")
    result = simulate(scenario)
    estimate = estimate_run(result.scenario, result.step_time)
    bounds = [days_lower_bound(scenario, fraction * result.step_time) for fraction in (0.5, 0.9, 1.0)]
    assert bounds == sorted(bounds)
    assert 0.95 * estimate.days <= bounds[-1] <= estimate.days
    ideal = math.ceil(300e9 / (8 * 1024)) * result.step_time / 86400.0
    assert estimate.goodput == pytest.approx(ideal / estimate.days)
