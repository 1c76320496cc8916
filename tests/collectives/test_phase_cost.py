"""Flows of a phase share links; none carries more than its rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.flow_routes import classify_links, route_phase
from clustersim.collectives.heterogeneous_groups import HeterogeneousGroups
from clustersim.collectives.library import ALGORITHMS, load_library
from clustersim.collectives.phase import group_topology
from clustersim.collectives.phase_cost import LinkClassRates, bottleneck_load, effective_bandwidth, phase_coefficients
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.program.task import CollectiveType
from tests.collectives.fake_fabric import FakeFabric

NCCL = load_library("nccl")
FABRIC = FakeFabric(48, 8, nvlink=450e9, nic=50e9, spine=100e9, rack=16)
CLASSES = classify_links(FABRIC.links)
PERMUTATIONS = st.permutations(range(48)).map(np.array)
SYMMETRIC = [
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
]


def rates(bandwidth):
    return LinkClassRates(bandwidth, np.zeros(len(bandwidth), dtype=bool))


@given(PERMUTATIONS, st.sampled_from([2, 3, 4, 6, 8, 12, 24, 48]), st.sampled_from(CollectiveType), st.data())
def test_no_link_carries_more_than_its_rate(ranks, size, kind, data):
    """In the time that the phase's slowest group needs, the bytes of all on its links fit their nominal bandwidth."""
    sets = group_topology(ranks.reshape(-1, size), FABRIC)
    siblings, able = side_by_side(sets, kind)
    algorithm = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    for number, arrangement in enumerate(sets):
        for routed in siblings.routed(number, algorithm) if algorithm in able[number] else ():
            crossed = route_phase(routed.phase, FABRIC).link_load[:-1] > 0
            for offer in NCCL.variants:
                reachable = effective_bandwidth(CLASSES.table, NCCL, offer, arrangement.domain_count)
                found = bottleneck_load(routed, CLASSES, NCCL)
                _, per_byte, _, _ = phase_coefficients(found, rates(reachable), np.zeros(len(found.uses_pcie)), 1.0)
                rate = routed.load[:-1][crossed] / per_byte.max()
                assert (rate <= FABRIC.links.bandwidth[crossed] * (1 + 1e-12)).all()


def side_by_side(sets, kind):
    """Sets of groups of one shape, and the algorithms that each can take."""
    able = [{name: found for name in ALGORITHMS if (found := ALGORITHMS[name].phases(kind, item))} for item in sets]
    return HeterogeneousGroups(able, lambda phase: route_phase(phase, FABRIC)), able


def per_byte_of(routed):
    reachable = effective_bandwidth(CLASSES.table, NCCL, NCCL.variants[2], 2)
    found = bottleneck_load(routed, CLASSES, NCCL)
    return phase_coefficients(found, rates(reachable), np.zeros(len(found.uses_pcie)), 1.0)[1]


@given(PERMUTATIONS, st.sampled_from(["ring", "pairwise"]), st.sampled_from(SYMMETRIC))
def test_a_group_alone_is_never_slower_than_beside_its_siblings(ranks, algorithm, kind):
    """Pairs of any ranks: their arrangement is the same alone and together, so only the links' loads differ."""
    members = ranks.reshape(-1, 2)
    sets = group_topology(members, FABRIC)
    siblings, able = side_by_side(sets, kind)
    for number, arrangement in enumerate(sets):
        if algorithm not in able[number]:
            continue
        together = per_byte_of(siblings.routed(number, algorithm)[0])
        for group, beside in zip(members[arrangement.group_indices], together, strict=True):
            (phase,) = ALGORITHMS[algorithm].phases(kind, group_topology(group[None], FABRIC)[0])
            assert per_byte_of(route_phase(phase, FABRIC))[0] <= beside * (1 + 1e-12)


def test_the_ll_protocol_stays_below_its_ceiling():
    bandwidth = effective_bandwidth(FABRIC.links, NCCL, NCCL.variants_for(CollectiveType.ALL_GATHER)[0], 1)
    assert bandwidth[0] == pytest.approx(141e9)  # NCCL's llMaxBws, Hopper, one node


def test_a_degraded_link_slows_only_the_group_that_uses_it():
    class Degraded(FakeFabric):
        @property
        def links(self):
            table = FakeFabric.links.fget(self)
            table.bandwidth[3] /= 10
            return table

    members = np.arange(48).reshape(6, 8)
    healthy, sick = (
        select_variants(Tuner(fabric, NCCL).evaluate_variants(CollectiveType.ALL_GATHER, members), 1e9).seconds
        for fabric in (FABRIC, Degraded(48, 8, nvlink=450e9, nic=50e9))
    )
    assert sick[0] > 5 * healthy[0]
    assert sick[1:] == pytest.approx(healthy[1:])
