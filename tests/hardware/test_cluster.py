"""Cluster files: packaged ones load, invalid ones are rejected in one sentence that names file and key."""

import json
import shutil
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.cluster import MAX_GPUS, describe_tiers, load_cluster
from clustersim.hardware.host_memory import HostMemory

RAILS = {
    "accelerator": "h100-sxm-80gb",
    "gpus": 16,
    "node": {
        "gpus": 4,
        "nvlink": {"gpus": 4, "bandwidth": "450 GB/s", "latency": "0.6 us"},
        "pcie": {"bandwidth": "63 GB/s", "latency": "0.5 us"},
        "nic": {"per_node": 4, "bandwidth": "400 Gbit/s", "latency": "0.7 us"},
    },
    "fabric": {
        "leaf": {"arrangement": "rail", "nodes": 2, "latency": "0.3 us"},
        "spine": {"units": 2, "latency": "0.3 us"},
        "core": {"pods": 4, "latency": "0.3 us"},
    },
}


@pytest.fixture
def rails(tmp_path):
    """A file with RAILS in it."""
    path = tmp_path / "rails.yaml"
    path.write_text(yaml.safe_dump(RAILS))
    return str(path)


@pytest.fixture
def graph_file(tmp_path):
    """A file with some graph in it: two GPUs, each in its host, on one switch."""

    def write_graph(**changes):
        edge = {"kind": "nic", "bandwidth": "10 GB/s", "latency": "1 us"}
        content = {
            "graph": {"accelerator": "h100-sxm-80gb"},
            "nodes": [
                {"id": "g0", "kind": "gpu", "node": 0},
                {"id": "g1", "kind": "gpu", "node": 1},
                {"id": "s", "kind": "switch"},
            ],
            "edges": [{"source": "g0", "target": "s", **edge}, {"source": "s", "target": "g1", **edge}],
        }
        path = tmp_path / "graph.json"
        path.write_text(json.dumps(content | changes))
        return str(path)

    return write_graph


@pytest.mark.parametrize("name", data_files.list_names("clusters"))
def test_every_packaged_cluster_loads_and_is_fully_sourced(name):
    cluster = load_cluster(name)
    assert cluster.fabric.gpu_count == cluster.gpu_count
    assert cluster.gpu_count % cluster.gpus_per_node == 0
    assert cluster.library in data_files.list_names("libraries")
    content = data_files.read_mapping(data_files.find_file("clusters", name))
    sections = {*content["node"], *({"fabric", "switches", "ecmp"} if "fabric" in content else ())} - {"gpus"}
    assert set(cluster.sources) == sections


def test_one_way_latency_over_one_leaf_is_what_ib_write_lat_measures():
    """2.68 us, ConnectX-7 NDR, Vultr HGX B200 acceptance report."""
    latency = load_cluster("dgx-h100").fabric.find_paths(np.array([0]), np.array([8])).latency
    assert latency == pytest.approx(2.68e-6, rel=0.02)


def test_llama3_pods_have_3072_gpus_and_a_seventh_of_their_bandwidth_above():
    """Full bisection in a pod: 3,072 x 50 GB/s; 1:7 above (arXiv:2407.21783, sec. 3.3.1)."""
    cluster = load_cluster("llama3-roce")
    fabric = cluster.fabric
    assert [fabric.highest_tier([0, gpu]) for gpu in (15, 16, 3071, 3072)] == ["leaf", "spine", "spine", "core"]
    spine, core = describe_tiers(cluster)[-2:]
    assert spine.oversubscription == 7
    assert core.count * core.bandwidth == pytest.approx(6 * 3072 * 50e9 / 7)
    with pytest.raises(InputError, match="at most 24,576"):
        load_cluster("llama3-roce", 24_584)


def test_gpu_counts_are_multiples_of_a_node_or_within_one_node():
    assert load_cluster("dgx-h100", 16_384).fabric.gpu_count == 16_384
    assert load_cluster("dgx-h100", 8 * 33).fabric.highest_tier([0, 8 * 32]) == "spine"
    assert load_cluster("dgx-h100", 2).gpu_count == 2
    with pytest.raises(InputError, match="1,024 or 1,032"):
        load_cluster("dgx-h100", 1030)


