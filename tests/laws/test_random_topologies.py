"""Collectives on random graphs of nodes and switches: bounds that hold whatever the topology and the algorithm.

However data travels, what one part of a group must learn from the rest crosses every cut between them: it takes at
least its bytes over the capacity of the smallest cut, which is the largest flow (max-flow min-cut theorem), and at
least the latency of the nearest way from the member that is the farthest. In-network reduction and multicast change
neither, since bytes are counted as partial sums and copies are counted once.
"""

from collections import Counter
from collections.abc import Iterator

import networkx as nx
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.arrays import FloatArray
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.program.task import CollectiveType
from tests.conftest import examples

NCCL = load_library("nccl")
ROUNDING = 1 + 1e-9
KINDS = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
    CollectiveType.BROADCAST,
)
PAYLOADS = st.floats(1.0, 10.0).map(lambda power: 10.0**power)
BANDWIDTHS = st.floats(1e9, 400e9)
LATENCIES = st.floats(1e-7, 2e-5)
Graph = nx.DiGraph


@st.composite
def topologies(draw: st.DrawFn) -> Graph:
    """Up to four nodes of up to three GPUs, with or without NVLink, on up to four switches joined at random."""
    graph: Graph = nx.DiGraph()
    switches = [f"s{index}" for index in range(draw(st.integers(1, 4)))]
    for switch in switches:
        graph.add_node(switch, kind="switch")
    for index, switch in enumerate(switches[1:], start=1):
        _join(draw, graph, switch, switches[draw(st.integers(0, index - 1))], "leaf")
    for _ in range(draw(st.integers(0, 2))):
        source, target = draw(st.sampled_from(switches)), draw(st.sampled_from(switches))
        if source != target:
            _join(draw, graph, source, target, "leaf")
    has_nvlink = draw(st.booleans())
    for node in range(draw(st.integers(1, 4))):
        _add_node(draw, graph, node, switches, has_nvlink=has_nvlink)
    return graph


def _add_node(draw: st.DrawFn, graph: Graph, node: int, switches: list[str], *, has_nvlink: bool) -> None:
    gpus = [f"g{node}.{index}" for index in range(draw(st.integers(1 + (node == 0), 3)))]
    for gpu in gpus:
        graph.add_node(gpu, kind="gpu", node=node)
        _join(draw, graph, gpu, draw(st.sampled_from(switches)), "nic")
    if has_nvlink:
        for index, gpu in enumerate(gpus):
            for other in gpus[:index]:
                _join(draw, graph, gpu, other, "nvlink")


def _join(draw: st.DrawFn, graph: Graph, source: str, target: str, kind: str) -> None:
    """Link two vertices in both directions, each with its own bandwidth and latency."""
    for ends in ((source, target), (target, source)):
        link = {"bandwidth": draw(BANDWIDTHS), "latency": draw(LATENCIES)}
        graph.add_edge(*ends, kind=kind, technology="nvlink4" if kind == "nvlink" else "infiniband", **link)


@st.composite
def collectives(draw: st.DrawFn) -> tuple[Graph, list[str], CollectiveType, float]:
    """A topology, members of a group in the order of their ranks, a collective and its payload."""
    graph = draw(topologies())
    gpus = gpu_names(graph)
    members = draw(st.sets(st.sampled_from(gpus), min_size=2))
    return graph, [gpu for gpu in gpus if gpu in members], draw(st.sampled_from(KINDS)), draw(PAYLOADS)


def gpu_names(graph: Graph) -> list[str]:
    """GPUs in the order of their ids: that of the graph, which mentions node by node."""
    return [vertex for vertex, kind in graph.nodes(data="kind") if kind == "gpu"]


def collective_seconds(graph: Graph, members: list[str], kind: CollectiveType, payload: float) -> float:
    group = np.array([[gpu_names(graph).index(member) for member in members]])
    (seconds,) = select_variants(Tuner(GraphFabric(graph), NCCL).evaluate_variants(kind, group), payload).seconds
    return float(seconds)


def crossing_bytes(kind: CollectiveType, payload: float, sources: int, targets: int, *, has_root: bool) -> float:
    """Bytes that must go from `sources` members to the `targets` others, the root of a broadcast among the former."""
    size = sources + targets
    return {
        CollectiveType.ALL_REDUCE: payload,  # the sum over the sources
        CollectiveType.ALL_GATHER: payload * sources / size,
        CollectiveType.REDUCE_SCATTER: payload * targets / size,
        CollectiveType.ALL_TO_ALL: payload * sources * targets / size,
        CollectiveType.BROADCAST: payload * has_root,
    }[kind]


def max_flow(graph: Graph, sources: list[str], targets: list[str]) -> float:
    """Bytes/s from all sources to all targets together."""
    capacities = nx.DiGraph()
    capacities.add_weighted_edges_from(graph.edges(data="bandwidth"), weight="capacity")
    capacities.add_edges_from(("from", source) for source in sources)  # no capacity: infinite
    capacities.add_edges_from((target, "to") for target in targets)
    return float(nx.maximum_flow_value(capacities, "from", "to"))


