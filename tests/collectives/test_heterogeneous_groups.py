"""Groups of a comm group that differ in shape select variants separately and share the links that they cross."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.flow_routes import FlowRoutes, route_phase
from clustersim.collectives.heterogeneous_groups import HeterogeneousGroups
from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.library_files import load_library
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
COLLECTIVES = st.sampled_from(
    [kind for kind in CollectiveType if kind is not CollectiveType.SEND_RECV and not kind.is_token_routing]
)
PAYLOADS = st.sampled_from([1e3, 1e5, 1e7, 1e9])
GROUPS_OF_SIX = np.arange(24).reshape(4, 6)  # over nodes of 8: 6 | 2 + 4 | 4 + 2 | 6


def select(fabric: Fabric, kind: CollectiveType, members: np.ndarray, payload: float) -> Selection:
    return select_variants(Tuner(fabric, NCCL).evaluate_variants(kind, members), payload)


def variant_names(selection: Selection) -> list[str]:
    return [selection.variants[variant_index].name for variant_index in selection.variant_index]


def with_dead_port(gpu: int) -> Fabric:
    """A cluster in which one GPU's NVLink port is dead."""
    change = LinkDegradation(f"gpu{gpu}", f"nvswitch{gpu // 8}", DeadLinkEffect())
    return degrade_fabric(HEALTHY, Degradations(links=(change,)))


def group_demand(demand: LinkDemand, group: int) -> tuple[object, ...]:
    """The link demand of one group, link by link."""
    link_loads = demand.link_loads
    in_group = link_loads.group_index == group
    order = np.argsort(link_loads.link_index[in_group])
    sorted_loads = (
        link_loads.link_index[in_group][order].tolist(),
        link_loads.seconds_per_byte[in_group][order].tolist(),
    )
    return (demand.latency[group], demand.transfer[group], demand.flow[group], *sorted_loads)


@given(st.integers(0, 63), st.sampled_from([2, 4, 8, 16, 32]), COLLECTIVES, PAYLOADS)
@examples(60)
def test_a_dead_nvlink_port_changes_nothing_for_groups_without_its_gpu(gpu, size, kind, payload):
    """Algorithms, times and demands of all groups that the GPU is not in are the same, bit for bit."""
    groups = {"tp": ProcessGroups("tp", np.arange(64).reshape(-1, size))}
    comm_op = CommOp("x", kind, "tp", payload)
    healthy, degraded = (CollectiveCost(fabric, NCCL, groups) for fabric in (HEALTHY, with_dead_port(gpu)))
    before, after = (
        variant_names(select(fabric, kind, groups["tp"].members, payload)) for fabric in (HEALTHY, with_dead_port(gpu))
    )
    for group in set(range(64 // size)) - {gpu // size}:
        assert before[group] == after[group]
        assert healthy.time_comm_op(comm_op).seconds[group] == degraded.time_comm_op(comm_op).seconds[group]
        assert group_demand(healthy.link_demand(comm_op), group) == group_demand(degraded.link_demand(comm_op), group)


def test_only_the_node_with_a_dead_nvlink_port_cannot_use_nvls():
    members = np.arange(64).reshape(-1, 8)
    selection = select(with_dead_port(0), CollectiveType.ALL_REDUCE, members, 1e8)
    assert variant_names(selection) == ["ring Simple"] + ["nvls Simple"] * 7
    assert selection.seconds[0] > 5 * selection.seconds[1]


def test_groups_of_different_shape_or_position_have_separate_topologies():
    fabric = FakeFabric(24, 8)
    within_node, two_and_four, four_and_two = sorted(
        group_topology(GROUPS_OF_SIX, fabric), key=lambda topology: topology.group_indices[0]
    )
    assert (within_node.domain_sizes, within_node.group_indices.tolist()) == ((6,), [0, 3])
    assert (two_and_four.domain_sizes, two_and_four.group_indices.tolist()) == ((2, 4), [1])
    assert (four_and_two.domain_sizes, four_and_two.group_indices.tolist()) == ((4, 2), [2])


@given(st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24]), COLLECTIVES, PAYLOADS)
def test_groups_without_common_links_take_their_uncontended_time(size, kind, payload):
    """Groups share no port, within a node or across two: bit for bit as without the others."""
    fabric = FakeFabric(48, 8, nvlink=450e9, nic=50e9)
    members = np.arange(48).reshape(-1, size)
    concurrent = select(fabric, kind, members, payload)
    separate = [select(fabric, kind, group[None], payload) for group in members]
    assert concurrent.seconds.tolist() == [float(selection.seconds[0]) for selection in separate]
    assert variant_names(concurrent) == [variant_names(item)[0] for item in separate]


