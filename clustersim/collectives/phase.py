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
class Rounds:
    """How many messages follow each other, each waiting for the one before, in each group: [groups] or a number.

    local: within a domain; network: between domains; posts: messages that one rank hands to its network interface one
    after the other without waiting for an answer.
    """

    local: IntArray | int = 0
    network: IntArray | int = 0
    posts: IntArray | int = 0

    def across(self, groups: int) -> "Rounds":
        """Numbers for each of so many groups."""
        return Rounds(*(np.broadcast_to(array, groups) for array in (self.local, self.network, self.posts)))

    def of(self, groups: IntArray) -> "Rounds":
        """Those of some groups, where there are numbers for each."""
        return Rounds(*(np.asarray(array)[groups] for array in (self.local, self.network, self.posts)))


@dataclass(frozen=True, slots=True)
class Flows:
    """Flows that carry equally much. sources, targets: GPU numbers, [groups, ...] of one shape.

    share: fraction of the payload that each flow carries over the whole phase. message: it is for the target alone, so
    it takes the links of its own pair where no switch joins a domain (see `woven`).
    """

    sources: IntArray
    targets: IntArray
    share: float
    message: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """Flows that run side by side.

    stages: how many chunk times the pipeline needs to fill, a chunk time being what the phase's busiest link needs for
    its part of one chunk.
    """

    parts: tuple[Flows, ...]
    rounds: Rounds
    stages: float = 1.0

    @property
    def sources(self) -> IntArray:
        """[groups, flows]: the GPU that sends."""
        return np.concatenate([part.sources.reshape(len(part.sources), -1) for part in self.parts], axis=1)

    @property
    def targets(self) -> IntArray:
        """[groups, flows]: the GPU that receives."""
        return np.concatenate([part.targets.reshape(len(part.targets), -1) for part in self.parts], axis=1)

    @property
    def share(self) -> FloatArray:
        """[groups, flows]: fraction of the payload."""
        return np.concatenate(
            [np.full((len(part.sources), part.sources[0].size), part.share) for part in self.parts], axis=1
        )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Groups of one shape by domain. members: [groups, size] in order, the root first; per_domain: of each domain.

    switched: every domain's members share an NVLink domain. groups: [groups] which of the role's groups these are.
    routing: of tokens to the members' experts, where it is they that travel.
    """

    members: IntArray
    per_domain: tuple[int, ...]
    switched: bool
    groups: IntArray
    routing: TokenRouting | None = None

    @property
    def size(self) -> int:
        """Members of one group."""
        return sum(self.per_domain)

    @property
    def spans(self) -> int:
        """How many domains each group crosses."""
        return len(self.per_domain)

    @property
    def rails(self) -> int:
        """Routes out of each domain: the members of the smallest."""
        return min(self.per_domain)

    @property
    def heads(self) -> IntArray:
        """[groups, domains, rails]: the first members of each domain, which hold its rails."""
        return self.members[:, self._starts[:, None] + np.arange(self.rails)]

    @property
    def beyond_the_first(self) -> "Arrangement":
        """The same without the root's domain."""
        own, *others = self.per_domain
        return replace(self, members=self.members[:, own:], per_domain=tuple(others))

    @property
    def domains(self) -> tuple[IntArray, ...]:
        """The domains of each number of members: [groups, domains of so many, members] each."""
        counts, starts = np.array(self.per_domain), self._starts
        numbers = dict.fromkeys(self.per_domain)
        return tuple(self.members[:, starts[counts == item][:, None] + np.arange(item)] for item in numbers)

    @property
    def _starts(self) -> IntArray:
        """[domains]: place of each domain's first member."""
        return np.cumsum((0, *self.per_domain[:-1]))


class Algorithm(Protocol):
    """The seam of the shelf: what a collective algorithm must answer."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """List what is moved; no phases if the algorithm cannot do this collective in groups of this shape."""


def arrange(members: IntArray, fabric: Fabric) -> tuple[Arrangement, ...]:
    """Order groups [groups, size] by domain, the first member's domain first; groups of each shape apart."""
    domains, switched = _domains(members, fabric)
    distance = domains - domains[:, :1]
    distance[distance < 0] += int(domains.max(initial=0)) + 1
    if (np.diff(distance, axis=1) < 0).any():
        order = np.argsort(distance, axis=1, kind="stable")
        members, distance = np.take_along_axis(members, order, axis=1), np.take_along_axis(distance, order, axis=1)
    starts = np.diff(distance, axis=1, prepend=-1) != 0
    shape, first = unique_by_columns([switched, _alike(starts)])
    sets = (np.flatnonzero(shape == number) for number in range(len(first)))
    return tuple(
        Arrangement(members[groups], _per_domain(starts[one]), bool(switched[one]), groups)
        for groups, one in zip(sets, first.tolist(), strict=True)
    )


def _alike(starts: BoolArray) -> IntArray:
    """[groups] the same number for groups whose domains hold the same numbers of members."""
    if (starts == starts[0]).all():
        return np.zeros(len(starts), np.int64)
    packed = np.packbits(starts, axis=1)
    return np.unique(packed, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _per_domain(starts: BoolArray) -> tuple[int, ...]:
    """Members of each domain of one group; `starts` marks the first of each."""
    return tuple(np.diff(np.flatnonzero(np.append(starts, True))).tolist())


def _domains(members: IntArray, fabric: Fabric) -> tuple[IntArray, BoolArray]:
    """NVLink domains, or nodes if these join several of a group; and whether it is the former, in each group."""
    domains, nodes = fabric.domains(members), fabric.nodes(members)
    if np.array_equal(nodes, domains):
        return domains, np.ones(len(members), dtype=np.bool_)
    switched = _distinct(nodes) >= _distinct(domains)
    return np.where(switched[:, None], domains, nodes), switched


def _distinct(numbers: IntArray) -> IntArray:
    """How many different numbers each row has."""
    different: IntArray = 1 + np.count_nonzero(np.diff(np.sort(numbers, axis=1), axis=1), axis=1)
    return different


def phase(*parts: Flows, rounds: Rounds, stages: float = 1.0) -> Phase:
    """Join flows into one phase."""
    return Phase(parts, rounds, stages)
