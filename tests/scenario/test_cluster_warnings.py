"""Machines that are likely a mistake are named in one sentence, and honest ones are left alone."""

from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.hardware.cluster import load_cluster
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

SMALL = {"layers": 4, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000}


def warned(mapping: dict[str, Any], *overrides: str) -> str:
    (warning,) = Scenario.from_mapping(mapping, overrides).warnings
    assert "\n" not in warning
    return warning


@pytest.mark.parametrize(
    ("cluster", "accelerator", "sentence"),
    [
        (
            "hgx-h200",
            "b300-sxm-288gb",
            "cluster: b300-sxm-288gb stands in hgx-h200, with nvlink4 links instead of nvlink5, NVLink of 450 GB/s "
            "instead of 900 GB/s, PCIe of 63 GB/s instead of 121 GB/s; aws-p6-b300, hgx-b300 have what belongs to it",
        ),
        (
            "dgx-h100",
            "h800-sxm-80gb",
            "cluster: h800-sxm-80gb stands in dgx-h100, with NVLink of 450 GB/s instead of 200 GB/s; dgx-h800 has what "
            "belongs to it",
        ),
        ("hgx-b200", "b300-sxm-288gb", "PCIe of 63 GB/s instead of 121 GB/s; aws-p6-b300, hgx-b300 have"),
        ("dgx-a100", "h100-sxm-80gb", "nvlink3 links instead of nvlink4, NVLink of 300 GB/s instead of 450 GB/s"),
        ("mi300x", "mi355x", "NVLink of 448 GB/s instead of 535.5 GB/s; mi355x has what belongs to it"),
        ("dgx-h100", "mi300x", "nvlink4 links instead of xgmi4"),
        (
            "gb200-nvl72",
            "b200-sxm-180gb",
            "NVLink domains of 72 instead of 8; aws-p6-b200, gcp-a4, hgx-b200 and 1 more",
        ),
    ],
)
def test_an_accelerator_in_the_hosts_of_another_is_told_where_it_belongs(
    mapping: dict[str, Any], cluster: str, accelerator: str, sentence: str
) -> None:
    assert sentence in warned(mapping, f"cluster.name={cluster}", f"cluster.accelerator={accelerator}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.accelerator=h200-sxm-141gb"],  # the same links
        ["cluster.accelerator=h100-sxm-96gb"],  # no cluster of its own to compare with
        ["cluster.name=dgx-a100", "cluster.accelerator=a100-sxm-40gb"],
        ["cluster.name=mi300x", "cluster.accelerator=mi325x"],
        ["cluster.accelerator=h800-sxm-80gb", "cluster.node.nvlink.bandwidth=200 GB/s"],
        ["cluster.accelerator=h800-sxm-80gb", "cluster.node={nvlink: {bandwidth: 160 GB/s}}"],  # said, so believed
        [
            "cluster.accelerator=h800-sxm-80gb",
            "cluster.node={nvlink: null, host: {bridges: 2, bandwidth: 40 GB/s, latency: 1 us}}",
            "layout.tp=1",
            "layout.dp=32",
        ],
        ["cluster.node.nvlink.bandwidth=112.5 GB/s"],  # what if it had a quarter?
        ["cluster.node.nvlink.bandwidth=900 GB/s"],
        ["cluster.node.nvlink.bandwidth=3600 Gbit/s"],  # 450 GB/s
        ["cluster.node.nic.bandwidth=100 GB/s"],  # 800 Gbit/s
        ["cluster.node.nic.bandwidth=800 Gbit/s"],
        ["cluster.node.nic={per_node: 32, bandwidth: 400 Gbit/s}"],  # four ports of a GPU together may be faster
    ],
)
def test_honest_machines_are_left_alone(mapping: dict[str, Any], overrides: list[str]) -> None:
    assert Scenario.from_mapping(mapping, overrides).warnings == ()


def test_other_nodes_of_a_mixed_cluster_are_looked_at_too(mapping: dict[str, Any]) -> None:
    mixed = "cluster.mixed={{nodes: 0, accelerator: {}}}"
    assert "a100-sxm-80gb stands in dgx-h100, with nvlink4" in warned(mapping, mixed.format("a100-sxm-80gb"))
    assert Scenario.from_mapping(mapping, [mixed.format("h200-sxm-141gb")]).warnings == ()


@pytest.mark.parametrize("name", sorted(set(data_files.list_names("clusters")) - {"laptop", "pcie-node"}))
def test_no_shipped_cluster_is_a_mistake(name: str) -> None:
    gpus = 2 * load_cluster(name).gpus_per_node
    training = {"sequence": 512, "global_batch": gpus, "precision": "fp16", "attention": "standard"}
    plan = {"model": SMALL, "cluster": {"name": name, "gpus": gpus}, "layout": {"tp": 2}, "training": training}
    assert Scenario.from_mapping(plan).warnings == ()


