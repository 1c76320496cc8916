"""What does an algorithm move, and between whom?

An algorithm is a sequence of phases. A phase is a set of flows that run side by side in every group, cut into chunks
that follow each other (pipelining). It only lists what is moved; how long that takes is asked in `transfer`.

Before an algorithm lists its flows, the members of each group are arranged by domain: domains in ascending number from
the root's on, members of a domain in the group's order. A domain is an NVLink domain or a node, whichever holds more of
the group. If every domain of a group holds the same number of members, algorithms can use one route per member out of
each domain; otherwise each member stands alone. Groups of a role that differ in shape are arranged apart.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clustersim.arrays import BoolArray, FloatArray, IntArray
from clustersim.hardware.topology import Fabric
from clustersim.program.colour import distinct
from clustersim.program.task import Collective


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
        return Rounds(*(np.broadcast_to(each, groups) for each in (self.local, self.network, self.posts)))

    def of(self, groups: IntArray) -> "Rounds":
        """Those of some groups, where there are numbers for each."""
        return Rounds(*(np.asarray(each)[groups] for each in (self.local, self.network, self.posts)))


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
    """Groups of one shape by domain. members: [groups, domains, per_domain]; spans: how many domains each crosses.

    Groups whose domains hold different numbers of members are arranged as `size` domains of one member. switched: every
    domain's members share an NVLink domain. groups: [groups] which of the role's groups these are.
    """

    members: IntArray
    spans: int
    switched: bool
    groups: IntArray

    @property
    def size(self) -> int:
        """Members of one group."""
        _, domains, per_domain = self.members.shape
        return int(domains * per_domain)

    @property
    def flat(self) -> IntArray:
        """[groups, size]: the members in order, the root first."""
        return self.members.reshape(len(self.members), -1)


class Algorithm(Protocol):
    """The seam of the shelf: what a collective algorithm must answer."""

    def phases(self, kind: Collective, arrangement: Arrangement) -> tuple[Phase, ...]:
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
    spans, even = starts.sum(axis=1), _even(starts)
    shape, first = distinct([spans, even, switched | ~even])
    sets = (np.flatnonzero(shape == number) for number in range(len(first)))
    return tuple(
        _arranged(members, groups, spans=int(spans[one]), even=bool(even[one]), switched=bool(switched[one]))
        for groups, one in zip(sets, first.tolist(), strict=True)
    )


def _arranged(members: IntArray, groups: IntArray, *, spans: int, even: bool, switched: bool) -> Arrangement:
    """Some of the groups, ordered, which cross equally many domains, evenly or not."""
    size = members.shape[1]
    count = spans if even else size
    return Arrangement(members[groups].reshape(len(groups), count, size // count), spans, switched, groups)


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


def _even(starts: BoolArray) -> BoolArray:
    """Whether all domains of a group hold equally many members; `starts` marks the first member of a domain."""
    size = starts.shape[1]
    per_domain = size // starts.sum(axis=1)
    even: BoolArray = (starts == (np.arange(size) % per_domain[:, None] == 0)).all(axis=1)
    return even


def phase(*parts: Flows, rounds: Rounds, stages: float = 1.0) -> Phase:
    """Join flows into one phase."""
    return Phase(parts, rounds, stages)
