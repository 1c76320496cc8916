"""Where ranks are placed changes what links they use, and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.collectives.library import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.allocation import shuffle
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.parallel.layout import Layout
from clustersim.parallel.process_groups import process_groups
from clustersim.program.placement import looped_placement
from clustersim.program.task import CollectiveType
from tests.conftest import examples
from tests.laws.timelines import same
from tests.strategies import scenarios

NCCL = load_library("nccl")
ASIDE = ("scenario", "simulate_wall_s")
RACKS: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "gb200-nvl72", "gpus": 128},
    "layout": {"tp": 2, "dp": 64},
    "training": {"sequence": 8192, "global_batch": 128},
}


def answers(scenario: Scenario) -> dict[str, Any]:
    return {key: value for key, value in simulate(scenario).to_json().items() if key not in ASIDE}


NETWORKS = st.sampled_from(["uncontended", "shared"])


@given(scenarios(), NETWORKS)
@examples(60)
def test_ranks_that_are_the_machines_gpus_take_exactly_what_they_take_unplaced(
    scenario: Scenario, network: str
) -> None:
    """To the last digit."""
    plain = scenario.with_overrides(f"cost.network={network}")
    assert answers(plain.with_overrides(f"cluster.placement.order=[0-{plain.layout.world_size - 1}]")) == answers(plain)


@given(scenarios("one switch"), st.integers(0, 2**32))
@examples(60)
def test_whole_nodes_may_trade_places_under_one_switch(scenario: Scenario, seed: int) -> None:
    """Every node is as far from every other, so which is which does not matter."""
    scenario = scenario.with_overrides(
        "cluster.fabric.leaf.nodes=16"
    )  # of which the job has 8 at most, and one is spare
    placed = scenario.with_overrides(f"cluster.placement={{scatter: nodes, spare: 1, seed: {seed}}}")
    event(f"in order: {bool((np.diff(placed.cluster.machine_gpu_ids) > 0).all())}")
    assert simulate(placed).step_time == pytest.approx(simulate(scenario).step_time, rel=1e-9)


@given(scenarios(), st.sampled_from(["nodes", "gpus"]), st.integers(0, 2**32), NETWORKS)
@examples(80)
def test_folded_is_unfolded_with_scattered_ranks(scenario: Scenario, what: str, seed: int, network: str) -> None:
    folded = scenario.with_overrides(f"cluster.placement={{scatter: {what}, seed: {seed}}}", f"cost.network={network}")
    every = simulate(folded.with_overrides("cost.symmetry=off"))
    same(simulate(folded).trace, every.trace, relative=1e-9)


@given(scenarios(), st.integers(0, 2**32))
@examples(40)
def test_a_seed_is_the_order_that_it_draws(scenario: Scenario, seed: int) -> None:
    drawn = scenario.with_overrides(f"cluster.placement={{scatter: gpus, seed: {seed}}}")
    order = ", ".join(map(str, drawn.cluster.machine_gpu_ids.tolist()))
    assert answers(scenario.with_overrides(f"cluster.placement.order=[{order}]")) == answers(drawn)


def test_a_job_on_64_of_72_gpus_of_each_rack_is_one_on_racks_of_64() -> None:
    """16 of 18 trays: routes, NICs and switches are the same where nothing above the racks is oversubscribed."""
    whole = Scenario.from_mapping(RACKS)
    part = whole.with_overrides("cluster.placement.per_domain=64")
    small = whole.with_overrides("cluster.node.nvlink.gpus=64", "cluster.fabric.leaf.nodes=16")
    assert part.cluster.machine.gpu_count == 144
    assert simulate(part).step_time == pytest.approx(simulate(small).step_time, rel=1e-9)


def test_a_job_on_half_of_each_node_is_one_on_nodes_of_half_the_size() -> None:
    """4 of 8 GPUs with a NIC each: nodes of 4 GPUs and 4 NICs."""
    mapping = {**RACKS, "cluster": {"name": "dgx-h100", "gpus": 32}, "layout": {"tp": 2, "dp": 16}}
    whole = Scenario.from_mapping(mapping)
    half = whole.with_overrides("cluster.placement.per_node=4")
    small = whole.with_overrides("cluster.node.gpus=4", "cluster.node.nvlink.gpus=4", "cluster.node.nic.per_node=4")
    assert half.cluster.node_count == 8
    assert simulate(half).step_time == pytest.approx(simulate(small).step_time, rel=1e-9)


def test_gpus_scattered_over_nodes_are_slower_than_whole_nodes() -> None:
    """Tensor-parallel pairs then meet over the network."""
    whole = Scenario.from_mapping({**RACKS, "cluster": {"name": "dgx-h100", "gpus": 128}})
    scattered = whole.with_overrides("cluster.placement.scatter=gpus")
    assert simulate(scattered).step_time > 1.2 * simulate(whole).step_time


@pytest.mark.parametrize("layout", [Layout(tp=8, pp=4, dp=16), Layout(tp=2, pp=4, dp=64)])
def test_turns_of_scattered_nodes_cost_what_all_ranks_cost(layout: Layout) -> None:
    """A group stands for its images as it does in the machine's own order."""
    machine = load_cluster("llama3-roce", 768).fabric
    nodes = shuffle(np.arange(96), 7)[:64]
    fabric = RankMappedFabric(machine, (8 * nodes[:, None] + np.arange(8)).reshape(-1))
    assert fabric.rotation is not None
    still = RankMappedFabric(machine, fabric.gpu_ids)
    object.__setattr__(still, "rotation", None)  # a cached property, worked out beforehand
    for groups in process_groups(layout, looped_placement(layout.pp)).values():
        if groups.members.shape[1] > 1:
            turned, plain = (
                Tuner(rank_mapped_fabric, NCCL).evaluate_variants(CollectiveType.ALL_REDUCE, groups.members)
                for rank_mapped_fabric in (fabric, still)
            )
            for payload in (4.0, 1e5, 1e9):
                assert select_variants(turned, payload).seconds == pytest.approx(
                    select_variants(plain, payload).seconds, rel=1e-9
                )


def test_what_is_wrong_with_the_machine_hurts_the_rank_that_is_there() -> None:
    """Numbers of disturbances are the machine's: GPU 10 is rank 2 of a job on nodes 1 and 0."""
    mapping = {**RACKS, "cluster": {"name": "dgx-h100", "gpus": 16}, "layout": {"dp": 16}}
    scenario = Scenario.from_mapping(mapping).with_overrides(
        "cluster.placement.nodes=[1, 0]", "disturbances.slow={gpu: 10, speed: 0.5}"
    )
    straggler = simulate(scenario).stragglers.slowest[0]
    assert straggler.ranks == (2,)
    order = replace(scenario.cluster, fabric=scenario.cluster.machine)
    assert order.machine_gpu_ids.tolist() == list(range(16)), "without a placement ranks are the machine's GPUs"
