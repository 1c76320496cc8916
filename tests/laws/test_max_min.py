"""Rates are the one max-min fair allocation, whoever computes it and in whichever order, scale or part."""

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
class Sharing:
    """Who shares what: entries of (resource, activity, weight), and the numbers of resources and activities."""

    entries: list[tuple[int, int, float]]
    capacity: list[float]
    cap: list[float]
    share: list[float]

    @property
    def usage(self) -> ResourceUsage:
        columns = [[entry[column] for entry in self.entries] for column in range(3)]
        return ResourceUsage(
            np.array(columns[0], np.int64), np.array(columns[1], np.int64), np.array(columns[2], np.float64)
        )

    @property
    def numbers(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        return np.array(self.capacity), np.array(self.cap), np.array(self.share)

    def rates(self) -> list[float]:
        found: list[float] = max_min_rates(self.usage, *self.numbers).tolist()
        return found


SMALL = st.integers(1, 12).map(lambda number: number / 4)  # so that ties are frequent
WIDE = st.floats(1e-3, 1e12)


@st.composite
def sharings(draw: st.DrawFn, number: st.SearchStrategy[float] = SMALL | WIDE) -> Sharing:
    activities, resources = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    entry = st.tuples(st.integers(0, resources - 1), st.integers(0, activities - 1), number)
    return Sharing(
        entries=draw(st.lists(entry, max_size=18)),
        capacity=[draw(number) for _ in range(resources)],
        cap=[draw(number | st.just(inf)) for _ in range(activities)],
        share=[draw(number) for _ in range(activities)],
    )


def filled_slowly(case: Sharing) -> list[float]:
    """Progressive filling in rational numbers: raise all levels to the next stop, freeze who is stopped, repeat."""
    rates: dict[int, Fraction | float] = {}
    rising = set(range(len(case.cap)))
    share = [Fraction(part) for part in case.share]
    while rising:
        stops: dict[frozenset[int], Fraction | float] = {}
        for number in rising:
            most = case.cap[number]
            stops[frozenset([number])] = inf if most == inf else Fraction(most) / share[number]
        for resource, whole in enumerate(case.capacity):
            users = [(number, Fraction(weight)) for where, number, weight in case.entries if where == resource]
            stopped = sum((weight * Fraction(rates[number]) for number, weight in users if number in rates), Fraction())
            demand = sum((weight * share[number] for number, weight in users if number in rising), Fraction())
            if demand:
                who = frozenset(number for number, _ in users if number in rising)
                stops[who] = min(stops.get(who, inf), (Fraction(whole) - stopped) / demand)
        level = min(stops.values())
        for number in set().union(*(who for who, stop in stops.items() if stop == level)):
            rates[number] = level * share[number]
            rising.remove(number)
    return [float(rates[number]) for number in range(len(case.cap))]


@given(sharings(SMALL))
@examples(400)
def test_rates_are_those_of_progressive_filling(case: Sharing) -> None:
    expected = filled_slowly(case)
    event(f"{len({rate / part for rate, part in zip(expected, case.share, strict=True)})} levels")
    np.testing.assert_allclose(case.rates(), expected, rtol=1e-10)


@given(sharings())
@examples(400)
def test_everybody_is_at_its_cap_or_highest_on_a_full_resource(case: Sharing) -> None:
    """No load is above a capacity either: together they characterise the max-min fair allocation."""
    rates = case.rates()
    load = [sum(w * rates[i] for r, i, w in case.entries if r == number) for number in range(len(case.capacity))]
    assert all(used <= whole * (1 + 1e-12) for used, whole in zip(load, case.capacity, strict=True))
    level = [rate / part for rate, part in zip(rates, case.share, strict=True)]
    highest = [max((level[i] for r, i, _ in case.entries if r == n), default=0.0) for n in range(len(load))]
    for number, rate in enumerate(rates):
        mine = {resource for resource, user, _ in case.entries if user == number}
        full = [r for r in mine if load[r] >= case.capacity[r] * (1 - 1e-12)]
        assert rate > 0
        assert rate <= case.cap[number]
        assert rate == case.cap[number] or any(level[number] >= highest[r] * (1 - 1e-15) for r in full)


@given(sharings())
@examples(200)
def test_python_and_numpy_agree_bit_for_bit(case: Sharing) -> None:
    assert fill_scalar(case.usage, *case.numbers).tolist() == fill_vectorized(case.usage, *case.numbers).tolist()


@given(sharings(), st.sampled_from([2.0, 0.25, 2.0**40]))
@examples(200)
def test_capacities_and_caps_scale_all_rates_exactly(case: Sharing, factor: float) -> None:
    capacity, cap, share = case.numbers
    for solve in (fill_scalar, fill_vectorized):
        scaled = solve(case.usage, capacity * factor, cap * factor, share)
        assert scaled.tolist() == (solve(case.usage, *case.numbers) * factor).tolist()


@given(sharings(), st.data())
@examples(200)
def test_the_order_of_entries_activities_and_resources_changes_no_bit(case: Sharing, data: st.DataObject) -> None:
    activity = data.draw(st.permutations(range(len(case.cap))))
    resource = data.draw(st.permutations(range(len(case.capacity))))
    entries = data.draw(st.permutations(case.entries))
    shuffled = Sharing(
        entries=[(resource.index(r), activity.index(i), weight) for r, i, weight in entries],
        capacity=[case.capacity[r] for r in resource],
        cap=[case.cap[i] for i in activity],
        share=[case.share[i] for i in activity],
    )
    rates = case.rates()
    for solve in (fill_scalar, fill_vectorized):
        assert solve(shuffled.usage, *shuffled.numbers).tolist() == [rates[i] for i in activity]


@given(sharings(SMALL), st.integers(2, 4))
@examples(200)
def test_copies_of_an_activity_are_one_that_uses_as_much_as_all(case: Sharing, copies: int) -> None:
    first = [entry for entry in case.entries if entry[1] == 0]
    rest = [entry for entry in case.entries if entry[1] != 0]
    folded = Sharing(rest + [(r, i, weight * copies) for r, i, weight in first], case.capacity, case.cap, case.share)
    more = [(r, len(case.cap) + copy, weight) for r, _, weight in first for copy in range(copies - 1)]
    cap, share = case.cap + case.cap[:1] * (copies - 1), case.share + case.share[:1] * (copies - 1)
    every = Sharing(case.entries + more, case.capacity, cap, share).rates()
    assert every[len(case.cap) :] == every[:1] * (copies - 1), "equal activities have equal rates, bit for bit"
    np.testing.assert_allclose(folded.rates(), every[: len(case.cap)], rtol=1e-10)


def connected(case: Sharing) -> list[set[tuple[str, int]]]:
    """Parts by joining sets, one entry after the other."""
    parts = [{("activity", i)} for i in range(len(case.cap))] + [{("resource", r)} for r in range(len(case.capacity))]
    for resource, activity, _ in case.entries:
        touched = [part for part in parts if part & {("activity", activity), ("resource", resource)}]
        parts = [part for part in parts if part not in touched] + [set().union(*touched)]
    return parts


@given(sharings())
@examples(200)
def test_parts_are_the_connected_ones(case: Sharing) -> None:
    labels = connected_components(case.usage, flow_count=len(case.cap), resource_count=len(case.capacity))
    found: dict[int, set[tuple[str, int]]] = {}
    for kind, column in (("activity", labels.flow), ("resource", labels.resource)):
        for number, label in enumerate(column.tolist()):
            found.setdefault(label, set()).add((kind, number))
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, connected(case)))
    assert sorted(found) == list(range(len(found)))


@given(sharings())
@examples(200)
def test_a_part_solved_alone_has_the_same_rates_bit_for_bit(case: Sharing) -> None:
    labels = connected_components(case.usage, flow_count=len(case.cap), resource_count=len(case.capacity))
    capacity, cap, share = case.numbers
    rates = case.rates()
    for part in set(labels.flow.tolist()):
        members: IntArray = np.flatnonzero(labels.flow == part)
        mine = labels.flow[case.usage.flow] == part
        place = np.searchsorted(members, case.usage.flow[mine])
        alone = ResourceUsage(case.usage.resource[mine], place, case.usage.weight[mine])
        for solve in (fill_scalar, fill_vectorized):
            assert solve(alone, capacity, cap[members], share[members]).tolist() == [rates[i] for i in members]
