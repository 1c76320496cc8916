"""Warnings about likely mistakes in cluster descriptions, and none for valid ones."""

from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.units import Dimension, parse_quantity
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.link_technology import SCALE_UP_BANDWIDTH, SCALE_UP_TECHNOLOGIES
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.sentences import parts

SMALL_MODEL = {"layers": 4, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000}


def only_warning(mapping: dict[str, Any], *overrides: str) -> str:
    (warning,) = Scenario.from_mapping(mapping, overrides).warnings
    assert "\n" not in warning
    return warning


@pytest.mark.parametrize(
    ("cluster", "accelerator", "sentence"),
    [
        (
            "hgx-h200",
            "b300-sxm-288gb",
            "cluster: b300-sxm-288gb ... hgx-h200 ... nvlink4 ... nvlink5, NVLink of 450 GB/s ... 900 GB/s, "
            "PCIe of 63 GB/s ... 121 GB/s; aws-p6-b300, hgx-b300",
        ),
        (
            "dgx-h100",
            "h800-sxm-80gb",
            "cluster: h800-sxm-80gb ... dgx-h100 ... NVLink of 450 GB/s ... 200 GB/s; dgx-h800",
        ),
        ("hgx-b200", "b300-sxm-288gb", "PCIe of 63 GB/s ... 121 GB/s; aws-p6-b300, hgx-b300"),
        ("dgx-a100", "h100-sxm-80gb", "nvlink3 ... nvlink4, NVLink of 300 GB/s ... 450 GB/s"),
        ("mi300x", "mi355x", "NVLink of 448 GB/s ... 535.5 GB/s; mi355x"),
        ("dgx-h100", "mi300x", "nvlink4 links instead of xgmi4"),
        ("gb200-nvl72", "b200-sxm-180gb", "NVLink domains of 72 ... 8; aws-p6-b200, gcp-a4, hgx-b200 and 1 more"),
    ],
)
def test_mismatched_accelerator_names_matching_clusters(
    mapping: dict[str, Any], cluster: str, accelerator: str, sentence: str
) -> None:
    assert parts(sentence).search(
        only_warning(mapping, f"cluster.name={cluster}", f"cluster.accelerator={accelerator}")
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.accelerator=h200-sxm-141gb"],  # the same links
        ["cluster.accelerator=h100-sxm-96gb"],  # no cluster of its own to compare with
        ["cluster.name=dgx-a100", "cluster.accelerator=a100-sxm-40gb"],
        ["cluster.name=mi300x", "cluster.accelerator=mi325x"],
        ["cluster.accelerator=h800-sxm-80gb", "cluster.node.nvlink.bandwidth=200 GB/s"],
        [
            "cluster.accelerator=h800-sxm-80gb",
            "cluster.node={nvlink: {bandwidth: 160 GB/s}}",
        ],  # an explicit value is trusted
        [
            "cluster.accelerator=h800-sxm-80gb",
            "cluster.node={nvlink: null, host: {bridges: 2, bandwidth: 40 GB/s, latency: 1 us}}",
            "layout.tp=1",
            "layout.dp=32",
        ],
        ["cluster.node.nvlink.bandwidth=112.5 GB/s"],  # a what-if study with a quarter of the bandwidth
        ["cluster.node.nvlink={bandwidth: 900 GB/s, generation: nvlink5}", "cluster.accelerator=b200-sxm-180gb"],
        ["cluster.node.nvlink.bandwidth=3600 Gbit/s"],  # 450 GB/s
        ["cluster.node.pcie.bandwidth=64 GB/s"],  # 16 lanes of 32 GT/s, as printed
        ["cluster.node.nic.bandwidth=100 GB/s"],  # 800 Gbit/s
        ["cluster.node.nic.bandwidth=800 Gbit/s"],
        [
            "cluster.node.nic={per_node: 32, bandwidth: 400 Gbit/s}"
        ],  # the sum of a GPU's four ports may exceed the limit
    ],
)
def test_valid_clusters_do_not_warn(mapping: dict[str, Any], overrides: list[str]) -> None:
    assert Scenario.from_mapping(mapping, overrides).warnings == ()


def test_mixed_nodes_are_checked(mapping: dict[str, Any]) -> None:
    mixed = "cluster.mixed={{nodes: 0, accelerator: {}}}"
    assert parts("a100-sxm-80gb ... dgx-h100 ... nvlink4").search(only_warning(mapping, mixed.format("a100-sxm-80gb")))
    assert Scenario.from_mapping(mapping, [mixed.format("h200-sxm-141gb")]).warnings == ()


