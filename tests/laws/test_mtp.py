"""Invariants of multi-token prediction: zero MTP layers change nothing, and ranks hold all parameters."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.model.transformer import parameter_count
from clustersim.results.memory_check import build_footprint
from tests.conftest import examples
from tests.laws.timelines import assert_same_trace
from tests.strategies import mappings


@st.composite
def mtp_mappings(draw: st.DrawFn, mtp_layers: int) -> dict[str, Any]:
    """A Llama scenario (rotary positions) with the given number of MTP layers."""
    mapping = draw(mappings())
    return {**mapping, "model": {**mapping["model"], "family": "llama", "mtp_layers": mtp_layers}}


@given(mtp_mappings(0))
@examples(16)
def test_zero_mtp_layers_equal_the_model_without_the_key(mapping: dict[str, Any]) -> None:
    model = {key: value for key, value in mapping["model"].items() if key != "mtp_layers"}
    zero_layers, no_key = (
        simulate(Scenario.from_mapping(variant)) for variant in (mapping, {**mapping, "model": model})
    )
    assert (zero_layers.step_time, zero_layers.model_flops) == (no_key.step_time, no_key.model_flops)
    assert [ledger.peak for ledger in zero_layers.ledgers] == [memory_ledger.peak for memory_ledger in no_key.ledgers]
    assert_same_trace(zero_layers.trace, no_key.trace, relative=0.0)


@given(mtp_mappings(2))
@examples(16)
def test_mtp_folding_and_coalescing_change_no_time(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    folded, unfolded_result = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    assert_same_trace(folded.trace, unfolded_result.trace, relative=1e-9)
    assert simulate(scenario.with_overrides("cost.coalesce=false")).step_time == pytest.approx(
        folded.step_time, rel=1e-9
    )


@given(mtp_mappings(2))
@examples(40)
def test_all_ranks_hold_the_model_and_copies_of_the_embedding(mapping: dict[str, Any]) -> None:
    """Without tensor parallelism, under which every rank holds all norms."""
    assume(mapping["layout"]["tp"] == 1)
    scenario = Scenario.from_mapping(mapping)
    plan, layout = build_plan(scenario), scenario.layout
    stage_weights = [build_footprint(scenario, plan).weights_by_group(rank) for rank in range(layout.pp)]
    shard_counts = {"dense": 1, "low_precision": 1, "experts": layout.ep * layout.effective_etp}
    copied_parameters = (len(plan.embedding_ranks) - 1) * scenario.model.vocab * scenario.model.hidden
    total_parameters = sum(
        count * shard_counts[name] for stage_weight in stage_weights for name, (count, _) in stage_weight.items()
    )
    assert total_parameters == parameter_count(scenario.model) + copied_parameters