def test_only_groups_that_straddle_nodes_are_slow():
    """Two NICs of a straddling group transfer 5/6 of the payload; groups within a node use their switch."""
    fabric = FakeFabric(24, 8, nvlink=450e9, nic=50e9)
    reduced = select(fabric, CollectiveType.ALL_REDUCE, GROUPS_OF_SIX, 1e9).seconds
    assert (reduced[[1, 2]] > 2 * reduced[[0, 3]]).all()
    gathered = select(fabric, CollectiveType.ALL_GATHER, GROUPS_OF_SIX, 1e9).seconds
    assert (gathered[[1, 2]] > 5 / 6 * 1e9 / 100e9).all()
    assert (gathered[[1, 2]] < 5 / 6 * 1e9 / 50e9).all()
    assert (gathered[[0, 3]] < 1e9 / 300e9).all()


def across_racks(spine: float) -> tuple[Fabric, np.ndarray]:
    """4 + 4 ranks of two nodes, and 5 + 3 of two others, over the same link between racks."""
    even, uneven = [*range(4), *range(16, 20)], [*range(8, 13), *range(24, 27)]
    return FakeFabric(32, 8, nvlink=450e9, nic=50e9, spine=spine, rack=16), np.array([even, uneven])


@pytest.mark.parametrize("kind", [CollectiveType.ALL_GATHER, CollectiveType.ALL_TO_ALL])
def test_groups_that_share_a_link_slow_each_other(kind):
    """A slow link between racks carries the traffic of both: each takes the sum of the separate times."""
    fabric, members = across_racks(1e9)
    concurrent = select(fabric, kind, members, 1e10).seconds
    separate = [select(fabric, kind, group[None], 1e10).seconds[0] for group in members]
    assert concurrent == pytest.approx(np.full(2, sum(separate)), rel=1e-3)


def routed_topologies(kind: CollectiveType) -> tuple[HeterogeneousGroups, list[dict[str, tuple[FlowRoutes, ...]]]]:
    """Phases of the even and the uneven group routed jointly, and separately."""
    fabric, members = across_racks(1e9)
    supported = [
        {name: phases for name in ALGORITHMS if (phases := ALGORITHMS[name].phases(kind, item))}
        for item in group_topology(members, fabric)
    ]
    separate = [
        {name: tuple(route_phase(element, fabric) for element in phases_by_name[name]) for name in phases_by_name}
        for phases_by_name in supported
    ]
    return HeterogeneousGroups(supported, lambda phase: route_phase(phase, fabric)), separate


def test_an_algorithm_loads_the_links_of_all_groups_that_support_it():
    concurrent, separate = routed_topologies(CollectiveType.ALL_REDUCE)
    for index in (0, 1):
        (tree,) = concurrent.routes_of(index, "tree")
        assert tree.link_load == pytest.approx(separate[0]["tree"][0].link_load + separate[1]["tree"][0].link_load)


def test_groups_without_the_algorithm_load_links_evenly_over_its_phases():
    """The uneven group does not support hierarchical: its ring's load is spread over the even group's three phases."""
    concurrent, separate = routed_topologies(CollectiveType.ALL_REDUCE)
    (even_index,) = [index for index, routes in enumerate(separate) if "hierarchical" in routes]
    phases = concurrent.routes_of(even_index, "hierarchical")
    assert len(phases) == 3
    for joint_route, separate_route in zip(phases, separate[even_index]["hierarchical"], strict=True):
        assert joint_route.link_load == pytest.approx(
            separate_route.link_load + separate[1 - even_index]["ring"][0].link_load / 3
        )


@given(st.permutations(range(24)).map(np.array), st.sampled_from([2, 3, 4, 6]), COLLECTIVES, PAYLOADS)
@examples(25)
def test_other_groups_make_no_group_faster(ranks, size, kind, payload):
    fabric = FakeFabric(24, 4, nvlink=450e9, nic=50e9, spine=20e9, rack=8)
    members = ranks.reshape(-1, size)
    concurrent = select(fabric, kind, members, payload).seconds
    separate = np.array([select(fabric, kind, group[None], payload).seconds[0] for group in members])
    assert (concurrent >= separate * (1 - 1e-12)).all()
