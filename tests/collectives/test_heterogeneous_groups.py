"""Groups of a role that differ in shape choose apart and share the links that they both cross."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.flow_routes import FlowRoutes, route_phase
from clustersim.collectives.heterogeneous_groups import HeterogeneousGroups
from clustersim.collectives.library import ALGORITHMS, load_library
from clustersim.collectives.phase import group_topology
from clustersim.collectives.tuner import Selection, Tuner, select_variants
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.timing import LinkDemand
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.degradation import DeadLinkEffect, Degradations, LinkDegradation, degrade_fabric
from clustersim.hardware.topology import Fabric
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp
from tests.collectives.fake_fabric import FakeFabric
from tests.conftest import examples

NCCL = load_library("nccl")
HEALTHY = load_cluster("dgx-h100", 64).fabric
KINDS = st.sampled_from(
    [kind for kind in CollectiveType if kind is not CollectiveType.SEND_RECV and not kind.is_token_routing]
)
PAYLOADS = st.sampled_from([1e3, 1e5, 1e7, 1e9])
SIXES = np.arange(24).reshape(4, 6)  # over nodes of 8: 6 | 2 + 4 | 4 + 2 | 6


def taken(fabric: Fabric, kind: CollectiveType, members: np.ndarray, payload: float) -> Selection:
    return select_variants(Tuner(fabric, NCCL).evaluate_variants(kind, members), payload)


def names(choice: Selection) -> list[str]:
    return [choice.variants[number].name for number in choice.variant_index]


def broken(gpu: int) -> Fabric:
    """A cluster in which one GPU's NVLink port is dead."""
    change = LinkDegradation(f"gpu{gpu}", f"nvswitch{gpu // 8}", DeadLinkEffect())
    return degrade_fabric(HEALTHY, Degradations(links=(change,)))


def own(demand: LinkDemand, group: int) -> tuple[object, ...]:
    """All that one group asks of links, link by link."""
    crossings = demand.link_loads
    mine = crossings.group_index == group
    order = np.argsort(crossings.link_index[mine])
    asked = (crossings.link_index[mine][order].tolist(), crossings.seconds_per_byte[mine][order].tolist())
    return (demand.latency[group], demand.transfer[group], demand.flow[group], *asked)


@given(st.integers(0, 63), st.sampled_from([2, 4, 8, 16, 32]), KINDS, PAYLOADS)
@examples(60)
def test_a_dead_nvlink_port_changes_nothing_for_groups_without_its_gpu(gpu, size, kind, payload):
    """Algorithms, times and demands of all groups that the GPU is not in are the same, bit for bit."""
    groups = {"tp": ProcessGroups("tp", np.arange(64).reshape(-1, size))}
    exchange = CommOp("x", kind, "tp", payload)
    whole, hurt = (CollectiveCost(fabric, NCCL, groups) for fabric in (HEALTHY, broken(gpu)))
    before, after = (names(taken(fabric, kind, groups["tp"].members, payload)) for fabric in (HEALTHY, broken(gpu)))
    for group in set(range(64 // size)) - {gpu // size}:
        assert before[group] == after[group]
        assert whole.time_comm_op(exchange).seconds[group] == hurt.time_comm_op(exchange).seconds[group]
        assert own(whole.link_demand(exchange), group) == own(hurt.link_demand(exchange), group)


def test_only_the_node_of_a_dead_nvlink_port_cannot_add_in_its_switches():
    members = np.arange(64).reshape(-1, 8)
    choice = taken(broken(0), CollectiveType.ALL_REDUCE, members, 1e8)
    assert names(choice) == ["ring Simple"] + ["in_network Simple"] * 7
    assert choice.seconds[0] > 5 * choice.seconds[1]


def test_groups_that_differ_in_shape_or_place_are_arranged_apart():
    fabric = FakeFabric(24, 8)
    inside, narrow, wide = sorted(group_topology(SIXES, fabric), key=lambda each: each.group_indices[0])
    assert (inside.domain_sizes, inside.group_indices.tolist()) == ((6,), [0, 3])
    assert (narrow.domain_sizes, narrow.group_indices.tolist()) == ((2, 4), [1])
    assert (wide.domain_sizes, wide.group_indices.tolist()) == ((4, 2), [2])


@given(st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24]), KINDS, PAYLOADS)
def test_groups_that_share_no_link_take_what_each_takes_alone(size, kind, payload):
    """Neighbours share no port, be they of one node or straddle two: bit for bit as if nobody else were there."""
    fabric = FakeFabric(48, 8, nvlink=450e9, nic=50e9)
    members = np.arange(48).reshape(-1, size)
    together = taken(fabric, kind, members, payload)
    alone = [taken(fabric, kind, group[None], payload) for group in members]
    assert together.seconds.tolist() == [float(selection.seconds[0]) for selection in alone]
    assert names(together) == [names(item)[0] for item in alone]


