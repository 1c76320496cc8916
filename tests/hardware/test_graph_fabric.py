"""Shortest-path routes of graph fabrics: they equal computed Clos routes, and irregular topologies work."""

import networkx as nx
import numpy as np
import pytest

from clustersim.common.errors import InputError
from clustersim.hardware.ecmp import HashedEcmp
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.hardware.topology import LINK_KINDS


def all_pairs(fabric):
    gpus = np.arange(fabric.gpu_count)
    return np.repeat(gpus, fabric.gpu_count), np.tile(gpus, fabric.gpu_count)


def describe_routes(fabric, sources, targets):
    """For each route: the kinds of its links in order, and its bottleneck."""
    table, routes = fabric.links, []
    for link_ids in fabric.find_paths(sources, targets).links:
        used = link_ids[link_ids >= 0]
        routes.append((table.kind[used].tolist(), table.bandwidth[used].min(initial=np.inf)))
    return routes


def test_shortest_path_routes_equal_computed_routes(machine):
    graph = GraphFabric(machine.to_graph())
    sources, targets = all_pairs(machine)
    assert describe_routes(graph, sources, targets) == describe_routes(machine, sources, targets)
    assert graph.find_paths(sources, targets).latency == pytest.approx(machine.find_paths(sources, targets).latency)


def test_domains_nodes_and_tiers_equal_those_of_the_clos_fabric(machine):
    graph, gpus = GraphFabric(machine.to_graph()), np.arange(machine.gpu_count)
    assert graph.gpu_count == machine.gpu_count
    assert (graph.node_ids(gpus) == machine.node_ids(gpus)).all()
    assert (graph.domain_ids(gpus) == machine.domain_ids(gpus)).all()
    random = np.random.default_rng(2)
    for size in (1, 2, 2, 2, 2, 3, 4, 6):
        chosen = random.choice(machine.gpu_count, size=min(size, machine.gpu_count), replace=False).tolist()
        assert graph.highest_tier(chosen) == machine.highest_tier(chosen)


def test_inter_domain_routes_are_shortest_by_networkx(machine):
    """Independent of our search: the hops of networkx's shortest path without NVLink and without other GPUs."""
    graph = machine.to_graph()
    without_nvlink = graph.edge_subgraph([(a, b) for a, b, edge in graph.edges(data=True) if edge["kind"] != "nvlink"])
    sources, targets = all_pairs(machine)
    inter_domain = machine.domain_ids(sources) != machine.domain_ids(targets)
    paths = machine.find_paths(sources[inter_domain], targets[inter_domain])
    for source, target, links in zip(sources[inter_domain], targets[inter_domain], paths.links, strict=True):
        ends = {f"gpu{source}", f"gpu{target}"}
        subgraph = without_nvlink.subgraph(
            [name for name in without_nvlink if name in ends or not name.startswith("gpu")]
        )
        within_node = machine.node_ids(source) == machine.node_ids(target)
        if not within_node:
            assert nx.shortest_path_length(subgraph, f"gpu{source}", f"gpu{target}") == (links >= 0).sum()


def test_tiers_of_a_node_equal_those_counted_from_its_shape(build):
    machine = build["one nvlink node"]()
    assert GraphFabric(machine.to_graph()).describe_tiers() == machine.describe_tiers()


def link_attributes(kind, bandwidth=1e9, latency=1e-6):
    technology = "nvlink4" if kind == "nvlink" else "infiniband"
    return {"kind": kind, "bandwidth": bandwidth, "latency": latency, "technology": technology}


def add_bidirectional_edge(graph, source, target, **attributes):
    graph.add_edge(source, target, **attributes)
    graph.add_edge(target, source, **attributes)


def two_switches(first_latency=1e-6):
    """Two GPUs in two hosts, joined by two switches; the first may be slower."""
    graph = nx.DiGraph()
    for gpu in (0, 1):
        graph.add_node(f"gpu{gpu}", kind="gpu", node=gpu)
    for name, latency in (("a", first_latency), ("b", 1e-6)):
        graph.add_node(name, kind="switch")
        add_bidirectional_edge(graph, "gpu0", name, **link_attributes("nic", latency=latency))
        add_bidirectional_edge(graph, name, "gpu1", **link_attributes("nic"))
    return graph


def route_vertices(fabric, source, target):
    link_ids = fabric.find_paths(np.array([source]), np.array([target])).links[0]
    return [fabric.link_info(int(link_id)).target for link_id in link_ids if link_id >= 0]


def test_ties_between_routes_are_broken_by_name():
    assert route_vertices(GraphFabric(two_switches()), 0, 1) == ["a", "gpu1"]


def test_less_latency_wins_over_the_name():
    assert route_vertices(GraphFabric(two_switches(first_latency=2e-6)), 0, 1) == ["b", "gpu1"]


