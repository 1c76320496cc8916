"""When do activities that share links end?

An activity has seconds of work, which it does at full speed where it has its links for itself, or at the part of it to
which it is limited. Each of its links it keeps busy for a part of every second of work; no link is busy for more than a
second per second. Speeds are max-min fair (`max_min_rates`) and constant between changes: when an activity comes or goes,
what is left of every activity in the same connected part of links and activities is brought up to date and their speeds
are found again, once per instant. An activity whose speed stays the same keeps its end, so one that nobody disturbs
takes exactly its own time.

Reference: Casanova et al., "Versatile, scalable, and accurate simulation of distributed applications and platforms",
J. Parallel Distrib. Comput. 74(10), 2014, section 3 (fluid models with lazy, partial updates).
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
"""Loads of a connected part up to which their speeds are remembered; larger parts seldom recur."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowDemand:
    """What an activity asks for. seconds: of work, above 0; share: by which links are divided, above 0.

    links: [links] numbers, each once; busy: [links] seconds that each is busy per second of work, above 0.
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
    """One load under way; `left` seconds of work at time `since`. done: it has ended.

    due: the timer whose end counts; most: the speed to which it is limited; under_way: it has begun.
    """

    __slots__ = ("done", "timer", "remaining", "demand", "rate_bound", "updated", "rate", "is_active")

    timer: simpy.Event

    def __init__(self, demand: FlowDemand, environment: SimEnvironment, updated: Seconds) -> None:
        self.demand, self.done = demand, simpy.Event(environment)
        self.remaining, self.updated = demand.work_seconds, updated
        self.rate, self.rate_bound, self.is_active = 0.0, 1.0, False


class FluidNetwork:
    """Links 0 ... links-1 and the activities that load them now."""

    def __init__(self, environment: SimEnvironment, link_count: int) -> None:
        self._environment = environment
        self._capacity = np.ones(link_count)
        self._link_flows: defaultdict[int, dict[Flow, None]] = defaultdict(dict)
        self._dirty_links: dict[int, None] = {}
        self._reservations: dict[int, Callable[[], None]] = {}
        self._rate_cache: dict[tuple[tuple[FlowDemand, ...], tuple[float, ...]], list[float]] = {}

    def create_flow(self, demand: FlowDemand) -> Flow:
        """An activity that is yet to begin."""
        return Flow(demand, self._environment, self._environment.now)

    def start_flow(self, demand: FlowDemand) -> simpy.Event:
        """Begin an activity; return its end."""
        flow = self.create_flow(demand)
        self.begin_flow(flow)
        return flow.done

    def set_rate_bound(self, flow: Flow, rate: float) -> None:
        """Let an activity go at this speed at most from now, or once it begins."""
        flow.rate_bound = rate
        if flow.is_active:
            self._mark_dirty(flow.demand.link_ids)

    def begin_flow(self, flow: Flow) -> None:
        """Begin an activity."""
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
        """Whether nobody loads these links or keeps any."""
        return not any(self._link_flows.get(link) or link in self._reservations for link in links)

    def reserve(self, links: Iterable[int], on_conflict: Callable[[], None]) -> None:
        """Be told before anybody loads one of these links, which are free."""
        self._reservations.update(dict.fromkeys(links, on_conflict))

    def release(self, links: Iterable[int], on_conflict: Callable[[], None]) -> None:
        """Keep links no longer, those of them that are kept."""
        for link in links:
            if self._reservations.get(link) == on_conflict:
                del self._reservations[link]

    def resume_flow(self, demand: FlowDemand, since: Seconds) -> Flow:
        """An activity that has had its links for itself since a time, and has them until now."""
        flow = Flow(demand, self._environment, since)
        flow.rate, flow.is_active = flow.rate_bound, True
        for link in demand.link_ids:
            self._link_flows[link][flow] = None
        self._set_timer(flow, self._environment.event_at(since + flow.remaining / flow.rate))
        return flow

    def _set_rate(self, flow: Flow, rate: float) -> None:
        """Let an activity go on at this speed from now."""
        now = self._environment.now
        flow.remaining = max(flow.remaining - (now - flow.updated) * flow.rate, 0.0)
        flow.updated, flow.rate = now, rate
        self._set_timer(flow, self._environment.event_after(flow.remaining / rate))

    def _set_timer(self, flow: Flow, timer: simpy.Event) -> None:
        """End an activity when an event happens, and at no other."""
        flow.timer = timer
        timer.callbacks.append(lambda event: self._finish_flow(flow, event))

    def _finish_flow(self, flow: Flow, timer: simpy.Event) -> None:
        """End an activity, unless its speed has changed since this timer was set."""
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
        """Find speeds again, at the end of this instant, in the parts of these links."""
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
        """All activities that are connected with a link through others; notes their links as seen."""
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
        """Give each activity of a connected part its fair speed."""
        for flow, rate in zip(flows, self._fair_rates(flows), strict=True):
            if rate != flow.rate:
                self._set_rate(flow, rate)

    def _fair_rates(self, flows: list[Flow]) -> list[float]:
        """Fair speeds of a connected part; the same few loads meet again and again while microbatches pass."""
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