SOLD = "but no port of more than 800 Gbit/s is sold (1,600 are announced)"


@pytest.mark.parametrize(
    ("bandwidth", "said"),
    [
        ("400 GB/s", f"400 GB/s is 3,200 Gbit/s, {SOLD}; was 400 Gbit/s meant?"),
        ("200 GB/s", f"200 GB/s is 1,600 Gbit/s, {SOLD}; was 200 Gbit/s meant?"),
        ("0.4 TB/s", f"0.4 TB/s is 3,200 Gbit/s, {SOLD}"),
        ("1600 Gbit/s", f"1600 Gbit/s is 1,600 Gbit/s, {SOLD}"),
    ],
)
def test_a_network_port_as_fast_as_nvlink_asks_whether_bits_were_meant(
    mapping: dict[str, Any], bandwidth: str, said: str
) -> None:
    warning = warned(mapping, f"cluster.node.nic.bandwidth={bandwidth}")
    assert warning == f"cluster.node.nic.bandwidth: {said}"


@pytest.mark.parametrize("bandwidth", ["450 Gbit/s", "900 Gbit/s"])
def test_nvlink_in_bits_asks_for_what_it_is_in_bytes(mapping: dict[str, Any], bandwidth: str) -> None:
    warning = warned(mapping, f"cluster.node.nvlink.bandwidth={bandwidth}")
    assert "h100-sxm-80gb has 450 GB/s of NVLink per direction (900 GB/s in both); was 450 GB/s meant?" in warning


def test_a_file_of_ones_own_is_looked_at_as_well(tmp_path: Any, mapping: dict[str, Any]) -> None:
    content = data_files.read_mapping(data_files.find_file("clusters", "dgx-h100"))
    content["node"]["nic"]["bandwidth"] = "400 GB/s"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content | {"accelerator": "a100-sxm-80gb"}))
    mapping["cluster"] = {"path": str(path), "gpus": 64}
    found = Scenario.from_mapping(mapping).warnings
    assert len(found) == 2
    assert "a100-sxm-80gb stands in mine, with nvlink4 links instead of nvlink3; " in found[0]
    assert "was 400 Gbit/s meant?" in found[1]


# 64 GPUs: 8 nodes, in one unit of dgx-h100 (32 nodes) and in four racks of llama3-roce (2 nodes), in one pod of both
IDLE = [
    ("dgx-h100", "leaf", {"tp": 4, "pp": 2}, "no transfer of this layout's 64 GPUs goes beyond the leaf switches"),
    ("dgx-h100", "leaf", {"tp": 1}, "no transfer of this layout's 64 GPUs goes beyond the leaf switches"),
    ("dgx-h100", "spine", {"tp": 8}, "the 64 GPUs are under one pod of spine switches"),
    ("llama3-roce", "spine", {"tp": 8}, "the 64 GPUs are under one pod of spine switches"),
]


@pytest.mark.parametrize(("cluster", "tier", "layout", "reason"), IDLE)
def test_oversubscription_that_nothing_crosses_says_so_and_costs_nothing(
    cluster: str, tier: str, layout: dict[str, int], reason: str
) -> None:
    plan = {
        "model": SMALL, "cluster": {"name": cluster, "gpus": 64}, "layout": layout,
        "training": {"sequence": 512, "global_batch": 64},
    }  # fmt: skip
    scenario = Scenario.from_mapping(plan)
    key = f"cluster.fabric.{tier}.oversubscription"
    narrow = scenario.with_overrides(f"{key}=20")
    assert narrow.warnings == (f"{key} 20 changes nothing: {reason}",)
    assert simulate(narrow).step_time == simulate(scenario).step_time


def test_oversubscription_that_transfers_cross_is_left_alone_and_costs_time() -> None:
    """Racks of two nodes: rings of 8 nodes climb to the spine. One rack alone has no links to climb."""
    plan = {
        "model": SMALL, "cluster": {"name": "llama3-roce", "gpus": 64}, "layout": {"tp": 8, "data": "ddp"},
        "training": {"sequence": 512, "global_batch": 64},
    }  # fmt: skip
    scenario = Scenario.from_mapping(plan)
    narrow = scenario.with_overrides("cluster.fabric.leaf.oversubscription=200")
    assert narrow.warnings == ()
    assert simulate(narrow).step_time > simulate(scenario).step_time
    (said,) = narrow.with_overrides("cluster.gpus=16").warnings
    assert "200 changes nothing: the 16 GPUs are under one leaf switch" in said


def test_what_the_file_itself_oversubscribes_is_not_the_users_doing(mapping: dict[str, Any]) -> None:
    mapping["cluster"] = {"name": "llama3-roce", "gpus": 64}
    assert Scenario.from_mapping(mapping).warnings == ()
    assert Scenario.from_mapping(mapping, ["cluster.fabric.spine.oversubscription=7"]).warnings == ()