def test_an_uneven_layout_costs_those_that_straddle_nodes_and_only_them():
    """Two NICs of a straddling group must let 5/6 of the payload through, those inside a node have their switch."""
    fabric = FakeFabric(24, 8, nvlink=450e9, nic=50e9)
    reduced = taken(fabric, CollectiveType.ALL_REDUCE, SIXES, 1e9).seconds
    assert (reduced[[1, 2]] > 2 * reduced[[0, 3]]).all()
    gathered = taken(fabric, CollectiveType.ALL_GATHER, SIXES, 1e9).seconds
    assert (gathered[[1, 2]] > 5 / 6 * 1e9 / 100e9).all()
    assert (gathered[[1, 2]] < 5 / 6 * 1e9 / 50e9).all()
    assert (gathered[[0, 3]] < 1e9 / 300e9).all()


def across_racks(spine: float) -> tuple[Fabric, np.ndarray]:
    """4 + 4 ranks of two nodes, and 5 + 3 of two others, over the same link between racks."""
    even, uneven = [*range(4), *range(16, 20)], [*range(8, 13), *range(24, 27)]
    return FakeFabric(32, 8, nvlink=450e9, nic=50e9, spine=spine, rack=16), np.array([even, uneven])


@pytest.mark.parametrize("kind", [CollectiveType.ALL_GATHER, CollectiveType.ALL_TO_ALL])
def test_sets_that_share_a_link_slow_each_other(kind):
    """A narrow link between racks carries what both send: both take the sum of what each takes alone."""
    fabric, members = across_racks(1e9)
    together = taken(fabric, kind, members, 1e10).seconds
    alone = [taken(fabric, kind, group[None], 1e10).seconds[0] for group in members]
    assert together == pytest.approx(np.full(2, sum(alone)), rel=1e-3)


def routed_by_set(kind: CollectiveType) -> tuple[HeterogeneousGroups, list[dict[str, tuple[FlowRoutes, ...]]]]:
    """The even and the uneven set beside each other, and each by itself."""
    fabric, members = across_racks(1e9)
    able = [
        {name: phases for name in ALGORITHMS if (phases := ALGORITHMS[name].phases(kind, item))}
        for item in group_topology(members, fabric)
    ]
    own = [{name: tuple(route_phase(element, fabric) for element in found[name]) for name in found} for found in able]
    return HeterogeneousGroups(able, lambda phase: route_phase(phase, fabric)), own


def test_an_algorithm_is_taken_by_all_that_can():
    siblings, own = routed_by_set(CollectiveType.ALL_REDUCE)
    for number in (0, 1):
        (tree,) = siblings.routes_of(number, "tree")
        assert tree.link_load == pytest.approx(own[0]["tree"][0].link_load + own[1]["tree"][0].link_load)


def test_those_that_cannot_load_their_links_evenly_over_its_phases():
    """The uneven group has no hierarchy: its ring's load is spread over the three phases of the even group's."""
    siblings, own = routed_by_set(CollectiveType.ALL_REDUCE)
    (even,) = [number for number, found in enumerate(own) if "hierarchical" in found]
    phases = siblings.routes_of(even, "hierarchical")
    assert len(phases) == 3
    for together, alone in zip(phases, own[even]["hierarchical"], strict=True):
        assert together.link_load == pytest.approx(alone.link_load + own[1 - even]["ring"][0].link_load / 3)


@given(st.permutations(range(24)).map(np.array), st.sampled_from([2, 3, 4, 6]), KINDS, PAYLOADS)
@examples(25)
def test_siblings_of_whatever_shape_make_no_group_faster(ranks, size, kind, payload):
    fabric = FakeFabric(24, 4, nvlink=450e9, nic=50e9, spine=20e9, rack=8)
    members = ranks.reshape(-1, size)
    together = taken(fabric, kind, members, payload).seconds
    alone = np.array([taken(fabric, kind, group[None], payload).seconds[0] for group in members])
    assert (together >= alone * (1 - 1e-12)).all()
