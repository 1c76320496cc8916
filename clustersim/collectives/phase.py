"""What does a collective algorithm move, and between whom?

An algorithm is a sequence of phases. A phase is a set of flows that run concurrently in every group, cut into
chunks that follow each other (pipelining). A phase only lists what is moved; `phase_cost` computes how long
that takes.

Before an algorithm lists its flows, the members of each group are sorted by domain: domains in ascending
order from the root's on, members of a domain in the group's order. A domain is an NVLink domain or a node,
whichever holds more of the group. Domains need not hold equally many members: the number of rails out of each
is the size of the smallest, because a library builds the same number of channels in all of them (of 8 GPUs on
one node and 4 on the next, 4 of each are heads, and 4 NICs of each are used). Groups of a communicator kind
that differ in shape get a topology each.

Reference: NVIDIA/nccl@5067397c, src/init.cc, initTransportsRank: each graph's channels are the minimum over
all ranks; src/graph/connect.cc, ncclTopoPostset: heads of NVLS likewise.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.hardware.topology import Fabric, find_site_ids
from clustersim.program.task import CollectiveType, TokenRouting
from clustersim.symmetry.labels import unique_by_columns


@dataclass(frozen=True, slots=True)
class LatencySteps:
    """Number of dependent latency steps of a phase, in each group: [groups] or one number for all.

    local: messages inside a domain that wait for each other; network: between domains; posts: messages that one
    rank posts to its NIC back to back, without waiting for completion; sites: the network steps of one chain of
    dependent messages that are between sites, None: all of them.
    """

    local: IntArray | int = 0
    network: IntArray | int = 0
    posts: IntArray | int = 0
    sites: IntArray | int | None = None

    @property
    def counts(self) -> tuple[IntArray | int, ...]:
        """Steps of all four kinds."""
        return self.local, self.network, self.posts, self.network if self.sites is None else self.sites

    def broadcast_to(self, group_count: int) -> "LatencySteps":
        """The steps as arrays of `group_count` entries."""
        return LatencySteps(*(np.broadcast_to(steps, group_count) for steps in self.counts))

    def select(self, group_indices: IntArray) -> "LatencySteps":
        """The steps of some of the groups, where they are arrays."""
        return LatencySteps(*(np.asarray(steps)[group_indices] for steps in self.counts))


@dataclass(frozen=True, slots=True)
class Flows:
    """Flows with equal payload shares. sources, targets: GPU ids, [groups, ...] of one shape.

    share: fraction of the payload that each flow carries over the whole phase. is_p2p: the data is for that
    target only, so it takes the links of its own pair where no switch connects a domain (see `multi_ring`).
    """

    sources: IntArray
    targets: IntArray
    share: float
    is_p2p: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """Flows that run concurrently.

    fill_stages: how many chunk times the pipeline needs to fill; a chunk time is what the most loaded link needs
    for its share of one chunk.
    """

    flows: tuple[Flows, ...]
    latency_steps: LatencySteps
    fill_stages: float = 1.0

    @property
    def sources(self) -> IntArray:
        """[groups, flows]: the sending GPU."""
        return np.concatenate([flows.sources.reshape(len(flows.sources), -1) for flows in self.flows], axis=1)

    @property
    def targets(self) -> IntArray:
        """[groups, flows]: the receiving GPU."""
        return np.concatenate([flows.targets.reshape(len(flows.targets), -1) for flows in self.flows], axis=1)

    @property
    def share(self) -> FloatArray:
        """[groups, flows]: fraction of the payload."""
        return np.concatenate(
            [np.full((len(flows.sources), flows.sources[0].size), flows.share) for flows in self.flows], axis=1
        )


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """Groups of one shape, members sorted by domain.

    members: [groups, size] GPU ids, the root first; domain_sizes: members of each domain; is_switched: every
    domain's members share an NVLink domain; group_indices: [groups] index of each group among all groups of its
    communicator kind; routing: of tokens to the members' experts, for dispatch and combine; domain_sites:
    [groups, domains] site of each domain, None where there is only one; sends: [groups, size] members that send, None:
    the root.
    """

    members: IntArray
    domain_sizes: tuple[int, ...]
    is_switched: bool
    group_indices: IntArray
    routing: TokenRouting | None = None
    domain_sites: IntArray | None = None
    sends: BoolArray | None = None

    @property
    def senders_and_receivers(self) -> tuple[IntArray, IntArray]:
        """Members that send, and the others: [groups, members] each."""
        if self.sends is None:
            return self.members[:, :1], self.members[:, 1:]
        groups = len(self.members)
        return self.members[self.sends].reshape(groups, -1), self.members[~self.sends].reshape(groups, -1)

    @property
    def ring_site_crossings(self) -> IntArray | int:
        """How many hops of a ring over the domains are between sites: [groups], or 0 without sites."""
        if self.domain_sites is None:
            return 0
        crossings: IntArray = np.count_nonzero(self.domain_sites != np.roll(self.domain_sites, -1, axis=1), axis=1)
        return crossings

    @property
    def size(self) -> int:
        """Members of one group."""
        return sum(self.domain_sizes)

    @property
    def domain_count(self) -> int:
        """Number of domains that each group spans."""
        return len(self.domain_sizes)

    @property
    def rails(self) -> int:
        """Routes out of each domain: the size of the smallest."""
        return min(self.domain_sizes)

    @property
    def heads(self) -> IntArray:
        """[groups, domains, rails]: the first members of each domain, which own its rails."""
        return self.members[:, self.domain_starts[:, None] + np.arange(self.rails)]

    @property
    def without_root_domain(self) -> "GroupTopology":
        """The topology without the root's domain."""
        root_size, *other_sizes = self.domain_sizes
        sites = None if self.domain_sites is None else self.domain_sites[:, 1:]
        return replace(self, members=self.members[:, root_size:], domain_sizes=tuple(other_sizes), domain_sites=sites)

    @property
    def domains_by_size(self) -> tuple[IntArray, ...]:
        """Members by domain, for each distinct domain size: [groups, domains of that size, members]."""
        counts, starts = np.array(self.domain_sizes), self.domain_starts
        sizes = dict.fromkeys(self.domain_sizes)
        return tuple(self.members[:, starts[counts == size][:, None] + np.arange(size)] for size in sizes)

    @property
    def domain_starts(self) -> IntArray:
        """[domains]: index of each domain's first member."""
        return np.cumsum((0, *self.domain_sizes[:-1]))