PROJECTIONS = {"vera-rubin-nvl144", "helios-mi455x"}
WITHOUT_NVLINK = {"laptop", "pcie-node", "l40s-node", "rtx-4090-node"}


@pytest.mark.parametrize("name", sorted(set(data_files.list_names("clusters")) - WITHOUT_NVLINK))
def test_packaged_clusters_do_not_warn_except_projections(name: str) -> None:
    gpus = 2 * load_cluster(name).gpus_per_node
    training = {"sequence": 512, "global_batch": gpus, "precision": "fp16", "attention": "standard"}
    plan = {"model": SMALL_MODEL, "cluster": {"name": name, "gpus": gpus}, "layout": {"tp": 2}, "training": training}
    warnings = [text for text in Scenario.from_mapping(plan).warnings if "is a projection" not in text]
    assert warnings == []
    assert (len(Scenario.from_mapping(plan).warnings) == 1) == (name in PROJECTIONS)


PORT_LIMIT_TEXT = "but no port of more than 800 Gbit/s is sold (1,600 are announced)"


@pytest.mark.parametrize(
    ("bandwidth", "suggestion"),
    [
        ("400 GB/s", f"400 GB/s is 3,200 Gbit/s, {PORT_LIMIT_TEXT}; was 400 Gbit/s meant?"),
        ("200 GB/s", f"200 GB/s is 1,600 Gbit/s, {PORT_LIMIT_TEXT}; was 200 Gbit/s meant?"),
        ("0.4 TB/s", f"0.4 TB/s is 3,200 Gbit/s, {PORT_LIMIT_TEXT}"),
        ("1600 Gbit/s", f"1600 Gbit/s is 1,600 Gbit/s, {PORT_LIMIT_TEXT}"),
    ],
)
def test_nic_in_bytes_suggests_bits(mapping: dict[str, Any], bandwidth: str, suggestion: str) -> None:
    warning = only_warning(mapping, f"cluster.node.nic.bandwidth={bandwidth}")
    assert warning == f"cluster.node.nic.bandwidth: {suggestion}"


@pytest.mark.parametrize("bandwidth", ["450 Gbit/s", "900 Gbit/s"])
def test_nvlink_in_bits_suggests_bytes(mapping: dict[str, Any], bandwidth: str) -> None:
    warning = only_warning(mapping, f"cluster.node.nvlink.bandwidth={bandwidth}")
    assert parts("h100-sxm-80gb has 450 GB/s ... per direction (900 GB/s in both) ... 450 GB/s").search(warning)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["cluster.node.nvlink.bandwidth=900 GB/s"],
            ["450 GB/s per direction of nvlink4", "900 GB/s is both", "was 450"],
        ),
        (["cluster.node.nvlink.bandwidth=7200 Gbit/s"], ["7200 Gbit/s", "450 GB/s per direction"]),
        (["cluster.node.nvlink.bandwidth=500 GB/s"], ["500 GB/s is more than the 450 GB/s per direction"]),
        (["cluster.name=dgx-h800", "cluster.node.nvlink.bandwidth=400 GB/s"], ["200 GB/s per direction", "h800"]),
        (["cluster.name=hgx-b200", "cluster.node.nvlink.bandwidth=1.8 TB/s"], ["900 GB/s per direction of nvlink5"]),
        (["cluster.name=dgx-a100", "cluster.node.nvlink.bandwidth=600 GB/s"], ["300 GB/s per direction of nvlink3"]),
        (["cluster.name=mi300x", "cluster.node.nvlink.bandwidth=896 GB/s"], ["448 GB/s per direction of xgmi4"]),
    ],
)
def test_nvlink_of_both_directions_warns(mapping: dict[str, Any], overrides: list[str], parts: list[str]) -> None:
    """Datasheets print 900 GB/s for H100, both directions; it had been taken for one, and steps were 8 % too short."""
    warning = only_warning(mapping, *overrides)
    assert warning.startswith("cluster.node.nvlink.bandwidth: ")
    assert all(part in warning for part in parts)


def test_nvlink_of_both_directions_warns_in_a_file_of_ones_own(tmp_path: Any, mapping: dict[str, Any]) -> None:
    content = data_files.read_mapping(data_files.find_file("clusters", "dgx-h100"))
    content["node"]["nvlink"]["bandwidth"] = "900 GB/s"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    mapping["cluster"] = {"path": str(path), "gpus": 64}
    assert "450 GB/s per direction" in only_warning(mapping)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["cluster.node.pcie.bandwidth=128 GB/s"], ["63 GB/s per direction", "126 GB/s is both", "was 63 GB/s meant?"]),
        (["cluster.name=dgx-a100", "cluster.node.pcie.bandwidth=64 GB/s"], ["31 GB/s per direction"]),
    ],
)
def test_pcie_of_both_directions_warns(mapping: dict[str, Any], overrides: list[str], parts: list[str]) -> None:
    warning = only_warning(mapping, *overrides)
    assert warning.startswith("cluster.node.pcie.bandwidth: ")
    assert all(part in warning for part in parts)


