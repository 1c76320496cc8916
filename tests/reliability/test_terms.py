"""What a job is made of: components, checkpoints, intervals, and step times of states of its cluster."""

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


def _on(cluster: str, gpus: int) -> Scenario:
    training = {"sequence": 1024, "global_batch": gpus}
    return Scenario.from_mapping(
        {**TWO_NODES, "cluster": {"name": cluster, "gpus": gpus}, "layout": {}, "training": training}
    )


def test_components_are_those_of_the_cluster() -> None:
    """40 nodes of 8 GPUs and NICs: rails of 32 nodes, so 8 leaf switches for the first 32 and 8 for the others."""
    site = build_failure_domains(_on("dgx-h100", 320))
    counts = site.counts
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
    assert site.lost_nodes(FailureDomain.NODE, 5) == (5,)
    assert site.lost_nodes(FailureDomain.RACK, 5) == (4, 5, 6, 7)
    assert site.lost_nodes(FailureDomain.LEAF, 5) == tuple(range(32))
    assert site.lost_nodes(FailureDomain.NOTHING, 5) == ()


def test_nodes_of_an_nvlink_domain_are_a_rack_that_is_bound() -> None:
    site = build_failure_domains(_on("gb200-nvl72", 144))
    assert (site.nodes_per_rack, site.is_nvlink_rack, site.counts.racks) == (18, True, 2)


@pytest.mark.parametrize(
    "layout", [{"dp": 16}, {"tp": 2, "dp": 8, "data": "zero1"}, {"pp": 2, "dp": 8, "data": "zero1"}]
)
def test_a_checkpoint_has_every_weight_once(layout: dict[str, Any]) -> None:
    """bf16 weights, fp32 master weights and two fp32 moments: 14 bytes of each parameter, whatever the layout.

    Norms are whole on every tensor-parallel rank, and counted as often: some thousandths.
    """
    scenario = Scenario.from_mapping({**TWO_NODES, "layout": layout})
    assert checkpoint_bytes(scenario) == pytest.approx(14.0 * parameter_count(scenario.model), rel=0.01)


def test_writing_takes_the_bytes_over_the_narrowest_way() -> None:
    """14 TB over storage of 100 GB/s, or over 2 nodes of 10 GB/s; others wait for the copy to the host alone."""
    storage = {
        "size": "14 TB",
        "bandwidth": "100 GB/s",
        "read_bandwidth": "200 GB/s",
        "overhead": "3 s",
        "write": "sync",
    }
    sync = build_checkpoint_cost(_with(**storage))
    assert (sync.block_seconds, sync.drain_seconds, sync.read_seconds, sync.synchronous_seconds) == (
        143.0,
        0.0,
        70.0,
        143.0,
    )
    assert build_checkpoint_cost(_with(**storage, bandwidth_per_node="10 GB/s")).block_seconds == 703.0
    asynchronous = build_checkpoint_cost(_with(**{**storage, "write": "async"}, snapshot="1 s", interference=0.1))
    assert asynchronous.block_seconds == pytest.approx(1.0 + 14e12 / 16 / _host_rate())
    assert (asynchronous.drain_seconds, asynchronous.delay_seconds) == (
        143.0,
        pytest.approx(asynchronous.block_seconds + 14.3),
    )
    peers = build_checkpoint_cost(
        _with(**{**storage, "write": "peers"}, snapshot="1 s", interference=0.1, stored_every=10)
    )
    assert peers.delay_seconds == pytest.approx(asynchronous.block_seconds + 1.43)
    assert peers.build_timeline(5.0).interval == 14.3  # storage takes no more


def _with(**checkpoint: Any) -> Scenario:
    return Scenario.from_mapping({**TWO_NODES, "reliability": {"checkpoint": checkpoint}})


def _host_rate() -> float:
    host = Scenario.from_mapping(TWO_NODES).cluster.host_memory
    assert host is not None
    return host.device_to_host


def test_rates_add_up_and_repairs_follow_littles_law() -> None:
    """2 nodes at one failure in 10 days, 16 GPUs at one in 80: 0.4 a day; nodes' repairs take 5 days: one at a time."""
    only = {
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
        {**TWO_NODES, "reliability": {"preset": "rsc-2", "failures": {"any": None, **only}}}
    )
    site, reliability = build_failure_domains(scenario), scenario.reliability
    assert mean_time_to_interruption(reliability, site) == pytest.approx(86400.0 / 0.4)
    assert mean_nodes_in_repair(reliability, site) == pytest.approx(1.0)


def test_steps_are_counted_whole() -> None:
    scenario = Scenario.from_mapping({**TWO_NODES, "economics": {"tokens": 64 * 1024 * 10 + 1}})
    assert total_work(scenario, 2.0) == (22.0, 64 * 1024 * 10 + 1)


def test_states_are_simulations_of_the_changed_scenario() -> None:
    """A slow GPU; one node fewer: 4 replicas do 16 microbatches instead of 8, or 8 with half of the batch."""
    scenario = Scenario.from_mapping({**TWO_NODES, "reliability": {"elastic": "keep-batch"}})
    states = ClusterStates(scenario, simulate(scenario))
    base = states.healthy.step_time
    name, slowdown = states(0, FailureSlowdown(0.5))
    slow = simulate(scenario.with_overrides("degradations.slow=[{gpu: 8, speed: 0.5}]"))
    assert (name, slowdown) == ("a GPU at 50 %", base / slow.step_time)
    name, slowdown = states(1, None)
    fewer = ["layout.dp=4", "cluster.gpus=8"]
    assert (name, slowdown) == ("4 of 8 replicas", base / simulate(scenario.with_overrides(fewer)).step_time)
    shrunk = scenario.with_overrides("reliability.elastic=shrink-batch")
    half = simulate(shrunk.with_overrides([*fewer, "training.global_batch=32"])).step_time
    assert ClusterStates(shrunk, simulate(shrunk))(1, None)[1] == pytest.approx(0.5 * base / half)
    assert states(2, None) == ("cannot run", 0.0)
    assert states(0, None) == ("healthy", 1.0)


def test_days_of_an_estimate_are_not_undercut() -> None:
    """By the bound of the same step, which lacks what comes behind the last failure but one, and by shorter ones'."""
    scenario = search_scenario("economics.tokens=300B", "reliability.rates=300")
    result = simulate(scenario)
    estimate = estimate_run(result.scenario, result.step_time)
    bounds = [days_lower_bound(scenario, fraction * result.step_time) for fraction in (0.5, 0.9, 1.0)]
    assert bounds == sorted(bounds)
    assert 0.95 * estimate.days <= bounds[-1] <= estimate.days
    ideal = math.ceil(300e9 / (8 * 1024)) * result.step_time / 86400.0
    assert estimate.goodput == pytest.approx(ideal / estimate.days)
