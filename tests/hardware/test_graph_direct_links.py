"""GPUs of a graph that links of their own join have as many of them as the regular machine whose graph it is."""

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


def fabric(*links, domains=2, places=4, switch=None):
    """links: place, place and bandwidth, the same in each domain; switch: a GPU with an NVLink to a switch."""
    graph = nx.DiGraph()
    graph.add_node("s", kind="switch")
    for domain in range(domains):
        for place in range(places):
            gpu = f"g{domain}.{place}"
            graph.add_node(gpu, kind="gpu", node=domain)
            for ends in permutations((gpu, "s")):
                graph.add_edge(*ends, bandwidth=1.0, **NIC)
        for here, there, bandwidth in links:
            for ends in permutations((here, there)):
                graph.add_edge(*(f"g{domain}.{place}" for place in ends), bandwidth=bandwidth, **NVLINK)
    if switch is not None:
        graph.add_node("nv", kind="nvswitch")
        for ends in permutations((switch, "nv")):
            graph.add_edge(*ends, bandwidth=9.0, **NVLINK)
    return graph


RING = [(0, 1, 2.0), (1, 2, 2.0), (2, 3, 2.0), (3, 0, 2.0)]
FULL = [(*pair, 3.0) for pair in combinations(range(4), 2)]


@pytest.mark.parametrize("name", ["mi300x", "dgx-v100"])
def test_the_graph_of_a_regular_machine_has_its_links_and_seats(name):
    machine = load_cluster(name, 16).machine
    graph = GraphFabric(machine.to_graph())
    assert graph.direct_links == machine.pairs
    gpus = np.arange(16)
    assert (graph.domain_slots(gpus) == machine.seats(gpus)).all()
    assert (graph.gpus_at_slots(graph.domain_slots(gpus)) == gpus).all()


@pytest.mark.parametrize("name", ["dgx-h100", "pcie-node"])
def test_where_switches_join_gpus_or_nothing_does_there_are_no_pairs(name):
    assert GraphFabric(load_cluster(name).machine.to_graph()).direct_links is None


def test_links_of_a_pair_are_counted_by_its_bandwidth():
    wide = [(here, there, 2.0 * many) for (here, there, _), many in zip(RING, (1, 2, 1, 2), strict=True)]
    assert GraphFabric(fabric(*FULL)).direct_links == DirectLinks.fully_connected(4)
    listed = [(0, 1), (1, 2), (1, 2), (2, 3), (3, 0), (3, 0)]
    assert GraphFabric(fabric(*wide)).direct_links == DirectLinks.from_pairs(4, listed)


@pytest.mark.parametrize(
    "graph",
    [
        fabric(*FULL, switch="g1.2"),
        fabric(*FULL[:-1]),  # GPUs with two and three links
        fabric(*RING[:-1], (3, 0, 3.0)),  # one and a half links
        fabric(*[(place, (place + 1) % 6, 1.0) for place in range(6)], places=6),  # opposite GPUs are two away
    ],
    ids=["a switch", "uneven", "no multiple", "far apart"],
)
def test_what_is_no_set_of_links_of_pairs_is_none(graph):
    assert GraphFabric(graph).direct_links is None


def test_domains_that_differ_have_none():
    graph = fabric(*FULL)
    graph.edges["g1.0", "g1.1"]["bandwidth"] = graph.edges["g1.1", "g1.0"]["bandwidth"] = 6.0
    assert GraphFabric(graph).direct_links is None


def test_a_slow_link_leaves_rings_as_they_are():
    """As on a regular cluster: libraries look for rings once, and data goes round a dead link over a neighbour."""
    whole = GraphFabric(fabric(*FULL))
    left = np.ones(len(whole.links.kind))
    left[whole.find_link("g0.0", "g0.1")] = 0.5
    slow = whole.with_degraded_links(left)
    again = pickle.loads(pickle.dumps(slow.with_degraded_links(np.ones(len(left)))))
    assert whole.direct_links == slow.direct_links == again.pairs == DirectLinks.fully_connected(4)
    assert again == slow.with_degraded_links(np.ones(len(left)))
    assert slow != GraphFabric(slow.to_graph())
