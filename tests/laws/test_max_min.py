"""Rates are the unique max-min fair allocation, independent of solver, order, scale and decomposition."""

from dataclasses import dataclass
from fractions import Fraction
from math import inf

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.engine.kernel.network.max_min import (
    ResourceUsage,
    connected_components,
    fill_scalar,
    fill_vectorized,
    max_min_rates,
)
from tests.conftest import examples


@dataclass(frozen=True, slots=True)
class MaxMinCase:
    """Which activity uses which resource: entries of (resource, activity, weight), capacities, rate caps and shares."""

    usage_entries: list[tuple[int, int, float]]
    capacity: list[float]
    cap: list[float]
    share: list[float]

    @property
    def usage(self) -> ResourceUsage:
        columns = [[entry[column] for entry in self.usage_entries] for column in range(3)]
        return ResourceUsage(
            np.array(columns[0], np.int64), np.array(columns[1], np.int64), np.array(columns[2], np.float64)
        )

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        return np.array(self.capacity), np.array(self.cap), np.array(self.share)

    def rates(self) -> list[float]:
        rates: list[float] = max_min_rates(self.usage, *self.bounds).tolist()
        return rates


SMALL = st.integers(1, 12).map(lambda quarters: quarters / 4)  # so that ties are frequent
WIDE = st.floats(1e-3, 1e12)


@st.composite
def max_min_cases(draw: st.DrawFn, value: st.SearchStrategy[float] = SMALL | WIDE) -> MaxMinCase:
    activities, resources = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    entry = st.tuples(st.integers(0, resources - 1), st.integers(0, activities - 1), value)
    return MaxMinCase(
        usage_entries=draw(st.lists(entry, max_size=18)),
        capacity=[draw(value) for _ in range(resources)],
        cap=[draw(value | st.just(inf)) for _ in range(activities)],
        share=[draw(value) for _ in range(activities)],
    )


def progressive_filling(case: MaxMinCase) -> list[float]:
    """Progressive filling in rational numbers: raise all levels to the next stop, freeze who is stopped, repeat."""
    rates: dict[int, Fraction | float] = {}
    rising = set(range(len(case.cap)))
    share = [Fraction(value) for value in case.share]
    while rising:
        stops: dict[frozenset[int], Fraction | float] = {}
        for activity in rising:
            cap = case.cap[activity]
            stops[frozenset([activity])] = inf if cap == inf else Fraction(cap) / share[activity]
        for resource, capacity in enumerate(case.capacity):
            users = [
                (activity, Fraction(weight))
                for used_resource, activity, weight in case.usage_entries
                if used_resource == resource
            ]
            frozen_load = sum(
                (weight * Fraction(rates[activity]) for activity, weight in users if activity in rates), Fraction()
            )
            demand = sum((weight * share[activity] for activity, weight in users if activity in rising), Fraction())
            if demand:
                stopped_activities = frozenset(activity for activity, _ in users if activity in rising)
                stops[stopped_activities] = min(
                    stops.get(stopped_activities, inf), (Fraction(capacity) - frozen_load) / demand
                )
        level = min(stops.values())
        for activity in set().union(
            *(stopped_activities for stopped_activities, stop in stops.items() if stop == level)
        ):
            rates[activity] = level * share[activity]
            rising.remove(activity)
    return [float(rates[activity]) for activity in range(len(case.cap))]


@given(max_min_cases(SMALL))
@examples(400)
def test_rates_are_those_of_progressive_filling(case: MaxMinCase) -> None:
    expected = progressive_filling(case)
    event(f"{len({rate / share for rate, share in zip(expected, case.share, strict=True)})} levels")
    np.testing.assert_allclose(case.rates(), expected, rtol=1e-10)


@given(max_min_cases())
@examples(400)
def test_every_activity_is_at_its_cap_or_highest_on_a_full_resource(case: MaxMinCase) -> None:
    """And no load exceeds a capacity: both conditions characterise the max-min fair allocation."""
    rates = case.rates()
    load = [sum(w * rates[i] for r, i, w in case.usage_entries if r == index) for index in range(len(case.capacity))]
    assert all(used <= capacity * (1 + 1e-12) for used, capacity in zip(load, case.capacity, strict=True))
    level = [rate / share for rate, share in zip(rates, case.share, strict=True)]
    highest = [max((level[i] for r, i, _ in case.usage_entries if r == n), default=0.0) for n in range(len(load))]
    for index, rate in enumerate(rates):
        used_resources = {resource for resource, user, _ in case.usage_entries if user == index}
        full = [r for r in used_resources if load[r] >= case.capacity[r] * (1 - 1e-12)]
        assert rate > 0
        assert rate <= case.cap[index]
        assert rate == case.cap[index] or any(level[index] >= highest[r] * (1 - 1e-15) for r in full)