def test_no_packaged_cluster_exceeds_its_generation() -> None:
    for name in data_files.list_names("clusters"):
        nvlink = data_files.read_mapping(data_files.find_file("clusters", name))["node"].get("nvlink")
        if nvlink is not None:
            limit = SCALE_UP_BANDWIDTH[SCALE_UP_TECHNOLOGIES[nvlink["generation"]]]
            assert parse_quantity(nvlink["bandwidth"], Dimension.BANDWIDTH) <= limit


def test_user_cluster_file_is_checked(tmp_path: Any, mapping: dict[str, Any]) -> None:
    content = data_files.read_mapping(data_files.find_file("clusters", "dgx-h100"))
    content["node"]["nic"]["bandwidth"] = "400 GB/s"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content | {"accelerator": "a100-sxm-80gb"}))
    mapping["cluster"] = {"path": str(path), "gpus": 64}
    warnings = Scenario.from_mapping(mapping).warnings
    assert len(warnings) == 3
    assert parts("a100-sxm-80gb ... mine ... nvlink4 ... nvlink3;").search(warnings[0])
    assert "was 400 Gbit/s meant?" in warnings[1]
    assert parts("63 GB/s ... 31 GB/s per direction ... a100-sxm-80gb").search(warnings[2])


# 64 GPUs: 8 nodes, in one unit of dgx-h100 (32 nodes) and in four racks of llama3-roce (2 nodes), in one pod of both
UNUSED_TIERS = [
    ("dgx-h100", "leaf", {"tp": 4, "pp": 2}, "no transfer ... 64 GPUs ... beyond the leaf switches"),
    ("dgx-h100", "leaf", {"tp": 1}, "no transfer ... 64 GPUs ... beyond the leaf switches"),
    ("dgx-h100", "spine", {"tp": 8}, "the 64 GPUs are under one pod of spine switches"),
    ("llama3-roce", "spine", {"tp": 8}, "the 64 GPUs are under one pod of spine switches"),
]


@pytest.mark.parametrize(("cluster", "tier", "layout", "reason"), UNUSED_TIERS)
def test_oversubscription_of_unused_tier_warns_without_cost(
    cluster: str, tier: str, layout: dict[str, int], reason: str
) -> None:
    plan = {
        "model": SMALL_MODEL, "cluster": {"name": cluster, "gpus": 64}, "layout": layout,
        "training": {"sequence": 512, "global_batch": 64},
    }  # fmt: skip
    scenario = Scenario.from_mapping(plan)
    key = f"cluster.fabric.{tier}.oversubscription"
    oversubscribed = scenario.with_overrides(f"{key}=20")
    (warning,) = oversubscribed.warnings
    assert parts(f"{key} 20 changes nothing: {reason}").fullmatch(warning)
    assert simulate(oversubscribed).step_time == simulate(scenario).step_time


def test_oversubscription_of_used_tier_costs_time() -> None:
    """Racks of two nodes: rings of 8 nodes use the spine. A single rack uses no uplinks."""
    plan = {
        "model": SMALL_MODEL, "cluster": {"name": "llama3-roce", "gpus": 64}, "layout": {"tp": 8, "data": "ddp"},
        "training": {"sequence": 512, "global_batch": 64},
    }  # fmt: skip
    scenario = Scenario.from_mapping(plan)
    oversubscribed = scenario.with_overrides("cluster.fabric.leaf.oversubscription=200")
    assert oversubscribed.warnings == ()
    assert simulate(oversubscribed).step_time > simulate(scenario).step_time
    (warning,) = oversubscribed.with_overrides("cluster.gpus=16").warnings
    assert "200 changes nothing: the 16 GPUs are under one leaf switch" in warning


def test_oversubscription_of_the_cluster_file_does_not_warn(mapping: dict[str, Any]) -> None:
    mapping["cluster"] = {"name": "llama3-roce", "gpus": 64}
    assert Scenario.from_mapping(mapping).warnings == ()
    assert Scenario.from_mapping(mapping, ["cluster.fabric.spine.oversubscription=7"]).warnings == ()