def test_fewer_hops_win_over_less_latency():
    graph = two_switches()
    add_bidirectional_edge(graph, "gpu0", "gpu1", **link_attributes("nic", latency=1.0))
    assert route_vertices(GraphFabric(graph), 0, 1) == ["gpu1"]


def test_hashing_uses_every_equal_route_and_repeats_itself():
    fabrics = [GraphFabric(two_switches(), HashedEcmp(seed)) for seed in range(20)]
    chosen = [route_vertices(fabric, 0, 1)[0] for fabric in fabrics]
    assert set(chosen) == {"a", "b"}
    assert chosen == [route_vertices(GraphFabric(two_switches(), HashedEcmp(seed)), 0, 1)[0] for seed in range(20)]


def test_gpus_forward_only_without_an_alternative():
    """A ring of four GPUs: neighbours need one hop, opposite ones two."""
    ring = nx.DiGraph()
    for gpu in range(4):
        ring.add_node(f"gpu{gpu}", kind="gpu", node=gpu)
    for gpu in range(4):
        add_bidirectional_edge(ring, f"gpu{gpu}", f"gpu{(gpu + 1) % 4}", **link_attributes("nic"))
    fabric = GraphFabric(ring)
    assert route_vertices(fabric, 0, 1) == ["gpu1"]
    assert route_vertices(fabric, 0, 2) == ["gpu1", "gpu2"]


def test_gpu_ids_are_grouped_by_node():
    graph = nx.DiGraph()
    for name, node in (("w", "left"), ("x", "right"), ("y", "left"), ("z", "right")):
        graph.add_node(name, kind="gpu", node=node)
    graph.add_node("s", kind="nvswitch")
    for name in "wxyz":
        add_bidirectional_edge(graph, name, "s", **link_attributes("nvlink"))
    fabric = GraphFabric(graph)
    assert fabric.node_ids(np.arange(4)).tolist() == [0, 0, 1, 1]
    assert route_vertices(fabric, 0, 1) == ["s", "y"]
    assert fabric.highest_tier([0, 1, 2, 3]) == "nvlink"


def test_a_gpu_that_cannot_be_reached_is_named():
    graph = two_switches()
    graph.add_node("gpu2", kind="gpu", node=2)
    graph.add_edge("gpu2", "a", **link_attributes("nic"))
    with pytest.raises(InputError, match="gpu2 cannot be reached from GPU gpu0"):
        GraphFabric(graph)
    graph.remove_edge("gpu2", "a")
    graph.add_edge("a", "gpu2", **link_attributes("nic"))
    with pytest.raises(InputError, match="gpu2 cannot reach GPU gpu0"):
        GraphFabric(graph)


def test_oversubscription_of_a_graph_is_bandwidth_below_over_bandwidth_above():
    """Three NICs of 1 GB/s under two leaves with one uplink of 0.5 GB/s each: 3."""
    graph = nx.DiGraph()
    for gpu in (0, 1, 2):
        graph.add_node(f"gpu{gpu}", kind="gpu", node=gpu)
        graph.add_node(f"nic{gpu}", kind="nic")
        add_bidirectional_edge(graph, f"gpu{gpu}", f"nic{gpu}", **link_attributes("pcie", 2e9))
    for name, kind in (("leaf0", "leaf"), ("leaf1", "leaf"), ("spine", "spine")):
        graph.add_node(name, kind=kind)
    for gpu, leaf in ((0, "leaf0"), (1, "leaf0"), (2, "leaf1")):
        add_bidirectional_edge(graph, f"nic{gpu}", leaf, **link_attributes("nic"))
    add_bidirectional_edge(graph, "leaf0", "spine", **link_attributes("leaf", 0.5e9))
    add_bidirectional_edge(graph, "leaf1", "spine", **link_attributes("leaf", 0.5e9))
    leaf = next(tier for tier in GraphFabric(graph).describe_tiers() if tier.kind == "leaf")
    assert (leaf.count, leaf.bandwidth, leaf.oversubscription) == (2, 0.5e9, pytest.approx(3.0))


def test_table_and_links_agree(build):
    fabric = GraphFabric(build["racks"]().to_graph())
    for link_id in range(len(fabric.links.kind)):
        described_link = fabric.link_info(link_id)
        assert described_link.kind is LINK_KINDS[fabric.links.kind[link_id]]
        assert described_link.bandwidth == fabric.links.bandwidth[link_id]


def test_equality_of_graph_fabrics(machine):
    graph = machine.to_graph()
    fabric = GraphFabric(graph)
    assert fabric == GraphFabric(graph.copy())
    assert hash(fabric) == hash(GraphFabric(graph.copy()))
    assert fabric != GraphFabric(graph.copy(), HashedEcmp(3))
    slower = np.ones(len(fabric.links.kind))
    slower[-1] = 0.5
    assert fabric.with_degraded_links(slower) != fabric
