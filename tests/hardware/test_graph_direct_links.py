"""Direct GPU-to-GPU links detected in a graph equal those of the cluster whose graph it is."""

import pickle
from itertools import combinations, permutations

import networkx as nx
import numpy as np
import pytest

from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.direct_links import DirectLinks
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.hardware.link_technology import TECHNOLOGIES

NVLINK = {"kind": "nvlink", "latency": 0.0, "technology": TECHNOLOGIES[0]}
NIC = {"kind": "nic", "latency": 0.0, "technology": NVLINK["technology"]}


def make_graph(*links, domains=2, gpus_per_domain=4, switch=None):
    """links: index, index and bandwidth, the same in each domain; switch: a GPU with an NVLink to a switch."""
    graph = nx.DiGraph()
    graph.add_node("s", kind="switch")
    for domain in range(domains):
        for index in range(gpus_per_domain):
            gpu = f"g{domain}.{index}"
            graph.add_node(gpu, kind="gpu", node=domain)
            for ends in permutations((gpu, "s")):
                graph.add_edge(*ends, bandwidth=1.0, **NIC)
        for source, target, bandwidth in links:
            for ends in permutations((source, target)):
                graph.add_edge(*(f"g{domain}.{index}" for index in ends), bandwidth=bandwidth, **NVLINK)
    if switch is not None:
        graph.add_node("nv", kind="nvswitch")
        for ends in permutations((switch, "nv")):
            graph.add_edge(*ends, bandwidth=9.0, **NVLINK)
    return graph


RING_LINKS = [(0, 1, 2.0), (1, 2, 2.0), (2, 3, 2.0), (3, 0, 2.0)]
MESH_LINKS = [(*pair, 3.0) for pair in combinations(range(4), 2)]


@pytest.mark.parametrize("name", ["mi300x", "dgx-v100"])
def test_the_graph_of_a_cluster_has_its_direct_links(name):
    machine = load_cluster(name, 16).machine
    graph = GraphFabric(machine.to_graph())
    assert graph.direct_links == machine.direct_links
    gpus = np.arange(16)
    assert (graph.domain_slots(gpus) == machine.domain_slots(gpus)).all()
    assert (graph.gpus_at_slots(graph.domain_slots(gpus)) == gpus).all()


@pytest.mark.parametrize("name", ["dgx-h100", "pcie-node"])
def test_switched_or_unconnected_gpus_have_no_direct_links(name):
    assert GraphFabric(load_cluster(name).machine.to_graph()).direct_links is None


def test_links_of_a_pair_are_counted_by_its_bandwidth():
    weighted = [
        (source, target, 2.0 * link_count)
        for (source, target, _), link_count in zip(RING_LINKS, (1, 2, 1, 2), strict=True)
    ]
    assert GraphFabric(make_graph(*MESH_LINKS)).direct_links == DirectLinks.fully_connected(4)
    pairs = [(0, 1), (1, 2), (1, 2), (2, 3), (3, 0), (3, 0)]
    assert GraphFabric(make_graph(*weighted)).direct_links == DirectLinks.from_pairs(4, pairs)


@pytest.mark.parametrize(
    "graph",
    [
        make_graph(*MESH_LINKS, switch="g1.2"),
        make_graph(*MESH_LINKS[:-1]),  # GPUs with two and three links
        make_graph(*RING_LINKS[:-1], (3, 0, 3.0)),  # one and a half links
        make_graph(
            *[(slot, (slot + 1) % 6, 1.0) for slot in range(6)], gpus_per_domain=6
        ),  # opposite GPUs are two away
    ],
    ids=["a switch", "uneven", "no multiple", "far apart"],
)
def test_irregular_graphs_have_no_direct_links(graph):
    assert GraphFabric(graph).direct_links is None


def test_unequal_domains_have_no_direct_links():
    graph = make_graph(*MESH_LINKS)
    graph.edges["g1.0", "g1.1"]["bandwidth"] = graph.edges["g1.1", "g1.0"]["bandwidth"] = 6.0
    assert GraphFabric(graph).direct_links is None


def test_a_slow_link_leaves_rings_as_they_are():
    """As on a regular cluster: libraries look for rings once, and data goes round a dead link over a neighbour."""
    healthy = GraphFabric(make_graph(*MESH_LINKS))
    fractions = np.ones(len(healthy.links.kind))
    fractions[healthy.find_link("g0.0", "g0.1")] = 0.5
    slow = healthy.with_degraded_links(fractions)
    restored = pickle.loads(pickle.dumps(slow.with_degraded_links(np.ones(len(fractions)))))
    assert healthy.direct_links == slow.direct_links == restored.direct_links == DirectLinks.fully_connected(4)
    assert restored == slow.with_degraded_links(np.ones(len(fractions)))
    assert slow != GraphFabric(slow.to_graph())
