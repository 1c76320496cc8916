"""How long do links between sites hold a step up at least?

Two lower bounds, without simulation:

- **Pipelines across sites.** The order of passes with their times, and the time of each message that crosses, alone on
  the links: the longest path through it. Steady states of interleaved schedules wait for such messages again and again,
  and without overlapped sends the sender waits, too. Besides, all messages share the links out of a site.
- **Replicas across sites.** What the links out of a site carry at best: of an all-reduce all gradients of a site once,
  of a reduce-scatter those of the shards elsewhere, of an all-gather the site's own shards. Reductions begin with the
  first backward that completes gradients, so the step lasts from then on as long as the links are busy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from clustersim.build import pass_orders, schedule_order
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.interning import IdentityKey
from clustersim.common.lru import LruCache, unit_size
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.site_links import route_latency
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import find_site_ids
from clustersim.memory.ledger import PassOrder, PassType
from clustersim.parallel.data_parallel_strategy import DdpStrategy, Zero1
from clustersim.parallel.mesh import DP_GROUP, DP_REPLICATE_GROUP, DP_SHARD_GROUP, PIPELINE
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.program.action import BACKWARD, FORWARD, Action, ActionKind, PipelineOrder, ScheduleEntry
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.settings import Contention
from clustersim.schedules.validation import OrderCosts, run_order

_PATHS: Final = LruCache[Seconds](1024, size=unit_size)
_COUNTS: Final = LruCache[list[tuple[tuple[PassType, ...], IntArray]]](1024, size=unit_size)
_OUTWARD: Final = LruCache[list[FloatArray]](1024, size=unit_size)
_DENSE: Final = (DP_GROUP.name, DP_SHARD_GROUP.name, DP_REPLICATE_GROUP.name)


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """[stages] least seconds of a forward and of a full backward of a microbatch."""

    forward: FloatArray
    backward: FloatArray

    def seconds_of(self, stage: int, kind: ActionKind) -> Seconds:
        """Of a pass through a stage."""
        return float((self.forward if kind is FORWARD else self.backward)[stage])


def site_lower_bound(resolved: ResolvedScenario, plan: Plan, passes: PassSeconds) -> Seconds:
    """Lower bound of a step over several sites; 0 on a single one, or where nothing is known."""
    cluster, machine = resolved.cluster, resolved.cluster.sites
    if machine is None or not resolved.effective_schedule.has_whole_backwards:
        return 0.0
    site_ids = find_site_ids(cluster.fabric, np.arange(plan.layout.world_size))
    if site_ids is None or len(np.unique(site_ids)) < 2:
        return 0.0
    ranks = _pipeline_rank_sites(plan, site_ids, len(machine.sites))
    messages = _message_seconds(plan, machine, ranks > 0)
    ends = [0.0]
    if messages.any():
        ends.append(_pipeline_bound(resolved, plan, passes, messages))
    if _shares_links(resolved):
        ends += _crossing_seconds(plan, machine, ranks > 0)
    if _shares_links(resolved) and isinstance(plan.layout.data, (DdpStrategy, Zero1)) and not plan.layout.mirrored:
        outward = _cached_outward_seconds(plan, machine, ranks)
        ready = np.array(list(_reduction_starts(resolved, plan, passes)) if outward else ())
        ends += [_busy_until(ready, seconds) for seconds in outward]
    return max(ends)


def _shares_links(resolved: ResolvedScenario) -> bool:
    """Whether what is sent at once shares the links, and how long it takes is modelled."""
    record = resolved.cost.record
    return resolved.cost.network is Contention.SHARED and (record is None or not record.collectives)


def _pipeline_rank_sites(plan: Plan, site_ids: IntArray, site_count: int) -> IntArray:
    """[pipeline ranks, sites] GPUs of each in each."""
    counts = np.zeros((plan.layout.pp, site_count), np.int64)
    np.add.at(counts, (plan.layout.rank_coordinates(PIPELINE), site_ids), 1)
    return counts


def _message_seconds(plan: Plan, machine: SitesFabric, is_in_site: BoolArray) -> FloatArray:
    """[stages] least time of a message from each stage to the next, between sites; 0 inside of one."""
    rank_of = plan.placement.stage_ranks
    return np.array(
        [
            _least_seconds(machine, is_in_site[source], is_in_site[target], plan.sent_bytes(stage))
            for stage, (source, target) in enumerate(zip(rank_of, [*rank_of[1:], rank_of[-1]], strict=True))
        ]
    )


def _least_seconds(machine: SitesFabric, sources: BoolArray, targets: BoolArray, size: Bytes) -> Seconds:
    """Of one message, alone on the shortest and the widest way."""
    if (sources & targets).any():
        return 0.0
    routes = [
        machine.routes[source, target]
        for source in np.flatnonzero(sources).tolist()
        for target in np.flatnonzero(targets).tolist()
    ]
    latency = min(route_latency(route, machine.site_links) for route in routes)
    return latency + size / max(min(machine.site_links[link].bandwidth for link in route) for route in routes)


def _pipeline_bound(resolved: ResolvedScenario, plan: Plan, passes: PassSeconds, messages: FloatArray) -> Seconds:
    """The longest path of a layout; cached, as data-parallel strategies share it."""
    schedule, blocks = resolved.effective_schedule, not plan.layout.overlap_p2p_comm
    times = passes.forward.tobytes(), passes.backward.tobytes(), messages.tobytes()
    key: tuple[Any, ...] = (schedule, plan.placement, plan.layout.pp, plan.microbatches, blocks, *times)
    return _PATHS.get_or_compute(
        key, lambda: longest_path(schedule_order(resolved, plan), passes, messages, blocks=blocks)
    )


def _crossing_seconds(plan: Plan, machine: SitesFabric, is_in_site: BoolArray) -> Iterator[Seconds]:
    """For each site, how long the links out of it carry activations and their gradients."""
    rank_of, replicas = plan.placement.stage_ranks, plan.layout.dp * plan.layout.cp * plan.microbatches
    for site in range(len(machine.sites)):
        capacity = sum(link.bandwidth for link in machine.site_links if link.source == site and link.is_alive)
        only_here = [bool(sites[site]) and int(sites.sum()) == 1 for sites in is_in_site]
        sent = sum(
            plan.sent_bytes(stage)
            for stage, (first, second) in enumerate(pairwise(rank_of))
            if only_here[first] != only_here[second] and not (is_in_site[first] & is_in_site[second]).any()
        )
        yield sent * replicas / capacity if capacity else 0.0


def longest_path(order: PipelineOrder, passes: PassSeconds, messages: FloatArray, *, blocks: bool) -> Seconds:
    """End of the last pass if each rank runs its passes in order; 0 where passes overlap each other.

    messages: [stages] seconds between a stage and the next, both ways; blocks: whether their senders wait for them.
    """
    if not all(
        isinstance(entry, Action) and entry.kind in (FORWARD, BACKWARD) for entries in order for entry in entries
    ):
        return 0.0
    seconds: dict[ActionKind, list[Seconds]] = {
        FORWARD: passes.forward.tolist(),
        BACKWARD: passes.backward.tolist(),
    }
    after_stage: list[Seconds] = messages.tolist()

    def pass_seconds(entry: ScheduleEntry) -> Seconds:
        if isinstance(entry, Action):
            return seconds[entry.kind][entry.stage]
        return pass_seconds(entry.forward) + pass_seconds(entry.backward)

    def message_seconds(action: Action) -> Seconds:
        if action.kind is FORWARD:
            return after_stage[action.stage]
        return after_stage[action.stage - 1] if action.stage else 0.0

    return run_order(order, OrderCosts(pass_seconds, message_seconds, sender_waits=blocks)).makespan


def _reduction_starts(resolved: ResolvedScenario, plan: Plan, passes: PassSeconds) -> Iterator[Seconds]:
    """For each pipeline rank, its passes before the first one that completes gradients of a stage."""
    key: tuple[Any, ...] = (resolved.effective_schedule, plan.placement, plan.layout.pp, plan.microbatches)
    for pass_types, counts in _COUNTS.get_or_compute(key, lambda: _early_passes(pass_orders(resolved, plan))):
        seconds = [sum(passes.seconds_of(*action) for action in pass_type) for pass_type in pass_types]
        yield float(counts @ np.array(seconds))


def _early_passes(orders: Sequence[PassOrder]) -> list[tuple[tuple[PassType, ...], IntArray]]:
    """For each pipeline rank, its types of passes, and how often they run before the last backward of any stage."""
    early = []
    for order in orders:
        last_uses = [
            int(np.flatnonzero(order.type_indices == index)[-1])
            for index, pass_type in enumerate(order.pass_types)
            if any(kind is BACKWARD for _, kind in pass_type)
        ]
        before = order.type_indices[: min(last_uses)]
        early.append((order.pass_types, np.bincount(before, minlength=len(order.pass_types))))
    return early


def _cached_outward_seconds(plan: Plan, machine: SitesFabric, ranks: IntArray) -> list[FloatArray]:
    """Cached, as microbatches and recomputation do not change them."""
    key = IdentityKey(machine), IdentityKey(plan.model), plan.layout, plan.placement, plan.parameter_groups
    return _OUTWARD.get_or_compute(key, lambda: list(_outward_seconds(plan, machine, ranks)))


def _outward_seconds(plan: Plan, machine: SitesFabric, ranks: IntArray) -> Iterator[FloatArray]:
    """For each site, [pipeline ranks] seconds of their reductions on the links out of it."""
    for site in range(len(machine.sites)):
        capacity = sum(link.bandwidth for link in machine.site_links if link.source == site and link.is_alive)
        sent = [_outward_bytes(plan, rank, ranks[rank], site) for rank in range(plan.layout.pp)]
        if capacity and any(sent):
            yield np.array(sent) / capacity


def _outward_bytes(plan: Plan, rank: int, sites: IntArray, site: int) -> Bytes:
    """What reductions of a pipeline rank's gradients send out of a site at least."""
    fraction = float(sites[site] / sites.sum())
    if not 0.0 < fraction < 1.0 or not _crosses_evenly(plan, sites):
        return 0.0
    return sum(
        plan.parameter_count(stage, group.name)
        * plan.layout.tp
        * group.formats.gradients.bytes
        * _outward_share(group, sites, fraction, plan.layout.tp)
        for stage in plan.stages_on_rank(rank)
        for group in plan.trained_groups
        if _is_dense(group)
    )


