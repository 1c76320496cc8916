"""Packaged clusters end to end: simulated (with contention too), drawn, and round-tripped."""

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from clustersim.common import data_files
from clustersim.hardware.cluster import load_cluster
from clustersim.report.panels.topology import build_topology
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

SMALL_MODEL = {"layers": 4, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000}


def small_mapping(name: str) -> dict[str, Any]:
    """Two NVLink domains (or nodes) if the cluster has them: tp 2, pp 2, FSDP over the remaining degree."""
    cluster = load_cluster(name)
    sizes = cluster.unit_sizes
    gpus = min(2 * max(sizes.domain_gpus, sizes.node_gpus), cluster.gpu_count)
    precision = "bf16" if cluster.accelerator.nvlink is None or "v100" not in cluster.accelerator.name else "fp16"
    pp = 2 if gpus > 2 else 1
    return {
        "model": SMALL_MODEL,
        "cluster": {"name": name, "gpus": gpus},
        "layout": {"tp": 2, "pp": pp, "data": "fsdp"},
        "training": {"sequence": 512, "global_batch": 2 * gpus, "precision": precision, "attention": "standard"},
    }


@pytest.mark.parametrize("name", data_files.list_names("clusters"))
def test_small_step_and_result_scenario_round_trip(name: str) -> None:
    scenario = Scenario.from_mapping(small_mapping(name))
    result = simulate(scenario)
    assert 0.0 < result.step_time < 60.0
    reread = Scenario.from_mapping(result.to_json()["scenario"])
    assert simulate(reread).step_time == result.step_time
    shared = simulate(scenario.with_overrides("cost.network=shared"))
    assert shared.step_time >= result.step_time * (1 - 1e-9)
    assert build_topology(scenario.cluster).tiers


@pytest.mark.parametrize("name", data_files.list_names("clusters"))
def test_networkx_round_trip(name: str, tmp_path: Path) -> None:
    """Graphs drawn or changed with networkx describe the same cluster that a scenario reads."""
    cluster = load_cluster(name, small_mapping(name)["cluster"]["gpus"])
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(nx.node_link_data(cluster.to_graph(), edges="edges")), encoding="utf-8")
    reread = load_cluster(str(path))
    assert nx.utils.graphs_equal(reread.to_graph(), cluster.to_graph())
    assert (reread.gpu_count, reread.gpus_per_node) == (cluster.gpu_count, cluster.gpus_per_node)
    assert (reread.accelerator, reread.library, reread.host_memory) == (
        cluster.accelerator,
        cluster.library,
        cluster.host_memory,
    )


@pytest.mark.parametrize("name", ["dgx-v100", "mi300x"])
@pytest.mark.parametrize("layout", [{"tp": 4, "pp": 2}, {"tp": 2, "pp": 2, "data": "fsdp"}])
def test_symmetry_with_heterogeneous_links(name: str, layout: dict[str, Any]) -> None:
    """GPUs 0 and 4 of a DGX-1 have two links, 2 and 6 one; rank equivalence is derived from costs."""
    plan = small_mapping(name) | {"layout": layout, "cost": {"network": "shared"}}
    scenario = Scenario.from_mapping(plan)
    folded = simulate(scenario).step_time
    for change in ("cost.symmetry=off", "cost.coalesce=false"):
        assert simulate(scenario.with_overrides(change)).step_time == pytest.approx(folded, rel=1e-9)
