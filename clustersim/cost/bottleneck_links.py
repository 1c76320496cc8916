"""Which links can be bottlenecks?

What a switch sends to the tier above has reached it from below. So where its uplinks carry at least what
its downlinks deliver (a non-oversubscribed tier, traffic spread over it), the uplinks are never saturated
before the downlinks are, and max-min fair rates are those of a network without the uplinks: they are
redundant constraints. The same holds for the opposite direction. Such links are removed before anything is
simulated.

This is not taken from the fabric's description but checked against the loads of the groups: a link is
removed if each group that uses it keeps its neighbours of the tier below, weighted by bandwidth, busy for
as long or longer. With weights that sum to 1, a saturated link implies saturated links below on average.
Tiers are processed from the top down, so that a removed link depends on links that are kept, or that depend
on such in turn.

Reference: redundant constraints in linear programs, Karwan et al., Redundancy in Mathematical Programming
(1983); Leiserson, Fat-Trees, IEEE Trans. Comput. C-34(10), 1985.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray, SmallIntArray
from clustersim.cost.timing import LinkDemand, LinkDemandCost
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkEndpoints, LinkKind, LinkTable
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix

UPLINK_TIERS: Final = ((LinkKind.SPINE, LinkKind.LEAF), (LinkKind.LEAF, LinkKind.NIC))
"""Pairs (links of a switch to the tier above, links from the tier below), from the top down."""
HOST_LINK_TIERS: Final = ((LinkKind.PCIE, LinkKind.NIC),)
"""Pairs (links of a NIC to its host, links to the network): what comes through one leaves through the other."""
TOLERANCE: Final = 1e-9
"""Relative tolerance by which a link may be busy for longer than its lower neighbours."""


@dataclass(frozen=True, slots=True)
class BottleneckLinkDemands:
    """Link demands restricted to links that can be bottlenecks (a `LinkDemandCost`).

    bottleneck_loads: each load matrix reduced to such links.
    """

    full_demands: LinkDemandCost
    bottleneck_loads: Mapping[LinkLoadMatrix, LinkLoadMatrix]

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Link demand of one collective in each group of its communicator, on potential bottleneck links only."""
        demand = self.full_demands.link_demand(comm_op)
        return replace(demand, link_loads=self.bottleneck_loads[demand.link_loads])


def restrict_to_bottleneck_links(
    jobs: Iterable[tuple[Program, LinkDemandCost]], fabric: Fabric, loaded_links: Iterable[int]
) -> tuple[BottleneckLinkDemands, ...]:
    """Remove from the demands of jobs that share a fabric the links that cannot be a bottleneck for any of them.

    jobs: program and link demands of each; loaded_links: ids of links with background traffic.
    """
    job_demands = tuple(jobs)
    job_comm_ops = ((demands, comm_op) for program, demands in job_demands for comm_op in program.comm_ops)
    link_loads = dict.fromkeys(demands.link_demand(comm_op).link_loads for demands, comm_op in job_comm_ops)
    bottleneck_loads = _bottleneck_loads(tuple(link_loads), fabric, tuple(loaded_links))
    return tuple(BottleneckLinkDemands(demands, bottleneck_loads) for _, demands in job_demands)


@lru_cache(maxsize=4)
def _bottleneck_loads(
    link_loads: tuple[LinkLoadMatrix, ...], fabric: Fabric, loaded_links: tuple[int, ...]
) -> Mapping[LinkLoadMatrix, LinkLoadMatrix]:
    """Each load matrix reduced to potential bottleneck links.

    Cached, since the tuner returns the same load matrices for the same groups (they are compared by identity).
    """
    is_bottleneck = bottleneck_link_mask(link_loads, fabric.links, fabric.link_endpoints)
    is_bottleneck[list(loaded_links)] = (
        True  # uplinks whose redundancy depends on a lower tier that background traffic may saturate
    )
    kept_entries = ((matrix, is_bottleneck[matrix.link_index]) for matrix in link_loads)
    return {matrix: matrix if is_kept.all() else _select_entries(matrix, is_kept) for matrix, is_kept in kept_entries}


