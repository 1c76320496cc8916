"""Weighted max-min fair rates: at which rates do flows advance when they share resources?

Flow i advances at rate x_i, at most its rate bound, and loads resource r with w_ri * x_i; no load exceeds a
capacity. The rates are weighted max-min fair: no x_i / p_i (its *level*; p_i is its fair-share weight) can
rise without lowering a level that is no higher. This is the fixed point of progressive filling: all levels
rise together, and stop at a bound or where a resource is full (Bertsekas and Gallagher, Data Networks, 2nd
ed., section 6.5.2).

Resources need not be filled in the global order of their levels. One whose level is the lowest among the
resources of each of its flows is a bottleneck already, because freezing others can only raise levels; so
every round freezes the flows of all such resources at once (Ros-Giralt et al., On the Bottleneck Structure of
Congestion-Controlled Networks, Proc. ACM Meas. Anal. Comput. Syst. 3(3), 2019). The number of rounds is the
length of the longest chain of dependent bottlenecks, and the rates of one connected component do not depend
on any other, bit for bit: a caller may solve only the component that changed (`connected_components`).

There is no tolerance: levels are compared as computed. Sums run in an order that values alone decide (by
demand, then ceiling), so symmetric resources have equal levels, and the order of the inputs changes no bit;
capacities and bounds scaled by a power of two scale every rate exactly. A level never falls from one round to
the next, so that rounding cannot leave the last flow of a resource without a rate.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray

MAX_SCALAR_ENTRIES = 48
"""Entries up to which plain Python is faster than numpy (crossover between 40 and 64, CPython 3.11, numpy 2.4)."""

_Entry = tuple[int, float, float, int]
"""One usage: resource, demand (load per level), ceiling (highest level) of the flow, flow."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Which flow loads which resource: one entry per pair, in any order; entries of one pair add up.

    resource, flow: [entries] indices; weight: [entries] load per unit of the flow's rate, above 0.
    """

    resource: IntArray
    flow: IntArray
    weight: FloatArray


@dataclass(frozen=True, slots=True)
class ConnectedComponents:
    """Component index of every flow [flows] and every resource [resources]."""

    flow: IntArray
    resource: IntArray


def max_min_rates(
    usage: ResourceUsage, capacity: FloatArray, rate_bound: FloatArray, fair_weight: FloatArray
) -> FloatArray:
    """Rates of all flows: [flows], in work per second; a flow that uses nothing runs at its bound.

    capacity: [resources] maximum load, above 0 and finite; rate_bound: [flows] above 0, may be infinite;
    fair_weight: [flows] fair-share weight, above 0. Both implementations give the same bits.
    """
    return (
        fill_scalar(usage, capacity, rate_bound, fair_weight)
        if len(usage.weight) <= MAX_SCALAR_ENTRIES
        else fill_vectorized(usage, capacity, rate_bound, fair_weight)
    )


def fill_scalar(
    usage: ResourceUsage, capacity: FloatArray, rate_bound: FloatArray, fair_weight: FloatArray
) -> FloatArray:
    """`max_min_rates` in plain Python."""
    bounds, weights, flows = rate_bound.tolist(), fair_weight.tolist(), usage.flow.tolist()
    ceilings = [bound / weight for bound, weight in zip(bounds, weights, strict=True)]
    usages = zip(usage.resource.tolist(), flows, usage.weight.tolist(), strict=True)
    entries = [(resource, load * weights[flow], ceilings[flow], flow) for resource, flow, load in usages]
    slack = dict(zip(usage.resource.tolist(), capacity[usage.resource].tolist(), strict=True))
    levels = _levels_scalar(sorted(entries), slack, ceilings)
    outcome = zip(levels, ceilings, bounds, weights, strict=True)
    return np.array([bound if level == ceiling else level * weight for level, ceiling, bound, weight in outcome])


def _levels_scalar(entries: list[_Entry], slack: dict[int, float], ceilings: list[float]) -> list[float]:
    """Level of every flow; `slack` is the remaining capacity of each resource, and is consumed."""
    levels, filled = ceilings.copy(), dict.fromkeys(slack, 0.0)
    while entries:
        _raise_resources(entries, slack, filled)
        _lower_flow_levels(entries, filled, levels)
        waiting = {resource for resource, _, _, flow in entries if levels[flow] < filled[resource]}
        frozen = {n for resource, _, ceiling, n in entries if resource not in waiting or levels[n] == ceiling}
        rising = [entry for entry in entries if entry[3] not in frozen]
        if rising:
            loads = [(resource, demand * levels[n]) for resource, demand, _, n in entries if n in frozen]
            for resource, load in _sum_by_resource(loads).items():
                slack[resource] -= load
        entries = rising
    return levels


def _raise_resources(entries: list[_Entry], slack: dict[int, float], filled: dict[int, float]) -> None:
    """Raise every resource to the level at which its unfrozen flows use up its remaining capacity."""
    for resource, demand in _sum_by_resource([entry[:2] for entry in entries]).items():
        filled[resource] = max(filled[resource], slack[resource] / demand)


def _lower_flow_levels(entries: list[_Entry], filled: dict[int, float], levels: list[float]) -> None:
    """Set every unfrozen flow to the minimum of its ceiling and the levels of its resources."""
    for _, _, ceiling, flow in entries:
        levels[flow] = ceiling
    for resource, _, _, flow in entries:
        levels[flow] = min(levels[flow], filled[resource])


def _sum_by_resource(terms: list[tuple[int, float]]) -> dict[int, float]:
    """Sum of terms by resource, in their order, as `np.bincount` does."""
    total: dict[int, float] = {}
    for resource, term in terms:
        total[resource] = total.get(resource, 0.0) + term
    return total


def fill_vectorized(
    usage: ResourceUsage, capacity: FloatArray, rate_bound: FloatArray, fair_weight: FloatArray
) -> FloatArray:
    """`max_min_rates` in numpy."""
    ceiling = rate_bound / fair_weight
    demand = usage.weight * fair_weight[usage.flow]
    order = np.lexsort((ceiling[usage.flow], demand, usage.resource))
    resource, flow, demand = usage.resource[order], usage.flow[order], demand[order]
    first = np.diff(resource, prepend=-1) != 0
    slack = capacity[resource[first]]
    level = _levels_vectorized(_UsageEntries(np.cumsum(first) - 1, flow, demand), slack, ceiling)
    return np.where(level == ceiling, rate_bound, level * fair_weight)


@dataclass(frozen=True, slots=True)
class _UsageEntries:
    """Usages of unfrozen flows: [entries] resource, flow and demand (load per level)."""

    resource: IntArray
    flow: IntArray
    demand: FloatArray

    def __getitem__(self, selected: BoolArray) -> "_UsageEntries":
        return _UsageEntries(self.resource[selected], self.flow[selected], self.demand[selected])

    def resource_loads(self, level: FloatArray, resource_count: int) -> FloatArray:
        """Load on every resource at given levels of the flows."""
        load = np.bincount(self.resource, self.demand * level[self.flow], minlength=resource_count)
        return np.asarray(load, dtype=np.float64)


def _levels_vectorized(entries: _UsageEntries, slack: FloatArray, ceiling: FloatArray) -> FloatArray:
    """Level of every flow; `slack` is the remaining capacity of each resource, and is consumed."""
    level, filled = ceiling.copy(), np.zeros_like(slack)
    while entries.demand.size:
        demand = np.bincount(entries.resource, entries.demand, minlength=slack.size)
        reached = np.divide(slack, demand, out=np.zeros_like(slack), where=demand > 0)
        np.maximum(filled, reached, out=filled)
        level[entries.flow] = ceiling[entries.flow]
        np.minimum.at(level, entries.flow, filled[entries.resource])
        waiting = np.zeros(slack.size, dtype=bool)
        waiting[entries.resource[level[entries.flow] < filled[entries.resource]]] = True
        frozen = level == ceiling
        frozen[entries.flow[~waiting[entries.resource]]] = True
        slack -= entries[frozen[entries.flow]].resource_loads(level, slack.size)
        entries = entries[~frozen[entries.flow]]
    return level


def connected_components(usage: ResourceUsage, *, flow_count: int, resource_count: int) -> ConnectedComponents:
    """Label the connected components of the bipartite graph of flows and resources.

    Components are numbered in the order of their first flow, then (unused resources) of their resource. Roots are
    hooked on the smallest neighbouring root and paths halved until no usage connects two roots (Shiloach and
    Vishkin, An O(log n) Parallel Connectivity Algorithm, J. Algorithms 3(1), 1982).
    """
    root = np.arange(flow_count + resource_count)
    flow_root, resource_root = usage.flow, usage.resource + flow_count
    while flow_root.size:
        np.minimum.at(root, np.maximum(flow_root, resource_root), np.minimum(flow_root, resource_root))
        while not np.array_equal(root, shorter := root[root]):
            root = shorter
        flow_root, resource_root = root[flow_root], root[resource_root]
        flow_root, resource_root = flow_root[flow_root != resource_root], resource_root[flow_root != resource_root]
    label = np.unique(root, return_inverse=True)[1].astype(np.int64, copy=False)
    return ConnectedComponents(label[:flow_count], label[flow_count:])
