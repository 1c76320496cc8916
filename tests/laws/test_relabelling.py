"""Which replica is called the first makes no difference."""

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


def replicas_swapped(layout: Layout, order: Sequence[int]) -> IntArray:
    """The GPU of each rank after replica i has moved to where replica order[i] was: [ranks]."""
    ranks = layout.mesh.rank_grid
    axis = ranks.ndim - 1 - layout.order.index("dp")
    moved = np.empty(layout.world_size, dtype=np.int64)
    moved[ranks.ravel()] = np.take(ranks, order, axis=axis).ravel()
    return moved


def alike(scenario: Scenario, moved: IntArray) -> bool:
    """Whether the cluster looks the same after the move: one node, or whole nodes trade places under one switch."""
    cluster = scenario.cluster
    gpus = np.arange(cluster.gpu_count)
    nodes, places = moved // cluster.gpus_per_node, moved % cluster.gpus_per_node
    whole = (nodes == np.repeat(nodes[:: cluster.gpus_per_node], cluster.gpus_per_node)[: len(gpus)]).all()
    return cluster.gpu_count <= cluster.gpus_per_node or bool(whole and (places == gpus % cluster.gpus_per_node).all())


def numbers(answer: Any) -> Any:
    """The answer rounded to 9 digits, without the time that it took to find."""
    if isinstance(answer, dict):
        return {key: numbers(value) for key, value in answer.items() if key != "simulate_wall_s"}
    if isinstance(answer, list):
        return [numbers(value) for value in answer]
    return float(f"{answer:.9g}") if isinstance(answer, float) else answer


@given(st.data(), scenarios("one domain") | scenarios("one switch"))
@examples(100, suppress_health_check=[HealthCheck.filter_too_much])
def test_relabelling_replicas_changes_no_number(data: st.DataObject, scenario: Scenario) -> None:
    """The groups of every role are the same sets of GPUs, so whatever is asked of them has the same answer."""
    assume(scenario.layout.dp > 1)
    order = data.draw(st.permutations(range(scenario.layout.dp)))
    moved = replicas_swapped(scenario.layout, order)
    assume(alike(scenario, moved) and (moved != np.arange(len(moved))).any())
    other = replace(scenario, cluster=scenario.cluster.with_rank_mapping(moved))
    assert numbers(simulate(other).to_json()) == numbers(simulate(scenario).to_json())
