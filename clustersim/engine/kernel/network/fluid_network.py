"""Fluid network: flows on shared links at max-min fair rates.

A flow has seconds of work, which it does at rate 1 where its links are uncontended, or at its rate bound. It
keeps each of its links busy for a fraction of every second of work (utilization); no link is busy for more
than a second per second. Rates are max-min fair (`max_min_rates`) and constant between changes: when a flow starts
or ends, the remaining work of every flow in the same connected component of links and flows is updated and
their rates are solved again, once per instant. A flow whose rate does not change keeps its timer, so an
uncontended one takes exactly its modeled time. Updates are lazy and partial, as SimGrid's (`fluid_action`).

A link that all of its flows at rate 1 would not keep busier than a second per second limits none of them, as no rate
is higher. So it connects no flows, and is left out of the solution: only links that are oversubscribed count.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.fluid_action import FluidAction
from clustersim.engine.kernel.network.max_min import ResourceUsage, max_min_rates

MAX_CACHED_FLOWS: Final = 64
"""Flows of a component up to which its rates are cached; larger components seldom recur."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowDemand:
    """Demand of a flow. work_seconds: of work, above 0; fair_weight: for max-min fairness, above 0.

    link_indices: [links] distinct; utilization: [links] busy seconds of each link per second of work, above 0;
    link_ids, link_loads: the links as a tuple, and with their utilization; runs_at_full_rate: no link limits the flow
    when it is uncontended.
    """

    work_seconds: Seconds
    fair_weight: float
    link_indices: IntArray
    utilization: FloatArray
    link_ids: tuple[int, ...] = field(init=False)
    link_loads: tuple[tuple[int, float], ...] = field(init=False)
    runs_at_full_rate: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "link_ids", tuple(self.link_indices.tolist()))
        object.__setattr__(self, "link_loads", tuple(zip(self.link_ids, self.utilization.tolist(), strict=True)))
        object.__setattr__(self, "runs_at_full_rate", bool((self.utilization <= 1.0).all()))


class LinkReserver(Protocol):
    """Interface of the network to who has reserved idle links."""

    def on_conflict(self) -> None:
        """Somebody else is about to load one of the links."""


class Flow(FluidAction):
    """A flow on the links of a demand. is_active: it has begun and not ended."""

    __slots__ = ("_network", "demand", "is_active")

    def __init__(self, network: "FluidNetwork", demand: FlowDemand) -> None:
        super().__init__(network.environment, demand.work_seconds)
        self._network, self.demand, self.is_active = network, demand, False
        self.done.callbacks.append(partial(network.end_flow, self))

    def set_rate_bound(self, rate: float) -> None:
        """Bound the rate from now on, or once it begins; the network decides on the rate."""
        self.rate_bound = rate
        if self.is_active:
            self._network.mark_dirty((self,))