@given(max_min_cases())
@examples(200)
def test_python_and_numpy_agree_bit_for_bit(case: MaxMinCase) -> None:
    assert fill_scalar(case.usage, *case.bounds).tolist() == fill_vectorized(case.usage, *case.bounds).tolist()


@given(max_min_cases(), st.sampled_from([2.0, 0.25, 2.0**40]))
@examples(200)
def test_capacities_and_caps_scale_all_rates_exactly(case: MaxMinCase, factor: float) -> None:
    capacity, cap, share = case.bounds
    for solve in (fill_scalar, fill_vectorized):
        scaled = solve(case.usage, capacity * factor, cap * factor, share)
        assert scaled.tolist() == (solve(case.usage, *case.bounds) * factor).tolist()


@given(max_min_cases(), st.data())
@examples(200)
def test_the_order_of_entries_activities_and_resources_changes_no_bit(case: MaxMinCase, data: st.DataObject) -> None:
    activity = data.draw(st.permutations(range(len(case.cap))))
    resource = data.draw(st.permutations(range(len(case.capacity))))
    entries = data.draw(st.permutations(case.usage_entries))
    shuffled = MaxMinCase(
        usage_entries=[(resource.index(r), activity.index(i), weight) for r, i, weight in entries],
        capacity=[case.capacity[r] for r in resource],
        cap=[case.cap[i] for i in activity],
        share=[case.share[i] for i in activity],
    )
    rates = case.rates()
    for solve in (fill_scalar, fill_vectorized):
        assert solve(shuffled.usage, *shuffled.bounds).tolist() == [rates[i] for i in activity]


@given(max_min_cases(SMALL), st.integers(2, 4))
@examples(200)
def test_equal_activities_can_be_merged_into_one(case: MaxMinCase, copies: int) -> None:
    first = [entry for entry in case.usage_entries if entry[1] == 0]
    other_entries = [entry for entry in case.usage_entries if entry[1] != 0]
    merged = MaxMinCase(
        other_entries + [(r, i, weight * copies) for r, i, weight in first], case.capacity, case.cap, case.share
    )
    copied_entries = [(r, len(case.cap) + copy, weight) for r, _, weight in first for copy in range(copies - 1)]
    cap, share = case.cap + case.cap[:1] * (copies - 1), case.share + case.share[:1] * (copies - 1)
    unmerged_rates = MaxMinCase(case.usage_entries + copied_entries, case.capacity, cap, share).rates()
    assert unmerged_rates[len(case.cap) :] == unmerged_rates[:1] * (copies - 1), (
        "equal activities have equal rates, bit for bit"
    )
    np.testing.assert_allclose(merged.rates(), unmerged_rates[: len(case.cap)], rtol=1e-10)


def components_by_joining(case: MaxMinCase) -> list[set[tuple[str, int]]]:
    """Connected components by joining sets, one entry after the other."""
    component_sets = [{("activity", i)} for i in range(len(case.cap))] + [
        {("resource", r)} for r in range(len(case.capacity))
    ]
    for resource, activity, _ in case.usage_entries:
        touched = [
            component for component in component_sets if component & {("activity", activity), ("resource", resource)}
        ]
        component_sets = [component for component in component_sets if component not in touched] + [
            set().union(*touched)
        ]
    return component_sets


@given(max_min_cases())
@examples(200)
def test_components_are_the_connected_ones(case: MaxMinCase) -> None:
    labels = connected_components(case.usage, flow_count=len(case.cap), resource_count=len(case.capacity))
    by_label: dict[int, set[tuple[str, int]]] = {}
    for kind, column in (("activity", labels.flow), ("resource", labels.resource)):
        for index, label in enumerate(column.tolist()):
            by_label.setdefault(label, set()).add((kind, index))
    assert sorted(map(sorted, by_label.values())) == sorted(map(sorted, components_by_joining(case)))
    assert sorted(by_label) == list(range(len(by_label)))


@given(max_min_cases())
@examples(200)
def test_a_component_solved_separately_has_the_same_rates_bit_for_bit(case: MaxMinCase) -> None:
    labels = connected_components(case.usage, flow_count=len(case.cap), resource_count=len(case.capacity))
    capacity, cap, share = case.bounds
    rates = case.rates()
    for label in set(labels.flow.tolist()):
        members: IntArray = np.flatnonzero(labels.flow == label)
        in_component = labels.flow[case.usage.flow] == label
        local_index = np.searchsorted(members, case.usage.flow[in_component])
        component_usage = ResourceUsage(case.usage.resource[in_component], local_index, case.usage.weight[in_component])
        for solve in (fill_scalar, fill_vectorized):
            assert solve(component_usage, capacity, cap[members], share[members]).tolist() == [
                rates[i] for i in members
            ]
