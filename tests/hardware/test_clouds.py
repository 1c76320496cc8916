"""Clusters of clouds and vendors: ports, links and tiers equal the published ones, counted here by hand."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.cluster import describe_tiers, load_cluster
from clustersim.hardware.topology import LINK_KINDS

NVLINK_BANDWIDTH = {"nvlink2": 150e9, "nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9, "nvlink6": 1800e9}
"""NVLink bandwidth of a GPU per direction: links times rate, 6 x 25, 12 x 25, 18 x 25, 18 x 50 and 36 x 50 GB/s."""
OTHER_NVLINK_BANDWIDTH = {
    "dgx-h800": 200e9, "hgx-a800": 200e9, "mi300x": 7 * 64e9, "mi325x": 7 * 64e9, "mi355x": 7 * 76.5e9,
    "mi250x": 6 * 50e9, "helios-mi455x": 1800e9,
}  # fmt: skip
"""Export limits reduce H800's and A800's bandwidth; xGMI has one link to each of seven peers, four to a sibling die."""
NETWORKED = sorted(set(data_files.list_names("clusters")) - {"laptop", "pcie-node", "l40s-node", "rtx-4090-node"})


@dataclass(frozen=True)
class PublishedCluster:
    """Published numbers. node_gbps: Gbit/s of all network ports of a node; per_node: number of ports."""

    accelerator: str
    per_node: int
    node_gbps: float
    network: str
    max_gpus: int


PUBLISHED = {
    "aws-p4d": PublishedCluster("a100-sxm-40gb", 4, 400, "efa1", 4_096),
    "aws-p4de": PublishedCluster("a100-sxm-80gb", 4, 400, "efa1", 4_096),
    "aws-p5": PublishedCluster("h100-sxm-80gb", 32, 3_200, "efa2", 20_480),
    "aws-p5e": PublishedCluster("h200-sxm-141gb", 32, 3_200, "efa2", 20_480),
    "aws-p5en": PublishedCluster("h200-sxm-141gb", 16, 3_200, "efa", 20_480),
    "aws-p6-b200": PublishedCluster("b200-sxm-180gb", 8, 3_200, "efa", 20_480),
    "aws-p6-b300": PublishedCluster("b300-sxm-288gb", 16, 6_400, "efa", 20_480),
    "aws-p6e-gb200": PublishedCluster("gb200", 4, 1_600, "efa", 72 * 16 * 16),
    "azure-nd-a100-v4": PublishedCluster("a100-sxm-40gb", 8, 1_600, "infiniband", 20 * 8 * 4 * 32),
    "azure-nd-h100-v5": PublishedCluster("h100-sxm-80gb", 8, 3_200, "infiniband", 65_536),
    "azure-nd-h200-v5": PublishedCluster("h200-sxm-141gb", 8, 3_200, "infiniband", 65_536),
    "coreweave-gb200": PublishedCluster("gb200", 4, 1_600, "infiniband", 9_216),
    "coreweave-h100": PublishedCluster("h100-sxm-80gb", 8, 3_200, "infiniband", 65_536),
    "dgx-2": PublishedCluster("v100-sxm-32gb", 8, 800, "infiniband", 18 * 16 * 9),
    "dgx-a100": PublishedCluster("a100-sxm-80gb", 8, 1_600, "infiniband", 20_480),
    "dgx-h100": PublishedCluster("h100-sxm-80gb", 8, 3_200, "infiniband", 65_536),
    "dgx-h800": PublishedCluster("h800-sxm-80gb", 8, 3_200, "infiniband", 16_384),
    "dgx-v100": PublishedCluster("v100-sxm-32gb", 4, 400, "infiniband", 18 * 8 * 9),
    "gb200-nvl72": PublishedCluster("gb200", 4, 1_600, "infiniband", 9_216),
    "gb300-nvl72": PublishedCluster("gb300", 4, 3_200, "infiniband", 10_368),
    "gcp-a3-high": PublishedCluster("h100-sxm-80gb", 4, 800, "tcpx", 16 * 8 * 32 * 16),
    "gcp-a3-mega": PublishedCluster("h100-sxm-80gb", 8, 1_600, "tcpxo", 8 * 8 * 32 * 16),
    "gcp-a3-ultra": PublishedCluster("h200-sxm-141gb", 8, 3_200, "roce", 4 * 8 * 32 * 16),
    "gcp-a4": PublishedCluster("b200-sxm-180gb", 8, 3_200, "roce", 4 * 8 * 32 * 16),
    "gcp-a4x": PublishedCluster("gb200", 4, 1_600, "roce", 72 * 16 * 8),
    "alps-gh200": PublishedCluster("gh200-96gb-660w", 4, 800, "slingshot", 10_752),
    "jupiter-gh200": PublishedCluster("gh200-96gb", 4, 800, "infiniband", 24_000),
    "hgx-a800": PublishedCluster("a800-sxm-80gb", 8, 1_600, "infiniband", 20 * 8 * 4 * 32),
    "hgx-h20": PublishedCluster("h20-sxm-96gb", 8, 3_200, "infiniband", 65_536),
    "mi250x": PublishedCluster("mi250x", 4, 800, "slingshot", 32_768),
    "vera-rubin-nvl144": PublishedCluster("rubin", 8, 6_400, "infiniband", 9_216),
    "helios-mi455x": PublishedCluster("mi455x", 12, 9_600, "roce", 9_216),
    "hgx-b200": PublishedCluster("b200-sxm-180gb", 8, 3_200, "infiniband", 65_536),
    "hgx-b300": PublishedCluster("b300-sxm-288gb", 8, 6_400, "infiniband", 10_368),
    "hgx-h200": PublishedCluster("h200-sxm-141gb", 8, 3_200, "infiniband", 65_536),
    "llama3-roce": PublishedCluster("h100-sxm-80gb", 8, 3_200, "roce", 24_576),
    "mi300x": PublishedCluster("mi300x", 8, 3_200, "roce", 8_192),
    "mi325x": PublishedCluster("mi325x", 8, 3_200, "roce", 8_192),
    "mi355x": PublishedCluster("mi355x", 8, 3_200, "roce", 8_192),
    "oci-b200": PublishedCluster("b200-sxm-180gb", 8, 3_200, "roce", 131_072),
    "oci-gb200": PublishedCluster("gb200", 4, 1_600, "infiniband", 9_216),
    "oci-h100": PublishedCluster("h100-sxm-80gb", 16, 3_200, "roce", 16_384),
    "oci-h200": PublishedCluster("h200-sxm-141gb", 8, 3_200, "roce", 65_536),
}


def link_bandwidths(cluster: Any, kind: str) -> set[float]:
    table = cluster.fabric.links
    return set(table.bandwidth[table.kind == [link_kind.value for link_kind in LINK_KINDS].index(kind)].tolist())


def test_every_networked_cluster_has_published_numbers() -> None:
    assert sorted(PUBLISHED) == NETWORKED


@pytest.mark.parametrize("name", NETWORKED)
def test_a_node_has_the_published_ports(name: str) -> None:
    """Ports times rate is the node's sum; several ports of a GPU act as one, so that links carry the sum as well."""
    cluster, published = load_cluster(name), PUBLISHED[name]
    nic_config = data_files.read_mapping(data_files.find_file("clusters", name))["node"]["nic"]
    rate = float(nic_config["bandwidth"].removesuffix(" Gbit/s"))
    assert (cluster.accelerator.name, nic_config["per_node"], nic_config["network"]) == (
        published.accelerator, published.per_node, published.network
    )  # fmt: skip
    assert nic_config["per_node"] * rate == published.node_gbps
    nics = cluster.fabric.nic_links(np.arange(cluster.gpus_per_node))
    assert cluster.fabric.links.bandwidth[nics].sum() / 2 == pytest.approx(published.node_gbps * 1e9 / 8)


