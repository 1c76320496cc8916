"""What a search varies where the cluster has several sites."""

from itertools import pairwise
from pathlib import Path

import yaml

from clustersim.planning.layouts import SearchSpace
from clustersim.planning.layouts.derived_scenarios import DerivedScenarios
from clustersim.report.panels.site_map import site_link_rows, site_panels, site_rows
from clustersim.scenario import Scenario


def scenario(folder: Path) -> Scenario:
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 32} for name in ("west", "east")],
        "links": [{"source": "west", "target": "east", "bandwidth": "100 Gbit/s", "round_trip": "40 ms"}],
    }
    path = folder / "sites.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Scenario.from_mapping(
        {
            "model": {"preset": "llama3-8b", "layers": 8},
            "cluster": {"path": str(path)},
            "layout": {"tp": 8, "dp": 8},
            "training": {"sequence": 4096, "global_batch": 64, "precision": "bf16"},
            "framework": "megatron",
        }
    )


def test_pipelines_or_replicas_cross_sites_and_states_are_sharded_in_each(tmp_path: Path) -> None:
    fixed = {
        "layout.tp": 8,
        "layout.cp": 1,
        "layout.sequence_parallel": True,
        "schedule": "1f1b",
        "training.microbatch": 1,
        "training.recompute": "none",
    }
    space = SearchSpace.from_scenario(scenario(tmp_path), fixed, {"layout.pp": [1, 2]})
    found = {
        tuple(dict(override.split("=", 1) for override in candidate.overrides).get(key, "") for key in keys)
        for candidate in space.candidates({})
        for keys in [("layout.pp", "layout.order", "layout.data")]
    }
    pipelines, replicas = "[tp, cp, dp, pp]", "[tp, cp, pp, dp]"
    assert {order for pp, order, _ in found if pp == "2"} == {pipelines, replicas}
    assert {order for pp, order, _ in found if pp == "1"} == {pipelines}  # nothing to order
    shards = {(pp, data) for pp, _, data in found if "shard" in data and data.startswith("{zero")}
    assert shards == {("1", "{zero: {stage: 1, shard: 4}}"), ("2", "{zero: {stage: 1, shard: 2}}")}


def test_a_replica_in_one_site_has_nothing_to_order(tmp_path: Path) -> None:
    local = scenario(tmp_path).changed({"diloco": {"inner_steps": 100}})
    over_two = local.changed({"diloco": {"replicas": 2}, "cluster": {"path": str(four_sites(tmp_path))}})
    plain, spanning = (SearchSpace.from_scenario(plan).jobs[0] for plan in (local, over_two))
    assert "layout.order" not in plain.values
    assert "layout.order" in spanning.values
    assert len(plain.outer_variants) == len(spanning.outer_variants) > 20


def four_sites(folder: Path) -> Path:
    names = ["a", "b", "c", "d"]
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 16} for name in names],
        "links": [
            {"source": source, "target": target, "bandwidth": "100 Gbit/s", "round_trip": "40 ms"}
            for source, target in pairwise(names)
        ],
    }
    path = folder / "four.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_layouts_of_one_size_share_what_they_read(tmp_path: Path) -> None:
    derived = DerivedScenarios(scenario(tmp_path))
    strategies = ("layout.data=ddp", "layout.data=zero1")
    first, second = (derived.resolve(("cluster.gpus=64", strategy)) for strategy in strategies)
    assert first.cluster.machine is second.cluster.machine


def test_the_map_lists_sites_and_links(tmp_path: Path) -> None:
    cluster = scenario(tmp_path).cluster
    assert site_rows(cluster) == [("west", "32", "h100-sxm-80gb"), ("east", "32", "h100-sxm-80gb")]
    assert site_link_rows(cluster)[0] == ("west", "east", "12.5 GB/s", "40 ms", "", "")
    assert len(list(site_panels(cluster))) == 3
