"""Slow and dead links: the right links change, no route uses a dead one, and routes connect their ends."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.connectivity import islands
from clustersim.hardware.ecmp import Hashed
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
    graph = fabric.changed(without(fabric, dead)).graph()
    apart = islands(fabric.ends, without(fabric, dead) > 0, np.arange(fabric.gpus))
    assert (apart is None) == connected(graph, gpu_names(fabric))
    if apart is not None:
        first, second = apart
        assert len(first) and len(second) and not set(first) & set(second)
        assert not any(nx.has_path(graph, f"gpu{a}", f"gpu{b}") for a in first for b in second)


@given(dead_links(EITHER))
@examples(150)
def test_routes_are_chains_of_living_links_from_source_to_target(case):
    fabric, dead = case
    names = {(fabric.link(number).source, fabric.link(number).target) for number in dead}
    if islands(fabric.ends, without(fabric, dead) > 0, np.arange(fabric.gpus)) is not None:
        return
    changed = fabric.changed(without(fabric, dead))
    sources, targets = all_pairs(fabric)
    paths = changed.paths(sources, targets)
    for source, target, numbers, latency in zip(sources, targets, paths.links, paths.latency, strict=True):
        chain = [changed.link(int(number)) for number in numbers if number >= 0]
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
    if islands(fabric.ends, left > 0, np.arange(fabric.gpus)) is not None:
        return
    changed = fabric.changed(left)
    searched = GraphFabric(changed.graph())
    sources, targets = all_pairs(fabric)
    ours, theirs = changed.paths(sources, targets), searched.paths(sources, targets)
    assert ((ours.links >= 0).sum(axis=1) == (theirs.links >= 0).sum(axis=1)).all()
    assert ours.latency == pytest.approx(theirs.latency)
    alone = np.arange(fabric.gpus)
    assert (changed.domains(alone) == searched.domains(alone)).all()
    assert (changed.nodes(alone) == fabric.nodes(alone)).all()


@given(dead_links(HEALTHY))
@examples(50)
def test_a_route_depends_on_its_own_ends_alone(case):
    """Whoever else is asked for, and in which order."""
    fabric, dead = case
    left = without(fabric, dead)
    if islands(fabric.ends, left > 0, np.arange(fabric.gpus)) is not None:
        return
    together, alone = fabric.changed(left), fabric.changed(left)
    sources, targets = all_pairs(fabric)
    paths = together.paths(sources, targets)
    moved = np.flatnonzero(np.isin(fabric.paths(sources, targets).links, dead).any(axis=1))
    for row in moved[::-1][:60]:
        numbers = alone.paths(sources[[row]], targets[[row]]).links[0]
        assert numbers[numbers >= 0].tolist() == paths.links[row][paths.links[row] >= 0].tolist()


@pytest.mark.parametrize("fabrics", [HEALTHY, GRAPHS], ids=["regular", "graph"])
@pytest.mark.parametrize("name", HEALTHY)
def test_only_the_links_that_are_named_have_less_bandwidth(fabrics, name):
    fabric = fabrics[name]
    healthy = fabric.links
    changed = fabric.changed(np.where(np.arange(len(healthy.kind)) % 3 == 1, 0.25, 1.0))
    expected = np.where(np.arange(len(healthy.kind)) % 3 == 1, healthy.bandwidth / 4, healthy.bandwidth)
    assert (changed.links.bandwidth == expected).all()
    assert (changed.links.kind == healthy.kind).all()
    assert (changed.links.latency == healthy.latency).all()
    graph = changed.graph()
    for number, bandwidth in enumerate(expected):
        link = changed.link(number)
        assert link.bandwidth == bandwidth == graph.edges[link.source, link.target]["bandwidth"]
    sources, targets = all_pairs(fabric)
    assert (changed.paths(sources, targets).links == fabric.paths(sources, targets).links).all()


@pytest.mark.parametrize("fabrics", [HEALTHY, GRAPHS], ids=["regular", "graph"])
@pytest.mark.parametrize("name", HEALTHY)
def test_links_are_found_by_the_names_of_their_ends(fabrics, name):
    fabric = fabrics[name]
    for number in range(len(fabric.links.kind)):
        link = fabric.link(number)
        assert fabric.find(link.source, link.target) == number


def test_vertices_are_numbered_once_and_gpus_first(machine):
    names = {}
    for number in range(len(machine.links.kind)):
        link = machine.link(number)
        ends = machine.ends.source[number], machine.ends.target[number]
        for vertex, name in zip(ends, (link.source, link.target), strict=True):
            assert names.setdefault(int(vertex), name) == name
    assert len(set(names.values())) == len(names)
    assert all(names.get(gpu, f"gpu{gpu}") == f"gpu{gpu}" for gpu in range(machine.gpus))
    assert max(names) < machine.ends.vertices


def test_nics_are_those_that_routes_beyond_the_node_load(build):
    for name in ("rails, three pods, last partial", "rails, shared nics", "racks of pcie nodes"):
        fabric = build[name]()
        for gpu in range(4):
            beyond = np.array([gpu]), np.array([gpu + 8])
            loaded = np.concatenate([fabric.paths(*beyond).links[0], fabric.paths(*beyond[::-1]).links[0]])
            own = [
                n for n in loaded if n >= 0 and fabric.link(n).kind is NIC and f"nic{gpu // 4}." in str(fabric.link(n))
            ]
            assert sorted(fabric.nics(np.array([gpu]))) == sorted(own)


def test_nics_of_a_graph_are_those_of_the_regular_machine(build):
    for name in ("rails, three pods, last partial", "rails, shared nics"):
        fabric = build[name]()
        graph = GraphFabric(fabric.graph())
        for gpus in ([0], [1, 2], [5, 6, 7]):
            ours, theirs = fabric.nics(np.array(gpus)), graph.nics(np.array(gpus))
            assert {str(fabric.link(n)) for n in ours} == {str(graph.link(n)) for n in theirs}


def test_a_machine_without_network_has_no_nics(build):
    fabric = build["one nvlink node"]()
    assert not len(fabric.nics(np.array([0])))
    assert not len(GraphFabric(fabric.graph()).nics(np.array([0])))


def hops(fabric, source, target):
    numbers = fabric.paths(np.array([source]), np.array([target])).links[0]
    return [(fabric.link(n).kind, fabric.link(n).target) for n in numbers if n >= 0]


def kill(fabric, *ends):
    numbers = [fabric.find(*way) for way in (ends, ends[::-1])]
    return fabric.changed(without(fabric, numbers))


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
    assert fabric.domains(np.arange(12)).tolist() == [0, 0, 0, 0, 1, 2, 1, 1, 3, 3, 3, 3]


def test_traffic_of_a_dead_hashed_link_is_spread_over_the_others_and_the_rest_stays():
    """A leaf of 8 NICs has 8 uplinks; one dies, so an eighth of its pairs moves, to each of the other seven."""
    healthy = ClosFabric(NVLINK_NODE, rails(8, 4, seed=3), 4 * 48)
    leaf, ways = healthy.wiring.leaf.up, healthy.counts.spines
    assert ways == 8
    changed = healthy.changed(without(healthy, [healthy.find("leaf0.0", "spine0.2")]))
    sources, targets = (array.ravel() for array in np.meshgrid(np.arange(0, 32, 4), np.arange(32, 192)))
    before, after = healthy.paths(sources, targets).links, changed.paths(sources, targets).links
    moved = (before == leaf.first + 2).any(axis=1)
    assert 0.08 < moved.mean() < 0.17
    assert (after[~moved] == before[~moved]).all()
    taken = np.array([(after[moved] == leaf.first + way).sum() for way in range(ways)])
    assert taken[2] == 0
    assert taken.sum() == moved.sum()
    assert np.delete(taken, 2).min() > moved.sum() / 7 / 2


def test_hashes_differ_between_attempts_and_repeat_themselves():
    pairs = np.arange(100), np.arange(100) + 7
    seeds = [ecmp.choose(*pairs).tolist() for ecmp in Hashed(1).others()]
    assert len({tuple(seed) for seed in seeds}) == len(seeds) == len(list(Hashed(1).others()))
    assert seeds == [ecmp.choose(*pairs).tolist() for ecmp in Hashed(1).others()]


def test_changes_of_a_changed_machine_add_up(build):
    fabric = build["racks"]()
    once = kill(kill(fabric, "gpu0", "nvswitch0"), "gpu1", "nvswitch0")
    numbers = [
        fabric.find(*ends) for gpu in (0, 1) for ends in ((f"gpu{gpu}", "nvswitch0"), ("nvswitch0", f"gpu{gpu}"))
    ]
    assert once == fabric.changed(without(fabric, numbers))
    assert hash(once) == hash(fabric.changed(without(fabric, numbers)))
    assert once != fabric
