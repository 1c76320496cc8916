"""Slurm's topology.conf, NCCL's topology and `nvidia-smi topo -m` become cluster files that load."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from clustersim.common.errors import InputError
from clustersim.hardware.cluster import load_cluster
from clustersim.interop.detect import detect_program
from clustersim.interop.machines import ImportedMachine, import_machine

TREE = """# two pods of two leaves
SwitchName=leaf0 Nodes=gpu[001-016]
SwitchName=leaf1 Nodes=gpu[017-032]
SwitchName=leaf2 Nodes=gpu[033-048] LinkSpeed=400
SwitchName=leaf3 Nodes=gpu[049-060],login1
SwitchName=pod0 Switches=leaf[0-1]
SwitchName=pod1 Switches=leaf2,leaf3
SwitchName=top Switches=pod[0-1]
"""
BLOCKS = """
BlockName=b1 Nodes=n[00-17]
BlockName=b2 Nodes=n[18-35]
BlockSizes=18,36
"""
NVLINKS = "".join(
    f'<nvlink target="0000:0{index}:00.0" count="{count}" tclass="0x068000"/>' for index, count in ((7, 10), (6, 8))
)


def gpu(index: int, nvlinks: str = NVLINKS, sm: int = 90) -> str:
    return f"""<pci busid="0000:{index}0:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:{index}1:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="{index}" sm="{sm}" rank="{index}" gdr="1">{nvlinks}</gpu></pci>
      <pci busid="0000:{index}2:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>
        <net name="mlx5_{index}" dev="{index}" speed="200000" port="1" gdr="1"/></nic></pci></pci>"""


def system(gpus: list[str]) -> str:
    half = len(gpus) // 2
    cpus = ["".join(gpus[:half]), "".join(gpus[half:])]
    body = "".join(f'<cpu host_hash="0x1" numaid="{number}">{inside}</cpu>' for number, inside in enumerate(cpus))
    return f'<system version="1">{body}</system>'


def matrix(cell: Mapping[tuple[int, int], str] | str, gpus: int, nics: int = 0) -> str:
    names = [*(f"GPU{index}" for index in range(gpus)), *(f"NIC{index}" for index in range(nics))]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for row in range(gpus):
        pairs = [(min(row, column), max(row, column)) for column in range(gpus)]
        joined = [cell if isinstance(cell, str) else cell.get(pair, "SYS") for pair in pairs]
        joined[row] = "X"
        lines.append("\t".join([f"GPU{row}", *joined, *["PXB"] * nics, "0-47", "0"]))
    return "\n".join([*lines, "", "Legend:", "  X    = Self", "  NV#  = a bonded set of # NVLinks"])


def _import(kind: str, text: str, base: str, folder: Path, gpus: int | None = None) -> ImportedMachine:
    """The import, which is loaded as a user's file would be."""
    assert detect_program(text, "file.txt") == kind
    imported = import_machine(kind, text, "file.txt", base, gpus)
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(dict(imported.content)), encoding="utf-8")
    load_cluster(str(path))
    return imported


def test_a_tree_is_leaf_spine_and_core(tmp_path: Path) -> None:
    """Two pods of two leaves of up to 16 nodes of 8 GPUs: 61 nodes in all."""
    imported = _import("slurm", TREE, "dgx-h100", tmp_path)
    fabric = imported.content["fabric"]
    assert (fabric["leaf"]["nodes"], fabric["spine"]["units"], fabric["core"]["pods"]) == (16, 2, 2)
    assert imported.content["gpus"] == 61 * 8
    assert any("13 to 16 nodes" in remark for remark in imported.remarks)


@pytest.mark.parametrize(("lines", "units", "pods"), [(1, None, None), (5, 2, None)])
def test_smaller_trees(tmp_path: Path, lines: int, units: int | None, pods: int | None) -> None:
    kept = "\n".join(TREE.splitlines()[1:][:lines] if lines == 1 else TREE.splitlines()[1:3] + TREE.splitlines()[5:6])
    fabric = _import("slurm", kept, "dgx-h100", tmp_path).content["fabric"]
    assert units is None or fabric["spine"]["units"] == units
    assert pods is None or fabric["core"]["pods"] == pods


def test_switches_that_nothing_joins_are_joined(tmp_path: Path) -> None:
    imported = _import("slurm", "\n".join(TREE.splitlines()[:5]), "dgx-h100", tmp_path)
    assert imported.content["fabric"]["spine"]["units"] == 4
    assert any("nothing joins" in remark for remark in imported.remarks)


def test_blocks_are_nvlink_domains_or_leaves(tmp_path: Path) -> None:
    rack = _import("slurm", BLOCKS, "gb200-nvl72", tmp_path).content
    assert (rack["node"]["nvlink"]["gpus"], rack["gpus"]) == (18 * 4, 36 * 4)
    assert _import("slurm", BLOCKS, "dgx-h100", tmp_path).content["fabric"]["leaf"]["nodes"] == 18


def test_nccl_s_topology_of_a_switched_node(tmp_path: Path) -> None:
    """18 links of 25 GB/s to switches; PCIe 5 x16 is 32 GT/s x 16 lanes x 128/130 / 8; NICs of 200 Gbit/s."""
    node = _import("nccl-topology", system([gpu(index) for index in range(8)]), "dgx-h100", tmp_path).content["node"]
    assert node["nvlink"]["bandwidth"] == "450 GB/s"
    assert node["nvlink"]["gpus"] == node["gpus"] == node["nic"]["per_node"] == 8
    assert node["nic"]["bandwidth"] == "200 Gbit/s"
    assert float(node["pcie"]["bandwidth"].split()[0]) == pytest.approx(32 * 16 * 128 / 130 / 8, rel=1e-3)


