"""Fluid network: flows on shared links at max-min fair rates.

A flow has seconds of work, which it does at rate 1 where its links are uncontended, or at its rate bound. It
keeps each of its links busy for a fraction of every second of work (utilization); no link is busy for more
than a second per second. Rates are max-min fair (`max_min_rates`) and constant between changes: when a flow starts
or ends, the remaining work of every flow in the same connected component of links and flows is updated and
their rates are solved again, once per instant. A flow whose rate does not change keeps its timer, so an
uncontended one takes exactly its modeled time.

Reference: Casanova et al., "Versatile, scalable, and accurate simulation of distributed applications and
platforms", J. Parallel Distrib. Comput. 74(10), 2014, section 3 (fluid models with lazy, partial updates).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.max_min import ResourceUsage, max_min_rates

MAX_CACHED_FLOWS: Final = 64
"""Flows of a component up to which its rates are cached; larger components seldom recur."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowDemand:
    """Demand of a flow. work_seconds: of work, above 0; fair_weight: for max-min fairness, above 0.

    link_indices: [links] distinct; utilization: [links] busy seconds of each link per second of work, above 0;
    link_ids: the same links as a tuple; runs_at_full_rate: no link limits the flow when it is uncontended.
    """

    work_seconds: Seconds
    fair_weight: float
    link_indices: IntArray
    utilization: FloatArray
    link_ids: tuple[int, ...] = field(init=False)
    runs_at_full_rate: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "link_ids", tuple(self.link_indices.tolist()))
        object.__setattr__(self, "runs_at_full_rate", bool((self.utilization <= 1.0).all()))


class Flow:
    """A flow; `remaining` seconds of work at time `updated`. done: its completion.

    timer: the only event that may end it; rate_bound: its highest rate; is_active: it has begun and not ended.
    """

    __slots__ = ("demand", "done", "is_active", "rate", "rate_bound", "remaining", "timer", "updated")

    timer: simpy.Event

    def __init__(self, demand: FlowDemand, environment: SimEnvironment, updated: Seconds) -> None:
        self.demand, self.done = demand, simpy.Event(environment)
        self.remaining, self.updated = demand.work_seconds, updated
        self.rate, self.rate_bound, self.is_active = 0.0, 1.0, False


