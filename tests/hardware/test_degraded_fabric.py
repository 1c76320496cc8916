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
from tests.hardware.conftest import NVLINK_NODE, rails
from tests.hardware.degraded import GRAPHS, HEALTHY, all_pairs, connected, dead_links, gpu_names, without

NVLINK, PCIE, HOST, NIC, LEAF, SPINE = LINK_KINDS
EITHER = {**{f"regular: {name}": fabric for name, fabric in HEALTHY.items()}, **GRAPHS}


@given(dead_links(EITHER))
@examples(150)
def test_gpus_are_cut_off_exactly_where_networkx_finds_no_way(case):
    fabric, dead = case
    graph = fabric.with_degraded_links(without(fabric, dead)).to_graph()
    apart = find_partition(fabric.link_endpoints, without(fabric, dead) > 0, np.arange(fabric.gpu_count))
    assert (apart is None) == connected(graph, gpu_names(fabric))
    if apart is not None:
        first, second = apart
        assert len(first) and len(second) and not set(first) & set(second)
        assert not any(nx.has_path(graph, f"gpu{a}", f"gpu{b}") for a in first for b in second)


@given(dead_links(EITHER))
@examples(150)
def test_routes_are_chains_of_living_links_from_source_to_target(case):
    fabric, dead = case
    names = {(fabric.link_info(number).source, fabric.link_info(number).target) for number in dead}
    if find_partition(fabric.link_endpoints, without(fabric, dead) > 0, np.arange(fabric.gpu_count)) is not None:
        return
    changed = fabric.with_degraded_links(without(fabric, dead))
    sources, targets = all_pairs(fabric)
    paths = changed.find_paths(sources, targets)
    for source, target, numbers, latency in zip(sources, targets, paths.links, paths.latency, strict=True):
        chain = [changed.link_info(int(number)) for number in numbers if number >= 0]
        places = [f"gpu{source}", *(link.target for link in chain)]
        assert [link.source for link in chain] == places[:-1]
        assert places[-1] == f"gpu{target}"
        assert len(set(places)) == len(places)
        assert not names.intersection((link.source, link.target) for link in chain)
        assert latency == pytest.approx(sum(link.latency for link in chain))


@given(dead_links(HEALTHY))
@examples(100)
def test_one_dead_cable_is_routed_around_as_by_search(case):
    """The same machine as a graph without these links, whose routes are searched: equal kinds, hops and latency."""
    fabric, dead = case
    left = without(fabric, dead[:1])
    if find_partition(fabric.link_endpoints, left > 0, np.arange(fabric.gpu_count)) is not None:
        return
    changed = fabric.with_degraded_links(left)
    searched = GraphFabric(changed.to_graph())
    sources, targets = all_pairs(fabric)
    ours, theirs = changed.find_paths(sources, targets), searched.find_paths(sources, targets)
    assert ((ours.links >= 0).sum(axis=1) == (theirs.links >= 0).sum(axis=1)).all()
    assert ours.latency == pytest.approx(theirs.latency)
    alone = np.arange(fabric.gpu_count)
    assert (changed.domain_ids(alone) == searched.domain_ids(alone)).all()
    assert (changed.node_ids(alone) == fabric.node_ids(alone)).all()


@given(dead_links(HEALTHY))
@examples(50)
def test_a_route_depends_on_its_own_ends_alone(case):
    """Whoever else is asked for, and in which order."""
    fabric, dead = case
    left = without(fabric, dead)
    if find_partition(fabric.link_endpoints, left > 0, np.arange(fabric.gpu_count)) is not None:
        return
    together, alone = fabric.with_degraded_links(left), fabric.with_degraded_links(left)
    sources, targets = all_pairs(fabric)
    paths = together.find_paths(sources, targets)
    moved = np.flatnonzero(np.isin(fabric.find_paths(sources, targets).links, dead).any(axis=1))
    for row in moved[::-1][:60]:
        numbers = alone.find_paths(sources[[row]], targets[[row]]).links[0]
        assert numbers[numbers >= 0].tolist() == paths.links[row][paths.links[row] >= 0].tolist()


@pytest.mark.parametrize("fabrics", [HEALTHY, GRAPHS], ids=["regular", "graph"])
@pytest.mark.parametrize("name", HEALTHY)
def test_only_the_links_that_are_named_have_less_bandwidth(fabrics, name):
    fabric = fabrics[name]
    healthy = fabric.links
    changed = fabric.with_degraded_links(np.where(np.arange(len(healthy.kind)) % 3 == 1, 0.25, 1.0))
    expected = np.where(np.arange(len(healthy.kind)) % 3 == 1, healthy.bandwidth / 4, healthy.bandwidth)
    assert (changed.links.bandwidth == expected).all()
    assert (changed.links.kind == healthy.kind).all()
    assert (changed.links.latency == healthy.latency).all()
    graph = changed.to_graph()
    for number, bandwidth in enumerate(expected):
        link = changed.link_info(number)
        assert link.bandwidth == bandwidth == graph.edges[link.source, link.target]["bandwidth"]
    sources, targets = all_pairs(fabric)
    assert (changed.find_paths(sources, targets).links == fabric.find_paths(sources, targets).links).all()


@pytest.mark.parametrize("fabrics", [HEALTHY, GRAPHS], ids=["regular", "graph"])
@pytest.mark.parametrize("name", HEALTHY)
def test_links_are_found_by_the_names_of_their_ends(fabrics, name):
    fabric = fabrics[name]
    for number in range(len(fabric.links.kind)):
        link = fabric.link_info(number)
        assert fabric.find_link(link.source, link.target) == number