@pytest.mark.parametrize("name", NETWORKED)
def test_nvlinks_have_their_generation_and_total_bandwidth(name: str) -> None:
    """What leaves a GPU over NVLink, whether by one port to a switch or by links to its peers."""
    cluster = load_cluster(name)
    generation = data_files.read_mapping(data_files.find_file("clusters", name))["node"]["nvlink"]["generation"]
    assert cluster.accelerator.nvlink is not None
    assert generation == cluster.accelerator.nvlink.value
    table, ends = cluster.fabric.links, cluster.fabric.link_endpoints
    is_outgoing = (table.kind == 0) & (ends.source == 3)
    assert table.bandwidth[is_outgoing].sum() == pytest.approx(
        OTHER_NVLINK_BANDWIDTH.get(name) or NVLINK_BANDWIDTH[generation]
    )


@pytest.mark.parametrize("name", NETWORKED)
def test_clusters_have_the_published_size_and_full_bisection(name: str) -> None:
    """No cluster but Llama 3's is oversubscribed: leaves send up what NICs send, spines hand on what leaves do."""
    max_gpus = PUBLISHED[name].max_gpus
    cluster = load_cluster(name, max_gpus)
    node_gpus = cluster.gpus_per_node
    with pytest.raises(InputError, match=f"at most {max_gpus:,}"):
        load_cluster(name, max_gpus + node_gpus)
    tiers = {tier.kind: tier for tier in describe_tiers(cluster)}
    nic_bandwidth = max_gpus // node_gpus * PUBLISHED[name].node_gbps * 1e9 / 8
    ratio = {"leaf": 1, "spine": 7 if name == "llama3-roce" else 1}
    for kind in ratio.keys() & tiers:
        total = tiers[kind].count * tiers[kind].bandwidth
        up = tiers[kind].oversubscription is not None
        assert total == pytest.approx(nic_bandwidth / (ratio[kind] if up else 1))


