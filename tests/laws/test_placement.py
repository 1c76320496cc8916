"""Placement of ranks changes which links they use, and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.allocation import shuffle
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.parallel.layout import Layout
from clustersim.parallel.process_groups import process_groups
from clustersim.program.placement import looped_placement
from clustersim.program.task import CollectiveType
from tests.conftest import examples
from tests.laws.timelines import assert_same_trace
from tests.strategies import scenarios

NCCL = load_library("nccl")
IGNORED_KEYS = ("scenario", "simulate_wall_s")
RACK_JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "gb200-nvl72", "gpus": 128},
    "layout": {"tp": 2, "dp": 64},
    "training": {"sequence": 8192, "global_batch": 128},
}


def result_json(scenario: Scenario) -> dict[str, Any]:
    return {key: value for key, value in simulate(scenario).to_json().items() if key not in IGNORED_KEYS}


NETWORKS = st.sampled_from(["uncontended", "shared"])


@given(scenarios(), NETWORKS)
@examples(60)
def test_an_identity_placement_changes_nothing(scenario: Scenario, network: str) -> None:
    """Exactly, to the last digit."""
    unplaced = scenario.with_overrides(f"cost.network={network}")
    assert result_json(
        unplaced.with_overrides(f"cluster.placement.order=[0-{unplaced.layout.world_size - 1}]")
    ) == result_json(unplaced)


@given(scenarios("one switch"), st.integers(0, 2**32))
@examples(60)
def test_permuting_full_nodes_under_one_switch_changes_nothing(scenario: Scenario, seed: int) -> None:
    """Every node is equally far from every other, so a permutation of nodes does not matter."""
    scenario = scenario.with_overrides(
        "cluster.fabric.leaf.nodes=16"
    )  # the job uses at most 8 of them, and one is spare
    placed = scenario.with_overrides(f"cluster.placement={{scatter: nodes, spare: 1, seed: {seed}}}")
    event(f"in order: {bool((np.diff(placed.cluster.machine_gpu_ids) > 0).all())}")
    assert simulate(placed).step_time == pytest.approx(simulate(scenario).step_time, rel=1e-9)


@given(scenarios(), st.sampled_from(["nodes", "gpus"]), st.integers(0, 2**32), NETWORKS)
@examples(80)
def test_folded_equals_unfolded_with_scattered_ranks(
    scenario: Scenario, placement: str, seed: int, network: str
) -> None:
    folded = scenario.with_overrides(
        f"cluster.placement={{scatter: {placement}, seed: {seed}}}", f"cost.network={network}"
    )
    unfolded_result = simulate(folded.with_overrides("cost.symmetry=off"))
    assert_same_trace(simulate(folded).trace, unfolded_result.trace, relative=1e-9)


@given(scenarios(), st.integers(0, 2**32))
@examples(40)
def test_a_seeded_placement_equals_its_explicit_order(scenario: Scenario, seed: int) -> None:
    drawn = scenario.with_overrides(f"cluster.placement={{scatter: gpus, seed: {seed}}}")
    order = ", ".join(map(str, drawn.cluster.machine_gpu_ids.tolist()))
    assert result_json(scenario.with_overrides(f"cluster.placement.order=[{order}]")) == result_json(drawn)


def test_a_job_on_64_of_72_gpus_of_each_rack_is_one_on_racks_of_64() -> None:
    """16 of 18 trays: routes, NICs and switches are the same where nothing above the racks is oversubscribed."""
    full_racks = Scenario.from_mapping(RACK_JOB)
    partial = full_racks.with_overrides("cluster.placement.per_domain=64")
    small = full_racks.with_overrides("cluster.node.nvlink.gpus=64", "cluster.fabric.leaf.nodes=16")
    assert partial.cluster.machine.gpu_count == 144
    assert simulate(partial).step_time == pytest.approx(simulate(small).step_time, rel=1e-9)


def test_a_job_on_half_of_each_node_is_one_on_nodes_of_half_the_size() -> None:
    """4 of 8 GPUs with a NIC each: nodes of 4 GPUs and 4 NICs."""
    mapping = {**RACK_JOB, "cluster": {"name": "dgx-h100", "gpus": 32}, "layout": {"tp": 2, "dp": 16}}
    full_nodes = Scenario.from_mapping(mapping)
    half = full_nodes.with_overrides("cluster.placement.per_node=4")
    small = full_nodes.with_overrides(
        "cluster.node.gpus=4", "cluster.node.nvlink.gpus=4", "cluster.node.nic.per_node=4"
    )
    assert half.cluster.node_count == 8
    assert simulate(half).step_time == pytest.approx(simulate(small).step_time, rel=1e-9)


def test_gpus_scattered_over_nodes_are_slower_than_contiguous_ones() -> None:
    """Tensor-parallel pairs then communicate over the network."""
    contiguous = Scenario.from_mapping({**RACK_JOB, "cluster": {"name": "dgx-h100", "gpus": 128}})
    scattered = contiguous.with_overrides("cluster.placement.scatter=gpus")
    assert simulate(scattered).step_time > 1.2 * simulate(contiguous).step_time


@pytest.mark.parametrize("layout", [Layout(tp=8, pp=4, dp=16), Layout(tp=2, pp=4, dp=64)])
def test_rotations_of_scattered_nodes_give_the_full_evaluation(layout: Layout) -> None:
    """A group represents its rotated images as it does in the cluster's natural order."""
    machine = load_cluster("llama3-roce", 768).fabric
    nodes = shuffle(np.arange(96), 7)[:64]
    fabric = RankMappedFabric(machine, (8 * nodes[:, None] + np.arange(8)).reshape(-1))
    assert fabric.rotation is not None
    unrotated_fabric = RankMappedFabric(machine, fabric.gpu_ids)
    object.__setattr__(unrotated_fabric, "rotation", None)  # a cached property, computed before
    for groups in process_groups(layout, looped_placement(layout.pp)).values():
        if groups.members.shape[1] > 1:
            with_rotation, without_rotation = (
                Tuner(mapped_fabric, NCCL).evaluate_variants(CollectiveType.ALL_REDUCE, groups.members)
                for mapped_fabric in (fabric, unrotated_fabric)
            )
            for payload in (4.0, 1e5, 1e9):
                assert select_variants(with_rotation, payload).seconds == pytest.approx(
                    select_variants(without_rotation, payload).seconds, rel=1e-9
                )


def test_degradations_affect_the_rank_placed_on_the_degraded_gpu() -> None:
    """GPU ids of degradations are the cluster's: GPU 10 is rank 2 of a job on nodes 1 and 0."""
    mapping = {**RACK_JOB, "cluster": {"name": "dgx-h100", "gpus": 16}, "layout": {"dp": 16}}
    scenario = Scenario.from_mapping(mapping).with_overrides(
        "cluster.placement.nodes=[1, 0]", "degradations.slow={gpu: 10, speed: 0.5}"
    )
    straggler = simulate(scenario).stragglers.slowest[0]
    assert straggler.ranks == (2,)
    unplaced = replace(scenario.cluster, fabric=scenario.cluster.machine)
    assert unplaced.machine_gpu_ids.tolist() == list(range(16)), "without a placement ranks are the machine's GPUs"
