"""Which links can decide how fast anything goes?

What a switch sends to the tier above has come to it from below. So where its links upwards carry at least what those
below bring (a tier without oversubscription, traffic spread over it), they are never full before those below are, and
the fair rates are those of a network without them: max-min fairness depends on nothing but the loads that are possible.
The same holds of what a switch sends downwards. Links that cannot decide are left out before anything is simulated.

This is not taken from a fabric's description but checked in what groups ask of it: a link is left out if each group
that keeps it busy keeps its neighbours of the tier below, weighed by bandwidth, busy for as long or longer. Weights
that sum to 1 make a full link a mean of full links. From the top tier down, so that what is left out rests on links
that are kept, or that rest on such in turn.

Reference: redundant constraints in linear programs, Karwan et al., Redundancy in Mathematical Programming (1983);
Leiserson, Fat-Trees, IEEE Trans. Comput. C-34(10), 1985.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.cost.timing import Demand, DemandCost
from clustersim.hardware.topology import LINK_KINDS, Ends, Fabric, LinkKind, LinkTable
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix

UPWARDS: Final = ((LinkKind.SPINE, LinkKind.LEAF), (LinkKind.LEAF, LinkKind.NIC))
"""Links of a switch to the tier above, and those from the tier below; from the top down."""
INWARDS: Final = ((LinkKind.PCIE, LinkKind.NIC),)
"""Links of a NIC to its host, and to the network: what comes through one goes through the other."""
ROUNDING: Final = 1e-9
"""Parts of its time by which a link may be kept busy for longer than its neighbours."""


@dataclass(frozen=True, slots=True)
class BindingDemands:
    """What exchanges ask of the links that can decide (a `DemandCost`). parts: of all crossings those of such links."""

    demands: DemandCost
    parts: Mapping[LinkLoadMatrix, LinkLoadMatrix]

    def demand(self, exchange: CommOp) -> Demand:
        """What one collective asks of links in each group of its role."""
        demand = self.demands.demand(exchange)
        return replace(demand, crossings=self.parts[demand.crossings])


def binding_demands(
    asked: Iterable[tuple[Program, DemandCost]], fabric: Fabric, loaded: Iterable[int] = ()
) -> tuple[BindingDemands, ...]:
    """Leave out of the demands of programs that share a fabric the links that cannot decide for any of them.

    loaded: links that others load, too.
    """
    jobs = tuple(asked)
    every = ((demands, exchange) for program, demands in jobs for exchange in program.comm_ops)
    crossings = dict.fromkeys(demands.demand(exchange).crossings for demands, exchange in every)
    parts = _parts(tuple(crossings), fabric, tuple(loaded))
    return tuple(BindingDemands(demands, parts) for _, demands in jobs)


@lru_cache(maxsize=4)
def _parts(
    crossings: tuple[LinkLoadMatrix, ...], fabric: Fabric, loaded: tuple[int, ...]
) -> Mapping[LinkLoadMatrix, LinkLoadMatrix]:
    """Of each of some crossings the part on links that can decide.

    Remembered, since surveys of the same groups give the same crossings again (they are compared by identity).
    """
    kept = binding(crossings, fabric.links, fabric.ends)
    kept[list(loaded)] = True  # what rests on the tier below is full where others fill it
    parts = ((crossing, kept[crossing.link_index]) for crossing in crossings)
    return {
        link_load_matrix: link_load_matrix if own.all() else _some(link_load_matrix, own)
        for link_load_matrix, own in parts
    }


def binding(crossings: Sequence[LinkLoadMatrix], links: LinkTable, ends: Ends) -> BoolArray:
    """Whether each link can decide how fast anything goes that crosses links so: [links]."""
    kept = np.zeros(len(links.kind), dtype=np.bool_)
    for crossing in crossings:
        kept[crossing.link_index] = True
    by_kind = [_by_kind(link_load_matrix, links.kind) for link_load_matrix in crossings]
    for upper, lower in (*UPWARDS, *INWARDS):
        found = [(parts[upper], parts[lower]) for parts in by_kind if len(parts[upper].link_index)]
        for near, far in ((ends.source, ends.target), (ends.target, ends.source)) if found else ():
            below = _Below.of(kept & (links.kind == LINK_KINDS.index(lower)), links.bandwidth, far, ends.vertices)
            rests = kept & (links.kind == LINK_KINDS.index(upper)) & (below.bandwidth[near] > 0)
            for above, under in found:
                rests[below.exceeded(under, _some(above, rests[above.link_index]), near)] = False
            kept &= ~rests
    return kept


def _by_kind(crossings: LinkLoadMatrix, kind: IntArray) -> dict[LinkKind, LinkLoadMatrix]:
    """What crosses links of the kinds that there are rules for."""
    own = kind[crossings.link_index]
    kinds = dict.fromkeys(item for pair in (*UPWARDS, *INWARDS) for item in pair)
    return {link_kind: _some(crossings, own == LINK_KINDS.index(link_kind)) for link_kind in kinds}


def _some(crossings: LinkLoadMatrix, chosen: BoolArray) -> LinkLoadMatrix:
    return LinkLoadMatrix(
        crossings.group_index[chosen], crossings.link_index[chosen], crossings.seconds_per_byte[chosen]
    )


@dataclass(frozen=True, slots=True)
class _Below:
    """Links of one tier by the switches at their upper ends.

    weight: [links] the part of its switch's bandwidth that each has, 0 of other links; at: [links] that switch;
    bandwidth: [vertices] of all of them together.
    """

    weight: FloatArray
    at: IntArray
    bandwidth: FloatArray

    @classmethod
    def of(cls, chosen: BoolArray, bandwidth: FloatArray, at: IntArray, vertices: int) -> "_Below":
        """The chosen links."""
        own = np.where(chosen, bandwidth, 0.0)
        whole = np.bincount(at, own, minlength=vertices).astype(np.float64)
        return cls(np.divide(own, whole[at], out=np.zeros_like(own), where=chosen), at, whole)

    def exceeded(self, lower: LinkLoadMatrix, upper: LinkLoadMatrix, at: IntArray) -> IntArray:
        """Links above switches that some group keeps busier than the links below them: numbers, some maybe twice."""
        lower = _some(lower, self.weight[lower.link_index] > 0.0)
        if not len(lower.link_index) or not len(upper.link_index):
            return upper.link_index
        keys = self._keys(lower, self.at)
        order = np.argsort(keys, kind="stable")
        first = np.flatnonzero(np.diff(keys[order], prepend=-1))
        busy = np.add.reduceat((lower.seconds_per_byte * self.weight[lower.link_index])[order], first)
        there, sought = keys[order][first], self._keys(upper, at)
        place = np.minimum(np.searchsorted(there, sought), len(there) - 1)
        most = np.where(there[place] == sought, busy[place], 0.0) * (1.0 + ROUNDING)
        exceeded: IntArray = upper.link_index[upper.seconds_per_byte > most]
        return exceeded

    def _keys(self, crossings: LinkLoadMatrix, at: IntArray) -> IntArray:
        """A number for each pair of a group and the switch at an end of a link that it crosses."""
        return crossings.group_index * len(self.bandwidth) + at[crossings.link_index]
