"""Relabelling data-parallel replicas changes no result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.common.arrays import IntArray
from clustersim.parallel.layout import Layout
from tests.conftest import examples
from tests.strategies import scenarios


def permuted_gpus(layout: Layout, order: Sequence[int]) -> IntArray:
    """The GPU of each rank after replica i has moved to where replica order[i] was: [ranks]."""
    ranks = layout.mesh.rank_grid
    axis = ranks.ndim - 1 - layout.order.index("dp")
    gpu_of_rank = np.empty(layout.world_size, dtype=np.int64)
    gpu_of_rank[ranks.ravel()] = np.take(ranks, order, axis=axis).ravel()
    return gpu_of_rank


def is_same_cluster(scenario: Scenario, gpu_of_rank: IntArray) -> bool:
    """Whether the cluster is the same after the move: one node, or full nodes permuted under one switch."""
    cluster = scenario.cluster
    gpus = np.arange(cluster.gpu_count)
    nodes, positions = gpu_of_rank // cluster.gpus_per_node, gpu_of_rank % cluster.gpus_per_node
    moves_full_nodes = (nodes == np.repeat(nodes[:: cluster.gpus_per_node], cluster.gpus_per_node)[: len(gpus)]).all()
    return cluster.gpu_count <= cluster.gpus_per_node or bool(
        moves_full_nodes and (positions == gpus % cluster.gpus_per_node).all()
    )


def rounded_values(value: Any) -> Any:
    """The result rounded to 9 significant digits, without the wall-clock time."""
    if isinstance(value, dict):
        return {key: rounded_values(item) for key, item in value.items() if key != "simulate_wall_s"}
    if isinstance(value, list):
        return [rounded_values(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@given(st.data(), scenarios("one domain") | scenarios("one switch"))
@examples(100, suppress_health_check=[HealthCheck.filter_too_much])
def test_relabelling_replicas_changes_no_result(data: st.DataObject, scenario: Scenario) -> None:
    """The groups of every kind are the same sets of GPUs, so all results agree."""
    assume(scenario.layout.dp > 1)
    order = data.draw(st.permutations(range(scenario.layout.dp)))
    gpu_of_rank = permuted_gpus(scenario.layout, order)
    assume(is_same_cluster(scenario, gpu_of_rank) and (gpu_of_rank != np.arange(len(gpu_of_rank))).any())
    other = replace(scenario, cluster=scenario.cluster.with_rank_mapping(gpu_of_rank))
    assert rounded_values(simulate(other).to_json()) == rounded_values(simulate(scenario).to_json())