def bottleneck_link_mask(link_loads: Sequence[LinkLoadMatrix], links: LinkTable, ends: LinkEndpoints) -> BoolArray:
    """Mask of the links that can be a bottleneck under these loads: [links]."""
    is_bottleneck = np.zeros(len(links.kind), dtype=np.bool_)
    for matrix in link_loads:
        is_bottleneck[matrix.link_index] = True
    by_kind = [_loads_by_link_kind(matrix, links.kind) for matrix in link_loads]
    for upper, lower in (*UPLINK_TIERS, *HOST_LINK_TIERS):
        tier_loads = [(loads[upper], loads[lower]) for loads in by_kind if len(loads[upper].link_index)]
        for near_end, far_end in ((ends.source, ends.target), (ends.target, ends.source)) if tier_loads else ():
            lower_links = _LowerTierLinks.from_mask(
                is_bottleneck & (links.kind == LINK_KINDS.index(lower)), links.bandwidth, far_end, ends.vertex_count
            )
            is_redundant = (
                is_bottleneck & (links.kind == LINK_KINDS.index(upper)) & (lower_links.bandwidth[near_end] > 0)
            )
            for upper_loads, lower_loads in tier_loads:
                is_redundant[
                    lower_links.links_exceeding(
                        lower_loads, _select_entries(upper_loads, is_redundant[upper_loads.link_index]), near_end
                    )
                ] = False
            is_bottleneck &= ~is_redundant
    return is_bottleneck


def _loads_by_link_kind(link_loads: LinkLoadMatrix, kind_of_link: SmallIntArray) -> dict[LinkKind, LinkLoadMatrix]:
    """Loads on links of each kind that the rules mention."""
    entry_kind = kind_of_link[link_loads.link_index]
    kinds = dict.fromkeys(link_kind for pair in (*UPLINK_TIERS, *HOST_LINK_TIERS) for link_kind in pair)
    return {link_kind: _select_entries(link_loads, entry_kind == LINK_KINDS.index(link_kind)) for link_kind in kinds}


def _select_entries(link_loads: LinkLoadMatrix, mask: BoolArray) -> LinkLoadMatrix:
    return LinkLoadMatrix(link_loads.group_index[mask], link_loads.link_index[mask], link_loads.seconds_per_byte[mask])


@dataclass(frozen=True, slots=True)
class _LowerTierLinks:
    """Links of one tier, grouped by the switches at their upper ends.

    weight: [links] fraction of its switch's bandwidth that each provides, 0 for other links; switch: [links]
    the switch at the upper end; bandwidth: [vertices] sum over the links of each switch.
    """

    weight: FloatArray
    switch: IntArray
    bandwidth: FloatArray

    @classmethod
    def from_mask(cls, mask: BoolArray, bandwidth: FloatArray, switch: IntArray, vertices: int) -> "_LowerTierLinks":
        """Group the links selected by a mask."""
        selected_bandwidth = np.where(mask, bandwidth, 0.0)
        switch_bandwidth = np.bincount(switch, selected_bandwidth, minlength=vertices).astype(np.float64)
        return cls(
            np.divide(selected_bandwidth, switch_bandwidth[switch], out=np.zeros_like(selected_bandwidth), where=mask),
            switch,
            switch_bandwidth,
        )

    def links_exceeding(self, lower: LinkLoadMatrix, upper: LinkLoadMatrix, switch: IntArray) -> IntArray:
        """Ids of links above switches that some group keeps busier than the links below them; may repeat."""
        lower = _select_entries(lower, self.weight[lower.link_index] > 0.0)
        if not len(lower.link_index) or not len(upper.link_index):
            return upper.link_index
        keys = self._group_switch_keys(lower, self.switch)
        order = np.argsort(keys, kind="stable")
        first = np.flatnonzero(np.diff(keys[order], prepend=-1))
        busy = np.add.reduceat((lower.seconds_per_byte * self.weight[lower.link_index])[order], first)
        switch_keys, upper_keys = keys[order][first], self._group_switch_keys(upper, switch)
        index = np.minimum(np.searchsorted(switch_keys, upper_keys), len(switch_keys) - 1)
        limit = np.where(switch_keys[index] == upper_keys, busy[index], 0.0) * (1.0 + TOLERANCE)
        exceeded: IntArray = upper.link_index[upper.seconds_per_byte > limit]
        return exceeded

    def _group_switch_keys(self, link_loads: LinkLoadMatrix, switch: IntArray) -> IntArray:
        """One integer key per (group, switch at the end of a link that it crosses)."""
        return link_loads.group_index * len(self.bandwidth) + switch[link_loads.link_index]
