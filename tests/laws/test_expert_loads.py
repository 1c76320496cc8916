"""Invariants of imbalanced experts: even loads equal balanced, imbalance is never faster, and no token is lost."""

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
from tests.laws.test_coalescing import assert_equal_operations, assert_same_breakdown
from tests.laws.test_token_dispatch import LAYOUTS
from tests.laws.timelines import assert_same_trace

EXPERTS = 16
TOKEN_COUNTS = st.lists(st.integers(0, 9), min_size=EXPERTS, max_size=EXPERTS).filter(any)
LOADS = st.sampled_from([0.1, 0.5, 2.0]) | TOKEN_COUNTS | st.lists(TOKEN_COUNTS, min_size=4, max_size=4)

NVIDIA_DISPATCHERS = tuple(dispatcher for dispatcher in TokenDispatcher if dispatcher is not TokenDispatcher.MORI)


def scenario_with_load(
    load: object, layout: dict[str, Any], dispatcher: TokenDispatcher = TokenDispatcher.ALL_TO_ALL, steps: int = 1
) -> Scenario:
    """Steps of a small MoE model on two nodes with an expert load."""
    experts = {"count": EXPERTS, "top_k": 2, "ffn": 512}
    load_value = {"tokens_per_expert": load} if isinstance(load, list) else load
    return Scenario.from_mapping(
        {
            "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "experts": experts},
            "cluster": {"name": "dgx-h100", "gpus": 16},
            "layout": layout | {"dispatcher": dispatcher.value},
            "training": {"sequence": 512, "global_batch": 32, "expert_load": load_value},
            "cost": {"network": "uncontended"},
            "framework": "ideal",
            "steps": steps,
        }
    )


@st.composite
def imbalanced_scenarios(draw: st.DrawFn) -> Scenario:
    """A step whose ranks have different expert loads."""
    return scenario_with_load(draw(LOADS), draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(NVIDIA_DISPATCHERS)))


@given(st.sampled_from(LAYOUTS), st.sampled_from(NVIDIA_DISPATCHERS), st.sampled_from([0.0, [3] * EXPERTS]))
@examples(12)
def test_even_loads_equal_balanced(layout: dict[str, Any], dispatcher: TokenDispatcher, load: object) -> None:
    even, balanced = (
        simulate(scenario_with_load(load, layout, dispatcher)),
        simulate(scenario_with_load("balanced", layout, dispatcher)),
    )
    assert_same_trace(even.trace, balanced.trace)
    assert even.step_time == balanced.step_time
    assert [ledger.peak for ledger in even.ledgers] == [memory_ledger.peak for memory_ledger in balanced.ledgers]


@given(imbalanced_scenarios())
@examples(12)
def test_imbalanced_folding_and_coalescing_change_no_time(scenario: Scenario) -> None:
    folded, fine_grained = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    assert_same_trace(folded.trace, simulate(scenario.with_overrides("cost.symmetry=off")).trace, relative=1e-9)
    assert_same_trace(folded.trace, fine_grained.trace, relative=1e-9)
    assert_equal_operations(folded.operation_trace, fine_grained.operation_trace, 1e-9 * folded.step_time)
    assert_same_breakdown(folded, fine_grained)


@given(imbalanced_scenarios())
@examples(6)
def test_imbalanced_folded_equals_unfolded_on_a_shared_network(scenario: Scenario) -> None:
    shared = scenario.with_overrides("cost.network=shared")
    assert_same_trace(simulate(shared).trace, simulate(shared.with_overrides("cost.symmetry=off")).trace, relative=1e-9)


@given(imbalanced_scenarios())
@examples(8)
def test_imbalanced_vectorized_engine_equals_the_scalar_engine(scenario: Scenario) -> None:
    prepared = build_simulation(scenario)
    trace = VectorizedEngine(prepared.program, prepared.classes, prepared.cost, None).simulate_all()
    assert trace is not None
    assert_same_trace(trace, simulate_scalar(prepared.program, prepared.classes, prepared.cost)[0], relative=1e-9)


@given(TOKEN_COUNTS, st.integers(0, EXPERTS - 1), st.integers(0, EXPERTS - 1), st.sampled_from(NVIDIA_DISPATCHERS))
@examples(16)
def test_more_imbalance_is_never_faster(
    token_counts: list[int], larger: int, smaller: int, dispatcher: TokenDispatcher
) -> None:
    """One token moves from an expert with fewer to one with more (majorisation; one expert per rank)."""
    if token_counts[larger] < token_counts[smaller]:
        larger, smaller = smaller, larger
    shifted = list(token_counts)
    if larger != smaller and shifted[smaller]:
        shifted[larger], shifted[smaller] = shifted[larger] + 1, shifted[smaller] - 1
    before, after = (
        simulate(scenario_with_load(counts, {"ep": 16}, dispatcher)).step_time for counts in (token_counts, shifted)
    )
    assert after >= before * (1.0 - 1e-9)


