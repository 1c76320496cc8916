"""What does an algorithm move, and between whom?

An algorithm is a sequence of phases. A phase is a set of flows that run side by side in every group, cut into chunks
that follow each other (pipelining). It only lists what is moved; how long that takes is asked in `transfer`.

Before an algorithm lists its flows, the members of each group are arranged by domain: domains in ascending number from
the root's on, members of a domain in the group's order. A domain is an NVLink domain or a node, whichever holds more of
the group. Domains need not hold equally many members: as many routes lead out of each as the smallest has members,
because a library builds equally many channels in all of them (of 8 GPUs on one node and 4 on the next, 4 of either are
heads, and 4 network ports of either are used). Groups of a role that differ in shape are arranged apart.

Reference: NVIDIA/nccl@5067397c, src/init.cc, initTransportsRank: each graph's channels are the fewest of any rank's;
src/graph/connect.cc, ncclTopoPostset: heads of NVLS likewise.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.hardware.topology import Fabric
from clustersim.program.task import CollectiveType, TokenRouting
from clustersim.symmetry.labels import unique_by_columns


@dataclass(frozen=True, slots=True)
class LatencySteps:
    """How many messages follow each other, each waiting for the one before, in each group: [groups] or a number.

    local: within a domain; network: between domains; posts: messages that one rank hands to its network interface one
    after the other without waiting for an answer.
    """

    local: IntArray | int = 0
    network: IntArray | int = 0
    posts: IntArray | int = 0

    def broadcast_to(self, group_count: int) -> "LatencySteps":
        """Numbers for each of so many groups."""
        return LatencySteps(*(np.broadcast_to(steps, group_count) for steps in (self.local, self.network, self.posts)))

    def select(self, group_indices: IntArray) -> "LatencySteps":
        """Those of some groups, where there are numbers for each."""
        return LatencySteps(*(np.asarray(steps)[group_indices] for steps in (self.local, self.network, self.posts)))


@dataclass(frozen=True, slots=True)
class Flows:
    """Flows that carry equally much. sources, targets: GPU numbers, [groups, ...] of one shape.

    share: fraction of the payload that each flow carries over the whole phase. message: it is for the target alone, so
    it takes the links of its own pair where no switch joins a domain (see `spread_over_rings`).
    """

    sources: IntArray
    targets: IntArray
    share: float
    is_p2p: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """Flows that run side by side.

    stages: how many chunk times the pipeline needs to fill, a chunk time being what the phase's busiest link needs for
    its part of one chunk.
    """

    flows: tuple[Flows, ...]
    latency_steps: LatencySteps
    fill_stages: float = 1.0

    @property
    def sources(self) -> IntArray:
        """[groups, flows]: the GPU that sends."""
        return np.concatenate([flows.sources.reshape(len(flows.sources), -1) for flows in self.flows], axis=1)

    @property
    def targets(self) -> IntArray:
        """[groups, flows]: the GPU that receives."""
        return np.concatenate([flows.targets.reshape(len(flows.targets), -1) for flows in self.flows], axis=1)

    @property
    def share(self) -> FloatArray:
        """[groups, flows]: fraction of the payload."""
        return np.concatenate(
            [np.full((len(flows.sources), flows.sources[0].size), flows.share) for flows in self.flows], axis=1
        )


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """Groups of one shape by domain. members: [groups, size] in order, the root first; per_domain: of each domain.

    switched: every domain's members share an NVLink domain. groups: [groups] which of the role's groups these are.
    routing: of tokens to the members' experts, where it is they that travel.
    """

    members: IntArray
    domain_sizes: tuple[int, ...]
    is_switched: bool
    group_indices: IntArray
    routing: TokenRouting | None = None

    @property
    def size(self) -> int:
        """Members of one group."""
        return sum(self.domain_sizes)

    @property
    def domain_count(self) -> int:
        """How many domains each group crosses."""
        return len(self.domain_sizes)

    @property
    def rails(self) -> int:
        """Routes out of each domain: the members of the smallest."""
        return min(self.domain_sizes)

    @property
    def heads(self) -> IntArray:
        """[groups, domains, rails]: the first members of each domain, which hold its rails."""
        return self.members[:, self._domain_starts[:, None] + np.arange(self.rails)]

    @property
    def without_root_domain(self) -> "GroupTopology":
        """The same without the root's domain."""
        root_size, *other_sizes = self.domain_sizes
        return replace(self, members=self.members[:, root_size:], domain_sizes=tuple(other_sizes))

    @property
    def domains_by_size(self) -> tuple[IntArray, ...]:
        """The domains of each number of members: [groups, domains of so many, members] each."""
        counts, starts = np.array(self.domain_sizes), self._domain_starts
        sizes = dict.fromkeys(self.domain_sizes)
        return tuple(self.members[:, starts[counts == size][:, None] + np.arange(size)] for size in sizes)

    @property
    def _domain_starts(self) -> IntArray:
        """[domains]: place of each domain's first member."""
        return np.cumsum((0, *self.domain_sizes[:-1]))


