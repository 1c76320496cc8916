"""Laws of disturbed clusters: what is wrong splits classes exactly where it is felt, and costs time in known ways."""

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
from tests.laws.timelines import same
from tests.strategies import mappings

PLACES = ["one switch", "racks"]
SMALLER = {"accelerator": "a100-sxm-80gb"}


@st.composite
def disturbed(draw: st.DrawFn, *, jitter: bool = False) -> Scenario:
    """Training steps of 2 to 16 GPUs with one thing wrong, on either network."""
    mapping: dict[str, Any] = draw(mappings(draw(st.sampled_from(PLACES))))
    assume(mapping["layout"].get("data") != "data_parallel")
    gpus = mapping["cluster"]["gpus"]
    wrong = draw(_wrong(gpus))
    if wrong.pop("mixed", None):
        mapping["cluster"] = {**mapping["cluster"], "mixed": [{"nodes": [draw(_node(gpus))], **SMALLER}]}
        mapping["training"]["precision"] = "bf16"  # which the smaller ones compute in, too
    if jitter:
        wrong["jitter"] = {"std": "2 %", "distribution": draw(st.sampled_from(["normal", "lognormal", "exponential"]))}
    cost = {
        "network": draw(st.sampled_from(["uncontended", "shared"])),
        "interference": draw(st.sampled_from([0.0, 0.2, 1.0])),
    }
    whole = {**mapping, "disturbances": wrong, "cost": cost, "steps": draw(st.sampled_from([1, 1, 1, 2]))}
    try:
        return Scenario.from_mapping(whole)
    except InputError as error:  # a dead link that leaves no way
        assert "dead" in str(error) or "reach" in str(error), error
        assume(False)
        raise


def _node(gpus: int) -> st.SearchStrategy[int]:
    return st.integers(0, gpus // 2 - 1)


@st.composite
def _wrong(draw: st.DrawFn, gpus: int) -> dict[str, Any]:
    gpu = draw(st.integers(0, gpus - 1))
    node = draw(_node(gpus))
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


@given(disturbed())
@examples(100)
def test_folded_is_unfolded_where_something_is_wrong(scenario: Scenario) -> None:
    folded, every = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    same(folded.trace, every.trace, relative=1e-9)


@given(disturbed() | disturbed(jitter=True))
@examples(70)
def test_coalesced_is_fine_grained_where_something_is_wrong(scenario: Scenario) -> None:
    whole, fine = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    same(whole.trace, fine.trace, relative=1e-9)
    rank = scenario.layout.world_size - 1
    mine, other = whole.operation_spans(rank), fine.operation_spans(rank)
    assert np.abs(mine.end - other.end).max(initial=0.0) <= 1e-9 * fine.trace.makespan


@given(disturbed() | disturbed(jitter=True))
@examples(60)
def test_every_answer_adds_up_where_something_is_wrong(scenario: Scenario) -> None:
    result = simulate(scenario)
    check_trace(result.trace, result.program)
    for rank in range(result.rank_count):
        parts = result.breakdown.rank_seconds(rank)
        assert sum(parts.values()) == pytest.approx(result.step_time, rel=1e-9)
        assert min(parts.values()) >= -1e-9 * result.step_time
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time, rel=1e-9)
    assert result.step_times.sum() == pytest.approx(result.trace.makespan, rel=1e-12)
    assert sum(result.provenance_shares.values()) == pytest.approx(1.0)


@given(disturbed(jitter=True))
@examples(25)
def test_the_same_disturbed_scenario_gives_the_same_bytes(scenario: Scenario) -> None:
    again = Scenario.from_mapping(scenario.to_mapping())
    assert pickle.dumps(simulate(scenario).trace) == pickle.dumps(simulate(again).trace)


@given(disturbed())
@examples(40)
def test_jitter_of_nothing_changes_nothing(scenario: Scenario) -> None:
    """With a deviation of 0, all ranks are run, at the times of their classes."""
    jittered = simulate(scenario.with_overrides("disturbances.jitter=0 %"))
    same(simulate(scenario).trace, jittered.trace, relative=1e-9)