@given(TOKEN_COUNTS, st.permutations(range(8)), st.sampled_from(NVIDIA_DISPATCHERS))
@examples(8)
def test_permuting_loads_of_equivalent_ranks_changes_nothing(
    token_counts: list[int], permutation: list[int], dispatcher: TokenDispatcher
) -> None:
    """Eight ranks of one node, each with two experts."""
    pairs = np.array(token_counts).reshape(8, 2)
    layout = {"ep": 8, "pp": 2}
    times = [
        simulate(scenario_with_load(counts.reshape(-1).tolist(), layout, dispatcher)).step_time
        for counts in (pairs, pairs[permutation])
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-12)


@given(LOADS, st.sampled_from([item for item in LAYOUTS if item["ep"] > 1]), st.integers(1, 3))
@examples(20)
def test_load_factors_of_a_group_average_to_one(load: object, layout: dict[str, Any], steps: int) -> None:
    """The ranks of a group receive what they send: load factors are 1 on average, in every layer and step."""
    plan = build_plan(scenario := scenario_with_load(load, layout, steps=steps))
    assert plan.expert_load is not None
    for step in range(steps):
        for factors in layer_load_factors(plan, plan.expert_load, step):
            assert factors.sum() == pytest.approx(layout["ep"], rel=1e-12)
    loads = build_load_factors(plan, scenario.steps)
    is_drawn = isinstance(plan.expert_load, RandomExpertLoad)
    assert len(loads.factors) == (4 * steps if is_drawn else 4 if plan.expert_load.varies_by_layer else 1)
    assert loads.loads_per_step == (4 if is_drawn else 0)
    groups = build_simulation(scenario).program.groups
    comm_group = "etp_ep" if "etp_ep" in groups else "ep"
    np.testing.assert_allclose(loads.factors[:, groups[comm_group].members].mean(axis=2), 1.0, rtol=1e-12)


def test_all_ranks_wait_for_the_hot_expert() -> None:
    """Its rank runs 16 times the mean token count; the others' matmuls have one row, and they wait at the combine."""
    even, hot = (simulate(scenario_with_load(load, {"ep": 16})) for load in ("balanced", [1] + [0] * 15))
    waits = np.bincount(hot.trace.rank, hot.trace.waited, minlength=16)
    assert waits[0] < 1e-9 < waits[hot.trace.representative[15]]
    assert hot.step_time > even.step_time


def test_activation_memory_grows_with_the_tokens_of_the_hot_rank() -> None:
    """Activations kept for 8 times the tokens: the difference to the mean is 7 times what the mean keeps of them."""
    even, hot, hotter = (
        peak_memory(scenario_with_load(load, {"ep": 16}))
        for load in ("balanced", [8] + [8 / 15] * 15, [15] + [1 / 15] * 15)
    )
    assert hotter - even == pytest.approx((hot - even) * 14 / 7, rel=1e-3)


def test_drawn_loads_depend_on_layer_step_and_seed() -> None:
    """Drawn anew for each layer, step and seed; checked against a gamma distribution's mean and variation."""
    load = RandomExpertLoad(0.5, seed=3)
    np.testing.assert_array_equal(load.expert_shares(64, 2, 1), RandomExpertLoad(0.5, seed=3).expert_shares(64, 2, 1))
    other_draws = [
        load.expert_shares(64, 3, 1),
        load.expert_shares(64, 2, 0),
        RandomExpertLoad(0.5, seed=4).expert_shares(64, 2, 1),
    ]
    assert all((load.expert_shares(64, 2, 1) != other_draw).all() for other_draw in other_draws)
    normalized = load.expert_shares(100_000, 0, 0) * 100_000
    assert normalized.mean() == pytest.approx(1.0, rel=1e-9)
    assert normalized.std() == pytest.approx(0.5, rel=0.01)  # the standard error of a gamma's deviation is 0.3 %


def test_drawn_loads_differ_between_steps() -> None:
    result = simulate(scenario_with_load(0.5, {"ep": 16}, steps=3))
    assert len(set(np.diff([0.0, *np.cumsum(result.step_times)]).tolist())) == 3


def test_capacity_overrides_expert_loads() -> None:
    """Tokens above the capacity are dropped, and missing ones are padded."""
    scenario = scenario_with_load(2.0, {"ep": 16})
    capped = {"count": EXPERTS, "top_k": 2, "ffn": 512, "capacity_factor": 1.0}
    with_capacity = scenario.with_overrides(f"model.experts={capped}")
    assert build_plan(with_capacity).expert_load is None
    assert (
        simulate(with_capacity).step_time
        == simulate(with_capacity.with_overrides("training.expert_load=balanced")).step_time
    )


def test_measured_loads_cycle_over_layers() -> None:
    load = MeasuredExpertLoad(((1.0, 3.0), (2.0, 2.0)))
    np.testing.assert_array_equal(load.expert_shares(2, 0, 5), [0.25, 0.75])
    np.testing.assert_array_equal(load.expert_shares(2, 1, 0), [0.5, 0.5])