class CollectiveAlgorithm(Protocol):
    """The seam of the shelf: what a collective algorithm must answer."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """List what is moved; no phases if the algorithm cannot do this collective in groups of this shape."""


def group_topology(members: IntArray, fabric: Fabric) -> tuple[GroupTopology, ...]:
    """Order groups [groups, size] by domain, the first member's domain first; groups of each shape apart."""
    domains, switched = _domain_ids(members, fabric)
    distance = domains - domains[:, :1]
    distance[distance < 0] += int(domains.max(initial=0)) + 1
    if (np.diff(distance, axis=1) < 0).any():
        order = np.argsort(distance, axis=1, kind="stable")
        members, distance = np.take_along_axis(members, order, axis=1), np.take_along_axis(distance, order, axis=1)
    starts = np.diff(distance, axis=1, prepend=-1) != 0
    shape_ids, first = unique_by_columns([switched, _shape_ids(starts)])
    groups_by_shape = (np.flatnonzero(shape_ids == shape_id) for shape_id in range(len(first)))
    return tuple(
        GroupTopology(
            members[group_indices], _domain_sizes(starts[first_group]), bool(switched[first_group]), group_indices
        )
        for group_indices, first_group in zip(groups_by_shape, first.tolist(), strict=True)
    )


def _shape_ids(starts: BoolArray) -> IntArray:
    """[groups] the same number for groups whose domains hold the same numbers of members."""
    if (starts == starts[0]).all():
        return np.zeros(len(starts), np.int64)
    packed = np.packbits(starts, axis=1)
    return np.unique(packed, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _domain_sizes(starts: BoolArray) -> tuple[int, ...]:
    """Members of each domain of one group; `starts` marks the first of each."""
    return tuple(np.diff(np.flatnonzero(np.append(starts, True))).tolist())


def _domain_ids(members: IntArray, fabric: Fabric) -> tuple[IntArray, BoolArray]:
    """NVLink domains, or nodes if these join several of a group; and whether it is the former, in each group."""
    domains, nodes = fabric.domain_ids(members), fabric.node_ids(members)
    if np.array_equal(nodes, domains):
        return domains, np.ones(len(members), dtype=np.bool_)
    switched = _count_distinct(nodes) >= _count_distinct(domains)
    return np.where(switched[:, None], domains, nodes), switched


def _count_distinct(ids: IntArray) -> IntArray:
    """How many different numbers each row has."""
    counts: IntArray = 1 + np.count_nonzero(np.diff(np.sort(ids, axis=1), axis=1), axis=1)
    return counts


def build_phase(*flows: Flows, latency_steps: LatencySteps, fill_stages: float = 1.0) -> Phase:
    """Join flows into one phase."""
    return Phase(flows, latency_steps, fill_stages)
