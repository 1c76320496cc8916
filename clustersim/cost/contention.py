"""Which exchanges must be simulated on a network that they share?

Collectives and messages outside blocks always are: they run beside whatever else a rank does. An exchange inside a
block is only where it crosses a link that any other group crosses too, of its own role or of another; where it has its
links for itself, it takes its own time and the block can stay one event.

Many share only ports of their own members, with these members' own collectives: tensor parallelism within nodes, with
gradients on the data stream. A rank's blocks do one exchange at a time; so while the data streams of its members are
idle such an exchange meets nobody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.cost.background_traffic import Other, loaded_by
from clustersim.cost.timing import Demand, DemandCost, ExchangeCost, ExchangeTiming
from clustersim.program.program import Program
from clustersim.program.task import OVERLAPPING_STREAMS, CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix


@dataclass(frozen=True, slots=True)
class Sharing:
    """demands: what exchanges ask of links; inside: of the exchanges of blocks, which groups share links with others.

    inside: [groups] by exchange; only of exchanges of which any group does. own: [groups] likewise, which of these
    share links with nobody while the data streams of their members are idle. others: what is on links beside.
    """

    demands: DemandCost
    inside: Mapping[CommOp, BoolArray]
    own: Mapping[CommOp, BoolArray]
    others: tuple[Other, ...] = ()

    def demand(self, exchange: CommOp) -> Demand:
        """What one collective asks of links in each group of its role."""
        return self.demands.demand(exchange)


@dataclass(frozen=True, slots=True)
class Alone:
    """Times exchanges (an `ExchangeCost`) as if groups that share links inside blocks had them for themselves.

    What sharing adds is found out by simulation; sources of durations let all groups of a role share their links.
    """

    cost: ExchangeCost
    sharing: Sharing
    _known: dict[CommOp, ExchangeTiming] = field(init=False, default_factory=dict)

    def exchange(self, exchange: CommOp) -> ExchangeTiming:
        """Time one collective in each group of its role."""
        known = self._known.get(exchange)
        if known is None:
            known = self._known[exchange] = self._timed(exchange)
        return known

    def _timed(self, exchange: CommOp) -> ExchangeTiming:
        timing, shares = self.cost.exchange(exchange), self.sharing.inside.get(exchange)
        if shares is None:
            return timing
        demand = self.sharing.demand(exchange)
        return replace(timing, seconds=np.where(shares, demand.latency + demand.transfer, timing.seconds))


def sharing(
    program: Program,
    demands: DemandCost,
    owner: IntArray,
    beside: tuple[Other, ...] = (),
    jobs: Iterable[IntArray] = (),
) -> Sharing:
    """Find out which exchanges of a program share links. owner: [links] the rank whose port a link is, -1: none's.

    beside: what loads links beside the program; jobs: links that other jobs cross, numbers of each.
    """
    loaded = np.isin(np.arange(len(owner)), np.concatenate([loaded_by(beside), *jobs]))
    crossed = loaded | _crossed_twice(program.comm_ops, demands, len(owner))
    others = loaded | (crossed & _crossed_by_others(program, demands, owner))
    shares: dict[CommOp, BoolArray] = {}
    own: dict[CommOp, BoolArray] = {}
    for exchange in program.comm_ops:
        if exchange not in program.segment_comm_ops:
            continue
        crossings = demands.demand(exchange).crossings
        groups, meets = np.zeros((2, len(program.groups[exchange.comm_group].members)), dtype=np.bool_)
        groups[crossings.group_index[crossed[crossings.link_index]]] = True
        meets[crossings.group_index[others[crossings.link_index]]] = True
        if groups.any():
            shares[exchange], own[exchange] = groups, groups & ~meets
    return Sharing(demands, shares, own, beside)


def _crossed_by_others(program: Program, demands: DemandCost, owner: IntArray) -> BoolArray:
    """For each link whether any but its owner's collectives, in blocks and beside them, crosses it."""
    every = (issued_comm_op for one in program.programs for issued_comm_op in one.issued_comm_ops)
    elsewhere = {exchange for stream, exchange in every if stream not in OVERLAPPING_STREAMS}
    crossed = np.zeros(len(owner), dtype=np.bool_)
    owned = (owner >= 0) & (owner < program.world_size)
    asked = (
        (comm_op.comm_group, demands.demand(comm_op).crossings, comm_op in elsewhere) for comm_op in program.comm_ops
    )
    for role, crossings, beyond in dict.fromkeys(asked):  # exchanges that differ in payload alone cross the same
        mine = owned[crossings.link_index] & (
            program.group_indices[role][owner[crossings.link_index]] == crossings.group_index
        )
        crossed[crossings.link_index if beyond else crossings.link_index[~mine]] = True
    return crossed


def _crossed_twice(exchanges: Iterable[CommOp], demands: DemandCost, links: int) -> BoolArray:
    """For each link whether groups of several roles, or several groups of one, cross it."""
    by_role: dict[str, dict[LinkLoadMatrix, None]] = {}
    for exchange in exchanges:
        by_role.setdefault(exchange.comm_group, {})[demands.demand(exchange).crossings] = None
    twice, once = np.zeros((2, links), dtype=np.bool_)
    for crossings in by_role.values():
        group = np.full(links, -1, dtype=np.int64)
        for crossing in crossings:
            before = group[crossing.link_index]
            group[crossing.link_index] = crossing.group_index  # of several groups on one link, one stays
            differs = (before >= 0) & (before != crossing.group_index) | (
                group[crossing.link_index] != crossing.group_index
            )
            twice[crossing.link_index[differs]] = True
        twice |= once & (group >= 0)
        once |= group >= 0
    return twice
