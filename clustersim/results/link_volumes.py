"""How many bytes does a collective put on each link?

The library takes an algorithm for every group of a role, as when the exchange is timed (`cost.collective_cost`); its
flows are routed and counted, in parts of the payload. Counted is what the algorithm moves: what protocols add on the
wire (flags beside the data) is not. A byte counts once for every link that it passes, and once for every tier that it
crosses, on however many links of it (up to a switch and down again).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clustersim.collectives.library import Library
from clustersim.collectives.multi_ring import spread_over_rings
from clustersim.collectives.phase import Flows
from clustersim.collectives.tuner import Selection, Tuner
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.collective_cost import CollectiveCost, CommKey, comm_key
from clustersim.hardware.topology import LINK_KINDS, Fabric
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What one collective carries in every group of its role, in parts of its payload.

    group, link, share: [entries] what a group puts on a link, a pair of them may occur more than once; sent: [groups]
    all that members send; crossing: [groups, LINK_KINDS] what crosses links of each kind. Compared by identity:
    exchanges that differ in nothing but payload share one.
    """

    group: IntArray
    link: IntArray
    share: FloatArray
    sent: FloatArray
    crossing: FloatArray


class Volumes(Protocol):
    """The seam between this analysis and what knows which algorithm a library takes."""

    def carried(self, exchange: CommOp) -> Carried:
        """What one collective carries in each group of its role."""


class Metered(CollectiveCost):
    """A cost of communication that also says how many bytes go where (`Volumes`)."""

    def __init__(
        self,
        fabric: Fabric,
        library: Library,
        groups: Mapping[str, ProcessGroups],
    ) -> None:
        super().__init__(fabric, library, groups)
        self._carried: dict[tuple[CommKey, tuple[str, ...], bytes], Carried] = {}

    def carried(self, exchange: CommOp) -> Carried:
        """What one collective carries in each group of its role, by the algorithms that the groups take."""
        groups = self._members(exchange.comm_group)
        if groups.shape[1] < 2 or not len(groups):
            return _nothing(len(groups))
        algorithms, taken = _algorithms(self._select_variant(exchange))
        key = comm_key(exchange), algorithms, taken.tobytes()
        if key not in self._carried:
            asked = self._tuner_for(exchange)
            flows = _flows(asked, exchange.collective, groups, algorithms, taken)
            self._carried[key] = _counted(flows, self._tuner.fabric, len(groups))
        return self._carried[key]


def _nothing(groups: int) -> Carried:
    none = np.zeros(0, np.int64)
    return Carried(none, none, np.zeros(0), np.zeros(groups), np.zeros((groups, len(LINK_KINDS))))


def _algorithms(choice: Selection) -> tuple[tuple[str, ...], IntArray]:
    """The algorithms that groups take, and which of them each takes: [groups]; protocols move the same bytes."""
    names = [choice.variants[number].algorithm for number in range(len(choice.variants))]
    used = tuple(dict.fromkeys(names[number] for number in np.unique(choice.variant_index).tolist()))
    number = np.array([used.index(name) if name in used else -1 for name in names], np.int64)
    return used, number[choice.variant_index]


def _flows(
    asked: Tuner, kind: CollectiveType, members: IntArray, algorithms: Sequence[str], taken: IntArray
) -> Iterator[tuple[IntArray, Flows]]:
    """Flows of groups that take an algorithm, and which groups these are. taken: [groups] the place of each one's."""
    for group_topology in asked.group_topologies(members):
        for number, name in enumerate(algorithms):
            own = taken[group_topology.group_indices] == number
            phases = asked.library.algorithm(name).phases(kind, group_topology) if own.any() else ()
            for part in (part for phase in phases for part in phase.flows if part.share > 0):
                taking = Flows(part.sources[own], part.targets[own], part.share, part.is_p2p)
                yield from (
                    (group_topology.group_indices[own], thread) for thread in spread_over_rings(taking, asked.fabric)
                )


def _counted(flows: Iterable[tuple[IntArray, Flows]], fabric: Fabric, groups: int) -> Carried:
    total, kind = _nothing(groups), fabric.links.kind
    columns: list[tuple[IntArray, IntArray, FloatArray]] = [(total.group, total.link, total.share)]
    for own, part in flows:
        sources, targets = part.sources.reshape(-1), part.targets.reshape(-1)
        links = fabric.find_paths(sources, targets).links
        flow, hop = np.nonzero(links >= 0)
        group, link = np.repeat(own, part.sources[0].size), links[flow, hop]
        columns.append((group[flow], link, np.full(len(flow), part.share)))
        total.sent[:] += part.share * np.bincount(group[sources != targets], minlength=groups)
        crosses = np.zeros((len(links), len(LINK_KINDS)), np.bool_)
        crosses[flow, kind[link]] = True
        for column in np.flatnonzero(crosses.any(axis=0)).tolist():
            total.crossing[:, column] += part.share * np.bincount(group[crosses[:, column]], minlength=groups)
    group, link, share = (np.concatenate(item) for item in zip(*columns, strict=True))
    return Carried(group, link, share, total.sent, total.crossing)