def _outward_share(group: ParameterGroup, sites: IntArray, fraction: float, tp: int) -> float:
    """Of a group's gradients, what leaves a site that has a fraction of its ranks."""
    members = sites[sites > 0] // tp
    is_whole_in_each = group.shard_count == 1 or bool((members % group.shard_count == 0).all())
    return 1.0 if is_whole_in_each else 1.0 - fraction


def _is_dense(group: ParameterGroup) -> bool:
    """Whether all ranks of a pipeline rank and tensor-parallel coordinate reduce its gradients."""
    names = [comm_group.name for comm_group in (group.shard_group, group.replicate_group) if comm_group is not None]
    return bool(names) and all(name in _DENSE for name in names)


def _crosses_evenly(plan: Plan, sites: IntArray) -> bool:
    """Whether whole tensor-parallel groups are in each site, so that every data-parallel group is in all of them."""
    order = plan.layout.order
    return order.index("tp") < min(order.index("cp"), order.index("dp")) and not (sites % plan.layout.tp).any()


def _busy_until(ready: FloatArray, seconds: FloatArray) -> Seconds:
    """When links are done with what becomes ready at these times."""
    by_ready = np.argsort(-ready)
    ends: FloatArray = ready[by_ready] + np.cumsum(seconds[by_ready])
    return float(ends.max())
