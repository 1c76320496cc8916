"""Flows of a phase share links; no link exceeds its bandwidth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.flow_routes import classify_links, route_phase
from clustersim.collectives.heterogeneous_groups import HeterogeneousGroups
from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.library_files import load_library
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


def link_class_rates(bandwidth):
    return LinkClassRates(bandwidth, np.zeros(len(bandwidth), dtype=bool))


@given(PERMUTATIONS, st.sampled_from([2, 3, 4, 6, 8, 12, 24, 48]), st.sampled_from(CollectiveType), st.data())
def test_no_link_exceeds_its_bandwidth(ranks, size, kind, data):
    """In the time of the phase's slowest group, all bytes on its links fit their nominal bandwidth."""
    topologies = group_topology(ranks.reshape(-1, size), FABRIC)
    groups, supported = joint_groups(topologies, kind)
    algorithm = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    for index, topology in enumerate(topologies):
        for routes in groups.routes_of(index, algorithm) if algorithm in supported[index] else ():
            is_loaded = route_phase(routes.phase, FABRIC).link_load[:-1] > 0
            for variant in NCCL.variants:
                bandwidth = effective_bandwidth(CLASSES.table, NCCL, variant, topology.domain_count)
                load = bottleneck_load(routes, CLASSES, NCCL)
                _, per_byte, _, _ = phase_coefficients(
                    load, link_class_rates(bandwidth), np.zeros(len(load.uses_pcie)), 1.0
                )
                rate = routes.link_load[:-1][is_loaded] / per_byte.max()
                assert (rate <= FABRIC.links.bandwidth[is_loaded] * (1 + 1e-12)).all()


def joint_groups(topologies, kind):
    """Groups of all topologies, and the phases of the algorithms that each topology supports."""
    supported = [
        {name: phases for name in ALGORITHMS if (phases := ALGORITHMS[name].phases(kind, topology))}
        for topology in topologies
    ]
    return HeterogeneousGroups(supported, lambda phase: route_phase(phase, FABRIC)), supported


def seconds_per_byte(routes):
    bandwidth = effective_bandwidth(CLASSES.table, NCCL, NCCL.variants[2], 2)
    load = bottleneck_load(routes, CLASSES, NCCL)
    return phase_coefficients(load, link_class_rates(bandwidth), np.zeros(len(load.uses_pcie)), 1.0)[1]


@given(PERMUTATIONS, st.sampled_from(["ring", "pairwise"]), st.sampled_from(SYMMETRIC))
def test_a_single_group_is_never_slower_than_with_others(ranks, algorithm, kind):
    """Pairs of random ranks: the topology of a pair is the same with and without others, so only link loads differ."""
    members = ranks.reshape(-1, 2)
    topologies = group_topology(members, FABRIC)
    groups, supported = joint_groups(topologies, kind)
    for index, topology in enumerate(topologies):
        if algorithm not in supported[index]:
            continue
        joint_seconds = seconds_per_byte(groups.routes_of(index, algorithm)[0])
        for group, joint in zip(members[topology.group_indices], joint_seconds, strict=True):
            (phase,) = ALGORITHMS[algorithm].phases(kind, group_topology(group[None], FABRIC)[0])
            assert seconds_per_byte(route_phase(phase, FABRIC))[0] <= joint * (1 + 1e-12)


def test_the_ll_protocol_is_limited_to_its_maximum_bandwidth():
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
    healthy, degraded = (
        select_variants(Tuner(fabric, NCCL).evaluate_variants(CollectiveType.ALL_GATHER, members), 1e9).seconds
        for fabric in (FABRIC, Degraded(48, 8, nvlink=450e9, nic=50e9))
    )
    assert degraded[0] > 5 * healthy[0]
    assert degraded[1:] == pytest.approx(healthy[1:])
