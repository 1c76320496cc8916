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
from clustersim.program.task import BESIDE, Exchange
from clustersim.symmetry.link_load_matrix import Crossings


@dataclass(frozen=True, slots=True)
class Sharing:
    """demands: what exchanges ask of links; inside: of the exchanges of blocks, which groups share links with others.

    inside: [groups] by exchange; only of exchanges of which any group does. own: [groups] likewise, which of these
    share links with nobody while the data streams of their members are idle. others: what is on links beside.
    """

    demands: DemandCost
    inside: Mapping[Exchange, BoolArray]
    own: Mapping[Exchange, BoolArray]
    others: tuple[Other, ...] = ()

    def demand(self, exchange: Exchange) -> Demand:
        """What one collective asks of links in each group of its role."""
        return self.demands.demand(exchange)


@dataclass(frozen=True, slots=True)
class Alone:
    """Times exchanges (an `ExchangeCost`) as if groups that share links inside blocks had them for themselves.

    What sharing adds is found out by simulation; sources of durations let all groups of a role share their links.
    """

    cost: ExchangeCost
    sharing: Sharing
    _known: dict[Exchange, ExchangeTiming] = field(init=False, default_factory=dict)

    def exchange(self, exchange: Exchange) -> ExchangeTiming:
        """Time one collective in each group of its role."""
        known = self._known.get(exchange)
        if known is None:
            known = self._known[exchange] = self._timed(exchange)
        return known

    def _timed(self, exchange: Exchange) -> ExchangeTiming:
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
    crossed = loaded | _crossed_twice(program.exchanges, demands, len(owner))
    others = loaded | (crossed & _crossed_by_others(program, demands, owner))
    shares: dict[Exchange, BoolArray] = {}
    own: dict[Exchange, BoolArray] = {}
    for exchange in program.exchanges:
        if exchange not in program.exchanges_inside:
            continue
        crossings = demands.demand(exchange).crossings
        groups, meets = np.zeros((2, len(program.groups[exchange.group].members)), dtype=np.bool_)
        groups[crossings.group[crossed[crossings.link]]] = True
        meets[crossings.group[others[crossings.link]]] = True
        if groups.any():
            shares[exchange], own[exchange] = groups, groups & ~meets
    return Sharing(demands, shares, own, beside)


def _crossed_by_others(program: Program, demands: DemandCost, owner: IntArray) -> BoolArray:
    """For each link whether any but its owner's collectives, in blocks and beside them, crosses it."""
    every = (item for one in program.programs for item in one.issued)
    elsewhere = {exchange for stream, exchange in every if stream not in BESIDE}
    crossed = np.zeros(len(owner), dtype=np.bool_)
    owned = (owner >= 0) & (owner < program.ranks)
    asked = ((element.group, demands.demand(element).crossings, element in elsewhere) for element in program.exchanges)
    for role, crossings, beyond in dict.fromkeys(asked):  # exchanges that differ in payload alone cross the same
        mine = owned[crossings.link] & (program.rows[role][owner[crossings.link]] == crossings.group)
        crossed[crossings.link if beyond else crossings.link[~mine]] = True
    return crossed


def _crossed_twice(exchanges: Iterable[Exchange], demands: DemandCost, links: int) -> BoolArray:
    """For each link whether groups of several roles, or several groups of one, cross it."""
    by_role: dict[str, dict[Crossings, None]] = {}
    for exchange in exchanges:
        by_role.setdefault(exchange.group, {})[demands.demand(exchange).crossings] = None
    twice, once = np.zeros((2, links), dtype=np.bool_)
    for crossings in by_role.values():
        group = np.full(links, -1, dtype=np.int64)
        for crossing in crossings:
            before = group[crossing.link]
            group[crossing.link] = crossing.group  # of several groups on one link, one stays
            differs = (before >= 0) & (before != crossing.group) | (group[crossing.link] != crossing.group)
            twice[crossing.link[differs]] = True
        twice |= once & (group >= 0)
        once |= group >= 0
    return twice
