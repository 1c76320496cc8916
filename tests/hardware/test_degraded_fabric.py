"""Slow and dead links: the right links change, no route uses a dead one, and routes connect their ends."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.connectivity import find_partition
from clustersim.hardware.ecmp import HashedEcmp
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.hardware.topology import LINK_KINDS
from tests.conftest import examples
from tests.hardware.conftest import NVLINK_NODE, rail_network
from tests.hardware.degraded import (
    GRAPHS,
    HEALTHY,
    all_pairs,
    dead_links,
    gpu_names,
    is_strongly_connected,
    remaining_fractions,
)

NVLINK, PCIE, HOST, NIC, LEAF, SPINE, _ = LINK_KINDS
ALL_FABRICS = {**{f"regular: {name}": fabric for name, fabric in HEALTHY.items()}, **GRAPHS}


@given(dead_links(ALL_FABRICS))
@examples(150)
def test_disconnection_agrees_with_networkx(case):
    fabric, dead = case
    graph = fabric.with_degraded_links(remaining_fractions(fabric, dead)).to_graph()
    disconnected = find_partition(
        fabric.link_endpoints, remaining_fractions(fabric, dead) > 0, np.arange(fabric.gpu_count)
    )
    assert (disconnected is None) == is_strongly_connected(graph, gpu_names(fabric))
    if disconnected is not None:
        first_component, second_component = disconnected
        assert len(first_component) and len(second_component) and not set(first_component) & set(second_component)
        assert not any(nx.has_path(graph, f"gpu{a}", f"gpu{b}") for a in first_component for b in second_component)


@given(dead_links(ALL_FABRICS))
@examples(150)
def test_routes_are_chains_of_live_links(case):
    fabric, dead = case
    names = {(fabric.link_info(link_id).source, fabric.link_info(link_id).target) for link_id in dead}
    if (
        find_partition(fabric.link_endpoints, remaining_fractions(fabric, dead) > 0, np.arange(fabric.gpu_count))
        is not None
    ):
        return
    changed = fabric.with_degraded_links(remaining_fractions(fabric, dead))
    sources, targets = all_pairs(fabric)
    paths = changed.find_paths(sources, targets)
    for source, target, link_ids, latency in zip(sources, targets, paths.links, paths.latency, strict=True):
        chain = [changed.link_info(int(link_id)) for link_id in link_ids if link_id >= 0]
        vertices = [f"gpu{source}", *(link.target for link in chain)]
        assert [link.source for link in chain] == vertices[:-1]
        assert vertices[-1] == f"gpu{target}"
        assert len(set(vertices)) == len(vertices)
        assert not names.intersection((link.source, link.target) for link in chain)
        assert latency == pytest.approx(sum(link.latency for link in chain))


@given(dead_links(HEALTHY))
@examples(100)
def test_rerouting_around_one_dead_link_equals_shortest_paths(case):
    """The same machine as a graph without these links, whose routes are searched: equal kinds, hops and latency."""
    fabric, dead = case
    fractions = remaining_fractions(fabric, dead[:1])
    if find_partition(fabric.link_endpoints, fractions > 0, np.arange(fabric.gpu_count)) is not None:
        return
    changed = fabric.with_degraded_links(fractions)
    searched = GraphFabric(changed.to_graph())
    sources, targets = all_pairs(fabric)
    rerouted, shortest = changed.find_paths(sources, targets), searched.find_paths(sources, targets)
    assert ((rerouted.links >= 0).sum(axis=1) == (shortest.links >= 0).sum(axis=1)).all()
    assert rerouted.latency == pytest.approx(shortest.latency)
    gpus = np.arange(fabric.gpu_count)
    assert (changed.domain_ids(gpus) == searched.domain_ids(gpus)).all()
    assert (changed.node_ids(gpus) == fabric.node_ids(gpus)).all()


@given(dead_links(HEALTHY))
@examples(50)
def test_a_route_depends_only_on_its_ends(case):
    """Whoever else is asked for, and in which order."""
    fabric, dead = case
    fractions = remaining_fractions(fabric, dead)
    if find_partition(fabric.link_endpoints, fractions > 0, np.arange(fabric.gpu_count)) is not None:
        return
    batched, single = fabric.with_degraded_links(fractions), fabric.with_degraded_links(fractions)
    sources, targets = all_pairs(fabric)
    paths = batched.find_paths(sources, targets)
    rerouted = np.flatnonzero(np.isin(fabric.find_paths(sources, targets).links, dead).any(axis=1))
    for pair in rerouted[::-1][:60]:
        link_ids = single.find_paths(sources[[pair]], targets[[pair]]).links[0]
        assert link_ids[link_ids >= 0].tolist() == paths.links[pair][paths.links[pair] >= 0].tolist()


@pytest.mark.parametrize("fabrics", [HEALTHY, GRAPHS], ids=["regular", "graph"])
@pytest.mark.parametrize("name", HEALTHY)
def test_only_changed_links_have_less_bandwidth(fabrics, name):
    fabric = fabrics[name]
    healthy = fabric.links
    changed = fabric.with_degraded_links(np.where(np.arange(len(healthy.kind)) % 3 == 1, 0.25, 1.0))
    expected = np.where(np.arange(len(healthy.kind)) % 3 == 1, healthy.bandwidth / 4, healthy.bandwidth)
    assert (changed.links.bandwidth == expected).all()
    assert (changed.links.kind == healthy.kind).all()
    assert (changed.links.latency == healthy.latency).all()
    graph = changed.to_graph()
    for link_id, bandwidth in enumerate(expected):
        link = changed.link_info(link_id)
        assert link.bandwidth == bandwidth == graph.edges[link.source, link.target]["bandwidth"]
    sources, targets = all_pairs(fabric)
    assert (changed.find_paths(sources, targets).links == fabric.find_paths(sources, targets).links).all()


@pytest.mark.parametrize("fabrics", [HEALTHY, GRAPHS], ids=["regular", "graph"])
@pytest.mark.parametrize("name", HEALTHY)
def test_links_are_found_by_the_names_of_their_ends(fabrics, name):
    fabric = fabrics[name]
    for link_id in range(len(fabric.links.kind)):
        link = fabric.link_info(link_id)
        assert fabric.find_link(link.source, link.target) == link_id


def test_vertex_ids_are_unique_and_gpus_come_first(machine):
    names = {}
    for link_id in range(len(machine.links.kind)):
        link = machine.link_info(link_id)
        ends = machine.link_endpoints.source[link_id], machine.link_endpoints.target[link_id]
        for vertex, name in zip(ends, (link.source, link.target), strict=True):
            assert names.setdefault(int(vertex), name) == name
    assert len(set(names.values())) == len(names)
    assert all(names.get(gpu, f"gpu{gpu}") == f"gpu{gpu}" for gpu in range(machine.gpu_count))
    assert max(names) < machine.link_endpoints.vertex_count


def test_nics_are_the_nic_links_of_inter_node_routes(build):
    for name in ("rails, three pods, last partial", "rails, shared nics", "racks of pcie nodes"):
        fabric = build[name]()
        for gpu in range(4):
            inter_node = np.array([gpu]), np.array([gpu + 8])
            route_links = np.concatenate(
                [fabric.find_paths(*inter_node).links[0], fabric.find_paths(*inter_node[::-1]).links[0]]
            )
            nic_links = [
                n
                for n in route_links
                if n >= 0 and fabric.link_info(n).kind is NIC and f"nic{gpu // 4}." in str(fabric.link_info(n))
            ]
            assert sorted(fabric.nic_links(np.array([gpu]))) == sorted(nic_links)


def test_nics_of_a_graph_equal_those_of_the_clos_fabric(build):
    for name in ("rails, three pods, last partial", "rails, shared nics"):
        fabric = build[name]()
        graph = GraphFabric(fabric.to_graph())
        for gpus in ([0], [1, 2], [5, 6, 7]):
            clos_nics, graph_nics = fabric.nic_links(np.array(gpus)), graph.nic_links(np.array(gpus))
            assert {str(fabric.link_info(n)) for n in clos_nics} == {str(graph.link_info(n)) for n in graph_nics}


def test_a_machine_without_network_has_no_nics(build):
    fabric = build["one nvlink node"]()
    assert not len(fabric.nic_links(np.array([0])))
    assert not len(GraphFabric(fabric.to_graph()).nic_links(np.array([0])))


def route_hops(fabric, source, target):
    link_ids = fabric.find_paths(np.array([source]), np.array([target])).links[0]
    return [(fabric.link_info(n).kind, fabric.link_info(n).target) for n in link_ids if n >= 0]


def kill_link(fabric, *ends):
    link_ids = [fabric.find_link(*direction) for direction in (ends, ends[::-1])]
    return fabric.with_degraded_links(remaining_fractions(fabric, link_ids))


def test_a_gpu_without_nic_sends_by_a_peer_on_the_target_s_rail(build):
    """GPU 1 reaches GPU 6, on rail 2 of the next node, by the NIC of GPU 2, without climbing to a spine."""
    fabric = kill_link(build["rails, three pods, last partial"](), "nic0.1", "leaf0.1")
    kinds = [kind for kind, _ in route_hops(fabric, 1, 6)]
    assert kinds == [NVLINK, NVLINK, PCIE, NIC, NIC, PCIE]
    assert route_hops(fabric, 1, 6)[1] == (NVLINK, "gpu2")
    assert route_hops(fabric, 0, 4) == route_hops(build["rails, three pods, last partial"](), 0, 4)


def test_a_gpu_without_nvlink_is_a_singleton_domain(build):
    fabric = kill_link(build["rails, three pods, last partial"](), "gpu5", "nvswitch1")
    assert [kind for kind, _ in route_hops(fabric, 5, 6)] == [PCIE, NIC, LEAF, LEAF, NIC, PCIE]
    assert fabric.domain_ids(np.arange(12)).tolist() == [0, 0, 0, 0, 1, 2, 1, 1, 3, 3, 3, 3]


def test_rerouted_hashed_traffic_is_spread_evenly():
    """A leaf of 8 NICs has 8 uplinks; one dies, so an eighth of its pairs moves, to each of the other seven."""
    healthy = ClosFabric(NVLINK_NODE, rail_network(8, 4, seed=3), 4 * 48)
    leaf, uplink_count = healthy.wiring.leaf.up, healthy.counts.spines
    assert uplink_count == 8
    changed = healthy.with_degraded_links(remaining_fractions(healthy, [healthy.find_link("leaf0.0", "spine0.2")]))
    sources, targets = (array.ravel() for array in np.meshgrid(np.arange(0, 32, 4), np.arange(32, 192)))
    healthy_links, rerouted_links = (
        healthy.find_paths(sources, targets).links,
        changed.find_paths(sources, targets).links,
    )
    moved = (healthy_links == leaf.first_id + 2).any(axis=1)
    assert 0.08 < moved.mean() < 0.17
    assert (rerouted_links[~moved] == healthy_links[~moved]).all()
    route_counts = np.array([(rerouted_links[moved] == leaf.first_id + uplink).sum() for uplink in range(uplink_count)])
    assert route_counts[2] == 0
    assert route_counts.sum() == moved.sum()
    assert np.delete(route_counts, 2).min() > moved.sum() / 7 / 2


def test_hashes_differ_between_attempts_and_repeat_themselves():
    pairs = np.arange(100), np.arange(100) + 7
    seeds = [ecmp.choose_paths(*pairs).tolist() for ecmp in HashedEcmp(1).rehashed()]
    assert len({tuple(seed) for seed in seeds}) == len(seeds) == len(list(HashedEcmp(1).rehashed()))
    assert seeds == [ecmp.choose_paths(*pairs).tolist() for ecmp in HashedEcmp(1).rehashed()]


def test_successive_degradations_compose(build):
    fabric = build["racks"]()
    degraded = kill_link(kill_link(fabric, "gpu0", "nvswitch0"), "gpu1", "nvswitch0")
    link_ids = [
        fabric.find_link(*ends) for gpu in (0, 1) for ends in ((f"gpu{gpu}", "nvswitch0"), ("nvswitch0", f"gpu{gpu}"))
    ]
    assert degraded == fabric.with_degraded_links(remaining_fractions(fabric, link_ids))
    assert hash(degraded) == hash(fabric.with_degraded_links(remaining_fractions(fabric, link_ids)))
    assert degraded != fabric