@pytest.mark.parametrize("gpus", [0, -8, MAX_GPUS + 8, 10**9])
def test_out_of_range_gpu_counts_are_rejected(gpus):
    with pytest.raises(InputError, match="1 to 1,048,576"):
        load_cluster("dgx-h100", gpus)


def test_a_file_need_not_say_how_many_gpus_a_job_says(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in RAILS.items() if key != "gpus"}))
    assert load_cluster(str(path), 32).gpu_count == 32
    with pytest.raises(InputError, match="gpus: is missing; state it here, or as cluster"):
        load_cluster(str(path))


def test_a_cluster_without_a_network_is_one_node():
    with pytest.raises(InputError, match="at most 8"):
        load_cluster("pcie-node", 16)


def test_an_unknown_name_gets_its_nearest_match():
    with pytest.raises(InputError, match="did you mean dgx-h100"):
        load_cluster("dgx-h10")


def test_overrides_are_dotted_or_nested(rails):
    dotted = load_cluster(rails, 32, {"fabric.leaf.oversubscription": 4})
    nested = load_cluster(rails, 32, {"fabric": {"leaf": {"oversubscription": 4}}})
    unchanged = load_cluster(rails, 32)
    assert describe_tiers(dotted) == describe_tiers(nested) != describe_tiers(unchanged)
    assert load_cluster(rails, overrides={"accelerator": "a100-sxm-80gb"}).accelerator.name == "a100-sxm-80gb"


def test_null_removes_a_section(rails):
    with pytest.raises(InputError, match="at most 16 "):
        load_cluster(rails, 32, {"fabric.core": None})


def test_oversubscription_divides_the_leafs_uplinks(rails):
    """2 nodes x 1 NIC of a rail x 50 GB/s = 100 GB/s up, 1:4 of it 25 GB/s."""
    leaf = next(
        tier
        for tier in describe_tiers(load_cluster(rails, 32, {"fabric.leaf.oversubscription": 4}))
        if tier.kind == "leaf"
    )
    assert leaf.bandwidth == pytest.approx(25e9)