def test_nccl_s_topology_of_pairs_and_of_no_nvlink(tmp_path: Path) -> None:
    def link(target: int) -> str:
        return f'<nvlink target="0000:{target}1:00.0" count="12" tclass="0x030200"/>'

    pairs = system([gpu(index, link(index ^ 1)) for index in range(4)])
    node = _import("nccl-topology", pairs, "dgx-h100", tmp_path).content["node"]
    assert (node["nvlink"]["gpus"], node["nvlink"]["bandwidth"], node["host"]["bridges"]) == (2, "300 GB/s", 2)
    none = _import("nccl-topology", system([gpu(index, "") for index in range(4)]), "dgx-h100", tmp_path)
    assert "nvlink" not in none.content["node"]
    assert any("same GPUs" in remark for remark in none.remarks)


def test_other_gpus_than_the_cluster_s_are_refused() -> None:
    with pytest.raises(InputError, match=r"8\.0, those of h100-sxm-80gb have 9\.0"):
        import_machine("nccl-topology", system([gpu(index, sm=80) for index in range(8)]), "x", "dgx-h100", None)


@pytest.mark.parametrize(("links", "base", "bandwidth"), [(12, "dgx-a100", "300 GB/s"), (18, "hgx-b200", "900 GB/s")])
def test_the_matrix_of_a_switched_node(tmp_path: Path, links: int, base: str, bandwidth: str) -> None:
    """Every pair of 8 GPUs has as many links as each GPU has to the switches; two NICs more than GPUs."""
    imported = _import("nvidia-smi", matrix(f"NV{links}", 8, nics=10), base, tmp_path)
    node = imported.content["node"]
    assert (node["nvlink"]["bandwidth"], node["nvlink"]["gpus"], node["nic"]["per_node"]) == (bandwidth, 8, 8)
    assert not any("same GPUs" in remark for remark in imported.remarks)


def test_the_matrix_of_a_hybrid_cube_mesh(tmp_path: Path) -> None:
    """DGX-1: 6 links a GPU, to four of the seven others."""
    links = load_cluster("dgx-v100", 8).file_values
    pairs = [tuple(pair) for pair in links["node.nvlink.links"]]  # type: ignore[attr-defined]
    cells = {pair: f"NV{pairs.count(pair)}" for pair in dict.fromkeys(pairs)}
    node = _import("nvidia-smi", matrix(cells, 8, nics=4), "dgx-v100", tmp_path).content["node"]
    assert sorted(map(tuple, node["nvlink"]["links"])) == sorted(pairs)
    assert node["nvlink"]["bandwidth"] == "150 GB/s"


def test_the_matrix_of_four_joined_gpus_without_switches(tmp_path: Path) -> None:
    """HGX A100 with 4 GPUs: 4 links for each pair, 12 a GPU."""
    node = _import("nvidia-smi", matrix("NV4", 4, nics=4), "dgx-a100", tmp_path).content["node"]
    assert (len(node["nvlink"]["links"]), node["nvlink"]["bandwidth"]) == (24, "300 GB/s")


def test_a_node_without_nics_is_alone(tmp_path: Path) -> None:
    imported = _import("nvidia-smi", matrix("SYS", 8), "pcie-node", tmp_path)
    assert "fabric" not in imported.content
    assert (imported.content["gpus"], imported.content["node"]["host"]["bridges"]) == (8, 2)


def test_a_rack_s_domain_stays_where_one_node_is_listed(tmp_path: Path) -> None:
    assert _import("nvidia-smi", matrix("NV18", 4, 4), "gb200-nvl72", tmp_path).content["node"]["nvlink"]["gpus"] == 72


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("slurm", "NodeName=a", "neither SwitchName nor BlockName"),
        ("slurm", "SwitchName=a Nodes=n[0-99999999]", "more than"),
        ("slurm", "".join(f"SwitchName=s{i} Nodes=n[0-1999]\n" for i in range(5000)), "more than 200,000 nodes"),
        ("slurm", "SwitchName=a Nodes=n[x-3]", "no list of names"),
        ("slurm", "SwitchName=a Switches=b", "no switch has Nodes"),
        ("nccl-topology", "<system", "is not XML"),
        ("nccl-topology", "<graphs/>", "root is 'graphs'"),
        ("nccl-topology", '<system version="1"/>', "has no GPU"),
        ("nccl-topology", '<system><gpu gcn="942"><xgmi target="1" count="1"/></gpu></system>', "is RCCL's"),
        ("nccl-topology", '<!DOCTYPE x [<!ENTITY a "b">]><system>&a;</system>', "document type"),
        ("nvidia-smi", "nothing", "no header with GPU0"),
        ("nvidia-smi", "\tGPU0\tGPU1\nGPU0\tX\tNV4\n", "rows for 1 of 2 GPUs"),
    ],
)
def test_what_is_no_such_file_is_one_sentence(kind: str, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        import_machine(kind, text, "x", "dgx-h100", None)
    assert "\n" not in str(refused.value)
