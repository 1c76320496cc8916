"""Unit costs on links that can be contended: 2 bytes keep each link of the group's route busy for 2 s."""

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
    """routes: links per group of a communication group type; others use none. latency: before data moves."""

    unit: UnitCost
    link_count: int
    routes: Mapping[str, list[list[int]]]
    latency: float = 0.0
    _link_load_cache: dict[str, LinkLoadMatrix] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.unit.program

    @property
    def table(self) -> LinkTable:
        """All links are equal."""
        link_kinds = np.full(self.link_count, LINK_KINDS.index(LinkKind.NIC), np.int8)
        return LinkTable(link_kinds, np.ones(self.link_count), np.zeros(self.link_count), np.zeros_like(link_kinds))

    @property
    def contention(self) -> ContentionMap:
        """Which communication operations share links with others."""
        return map_contention(self.program, self, np.full(self.link_count, -1))

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        seconds = self.unit.comm_op_seconds(comm_op)
        link_loads = self._link_load_matrix(comm_op.comm_group)
        uses_links = np.isin(np.arange(len(seconds)), link_loads.group_index)
        latency = np.where(uses_links, self.latency, seconds)
        per_byte = self.unit.comm_op_seconds(replace(comm_op, payload=1.0))
        return LinkDemand(latency, np.where(uses_links, seconds, 0.0), per_byte, seconds, comm_op.payload, link_loads)

    def _link_load_matrix(self, comm_group: str) -> LinkLoadMatrix:
        if comm_group not in self._link_load_cache:
            group_routes = self.routes.get(comm_group, [])
            pairs = [(group_index, link) for group_index, links in enumerate(group_routes) for link in links]
            group, link = np.array(pairs, np.int64).reshape(-1, 2).T
            self._link_load_cache[comm_group] = LinkLoadMatrix(group, link, np.ones(len(pairs)))
        return self._link_load_cache[comm_group]
