"""Max-min fair rates of flows that share resources, against allocations worked out by hand."""

from collections.abc import Callable
from math import inf, nextafter

import numpy as np
import pytest

from clustersim.common.arrays import FloatArray
from clustersim.engine.kernel.network.max_min import (
    MAX_SCALAR_ENTRIES,
    ResourceUsage,
    connected_components,
    fill_scalar,
    fill_vectorized,
    max_min_rates,
)

Solver = Callable[[ResourceUsage, FloatArray, FloatArray, FloatArray], FloatArray]

all_solvers = pytest.mark.parametrize("solve", [fill_scalar, fill_vectorized, max_min_rates])


def usage(*entries: tuple[int, int, float]) -> ResourceUsage:
    """Entries of (resource, activity, weight)."""
    resource, activity, weight = zip(*entries, strict=True) if entries else ((), (), ())
    return ResourceUsage(np.array(resource, np.int64), np.array(activity, np.int64), np.array(weight, np.float64))


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float64)


@all_solvers
def test_two_flows_on_one_link_have_half_each(solve: Solver) -> None:
    rates = solve(usage((0, 0, 1.0), (0, 1, 1.0)), floats(10.0), floats(inf, inf), np.ones(2))
    assert rates.tolist() == [5.0, 5.0]


@all_solvers
def test_the_parking_lot(solve: Solver) -> None:
    """One long flow over links of 1, 2 and 4, and a short one on each: the long one gets half of the slowest link."""
    entries = usage(*((link, 0, 1.0) for link in range(3)), *((link, link + 1, 1.0) for link in range(3)))
    rates = solve(entries, floats(1.0, 2.0, 4.0), np.full(4, inf), np.ones(4))
    assert rates.tolist() == [0.5, 0.5, 1.5, 3.5]


@all_solvers
def test_bottlenecks_wait_for_each_other(solve: Solver) -> None:
    """Link i carries flows i and i + 1 and 2·(i + 1): flow 0 has 1, which leaves 3 of link 1, which leaves 3 of link 2.

    Link 0 (2) is shared by flows 0, 1: 1 each. Link 1 (4): flow 2 has 3. Link 2 (6): flow 3 has 3, link 3 (8): 5.
    """
    links = [entry for link in range(4) for entry in ((link, link, 1.0), (link, link + 1, 1.0))]
    rates = solve(usage(*links), floats(2.0, 4.0, 6.0, 8.0), np.full(5, inf), np.ones(5))
    assert rates.tolist() == [1.0, 1.0, 3.0, 3.0, 5.0]


@all_solvers
def test_bandwidth_left_by_capped_flows_goes_to_the_others(solve: Solver) -> None:
    entries = usage((0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0))
    assert solve(entries, floats(9.0), floats(1.0, inf, inf), np.ones(3)).tolist() == [1.0, 4.0, 4.0]
    assert solve(entries, floats(9.0), floats(1.0, 2.0, 3.0), np.ones(3)).tolist() == [1.0, 2.0, 3.0]


@all_solvers
def test_shares_divide_a_link_in_their_proportion(solve: Solver) -> None:
    rates = solve(usage((0, 0, 1.0), (0, 1, 1.0)), floats(8.0), floats(inf, inf), floats(1.0, 3.0))
    assert rates.tolist() == [2.0, 6.0]


@all_solvers
def test_a_heavy_user_has_the_same_rate_and_more_load(solve: Solver) -> None:
    rates = solve(usage((0, 0, 1.0), (0, 1, 3.0)), floats(8.0), floats(inf, inf), np.ones(2))
    assert rates.tolist() == [2.0, 2.0]


@all_solvers
def test_equal_flows_fold_into_one_weighted_flow(solve: Solver) -> None:
    """Four flows on links of 6 and 9 with two others: at 1.0 each link 0 is full, which leaves 5 for the last."""
    four = [(0, flow, 1.0) for flow in range(4)] + [(1, flow, 1.0) for flow in range(4)]
    unfolded = solve(usage(*four, (0, 4, 2.0), (1, 5, 1.0)), floats(6.0, 9.0), np.full(6, inf), np.ones(6))
    assert unfolded.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    folded = usage((0, 0, 4.0), (1, 0, 4.0), (0, 1, 2.0), (1, 2, 1.0))
    assert solve(folded, floats(6.0, 9.0), np.full(3, inf), np.ones(3)).tolist() == [1.0, 1.0, 5.0]
    summed = usage((0, 0, 1.0), (1, 0, 1.0), (0, 1, 2.0), (1, 2, 1.0))
    assert solve(summed, floats(6.0, 9.0), np.full(3, inf), floats(4.0, 1.0, 1.0)).tolist() == [4.0, 1.0, 5.0]


