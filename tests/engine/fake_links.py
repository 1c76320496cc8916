"""Unit costs on links that can be shared: an exchange of 2 bytes keeps each link of its group's route busy for 2 s."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from clustersim.cost.contention import ContentionMap, map_contention
from clustersim.cost.timing import LinkDemand
from clustersim.hardware.topology import LINK_KINDS, LinkKind, LinkTable
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix
from tests.engine.fake_costs import UnitCost


@dataclass(frozen=True)
class LinkCost:
    """routes: links of every group of a role; groups of other roles cross none. latency: before anything moves."""

    unit: UnitCost
    links: int
    routes: Mapping[str, list[list[int]]]
    latency: float = 0.0
    _crossings: dict[str, LinkLoadMatrix] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.unit.program

    @property
    def table(self) -> LinkTable:
        """All links are equal."""
        kind = np.full(self.links, LINK_KINDS.index(LinkKind.NIC))
        return LinkTable(kind, np.ones(self.links), np.zeros(self.links), np.zeros_like(kind))

    @property
    def sharing(self) -> ContentionMap:
        """Which exchanges meet others on links."""
        return map_contention(self.program, self, np.full(self.links, -1))

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        seconds = self.unit.seconds(comm_op)
        crossings = self._of(comm_op.comm_group)
        moves = np.isin(np.arange(len(seconds)), crossings.group_index)
        latency = np.where(moves, self.latency, seconds)
        per_byte = self.unit.seconds(replace(comm_op, payload=1.0))
        return LinkDemand(latency, np.where(moves, seconds, 0.0), per_byte, seconds, comm_op.payload, crossings)

    def _of(self, role: str) -> LinkLoadMatrix:
        if role not in self._crossings:
            rows = self.routes.get(role, [])
            pairs = [(row, link) for row, links in enumerate(rows) for link in links]
            group, link = np.array(pairs, np.int64).reshape(-1, 2).T
            self._crossings[role] = LinkLoadMatrix(group, link, np.ones(len(pairs)))
        return self._crossings[role]