class FluidNetwork:
    """Links 0 ... link_count-1 and the flows that load them."""

    def __init__(self, environment: SimEnvironment, link_count: int) -> None:
        self._environment = environment
        self._capacity = np.ones(link_count)
        self._link_flows: defaultdict[int, dict[Flow, None]] = defaultdict(dict)
        self._dirty_links: dict[int, None] = {}
        self._reservations: dict[int, Callable[[], None]] = {}
        self._rate_cache: dict[tuple[tuple[FlowDemand, ...], tuple[float, ...]], list[float]] = {}

    def create_flow(self, demand: FlowDemand) -> Flow:
        """A flow that has not begun."""
        return Flow(demand, self._environment, self._environment.now)

    def start_flow(self, demand: FlowDemand) -> simpy.Event:
        """Begin a new flow; return its completion."""
        flow = self.create_flow(demand)
        self.begin_flow(flow)
        return flow.done

    def set_rate_bound(self, flow: Flow, rate: float) -> None:
        """Bound the rate of a flow from now on, or once it begins."""
        flow.rate_bound = rate
        if flow.is_active:
            self._mark_dirty(flow.demand.link_ids)

    def begin_flow(self, flow: Flow) -> None:
        """Begin a flow."""
        demand, flow.updated, flow.is_active = flow.demand, self._environment.now, True
        if self._reservations:
            for on_conflict in dict.fromkeys(
                self._reservations[link] for link in demand.link_ids if link in self._reservations
            ):
                on_conflict()
        link_flows = [self._link_flows[link] for link in demand.link_ids]
        is_uncontended = demand.runs_at_full_rate and not any(link_flows)
        for flows in link_flows:
            flows[flow] = None
        if is_uncontended:
            self._set_rate(flow, flow.rate_bound)
        else:
            self._mark_dirty(demand.link_ids)

    def are_idle(self, links: Iterable[int]) -> bool:
        """Whether nobody loads or has reserved any of these links."""
        return not any(self._link_flows.get(link) or link in self._reservations for link in links)

    def reserve(self, links: Iterable[int], on_conflict: Callable[[], None]) -> None:
        """Reserve idle links: on_conflict is called before anybody else loads one of them."""
        self._reservations.update(dict.fromkeys(links, on_conflict))

    def release(self, links: Iterable[int], on_conflict: Callable[[], None]) -> None:
        """Release links, as far as they are reserved with this callback."""
        for link in links:
            if self._reservations.get(link) == on_conflict:
                del self._reservations[link]

    def resume_flow(self, demand: FlowDemand, since: Seconds) -> Flow:
        """An active flow that began at time `updated`, on links that were uncontended until now."""
        flow = Flow(demand, self._environment, since)
        flow.rate, flow.is_active = flow.rate_bound, True
        for link in demand.link_ids:
            self._link_flows[link][flow] = None
        self._set_timer(flow, self._environment.event_at(since + flow.remaining / flow.rate))
        return flow

    def _set_rate(self, flow: Flow, rate: float) -> None:
        """Let a flow continue at this rate from now on."""
        now = self._environment.now
        flow.remaining = max(flow.remaining - (now - flow.updated) * flow.rate, 0.0)
        flow.updated, flow.rate = now, rate
        self._set_timer(flow, self._environment.event_after(flow.remaining / rate))

    def _set_timer(self, flow: Flow, timer: simpy.Event) -> None:
        """End a flow when this event is triggered, and by no other."""
        flow.timer = timer
        timer.callbacks.append(lambda event: self._finish_flow(flow, event))

    def _finish_flow(self, flow: Flow, timer: simpy.Event) -> None:
        """End a flow, unless its rate has changed since this timer was set."""
        if timer is not flow.timer:
            return
        loaded_links: list[int] = []
        for link in flow.demand.link_ids:
            flows = self._link_flows[link]
            del flows[flow]
            if flows:
                loaded_links.append(link)
        flow.is_active = False
        flow.done.succeed()
        self._mark_dirty(loaded_links)

    def _mark_dirty(self, links: Sequence[int]) -> None:
        """Solve the rates in the components of these links again, at the end of this instant."""
        if not links:
            return
        is_scheduled = bool(self._dirty_links)
        self._dirty_links.update(dict.fromkeys(links))
        if not is_scheduled:
            self._environment.end_of_instant().callbacks.append(self._update_rates)

    def _update_rates(self, _: simpy.Event) -> None:
        dirty_links, self._dirty_links = self._dirty_links, {}
        seen: set[int] = set()
        for link in dirty_links:
            if link not in seen and self._link_flows[link]:
                self._update_component(self._find_component(link, seen))

    def _find_component(self, link: int, seen: set[int]) -> list[Flow]:
        """All flows that are connected with a link through others; adds their links to `seen`."""
        component: dict[Flow, None] = {}
        pending_links = [link]
        seen.add(link)
        while pending_links:
            for flow in self._link_flows[pending_links.pop()]:
                if flow not in component:
                    component[flow] = None
                    new_links = [link_id for link_id in flow.demand.link_ids if link_id not in seen]
                    seen.update(new_links)
                    pending_links += new_links
        return list(component)

    def _update_component(self, flows: list[Flow]) -> None:
        """Give each flow of a connected component its fair rate."""
        for flow, rate in zip(flows, self._fair_rates(flows), strict=True):
            if rate != flow.rate:
                self._set_rate(flow, rate)

    def _fair_rates(self, flows: list[Flow]) -> list[float]:
        """Fair rates of a connected component; cached, as the same few demands recur while microbatches pass."""
        demands, bounds = tuple([flow.demand for flow in flows]), tuple([flow.rate_bound for flow in flows])
        if len(demands) == 1 and demands[0].runs_at_full_rate:
            return [bounds[0]]
        if len(demands) > MAX_CACHED_FLOWS:
            return self._solve_max_min(demands, bounds)
        rates = self._rate_cache.get((demands, bounds))
        if rates is None:
            rates = self._rate_cache[demands, bounds] = self._solve_max_min(demands, bounds)
        return rates

    def _solve_max_min(self, demands: Sequence[FlowDemand], bounds: Sequence[float]) -> list[float]:
        usage = ResourceUsage(
            resource=np.concatenate([demand.link_indices for demand in demands]),
            flow=np.repeat(np.arange(len(demands)), [len(demand.link_indices) for demand in demands]),
            weight=np.concatenate([demand.utilization for demand in demands]),
        )
        fair_weight = np.array([demand.fair_weight for demand in demands])
        rates: list[float] = max_min_rates(usage, self._capacity, np.array(bounds), fair_weight).tolist()
        return rates
