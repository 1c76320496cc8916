"""Invariants of degraded clusters: degradations split equivalence classes exactly where they have an effect."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from tests.conftest import examples
from tests.laws.test_trace import check_trace
from tests.laws.timelines import assert_same_trace
from tests.strategies import mappings

FABRICS = ["one switch", "racks"]
A100_NODE = {"accelerator": "a100-sxm-80gb"}


@st.composite
def degraded_scenarios(draw: st.DrawFn, *, jitter: bool = False) -> Scenario:
    """Training steps of 2 to 16 GPUs with one degradation, on a shared or uncontended network."""
    mapping: dict[str, Any] = draw(mappings(draw(st.sampled_from(FABRICS))))
    assume(mapping["layout"].get("data") != "data_parallel")
    gpus = mapping["cluster"]["gpus"]
    degradation = draw(_degradations(gpus))
    if degradation.pop("mixed", None):
        mapping["cluster"] = {**mapping["cluster"], "mixed": [{"nodes": [draw(_node_ids(gpus))], **A100_NODE}]}
        mapping["training"]["precision"] = "bf16"  # which A100s compute in, too
    if jitter:
        degradation["jitter"] = {
            "std": "2 %",
            "distribution": draw(st.sampled_from(["normal", "lognormal", "exponential"])),
        }
    cost = {
        "network": draw(st.sampled_from(["uncontended", "shared"])),
        "interference": draw(st.sampled_from([0.0, 0.2, 1.0])),
    }
    full_mapping = {**mapping, "degradations": degradation, "cost": cost, "steps": draw(st.sampled_from([1, 1, 1, 2]))}
    try:
        return Scenario.from_mapping(full_mapping)
    except InputError as error:  # a dead link that leaves no path
        assert "dead" in str(error) or "reach" in str(error), error
        assume(False)
        raise


def _node_ids(gpus: int) -> st.SearchStrategy[int]:
    return st.integers(0, gpus // 2 - 1)


@st.composite
def _degradations(draw: st.DrawFn, gpus: int) -> dict[str, Any]:
    gpu = draw(st.integers(0, gpus - 1))
    node = draw(_node_ids(gpus))
    kinds: dict[str, dict[str, Any]] = {
        "nothing": {},
        "slow GPU": {"slow": [{"gpu": gpu, "speed": draw(st.sampled_from([0.5, 0.9]))}]},
        "slow node": {"slow": [{"node": node, "speed": 0.8}]},
        "slow NIC": {"nics": [{"gpu": gpu, "bandwidth": 0.5}]},
        "background": {"background": {"nic": 0.5}},
        "dead NIC": {"links": [{"between": [f"nic{gpu // 2}.{gpu % 2}", f"gpu{gpu}"], "dead": True}]},
        "dead NVLink": {"links": [{"between": [f"gpu{gpu}", f"nvswitch{gpu // 2}"], "dead": True}]},
        "mixed": {"mixed": True},
    }
    kind = draw(st.sampled_from(sorted(kinds)))
    event(kind)
    return kinds[kind]


@given(degraded_scenarios())
@examples(100)
def test_folded_equals_unfolded_with_degradations(scenario: Scenario) -> None:
    folded, unfolded_result = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    assert_same_trace(folded.trace, unfolded_result.trace, relative=1e-9)


@given(degraded_scenarios() | degraded_scenarios(jitter=True))
@examples(70)
def test_coalesced_equals_fine_grained_with_degradations(scenario: Scenario) -> None:
    coalesced, fine = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    assert_same_trace(coalesced.trace, fine.trace, relative=1e-9)
    rank = scenario.layout.world_size - 1
    spans, fine_spans = coalesced.operation_spans(rank), fine.operation_spans(rank)
    assert np.abs(spans.end - fine_spans.end).max(initial=0.0) <= 1e-9 * fine.trace.makespan


@given(degraded_scenarios() | degraded_scenarios(jitter=True))
@examples(60)
def test_breakdowns_and_critical_paths_sum_with_degradations(scenario: Scenario) -> None:
    result = simulate(scenario)
    check_trace(result.trace, result.program)
    for rank in range(result.rank_count):
        categories = result.breakdown.rank_seconds(rank)
        assert sum(categories.values()) == pytest.approx(result.step_time, rel=1e-9)
        assert min(categories.values()) >= -1e-9 * result.step_time
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time, rel=1e-9)
    assert result.step_times.sum() == pytest.approx(result.trace.makespan, rel=1e-12)
    assert sum(result.provenance_shares.values()) == pytest.approx(1.0)


@given(degraded_scenarios(jitter=True))
@examples(25)
def test_the_same_degraded_scenario_gives_the_same_bytes(scenario: Scenario) -> None:
    again = Scenario.from_mapping(scenario.to_mapping())
    assert pickle.dumps(simulate(scenario).trace) == pickle.dumps(simulate(again).trace)


@given(degraded_scenarios())
@examples(40)
def test_zero_jitter_changes_nothing(scenario: Scenario) -> None:
    """With a deviation of 0, all ranks are run, at the times of their classes."""
    jittered = simulate(scenario.with_overrides("degradations.jitter=0 %"))
    assert_same_trace(simulate(scenario).trace, jittered.trace, relative=1e-9)