def halves(members: list[str], data: st.DataObject) -> Iterator[tuple[list[str], list[str]]]:
    """Each member against the others, the first ones against the rest, and a random part, in both directions."""
    parts = [{member} for member in members] + [set(members[: len(members) // 2])]
    parts.append(data.draw(st.sets(st.sampled_from(members), min_size=1, max_size=len(members) - 1)))
    for part in parts:
        inside = [member for member in members if member in part]
        outside = [member for member in members if member not in part]
        yield from ((inside, outside), (outside, inside))


def spread(graph: Graph, members: list[str]) -> float:
    """What the links of a pair carry over what is modelled: 1, but where nodes hold unequal parts of a group.

    A ring through m of them leaves out one pair of neighbours, and what it moves is modelled as spread evenly over all
    m pairs (`collectives.ring`); where there are as many rings as members, it is.
    """
    sizes = Counter(graph.nodes[member]["node"] for member in members).values()
    return max(sizes) / (max(sizes) - 1) if len(set(sizes)) > 1 else 1.0


@given(collectives(), st.data())
@examples(150)
def test_no_collective_is_faster_than_the_smallest_cut(
    case: tuple[Graph, list[str], CollectiveType, float], data: st.DataObject
) -> None:
    graph, members, kind, payload = case
    seconds, closest = collective_seconds(graph, members, kind, payload), 0.0
    for sources, targets in halves(members, data):
        has_root = members[0] in sources
        must_cross = crossing_bytes(kind, payload, len(sources), len(targets), has_root=has_root)
        bound = must_cross / max_flow(graph, sources, targets)
        closest = max(closest, bound / seconds)
        assert seconds * ROUNDING * spread(graph, members) >= bound
    event(f"share of the time that the bound explains: {closest:.1f}")


@given(collectives())
@examples(100)
def test_no_collective_is_faster_than_the_way_between_its_farthest_members(
    case: tuple[Graph, list[str], CollectiveType, float],
) -> None:
    graph, members, kind, payload = case
    sources = members[:1] if kind is CollectiveType.BROADCAST else members
    reach = (nx.single_source_dijkstra_path_length(graph, source, weight="latency") for source in sources)
    farthest = max(lengths[target] for lengths in reach for target in members)
    assert collective_seconds(graph, members, kind, payload) * ROUNDING >= farthest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", [2, 3])
def test_a_node_whose_gpus_only_the_network_joins_is_several_nodes(kind: CollectiveType, gpus: int) -> None:
    """Its steps are over the network: their latency used to be that of PCIe, whatever the switch takes."""
    seconds = []
    for nodes in ([0] * gpus, range(gpus)):
        graph: Graph = nx.DiGraph()
        graph.add_node("switch", kind="switch")
        for gpu, node in enumerate(nodes):
            graph.add_node(f"gpu{gpu}", kind="gpu", node=node)
            link = {"kind": "nic", "technology": "infiniband", "bandwidth": 50e9, "latency": 20e-6}
            graph.add_edge(f"gpu{gpu}", "switch", **link)
            graph.add_edge("switch", f"gpu{gpu}", **link)
        seconds.append(collective_seconds(graph, gpu_names(graph), kind, 1e3))
    together, apart = seconds
    assert min(seconds) >= 2 * 20e-6
    if kind in (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER, CollectiveType.BROADCAST):
        # of the others an all-reduce has trees over nodes, and all-to-all messages between nodes are posted one by one
        assert together == pytest.approx(apart, rel=1e-9)


def scaled(graph: Graph, factor: float) -> Graph:
    """The graph with all links this many times as fast, in bandwidth and latency."""
    faster = graph.copy()
    for _, _, link in faster.edges(data=True):
        link.update(bandwidth=link["bandwidth"] * factor, latency=link["latency"] / factor)
    return faster


@given(collectives(), st.sampled_from([2.0, 16.0]))
@examples(100)
def test_links_k_times_as_fast_give_at_most_k_times_the_speed(
    case: tuple[Graph, list[str], CollectiveType, float], factor: float
) -> None:
    """And never less: what remains are launch and the library's own steps.

    But a broadcast's steps take less than the latency of a link that they are said to include (0.5 us of the LL
    protocol), so that it may gain a little more.
    """
    graph, *collective = case
    factor_limit = factor * (1.05 if collective[1] is CollectiveType.BROADCAST else 1.0)
    before, after = (collective_seconds(network, *collective) for network in (graph, scaled(graph, factor)))
    assert before / factor_limit <= after * ROUNDING
    assert after <= before * ROUNDING


@given(collectives(), st.randoms(use_true_random=False))
@examples(100)
def test_names_mean_nothing(case: tuple[Graph, list[str], CollectiveType, float], source: object) -> None:
    """With names permuted, GPUs numbered as before; links differ in latency, so that no name decides on a route."""
    graph, members, *collective = case
    names = list(graph)
    shuffled = [*names]
    source.shuffle(shuffled)  # type: ignore[attr-defined]
    new_name = dict(zip(names, shuffled, strict=True))
    renamed = nx.relabel_nodes(graph, new_name)
    assert collective_seconds(renamed, [new_name[member] for member in members], *collective) == pytest.approx(
        collective_seconds(graph, members, *collective), rel=1e-9
    )


def route_latencies(graph: Graph) -> FloatArray:
    """Latency of the route from every GPU to every other."""
    gpus = np.arange(len(gpu_names(graph)))
    sources, targets = (index.ravel() for index in np.meshgrid(gpus, gpus, indexing="ij"))
    apart = sources != targets
    return GraphFabric(graph).find_paths(sources[apart], targets[apart]).latency


@given(topologies())
@examples(100)
def test_no_route_is_shorter_than_the_nearest_way(graph: Graph) -> None:
    gpus = gpu_names(graph)
    ways = dict(nx.all_pairs_dijkstra_path_length(graph, weight="latency"))
    nearest = [ways[source][target] for source in gpus for target in gpus if source != target]
    assert (route_latencies(graph) * ROUNDING >= np.array(nearest)).all()