class FluidNetwork:
    """Links 0 ... link_count-1 and the flows that load them, with the utilization of each."""

    def __init__(self, environment: SimEnvironment, link_count: int) -> None:
        self.environment = environment
        self._capacity = np.ones(link_count)
        self._link_flows: defaultdict[int, dict[Flow, float]] = defaultdict(dict)
        self._oversubscribed: set[int] = set()
        self._dirty_flows: dict[Flow, None] = {}
        self._reservations: dict[int, LinkReserver] = {}
        self._rate_cache: dict[tuple[tuple[FlowDemand, ...], tuple[float, ...]], list[float]] = {}

    def start_flow(self, demand: FlowDemand) -> simpy.Event:
        """Begin a new flow; return its completion."""
        flow = Flow(self, demand)
        self.begin_flow(flow)
        return flow.done

    def begin_flow(self, flow: Flow) -> None:
        """Begin a flow."""
        demand, flow.is_active = flow.demand, True
        if not self._reservations.keys().isdisjoint(demand.link_ids):
            for reserver in dict.fromkeys(map(self._reservations.get, demand.link_ids)):
                if reserver is not None:
                    reserver.on_conflict()
        self._load_links(flow)
        if self._oversubscribed.isdisjoint(demand.link_ids):
            flow.set_rate(flow.rate_bound)
        else:
            self.mark_dirty((flow,))

    def _load_links(self, flow: Flow) -> None:
        for link, utilization in flow.demand.link_loads:
            flows = self._link_flows[link]
            flows[flow] = utilization
            if sum(flows.values()) > 1.0:
                self._oversubscribed.add(link)

    def are_idle(self, links: Collection[int]) -> bool:
        """Whether nobody loads or has reserved any of these links."""
        return self._reservations.keys().isdisjoint(links) and not any(map(self._link_flows.get, links))

    def reserve(self, links: Collection[int], reserver: LinkReserver) -> None:
        """Reserve idle links: the reserver is notified before anybody else loads one of them."""
        self._reservations.update(dict.fromkeys(links, reserver))

    def release(self, links: Collection[int], reserver: LinkReserver) -> None:
        """Release links, as far as they are reserved by this one."""
        for link in links:
            if self._reservations.get(link) is reserver:
                del self._reservations[link]

    def resume_flow(self, demand: FlowDemand, since: Seconds) -> Flow:
        """An active flow that began at time `since`, on links that were uncontended until now."""
        flow = Flow(self, demand)
        flow.last_update, flow.rate, flow.is_active = since, flow.rate_bound, True
        self._load_links(flow)
        flow.complete_with(self.environment.event_at(since + flow.remaining / flow.rate))
        return flow

    def end_flow(self, flow: Flow, _: simpy.Event) -> None:
        """Take a flow that has ended off its links."""
        released_flows: dict[Flow, float] = {}
        for link in flow.demand.link_ids:
            flows = self._link_flows[link]
            del flows[flow]
            if link in self._oversubscribed:
                released_flows |= flows
                if sum(flows.values()) <= 1.0:
                    self._oversubscribed.remove(link)
        flow.is_active = False
        self.mark_dirty(released_flows)

    def mark_dirty(self, flows: Collection[Flow]) -> None:
        """Solve the rates in the components of these flows again, at the end of this instant."""
        if not flows:
            return
        is_scheduled = bool(self._dirty_flows)
        self._dirty_flows.update(dict.fromkeys(flows))
        if not is_scheduled:
            self.environment.call_at_end_of_instant(self._update_rates)

    def _update_rates(self) -> None:
        dirty_flows, self._dirty_flows = self._dirty_flows, {}
        seen: set[Flow] = set()
        for flow in dirty_flows:
            if not flow.is_active or flow in seen:
                continue
            if self._oversubscribed.isdisjoint(flow.demand.link_ids):
                _change_rate(flow, flow.rate_bound)
            else:
                component = self._find_component(flow)
                seen.update(component)
                for member, rate in zip(component, self._fair_rates(component), strict=True):
                    _change_rate(member, rate)

    def _find_component(self, flow: Flow) -> dict[Flow, None]:
        """All flows that are connected with a flow through oversubscribed links and others."""
        component, pending_flows, seen_links = {flow: None}, [flow], set[int]()
        while pending_flows:
            for link in self._oversubscribed.intersection(pending_flows.pop().demand.link_ids) - seen_links:
                seen_links.add(link)
                joined = [other for other in self._link_flows[link] if other not in component]
                pending_flows += joined
                component.update(dict.fromkeys(joined))
        return component

    def _fair_rates(self, flows: Collection[Flow]) -> list[float]:
        """Fair rates of a connected component; cached, as the same few demands recur while microbatches pass."""
        demands, bounds = tuple([flow.demand for flow in flows]), tuple([flow.rate_bound for flow in flows])
        if len(demands) > MAX_CACHED_FLOWS:
            return self._solve_max_min(demands, bounds)
        rates = self._rate_cache.get((demands, bounds))
        if rates is None:
            rates = self._rate_cache[demands, bounds] = self._solve_max_min(demands, bounds)
        return rates

    def _solve_max_min(self, demands: Sequence[FlowDemand], bounds: Sequence[float]) -> list[float]:
        """Rates of a connected component, from the links that it oversubscribes."""
        load: dict[int, float] = {}
        for demand in demands:
            for link, utilization in demand.link_loads:
                load[link] = load.get(link, 0.0) + utilization
        usage = [
            (link, flow, utilization)
            for flow, demand in enumerate(demands)
            for link, utilization in demand.link_loads
            if load[link] > 1.0
        ]
        if not usage:  # flows met on a link that is full, but for rounding
            return list(bounds)
        resource, flows, weight = zip(*usage, strict=True)
        fair_weight = np.array([demand.fair_weight for demand in demands])
        rates: list[float] = max_min_rates(
            ResourceUsage(np.array(resource), np.array(flows), np.array(weight)),
            self._capacity, np.array(bounds), fair_weight,
        ).tolist()  # fmt: skip
        return rates


def _change_rate(flow: Flow, rate: float) -> None:
    """Continue at this rate; at the same one a flow keeps its timer."""
    if rate != flow.rate:
        flow.set_rate(rate)
