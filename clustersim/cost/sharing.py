"""Which exchanges must be simulated on a network that they share?

Collectives and messages outside blocks always are: they run beside whatever else a rank does. An exchange inside a
block is only where it crosses a link that any other group crosses too, of its own role or of another; where it has its
links for itself, it takes its own time and the block can stay one event.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from clustersim.arrays import BoolArray
from clustersim.cost.timing import Demand, DemandCost, ExchangeCost, ExchangeTiming
from clustersim.program.program import Program
from clustersim.program.task import Exchange
from clustersim.program.traffic import Crossings


@dataclass(frozen=True, slots=True)
class Sharing:
    """demands: what exchanges ask of links; inside: of the exchanges of blocks, which groups share links with others.

    inside: [groups] by exchange; only of exchanges of which any group does.
    """

    demands: DemandCost
    inside: Mapping[Exchange, BoolArray]

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

    def exchange(self, exchange: Exchange) -> ExchangeTiming:
        """Time one collective in each group of its role."""
        timing, shares = self.cost.exchange(exchange), self.sharing.inside.get(exchange)
        if shares is None:
            return timing
        demand = self.sharing.demand(exchange)
        return replace(timing, seconds=np.where(shares, demand.latency + demand.transfer, timing.seconds))


def sharing(program: Program, demands: DemandCost, links: int) -> Sharing:
    """Find out which exchanges of a program share any of so many links."""
    crossed = _crossed_twice(program.exchanges, demands, links)
    shares: dict[Exchange, BoolArray] = {}
    for exchange in program.exchanges:
        if exchange not in program.exchanges_inside:
            continue
        crossings = demands.demand(exchange).crossings
        groups = np.zeros(len(program.groups[exchange.group].members), dtype=np.bool_)
        groups[crossings.group[crossed[crossings.link]]] = True
        if groups.any():
            shares[exchange] = groups
    return Sharing(demands, shares)


def _crossed_twice(exchanges: Iterable[Exchange], demands: DemandCost, links: int) -> BoolArray:
    """For each link whether groups of several roles, or several groups of one, cross it."""
    by_role: dict[str, dict[Crossings, None]] = {}
    for exchange in exchanges:
        by_role.setdefault(exchange.group, {})[demands.demand(exchange).crossings] = None
    twice, once = np.zeros((2, links), dtype=np.bool_)
    for crossings in by_role.values():
        group = np.full(links, -1, dtype=np.int64)
        for each in crossings:
            before = group[each.link]
            group[each.link] = each.group  # of several groups on one link, one stays
            differs = (before >= 0) & (before != each.group) | (group[each.link] != each.group)
            twice[each.link[differs]] = True
        twice |= once & (group >= 0)
        once |= group >= 0
    return twice
