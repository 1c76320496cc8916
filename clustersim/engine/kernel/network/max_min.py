"""At which rates do activities advance when they share resources?

Activity i advances at rate x_i, at most its cap, and loads resource r with w_ri · x_i; no load exceeds a capacity. The
rates are weighted max-min fair: nobody's x_i / p_i (its *level*; p_i is its share) can rise without lowering a level
that is no higher. This is the fixed point of progressive filling: all levels rise together, and stop at a cap or where
a resource is full (Bertsekas and Gallagher, Data Networks, 2nd ed., section 6.5.2).

Resources need not be filled in the global order of their levels. One whose level is the lowest that each of its
activities meets is a bottleneck already, because freezing others can only raise levels; so every round freezes the
activities of all such resources at once (Ros-Giralt et al., On the Bottleneck Structure of Congestion-Controlled
Networks, Proc. ACM Meas. Anal. Comput. Syst. 3(3), 2019). Rounds are as many as the longest chain of bottlenecks that
wait for each other, and the rates of one connected part do not depend on any other part, bit for bit: a caller may
solve again only the part that changed (`components`).

There is no tolerance: levels are compared as computed. Sums run in an order that the numbers alone decide (by demand,
then ceiling), so symmetric resources have equal levels, and the order of the inputs changes no bit; capacities and caps
scaled by a power of two scale every rate exactly. A level never falls from one round to the next, so that rounding
cannot leave the last activity of a resource without a rate.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray

FEW = 48
"""Entries up to which plain Python is faster than numpy (they cross between 40 and 64, CPython 3.11, numpy 2.4)."""

_Entry = tuple[int, float, float, int]
"""One usage: resource, demand (load per level), the activity's ceiling, the activity."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Which activity loads which resource: one entry per pair, in any order; entries of one pair add.

    resource, activity: [entries] numbers; weight: [entries] load per unit of the activity's rate, above 0.
    """

    resource: IntArray
    activity: IntArray
    weight: FloatArray


@dataclass(frozen=True, slots=True)
class Parts:
    """Connected parts: activity, resource: [activities], [resources] the number of the part that each belongs to."""

    activity: IntArray
    resource: IntArray


def max_min(usage: Usage, capacity: FloatArray, cap: FloatArray, share: FloatArray) -> FloatArray:
    """Rates of all activities: [activities], in work per second; an activity that uses nothing has its cap.

    capacity: [resources] load that each can carry, above 0 and finite; cap: [activities] rate of each alone, above 0,
    may be infinite; share: [activities] fair-share weight, above 0. Both ways of filling give the same bits.
    """
    return fill_few(usage, capacity, cap, share) if len(usage.weight) <= FEW else fill_many(usage, capacity, cap, share)


def fill_few(usage: Usage, capacity: FloatArray, cap: FloatArray, share: FloatArray) -> FloatArray:
    """`max_min` in plain Python."""
    caps, shares, activities = cap.tolist(), share.tolist(), usage.activity.tolist()
    ceilings = [most / part for most, part in zip(caps, shares, strict=True)]
    rows = zip(usage.resource.tolist(), activities, usage.weight.tolist(), strict=True)
    entries = [(resource, weight * shares[number], ceilings[number], number) for resource, number, weight in rows]
    slack = dict(zip(usage.resource.tolist(), capacity[usage.resource].tolist(), strict=True))
    levels = _levels_of_few(sorted(entries), slack, ceilings)
    outcome = zip(levels, ceilings, caps, shares, strict=True)
    return np.array([most if level == ceiling else level * part for level, ceiling, most, part in outcome])


def _levels_of_few(entries: list[_Entry], slack: dict[int, float], ceilings: list[float]) -> list[float]:
    """Level of every activity; `slack` is what is left of each resource, and is used up."""
    levels, filled = ceilings.copy(), dict.fromkeys(slack, 0.0)
    while entries:
        _fill(entries, slack, filled)
        _meet(entries, filled, levels)
        waiting = {resource for resource, _, _, number in entries if levels[number] < filled[resource]}
        frozen = {n for resource, _, ceiling, n in entries if resource not in waiting or levels[n] == ceiling}
        rising = [entry for entry in entries if entry[3] not in frozen]
        if rising:
            loads = [(resource, demand * levels[n]) for resource, demand, _, n in entries if n in frozen]
            for resource, load in _sums(loads).items():
                slack[resource] -= load
        entries = rising
    return levels


def _fill(entries: list[_Entry], slack: dict[int, float], filled: dict[int, float]) -> None:
    """Raise every resource to the level at which its rising activities use up what is left of it."""
    for resource, demand in _sums([entry[:2] for entry in entries]).items():
        filled[resource] = max(filled[resource], slack[resource] / demand)


def _meet(entries: list[_Entry], filled: dict[int, float], levels: list[float]) -> None:
    """Set every rising activity to the lowest level that it meets: its ceiling or one of its resources."""
    for _, _, ceiling, number in entries:
        levels[number] = ceiling
    for resource, _, _, number in entries:
        levels[number] = min(levels[number], filled[resource])


def _sums(terms: list[tuple[int, float]]) -> dict[int, float]:
    """Add terms by resource, in their order, as `np.bincount` does."""
    total: dict[int, float] = {}
    for resource, term in terms:
        total[resource] = total.get(resource, 0.0) + term
    return total


def fill_many(usage: Usage, capacity: FloatArray, cap: FloatArray, share: FloatArray) -> FloatArray:
    """`max_min` in numpy."""
    ceiling = cap / share
    demand = usage.weight * share[usage.activity]
    order = np.lexsort((ceiling[usage.activity], demand, usage.resource))
    resource, activity, demand = usage.resource[order], usage.activity[order], demand[order]
    first = np.diff(resource, prepend=-1) != 0
    slack = capacity[resource[first]]
    level = _levels_of_many(_Entries(np.cumsum(first) - 1, activity, demand), slack, ceiling)
    return np.where(level == ceiling, cap, level * share)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Usages of activities that still rise: [entries] resource, activity and demand (load per level)."""

    resource: IntArray
    activity: IntArray
    demand: FloatArray

    def __getitem__(self, chosen: BoolArray) -> "_Entries":
        return _Entries(self.resource[chosen], self.activity[chosen], self.demand[chosen])

    def loads(self, level: FloatArray, resources: int) -> FloatArray:
        """Load on every resource at these levels of the activities."""
        load = np.bincount(self.resource, self.demand * level[self.activity], minlength=resources)
        return np.asarray(load, dtype=np.float64)