@all_solvers
def test_a_flow_without_resources_gets_its_cap(solve: Solver) -> None:
    assert solve(usage((0, 1, 1.0)), floats(4.0), floats(7.0, 9.0, inf), floats(1.0, 2.0, 3.0)).tolist() == [7, 4, inf]
    assert solve(usage(), floats(4.0), floats(0.1), floats(0.3)).tolist() == [0.1]
    assert solve(usage(), floats(), floats(), floats()).tolist() == []


@all_solvers
def test_entries_of_one_pair_add(solve: Solver) -> None:
    rates = solve(usage((0, 0, 1.0), (0, 1, 1.0), (0, 0, 2.0)), floats(8.0), floats(inf, inf), np.ones(2))
    assert rates.tolist() == [2.0, 2.0]


@all_solvers
def test_a_reached_cap_is_the_exact_rate(solve: Solver) -> None:
    """Also where the link is full at the same level, although level times share differs from the cap by rounding."""
    level = 0.7 / 0.3
    assert level * 0.3 != 0.7
    for capacity in (9.0, 0.6 * level):
        rates = solve(usage((0, 0, 1.0), (0, 1, 1.0)), floats(capacity), floats(0.7, inf), floats(0.3, 0.3))
        assert rates[0] == 0.7


@all_solvers
def test_rounding_leaves_no_flow_without_a_rate(solve: Solver) -> None:
    """Three flows stop one rounding step below a full link, and their loads add up to more than its capacity.

    The computed remainder for the fourth is negative; it keeps the level that the link had reached.
    """
    level = 3.1 / (0.3 + 0.3 + 0.3)
    below = nextafter(level, 0.0)
    assert 3.1 - (0.3 * below + 0.3 * below + 0.3 * below) < 0.0
    entries = usage((0, 0, 0.3), (0, 1, 0.3), (0, 2, 0.3), (0, 3, 1e-30))
    rates = solve(entries, floats(3.1), floats(below, below, below, inf), np.ones(4))
    assert rates.tolist() == [below, below, below, level]


def test_small_and_large_solvers_agree_bit_for_bit() -> None:
    random = np.random.default_rng(7)
    for entries in (MAX_SCALAR_ENTRIES - 1, MAX_SCALAR_ENTRIES, MAX_SCALAR_ENTRIES + 1, 600):
        resource, activity = random.integers(0, 40, entries), random.integers(0, 90, entries)
        case = ResourceUsage(resource, activity, random.uniform(0.1, 3.0, entries))
        arguments = random.uniform(1.0, 9.0, 40), random.uniform(0.1, 2.0, 90), random.uniform(0.5, 2.0, 90)
        assert (
            fill_scalar(case, *arguments).tolist()
            == fill_vectorized(case, *arguments).tolist()
            == max_min_rates(case, *arguments).tolist()
        )


def test_solvers_do_not_modify_their_inputs() -> None:
    entries, capacity, cap, share = usage((0, 0, 1.0), (0, 1, 1.0)), floats(4.0), floats(1.0, inf), np.ones(2)
    for solve in (fill_scalar, fill_vectorized):
        solve(entries, capacity, cap, share)
    assert (capacity.tolist(), cap.tolist(), share.tolist()) == ([4.0], [1.0, inf], [1.0, 1.0])


def test_components_are_connected_by_usage() -> None:
    labels = connected_components(usage((0, 0, 1.0), (2, 3, 1.0), (0, 2, 1.0)), flow_count=4, resource_count=4)
    assert labels.flow.tolist() == [0, 1, 0, 2]
    assert labels.resource.tolist() == [0, 3, 2, 4]


def test_a_long_chain_is_one_component() -> None:
    """Activity i uses resources i and i + 1, numbered at random so that roots are hooked in many rounds."""
    random = np.random.default_rng(3)
    activity, resource = random.permutation(1000), random.permutation(1001)
    chain = ResourceUsage(
        np.concatenate([resource[:-1], resource[1:]]), np.concatenate([activity, activity]), np.ones(2000)
    )
    labels = connected_components(chain, flow_count=1000, resource_count=1001)
    assert set(labels.flow.tolist()) == set(labels.resource.tolist()) == {0}


def test_without_usage_every_vertex_is_a_component() -> None:
    labels = connected_components(usage(), flow_count=2, resource_count=1)
    assert (labels.flow.tolist(), labels.resource.tolist()) == ([0, 1], [2])