@pytest.mark.parametrize("name", NETWORKED)
def test_pcie_and_nic_rates_exist_as_products(name: str) -> None:
    """A GPU's PCIe carries its ports (PCIe 5 x16 is 63 GB/s, PCIe 6 121, or several), or they could not be fed."""
    cluster = load_cluster(name)
    (pcie,) = link_bandwidths(cluster, "pcie")
    assert pcie in {15.75e9, 31e9, 63e9, 121e9, 2 * 121e9, 3 * 121e9}
    assert max(link_bandwidths(cluster, "nic")) <= pcie


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("aws-p5", {16 * 8 - 1: "leaf", 16 * 8: "spine", 2_047: "spine", 2_048: "core"}),
        ("gcp-a3-ultra", {31: "leaf", 32: "spine", 1_023: "spine", 1_024: "core"}),
        ("oci-h100", {8: "leaf", 32 * 8 - 8: "leaf", 32 * 8: "spine", 4_096: "core"}),
        ("dgx-h800", {2_040: "spine", 16_376: "spine"}),
        ("hgx-b300", {71 * 8: "leaf", 72 * 8: "spine", 10_360: "spine"}),
        ("gb300-nvl72", {71: "nvlink", 72: "leaf", 284: "leaf", 288: "spine"}),
        ("aws-p6e-gb200", {71: "nvlink", 72: "spine", 72 * 16: "core"}),
    ],
)
def test_gpu_0_reaches_others_over_the_expected_tier(name: str, tiers: dict[int, str]) -> None:
    fabric = load_cluster(name, PUBLISHED[name].max_gpus).fabric
    assert {gpu: fabric.highest_tier([0, gpu]) for gpu in tiers} == tiers


def test_deepseek_planes_have_the_switches_for_16384_gpus() -> None:
    """8 planes of 64 leaves and 32 spines with 64 ports: 2,048 nodes, 32 to a leaf, half of its ports up."""
    counts = {tier.kind: tier.count for tier in describe_tiers(load_cluster("dgx-h800", 16_384))}
    assert (counts["leaf"], counts["spine"]) == (8 * 64, 8 * 32)


def test_xdr_switches_join_10368_ports_in_two_tiers() -> None:
    """144 ports: 72 down, 72 up; 144 leaves under 72 spines join 144 x 72 ports."""
    for name in ("hgx-b300", "gb300-nvl72"):
        counts = {tier.kind: tier.count for tier in describe_tiers(load_cluster(name, 10_368))}
        assert (counts["leaf"], counts["spine"]) == (144, 72)