class CollectiveAlgorithm(Protocol):
    """Interface of a collective algorithm."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """List what is moved; empty if the algorithm cannot do this collective in groups of this shape."""


def group_topology(members: IntArray, fabric: Fabric) -> tuple[GroupTopology, ...]:
    """Sort groups [groups, size] by domain, the first member's domain first; one topology for each distinct shape."""
    domains, switched = _domain_ids(members, fabric)
    distance = domains - domains[:, :1]
    distance[distance < 0] += int(domains.max(initial=0)) + 1
    if (np.diff(distance, axis=1) < 0).any():
        order = np.argsort(distance, axis=1, kind="stable")
        members, distance = np.take_along_axis(members, order, axis=1), np.take_along_axis(distance, order, axis=1)
    starts = np.diff(distance, axis=1, prepend=-1) != 0
    shape_ids, first = unique_by_columns([switched, _shape_ids(starts)])
    groups_by_shape = (np.flatnonzero(shape_ids == shape_id) for shape_id in range(len(first)))
    topologies = (
        GroupTopology(
            members[group_indices], _domain_sizes(starts[first_group]), bool(switched[first_group]), group_indices
        )
        for group_indices, first_group in zip(groups_by_shape, first.tolist(), strict=True)
    )
    return tuple(replace(topology, domain_sites=_domain_sites(topology, fabric)) for topology in topologies)


def _domain_sites(topology: GroupTopology, fabric: Fabric) -> IntArray | None:
    """[groups, domains] site of each domain; None without several sites."""
    return find_site_ids(fabric, topology.members[:, topology.domain_starts])


def _shape_ids(starts: BoolArray) -> IntArray:
    """[groups] id of the group's shape: equal for groups with equal domain sizes."""
    if (starts == starts[0]).all():
        return np.zeros(len(starts), np.int64)
    packed = np.packbits(starts, axis=1)
    return np.unique(packed, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _domain_sizes(starts: BoolArray) -> tuple[int, ...]:
    """Domain sizes of one group; `starts` marks the first member of each."""
    return tuple(np.diff(np.flatnonzero(np.append(starts, True))).tolist())


def _domain_ids(members: IntArray, fabric: Fabric) -> tuple[IntArray, BoolArray]:
    """Domain ids [groups, size]: NVLink domains, or nodes where these hold more of a group.

    And which of both, [groups].
    """
    domains, nodes = fabric.domain_ids(members), fabric.node_ids(members)
    if np.array_equal(nodes, domains):
        return domains, np.ones(len(members), dtype=np.bool_)
    switched = _count_distinct(nodes) >= _count_distinct(domains)
    return np.where(switched[:, None], domains, nodes), switched


def _count_distinct(ids: IntArray) -> IntArray:
    """Number of distinct ids in each row."""
    counts: IntArray = 1 + np.count_nonzero(np.diff(np.sort(ids, axis=1), axis=1), axis=1)
    return counts


def build_phase(*flows: Flows, latency_steps: LatencySteps, fill_stages: float = 1.0) -> Phase:
    """Combine flows into one phase."""
    return Phase(flows, latency_steps, fill_stages)