def _levels_of_many(entries: _Entries, slack: FloatArray, ceiling: FloatArray) -> FloatArray:
    """Level of every activity; `slack` is what is left of each resource, and is used up."""
    level, filled = ceiling.copy(), np.zeros_like(slack)
    while entries.demand.size:
        demand = np.bincount(entries.resource, entries.demand, minlength=slack.size)
        reached = np.divide(slack, demand, out=np.zeros_like(slack), where=demand > 0)
        np.maximum(filled, reached, out=filled)
        level[entries.activity] = ceiling[entries.activity]
        np.minimum.at(level, entries.activity, filled[entries.resource])
        waiting = np.zeros(slack.size, dtype=bool)
        waiting[entries.resource[level[entries.activity] < filled[entries.resource]]] = True
        frozen = level == ceiling
        frozen[entries.activity[~waiting[entries.resource]]] = True
        slack -= entries[frozen[entries.activity]].loads(level, slack.size)
        entries = entries[~frozen[entries.activity]]
    return level


def components(usage: Usage, *, activities: int, resources: int) -> Parts:
    """Label the connected parts of the graph of activities and resources.

    Parts are numbered in the order of their first activity, then (resources that nobody uses) of their resource. Roots
    are hooked on the smallest neighbouring root and paths halved until no usage crosses (Shiloach and Vishkin, An
    O(log n) Parallel Connectivity Algorithm, J. Algorithms 3(1), 1982).
    """
    root = np.arange(activities + resources)
    left, right = usage.activity, usage.resource + activities
    while left.size:
        np.minimum.at(root, np.maximum(left, right), np.minimum(left, right))
        while not np.array_equal(root, shorter := root[root]):
            root = shorter
        left, right = root[left], root[right]
        left, right = left[left != right], right[left != right]
    label = np.unique(root, return_inverse=True)[1].astype(np.int64, copy=False)
    return Parts(label[:activities], label[activities:])
