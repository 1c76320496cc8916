"""Laws of uneven experts: even loads are none, more imbalance is never faster, and nothing is lost on the way."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan, build_simulation
from clustersim.engine.engine import simulate_scalar
from clustersim.engine.vectorized.engine import VectorizedEngine
from clustersim.model.moe_expert_load import MeasuredExpertLoad, RandomExpertLoad
from clustersim.parallel.expert_load_factors import build_load_factors, layer_load_factors
from clustersim.program.task import TokenDispatcher
from clustersim.results.memory_check import peak_memory
from tests.conftest import examples
from tests.laws.test_coalescing import equal, same_breakdown
from tests.laws.test_token_dispatch import LAYOUTS
from tests.laws.timelines import same

EXPERTS = 16
ROWS = st.lists(st.integers(0, 9), min_size=EXPERTS, max_size=EXPERTS).filter(any)
LOADS = st.sampled_from([0.1, 0.5, 2.0]) | ROWS | st.lists(ROWS, min_size=4, max_size=4)


def loaded(
    load: object, layout: dict[str, Any], way: TokenDispatcher = TokenDispatcher.ALL_TO_ALL, steps: int = 1
) -> Scenario:
    """Steps of a small mixture on two nodes."""
    experts = {"count": EXPERTS, "top_k": 2, "ffn": 512}
    said = {"rows": load} if isinstance(load, list) else load
    return Scenario.from_mapping(
        {
            "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "experts": experts},
            "cluster": {"name": "dgx-h100", "gpus": 16},
            "layout": layout | {"dispatcher": way.value},
            "training": {"sequence": 512, "global_batch": 32, "expert_load": said},
            "cost": {"network": "uncontended"},
            "steps": steps,
        }
    )


@st.composite
def uneven(draw: st.DrawFn) -> Scenario:
    """A step whose ranks have loads of their own."""
    return loaded(draw(LOADS), draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(TokenDispatcher)))


@given(st.sampled_from(LAYOUTS), st.sampled_from(TokenDispatcher), st.sampled_from([0.0, [3] * EXPERTS]))
@examples(12)
def test_even_loads_are_none(layout: dict[str, Any], way: TokenDispatcher, load: object) -> None:
    even, none = simulate(loaded(load, layout, way)), simulate(loaded("balanced", layout, way))
    same(even.trace, none.trace)
    assert even.step_time == none.step_time
    assert [ledger.peak for ledger in even.ledgers] == [memory_ledger.peak for memory_ledger in none.ledgers]


@given(uneven())
@examples(12)
def test_folded_is_unfolded_and_coalesced_is_fine(scenario: Scenario) -> None:
    folded, fine = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    same(folded.trace, simulate(scenario.with_overrides("cost.symmetry=off")).trace, relative=1e-9)
    same(folded.trace, fine.trace, relative=1e-9)
    equal(folded.operation_trace, fine.operation_trace, 1e-9 * folded.step_time)
    same_breakdown(folded, fine)


@given(uneven())
@examples(6)
def test_folded_is_unfolded_on_a_shared_network(scenario: Scenario) -> None:
    shared = scenario.with_overrides("cost.network=shared")
    same(simulate(shared).trace, simulate(shared.with_overrides("cost.symmetry=off")).trace, relative=1e-9)


@given(uneven())
@examples(8)
def test_cohorts_are_ranks_one_by_one(scenario: Scenario) -> None:
    made = build_simulation(scenario)
    trace = VectorizedEngine(made.program, made.classes, made.cost, None).simulate_all()
    assert trace is not None
    same(trace, simulate_scalar(made.program, made.classes, made.cost)[0], relative=1e-9)


@given(ROWS, st.integers(0, EXPERTS - 1), st.integers(0, EXPERTS - 1), st.sampled_from(TokenDispatcher))
@examples(16)
def test_more_imbalance_is_never_faster(rows: list[int], rich: int, poor: int, way: TokenDispatcher) -> None:
    """A row that goes from an expert with fewer to one with more (majorisation; experts of their own ranks)."""
    if rows[rich] < rows[poor]:
        rich, poor = poor, rich
    more = list(rows)
    if rich != poor and more[poor]:
        more[rich], more[poor] = more[rich] + 1, more[poor] - 1
    before, after = (simulate(loaded(item, {"ep": 16}, way)).step_time for item in (rows, more))
    assert after >= before * (1.0 - 1e-9)


@given(ROWS, st.permutations(range(8)), st.sampled_from(TokenDispatcher))
@examples(8)
def test_whose_ranks_are_alike_may_trade_loads(rows: list[int], places: list[int], way: TokenDispatcher) -> None:
    """Eight ranks of one node, each with two experts."""
    pairs = np.array(rows).reshape(8, 2)
    layout = {"ep": 8, "pp": 2}
    times = [simulate(loaded(array.reshape(-1).tolist(), layout, way)).step_time for array in (pairs, pairs[places])]
    assert times[0] == pytest.approx(times[1], rel=1e-12)


@given(LOADS, st.sampled_from([element for element in LAYOUTS if element["ep"] > 1]), st.integers(1, 3))
@examples(20)
def test_no_row_is_lost_between_ranks(load: object, layout: dict[str, Any], steps: int) -> None:
    """What comes to the ranks of a group is what they send: loads are 1 on average, in every layer and step."""
    plan = build_plan(scenario := loaded(load, layout, steps=steps))
    assert plan.expert_load is not None
    for step in range(steps):
        for factors in layer_load_factors(plan, plan.expert_load, step):
            assert factors.sum() == pytest.approx(layout["ep"], rel=1e-12)
    loads = build_load_factors(plan, scenario.steps)
    drawn = isinstance(plan.expert_load, RandomExpertLoad)
    assert len(loads.factors) == (4 * steps if drawn else 4 if plan.expert_load.varies_by_layer else 1)
    assert loads.loads_per_step == (4 if drawn else 0)
    groups = build_simulation(scenario).program.groups
    role = "etp_ep" if "etp_ep" in groups else "ep"
    np.testing.assert_allclose(loads.factors[:, groups[role].members].mean(axis=2), 1.0, rtol=1e-12)


def test_one_expert_that_all_choose_is_waited_for_by_all() -> None:
    """Its rank runs 16 times the mean's rows; the others' products are of one row, and they wait where results meet."""
    even, hot = (simulate(loaded(load, {"ep": 16})) for load in ("balanced", [1] + [0] * 15))
    waits = np.bincount(hot.trace.rank, hot.trace.waited, minlength=16)
    assert waits[0] < 1e-9 < waits[hot.trace.representative[15]]
    assert hot.step_time > even.step_time


def test_the_fullest_rank_keeps_its_rows() -> None:
    """What backward reads of 8 times the rows: the difference to the mean is 7 times what the mean keeps of them."""
    even, hot, hotter = (
        peak_memory(loaded(load, {"ep": 16})) for load in ("balanced", [8] + [8 / 15] * 15, [15] + [1 / 15] * 15)
    )
    assert hotter - even == pytest.approx((hot - even) * 14 / 7, rel=1e-3)


def test_loads_are_the_seeds() -> None:
    """Drawn anew for each layer, step and seed; a gamma's mean and variation."""
    load = RandomExpertLoad(0.5, seed=3)
    np.testing.assert_array_equal(load.expert_shares(64, 2, 1), RandomExpertLoad(0.5, seed=3).expert_shares(64, 2, 1))
    others = [
        load.expert_shares(64, 3, 1),
        load.expert_shares(64, 2, 0),
        RandomExpertLoad(0.5, seed=4).expert_shares(64, 2, 1),
    ]
    assert all((load.expert_shares(64, 2, 1) != other).all() for other in others)
    many = load.expert_shares(100_000, 0, 0) * 100_000
    assert many.mean() == pytest.approx(1.0, rel=1e-9)
    assert many.std() == pytest.approx(0.5, rel=0.01)  # the standard error of a gamma's deviation is 0.3 %


def test_a_drawn_step_differs_from_the_next() -> None:
    answer = simulate(loaded(0.5, {"ep": 16}, steps=3))
    assert len(set(np.diff([0.0, *np.cumsum(answer.step_times)]).tolist())) == 3


def test_experts_with_a_capacity_take_that_many_rows() -> None:
    """Whoever is chosen: the rest is dropped, and what lacks is padded."""
    scenario = loaded(2.0, {"ep": 16})
    capped = {"count": EXPERTS, "top_k": 2, "ffn": 512, "capacity": 1.0}
    with_capacity = scenario.with_overrides(f"model.experts={capped}")
    assert build_plan(with_capacity).expert_load is None
    assert (
        simulate(with_capacity).step_time
        == simulate(with_capacity.with_overrides("training.expert_load=balanced")).step_time
    )


def test_measured_loads_are_of_each_layer() -> None:
    load = MeasuredExpertLoad(((1.0, 3.0), (2.0, 2.0)))
    np.testing.assert_array_equal(load.expert_shares(2, 0, 5), [0.25, 0.75])
    np.testing.assert_array_equal(load.expert_shares(2, 1, 0), [0.5, 0.5])