def test_more_nics_than_gpus_act_as_one_wider_nic_each(rails):
    fabric = load_cluster(rails, overrides={"node.nic": {"per_node": 8, "bandwidth": "200 Gbit/s"}}).fabric
    assert set(fabric.links.bandwidth[fabric.links.kind == 3]) == {50e9}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"fabric.oversubscription": 7},
            r"fabric.oversubscription: unknown key; did you mean fabric.\w+.oversubscription",
        ),
        ({"fabric.leaf.arangement": "rail"}, "did you mean fabric.leaf.arrangement"),
        ({"fabric.leaf.arrangement": "rails"}, "'rails' is unknown; did you mean rail"),
        ({"acelerator": "x"}, "did you mean accelerator"),
        ({"node.nic.bandwidth": 400}, "node.nic.bandwidth: 400 has no unit; .*'400 Gbit/s'"),
        ({"node.nic.bandwidth": "400 us"}, "not a unit of bandwidth"),
        ({"node.nic.bandwidth": "0 GB/s"}, "not above zero"),
        ({"node.nic.bandwidth": "1e400 GB/s"}, "not finite"),
        ({"node.nvlink.latency": "-1 us"}, "below zero"),
        ({"node.gpus": 0}, "node.gpus: 0 is not a whole number from 1"),
        ({"node.gpus": 4.5}, "node.gpus: 4.5 is not a whole number"),
        ({"node.gpus": True}, "node.gpus: true is not a whole number"),
        ({"node.nvlink.gpus": 3}, "domains of 3 do not divide into nodes of 4"),
        ({"node.nvlink.gpus": 2}, "node.host: is missing"),
        ({"node.nic.per_node": 6}, "6 NICs do not divide evenly among 4 GPUs"),
        ({"node.pcie": None}, "NICs need node.pcie"),
        ({"node.nic": None}, "no node.nic to reach them"),
        ({"fabric.spine": None}, "nothing joins the leaf switches"),
        ({"fabric.leaf": "big"}, "fabric.leaf: 'big' is not a mapping"),
        ({"fabric.leaf.nodes.x": 1}, "fabric.leaf.nodes is 2 and has no key x"),
        ({"node": {"gpus": {}}}, "node.gpus is 4, not a mapping of keys to values"),
        ({"fabric.leaf.oversubscription": 0}, "0 is not a number above 0"),
        ({"fabric.leaf.oversubscription": "1:7"}, "'1:7' is not a number above 0"),
        ({"fabric.ecmp": "hash"}, "did you mean hashed"),
        ({"accelerator": "h100"}, r"accelerator:.*'h100'.*h100-sxm-80gb\?"),
        ({"library": "ncl"}, r"library: there is no library 'ncl'; did you mean nccl\?"),
        ({"fabric.spine.oversub": 7}, r"unknown key; did you mean fabric.spine.oversubscription\?"),
        ({"gpus": "many"}, "gpus: 'many' is not a whole number"),
        ({"fabric": {"ecmp": "hashed", "leaf": {"nodes": 2**20, "oversubscription": 0.1}}}, "at most 16,777,216"),
    ],
)
def test_invalid_overrides_are_rejected_with_file_and_key(rails, changes, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        load_cluster(rails, overrides=changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(rails)


def test_missing_broken_and_empty_files_are_rejected(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_cluster(str(tmp_path / "no.yaml"))
    for name, text in (
        ("broken.yaml", "a: ["),
        ("broken.json", '{"nodes": ['),
        ("list.yaml", "- 1"),
        ("empty.yaml", ""),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=name):
            load_cluster(str(tmp_path / name))


def test_a_graph_file_is_a_cluster(graph_file):
    cluster = load_cluster(graph_file())
    assert (cluster.gpu_count, cluster.gpus_per_node, cluster.library) == (2, 1, "nccl")
    assert cluster.fabric.find_paths(np.array([0]), np.array([1])).latency == pytest.approx([2e-6])
    assert load_cluster(graph_file(), overrides={"accelerator": "a100-sxm-80gb"}).accelerator.name == "a100-sxm-80gb"
    assert load_cluster(graph_file(), 1).gpu_count == 1


def test_host_memory_is_optional(graph_file):
    memory = {
        "capacity": "1 TB", "bandwidth": "90 GB/s", "device_to_host": "50 GB/s", "host_to_device": "40 GB/s",
        "latency": "1 us", "optimizer_fraction": 0.5,
    }  # fmt: skip
    expected = HostMemory(1e12, 90e9, 50e9, 40e9, pytest.approx(1e-6), 0.5)
    assert load_cluster("pcie-node").host_memory is None
    assert load_cluster(graph_file()).host_memory is None
    assert load_cluster("pcie-node", overrides={"node.host_memory": memory}).host_memory == expected
    graph = {"accelerator": "h100-sxm-80gb", "host_memory": memory}
    assert load_cluster(graph_file(graph=graph)).host_memory == expected


def test_a_packaged_cluster_round_trips_as_a_graph(tmp_path):
    cluster = load_cluster("dgx-h100", 32)
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(nx.node_link_data(cluster.to_graph(), edges="edges")))
    copy = load_cluster(str(path))
    sources, targets = np.repeat(np.arange(32), 32), np.tile(np.arange(32), 32)
    assert copy.gpus_per_node == 8
    assert copy.fabric.links.bandwidth.sum() == cluster.fabric.links.bandwidth.sum()
    paths, expected = copy.fabric.find_paths(sources, targets), cluster.fabric.find_paths(sources, targets)
    assert paths.latency == pytest.approx(expected.latency)


def simulated_step_time(**cluster):
    layout = {"tp": 2, "dp": 4, "sequence_parallel": True}
    training = {"sequence": 1024, "global_batch": 8, "precision": "fp16", "attention": "standard"}
    config = {"model": "llama3-8b", "layout": layout, "training": training}
    return simulate(Scenario.from_mapping(config | {"cluster": cluster})).to_json()["step_time_s"]


@pytest.mark.parametrize("ecmp", [{}, {"ecmp": "hashed", "seed": 7}])
def test_a_graph_round_trips_through_networkx_exactly(tmp_path, ecmp):
    """Two spines between four leaves of one node of two GPUs each, so that routes are equal and hashes choose."""
    memory = {
        "capacity": "1 TB", "bandwidth": "90.1 GB/s", "device_to_host": "50 GB/s", "host_to_device": "40 GB/s",
        "latency": "1.7 us", "optimizer_fraction": 0.5,
    }  # fmt: skip
    accelerator_file = tmp_path / "my-gpu.yaml"
    shutil.copy(data_files.find_file("accelerators", "h100-sxm-80gb"), accelerator_file)
    shutil.copy(data_files.find_file("libraries", "nccl"), tmp_path / "my-library.yaml")
    attributes = {
        "accelerator": "my-gpu.yaml",
        "library": "my-library.yaml",
        "host_memory": memory,
        "sources": {"nic": "a guess"},
    }
    graph = nx.Graph(**attributes, **ecmp, measured=True)
    for gpu in range(8):
        graph.add_node(f"g{gpu}", kind="gpu", node=f"n{gpu // 2}")
        graph.add_edge(f"g{gpu}", f"leaf{gpu // 2}", kind="nic", bandwidth="0.1 Tbit/s", latency="1.3 us")
    graph.add_edges_from(
        [("g0", "g1"), ("g6", "g7")], kind="nvlink", generation="nvlink3", bandwidth="7 GB/s", latency="0 s"
    )
    for leaf, spine in ((leaf, spine) for leaf in range(4) for spine in range(2)):
        graph.add_edge(
            f"leaf{leaf}", f"spine{spine}", kind="leaf", network="roce", bandwidth="3 GB/s", latency="0.1 us"
        )
    nx.set_node_attributes(
        graph, {f"leaf{leaf}": "leaf" for leaf in range(4)} | {"spine0": "spine", "spine1": "spine"}, "kind"
    )
    files = []
    current_graph = graph
    for name in ("first", "second"):
        files.append(str(tmp_path / f"{name}.json"))
        Path(files[-1]).write_text(json.dumps(nx.node_link_data(current_graph, edges="edges")))
        current_graph = load_cluster(files[-1]).to_graph()
    first_cluster, second_cluster = map(load_cluster, files)
    for attribute in ("fabric", "accelerator", "host_memory", "sources", "is_measured", "gpu_count", "gpus_per_node"):
        assert getattr(first_cluster, attribute) == getattr(second_cluster, attribute)
    assert simulated_step_time(path=files[0]) == simulated_step_time(path=files[1])


@pytest.mark.parametrize("name", ["dgx-h100", "pcie-node", "gb200-nvl72", "llama3-roce", "mi300x", "dgx-v100"])
def test_a_clos_cluster_and_its_graph_give_the_same_step_time(tmp_path, name):
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(nx.node_link_data(load_cluster(name, 8).to_graph(), edges="edges")))
    assert simulated_step_time(name=name, gpus=8) == simulated_step_time(path=str(path))


def test_a_graph_of_a_degraded_cluster_has_the_remaining_bandwidth():
    degradations = {"links": {"between": ["nic1.0", "leaf0.0"], "bandwidth": "50 %"}}
    layout = {"dp": 16}
    config = {"model": "llama3-8b", "layout": layout, "training": {"sequence": 1024, "global_batch": 16}}
    cluster = {"name": "dgx-h100", "gpus": 16}
    edges = [
        Scenario.from_mapping({**config, "cluster": cluster, **extra}).cluster.to_graph().edges["nic1.0", "leaf0.0"]
        for extra in ({}, {"degradations": degradations})
    ]
    assert [edge["bandwidth"] for edge in edges] == ["50000000000.0 B/s", "25000000000.0 B/s"]


GPU = {"id": "g2", "kind": "gpu", "node": 2}
NODES = [{"id": "g0", "kind": "gpu", "node": 0}, {"id": "g1", "kind": "gpu", "node": 0}]
EDGE = {"source": "g0", "target": "g1", "kind": "nvlink", "bandwidth": "1 GB/s", "latency": "1 us"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": [*NODES, GPU], "edges": [EDGE]}, "GPU g2 cannot be reached from GPU g0"),
        ({"nodes": [{"id": "s", "kind": "switch"}], "edges": []}, "none of them is of kind gpu"),
        ({"nodes": [*NODES, NODES[0]], "edges": [EDGE]}, r"nodes\[2\] \(g0\).id: there is such a node already"),
        ({"nodes": [{"id": "g0", "kind": "gpux", "node": 0}], "edges": []}, "'gpux' is unknown; did you mean gpu"),
        ({"nodes": [{"id": "g0", "kind": "gpu"}], "edges": []}, r"nodes\[0\] \(g0\).node: is missing"),
        ({"nodes": [{"id": "g0", "node": 0}], "edges": []}, r"\(g0\).kind: is missing"),
        ({"nodes": ["g0"], "edges": []}, r"nodes\[0\]: 'g0' is not a mapping"),
        ({"nodes": {"g0": 1}}, "nodes: .* is not a list"),
        ({"nodes": NODES, "edges": [EDGE | {"target": "g9"}]}, r"edges\[0\] \(g0-g9\).target: there is no node 'g9'"),
        ({"nodes": NODES, "edges": [EDGE, EDGE]}, r"edges\[1\] \(g0-g1\).target: there is such an edge already"),
        ({"nodes": NODES, "edges": [EDGE | {"target": "g0"}]}, "ends where it starts"),
        ({"nodes": NODES, "edges": [EDGE | {"bandwidth": 10}]}, r"\(g0-g1\).bandwidth: 10 has no unit"),
        ({"nodes": NODES, "edges": [EDGE | {"bandwidth": "1 s"}]}, "not a unit of bandwidth"),
        ({"nodes": NODES, "edges": [EDGE | {"bandwidth": "-1 GB/s"}]}, "not above zero"),
        ({"nodes": NODES, "edges": [{"source": "g0", "target": "g1", "kind": "nvlink"}]}, "bandwidth: is missing"),
        ({"nodes": NODES, "edges": [EDGE | {"kind": "wire"}]}, "'wire' is unknown"),
        ({"nodes": [*NODES, GPU], "edges": [EDGE, EDGE | {"source": "g2"}]}, "hosts have 1 to 2 GPUs"),
        ({"graph": {}}, "graph: is empty; it is a mapping of keys"),
        ({"graph": [1]}, r"graph is \[1\], not a mapping of keys"),
        ({"graph": {"accelerator": "h100-sxm-80gb", "ecmp": "hash"}}, "^[^:]*: graph.ecmp: 'hash' is unknown"),
        ({"graph": {"library": "nccl"}}, "graph.accelerator: is missing"),
        ({"graph": {"accelerator": "h100-sxm-80gb", "fabric": 1}}, "graph.fabric: unknown key"),
        ({"directed": "yes"}, "neither true nor false"),
    ],
)
def test_an_invalid_graph_is_rejected_with_the_vertex_or_edge(graph_file, changes, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        load_cluster(graph_file(**changes))
    assert "graph.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_relative_paths_resolve_to_the_file_s_folder_first(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    shutil.copy(data_files.find_file("accelerators", "h100-sxm-80gb"), tmp_path / "mine" / "chip.yaml")
    shutil.copy(data_files.find_file("libraries", "nccl"), tmp_path / "sums.yaml")
    path = tmp_path / "mine" / "rails.yaml"
    path.write_text(yaml.safe_dump({**RAILS, "accelerator": "chip.yaml", "library": "sums.yaml"}))
    monkeypatch.chdir(tmp_path)
    cluster = load_cluster(str(path))
    assert cluster.files == (path, tmp_path / "mine" / "chip.yaml", Path("sums.yaml"))
    assert (cluster.accelerator.name, cluster.library) == ("chip", "sums.yaml")


def test_only_an_unchanged_packaged_cluster_counts_as_measured() -> None:
    assert load_cluster("dgx-h100").is_measured
    assert not load_cluster("dgx-h100", overrides={"node.nvlink.bandwidth": "7 GB/s"}).is_measured
    assert not load_cluster("gb200-nvl72").is_measured
