"""Collectives on any regular cluster: bandwidth lower bounds, monotonicity in bandwidth and latency.

Known anomalies: more NICs per node are no gain where each has a leaf of its own (rails), as pairs of GPUs
that shared a leaf then connect above it; and one more GPU adds its own latency steps and its share of the
payload.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.arrays import IntArray
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import LeafSpec, NetworkSpec, NicSpec, NodeSpec, NvlinkSpec, Port, SpineSpec
from clustersim.hardware.ecmp import SpreadEcmp
from clustersim.program.task import CollectiveType
from tests.conftest import examples

NCCL = load_library("nccl")
NODES = 6
US = 1e-6
PAYLOADS = st.floats(0.0, 10.0).map(lambda power: 10.0**power)
REDUCTIONS = [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER]
KINDS = st.sampled_from([*REDUCTIONS, CollectiveType.ALL_TO_ALL, CollectiveType.BROADCAST])


@dataclass(frozen=True)
class ClusterParameters:
    """Six nodes of `gpus` GPUs, NVLink domains over `nodes_per_domain` nodes, `nics` per node, leaves of two nodes."""

    gpus: int
    nodes_per_domain: int
    nvlink: Port
    nics: int
    nic: Port
    rails: bool
    oversubscription: float

    @property
    def domain(self) -> int:
        return self.gpus * self.nodes_per_domain

    @property
    def fabric(self) -> ClosFabric:
        node = NodeSpec(
            gpu_count=self.gpus,
            pcie=Port(64e9, 0.5 * US),
            nvlink=NvlinkSpec(self.domain, self.nvlink),
            nics=NicSpec(self.nics, self.nic),
        )
        leaf = LeafSpec(2, self.nics if self.rails else 1, 0.3 * US, self.oversubscription)
        return ClosFabric(node, NetworkSpec(leaf, SpreadEcmp(), SpineSpec(3, 0.3 * US)), NODES * self.gpus)


MACHINES = st.builds(
    ClusterParameters,
    gpus=st.sampled_from([4, 8]),
    nodes_per_domain=st.sampled_from([1, 2, 3]),
    nvlink=st.builds(Port, st.floats(200e9, 1800e9), st.floats(0.1 * US, 3 * US)),
    nics=st.sampled_from([1, 2, 4]),
    nic=st.builds(Port, st.floats(10e9, 100e9), st.floats(0.1 * US, 10 * US)),
    rails=st.booleans(),
    oversubscription=st.floats(1.0, 7.0),
)


@st.composite
def rank_groups(draw: st.DrawFn, machine: ClusterParameters) -> IntArray:
    """Groups of contiguous or strided ranks, or one group of arbitrary GPUs: [groups, ranks]."""
    world = NODES * machine.gpus
    if draw(st.booleans()):
        members = draw(st.sets(st.integers(0, world - 1), min_size=2, max_size=world))
        return np.array([sorted(members)])
    size = draw(st.sampled_from([size for size in range(2, world + 1) if world % size == 0]))
    ranks = np.arange(world)
    return ranks.reshape(-1, size) if draw(st.booleans()) else ranks.reshape(size, -1).T


@st.composite
def collective_cases(draw: st.DrawFn) -> tuple[ClusterParameters, IntArray, CollectiveType, float]:
    machine = draw(MACHINES)
    return machine, draw(rank_groups(machine)), draw(KINDS), draw(PAYLOADS)


def collective_seconds(
    machine: ClusterParameters, members: IntArray, kind: CollectiveType, payload: float
) -> np.ndarray:
    """Seconds of the selected algorithm for each group: [groups]."""
    return select_variants(Tuner(machine.fabric, NCCL).evaluate_variants(kind, members), payload).seconds


def with_bandwidth_factor(port: Port, factor: float) -> Port:
    return replace(port, bandwidth=port.bandwidth * factor)


@given(collective_cases(), st.floats(1.0, 8.0))
@examples(200)
def test_more_bandwidth_or_less_latency_never_makes_a_collective_slower(case, factor):
    machine, members, kind, payload = case
    before = collective_seconds(machine, members, kind, payload)
    for better in (
        replace(machine, nvlink=with_bandwidth_factor(machine.nvlink, factor)),
        replace(machine, nic=with_bandwidth_factor(machine.nic, factor)),
        replace(machine, nvlink=replace(machine.nvlink, latency=machine.nvlink.latency / factor)),
        replace(machine, nic=replace(machine.nic, latency=machine.nic.latency / factor)),
        replace(machine, oversubscription=max(1.0, machine.oversubscription / factor)),
    ):
        assert (collective_seconds(better, members, kind, payload) <= before * (1 + 1e-9)).all()


@given(collective_cases())
@examples(100)
def test_more_network_ports_under_one_leaf_never_make_a_collective_slower(case):
    machine, members, kind, payload = case
    single_leaf = replace(machine, rails=False)
    more_nics = replace(single_leaf, nics=machine.gpus)
    assert (
        collective_seconds(more_nics, members, kind, payload)
        <= collective_seconds(single_leaf, members, kind, payload) * (1 + 1e-9)
    ).all()


def min_seconds_per_byte(machine: ClusterParameters, group: IntArray, kind: CollectiveType) -> float:
    """Lower bound in seconds per byte of payload, from the network ports of the most loaded NVLink domain.

    A domain with m of n members must take in what the others gathered, the sum of what they hold (or their shares
    of it), or what they send to each of its members.
    """
    worst, group_size = 0.0, len(group)
    domains = group // machine.domain
    for domain in np.unique(domains):
        domain_members = group[domains == domain]
        ports = len(np.unique(domain_members * machine.nics // machine.gpus)) * machine.nic.bandwidth
        member_count = len(domain_members)
        payload_share = {
            CollectiveType.ALL_REDUCE: 1.0 if member_count < group_size else 0.0,
            CollectiveType.ALL_GATHER: (group_size - member_count) / group_size,
            CollectiveType.REDUCE_SCATTER: max(member_count, group_size - member_count) / group_size
            if member_count < group_size
            else 0.0,  # in: m parts; out: sums of the others'
            CollectiveType.ALL_TO_ALL: member_count * (group_size - member_count) / group_size,
        }
        worst = max(worst, payload_share[kind] / ports)
    return worst


@given(collective_cases().filter(lambda case: case[2] is not CollectiveType.BROADCAST))
@examples(200)
def test_no_collective_beats_the_port_bandwidth_bound_of_a_domain(case):
    machine, members, kind, payload = case
    actual = collective_seconds(machine, members, kind, payload)
    bound = np.array([min_seconds_per_byte(machine, group, kind) for group in members]) * payload
    assert (actual >= bound * (1 - 1e-9)).all()


@given(collective_cases())
@examples(200)
def test_reduce_scatter_plus_all_gather_respect_the_bandwidth_bound(case):
    """Every member must receive (n-1)/n of the payload twice, over NVLink and its network port concurrently at best."""
    machine, members, _, payload = case
    n = members.shape[1]
    total_seconds = sum(collective_seconds(machine, members, kind, payload) for kind in REDUCTIONS[1:])
    ports = machine.nvlink.bandwidth + machine.nic.bandwidth
    assert (total_seconds >= 2 * (n - 1) / n * payload / ports).all()


@st.composite
def domain_occupancies(draw: st.DrawFn) -> tuple[ClusterParameters, list[int]]:
    """A cluster with a NIC per GPU, slower than NVLink, and the number of group members in each domain."""
    machine = draw(MACHINES)
    nic = replace(machine.nic, bandwidth=min(machine.nic.bandwidth, machine.nvlink.bandwidth / 8))
    machine = replace(machine, nics=machine.gpus, nic=nic, oversubscription=1.0)
    count = NODES // machine.nodes_per_domain
    occupancy = st.integers(1, machine.domain - 1)
    return machine, draw(st.lists(occupancy, min_size=2, max_size=count))


def group_with_occupancy(machine: ClusterParameters, per_domain: list[int]) -> IntArray:
    return np.array([[machine.domain * i + index for i, count in enumerate(per_domain) for index in range(count)]])


@given(domain_occupancies(), st.data())
@examples(200)
def test_one_more_gpu_costs_at_most_its_steps_and_payload_share(case, data):
    """For large payloads: (n-1)/n becomes n/(n+1); the latency steps of one more member are far below a millisecond."""
    machine, per_domain = case
    kind = data.draw(st.sampled_from(REDUCTIONS))
    grown_domain = data.draw(st.integers(0, len(per_domain) - 1))
    grown = [count + (domain == grown_domain) for domain, count in enumerate(per_domain)]
    n, payload = sum(per_domain), 1e10
    before, after = (
        collective_seconds(machine, group_with_occupancy(machine, occupancy), kind, payload)[0]
        for occupancy in (per_domain, grown)
    )
    assert after <= before * n**2 / (n**2 - 1) * 1.01 + 1e-3


@pytest.mark.parametrize("kind", REDUCTIONS)
@given(domain_occupancies())
@examples(50)
def test_uneven_domains_cost_no_more_than_the_smallest_everywhere(kind, case):
    """What the fullest domain forwards inside NVLink is all that adds up, as NVLink is 8 times as fast."""
    machine, per_domain = case
    payload, n = 1e10, sum(per_domain)
    even = [min(per_domain)] * len(per_domain)
    uneven_seconds, even_seconds = (
        collective_seconds(machine, group_with_occupancy(machine, occupancy), kind, payload)[0]
        for occupancy in (per_domain, even)
    )
    m = sum(even)
    assert (
        uneven_seconds
        <= even_seconds * (n - 1) / n * m / (m - 1) * 1.01 + 2 * payload / machine.nvlink.bandwidth + 1e-3
    )