def test_vertices_are_numbered_once_and_gpus_first(machine):
    names = {}
    for number in range(len(machine.links.kind)):
        link = machine.link_info(number)
        ends = machine.link_endpoints.source[number], machine.link_endpoints.target[number]
        for vertex, name in zip(ends, (link.source, link.target), strict=True):
            assert names.setdefault(int(vertex), name) == name
    assert len(set(names.values())) == len(names)
    assert all(names.get(gpu, f"gpu{gpu}") == f"gpu{gpu}" for gpu in range(machine.gpu_count))
    assert max(names) < machine.link_endpoints.vertices


def test_nics_are_those_that_routes_beyond_the_node_load(build):
    for name in ("rails, three pods, last partial", "rails, shared nics", "racks of pcie nodes"):
        fabric = build[name]()
        for gpu in range(4):
            beyond = np.array([gpu]), np.array([gpu + 8])
            loaded = np.concatenate([fabric.find_paths(*beyond).links[0], fabric.find_paths(*beyond[::-1]).links[0]])
            own = [
                n
                for n in loaded
                if n >= 0 and fabric.link_info(n).kind is NIC and f"nic{gpu // 4}." in str(fabric.link_info(n))
            ]
            assert sorted(fabric.nic_links(np.array([gpu]))) == sorted(own)


def test_nics_of_a_graph_are_those_of_the_regular_machine(build):
    for name in ("rails, three pods, last partial", "rails, shared nics"):
        fabric = build[name]()
        graph = GraphFabric(fabric.to_graph())
        for gpus in ([0], [1, 2], [5, 6, 7]):
            ours, theirs = fabric.nic_links(np.array(gpus)), graph.nic_links(np.array(gpus))
            assert {str(fabric.link_info(n)) for n in ours} == {str(graph.link_info(n)) for n in theirs}


def test_a_machine_without_network_has_no_nics(build):
    fabric = build["one nvlink node"]()
    assert not len(fabric.nic_links(np.array([0])))
    assert not len(GraphFabric(fabric.to_graph()).nic_links(np.array([0])))


def hops(fabric, source, target):
    numbers = fabric.find_paths(np.array([source]), np.array([target])).links[0]
    return [(fabric.link_info(n).kind, fabric.link_info(n).target) for n in numbers if n >= 0]


def kill(fabric, *ends):
    numbers = [fabric.find_link(*way) for way in (ends, ends[::-1])]
    return fabric.with_degraded_links(without(fabric, numbers))


def test_a_gpu_without_its_nic_sends_by_a_neighbour_on_the_targets_rail(build):
    """GPU 1 reaches GPU 6, on rail 2 of the next node, by the NIC of GPU 2, without climbing to a spine."""
    fabric = kill(build["rails, three pods, last partial"](), "nic0.1", "leaf0.1")
    kinds = [kind for kind, _ in hops(fabric, 1, 6)]
    assert kinds == [NVLINK, NVLINK, PCIE, NIC, NIC, PCIE]
    assert hops(fabric, 1, 6)[1] == (NVLINK, "gpu2")
    assert hops(fabric, 0, 4) == hops(build["rails, three pods, last partial"](), 0, 4)


def test_a_gpu_without_nvlink_uses_its_nic_and_is_a_domain_of_its_own(build):
    fabric = kill(build["rails, three pods, last partial"](), "gpu5", "nvswitch1")
    assert [kind for kind, _ in hops(fabric, 5, 6)] == [PCIE, NIC, LEAF, LEAF, NIC, PCIE]
    assert fabric.domain_ids(np.arange(12)).tolist() == [0, 0, 0, 0, 1, 2, 1, 1, 3, 3, 3, 3]


def test_traffic_of_a_dead_hashed_link_is_spread_over_the_others_and_the_rest_stays():
    """A leaf of 8 NICs has 8 uplinks; one dies, so an eighth of its pairs moves, to each of the other seven."""
    healthy = ClosFabric(NVLINK_NODE, rails(8, 4, seed=3), 4 * 48)
    leaf, ways = healthy.wiring.leaf.up, healthy.counts.spines
    assert ways == 8
    changed = healthy.with_degraded_links(without(healthy, [healthy.find_link("leaf0.0", "spine0.2")]))
    sources, targets = (array.ravel() for array in np.meshgrid(np.arange(0, 32, 4), np.arange(32, 192)))
    before, after = healthy.find_paths(sources, targets).links, changed.find_paths(sources, targets).links
    moved = (before == leaf.first_id + 2).any(axis=1)
    assert 0.08 < moved.mean() < 0.17
    assert (after[~moved] == before[~moved]).all()
    taken = np.array([(after[moved] == leaf.first_id + way).sum() for way in range(ways)])
    assert taken[2] == 0
    assert taken.sum() == moved.sum()
    assert np.delete(taken, 2).min() > moved.sum() / 7 / 2


def test_hashes_differ_between_attempts_and_repeat_themselves():
    pairs = np.arange(100), np.arange(100) + 7
    seeds = [ecmp.choose_paths(*pairs).tolist() for ecmp in HashedEcmp(1).rehashed()]
    assert len({tuple(seed) for seed in seeds}) == len(seeds) == len(list(HashedEcmp(1).rehashed()))
    assert seeds == [ecmp.choose_paths(*pairs).tolist() for ecmp in HashedEcmp(1).rehashed()]


def test_changes_of_a_changed_machine_add_up(build):
    fabric = build["racks"]()
    once = kill(kill(fabric, "gpu0", "nvswitch0"), "gpu1", "nvswitch0")
    numbers = [
        fabric.find_link(*ends) for gpu in (0, 1) for ends in ((f"gpu{gpu}", "nvswitch0"), ("nvswitch0", f"gpu{gpu}"))
    ]
    assert once == fabric.with_degraded_links(without(fabric, numbers))
    assert hash(once) == hash(fabric.with_degraded_links(without(fabric, numbers)))
    assert once != fabric
