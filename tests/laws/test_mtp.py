"""Laws of layers that predict further tokens: none is the model without, and they are on ranks as all else is."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.model.transformer import parameter_count
from clustersim.results.memory_check import build_footprint
from tests.conftest import examples
from tests.laws.timelines import same
from tests.strategies import mappings


@st.composite
def further(draw: st.DrawFn, many: int) -> dict[str, Any]:
    """A scenario whose model predicts so many further tokens; its positions are rotary."""
    mapping = draw(mappings())
    return {**mapping, "model": {**mapping["model"], "family": "llama", "mtp_layers": many}}


@given(further(0))
@examples(16)
def test_none_is_the_model_without(mapping: dict[str, Any]) -> None:
    model = {key: value for key, value in mapping["model"].items() if key != "mtp_layers"}
    none, without = (simulate(Scenario.from_mapping(item)) for item in (mapping, {**mapping, "model": model}))
    assert (none.step_time, none.model_flops) == (without.step_time, without.model_flops)
    assert [ledger.peak for ledger in none.ledgers] == [memory_ledger.peak for memory_ledger in without.ledgers]
    same(none.trace, without.trace, relative=0.0)


@given(further(2))
@examples(16)
def test_folded_is_unfolded_and_coalesced_is_fine(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    folded, every = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    same(folded.trace, every.trace, relative=1e-9)
    assert simulate(scenario.with_overrides("cost.coalesce=false")).step_time == pytest.approx(
        folded.step_time, rel=1e-9
    )


@given(further(2))
@examples(40)
def test_all_ranks_hold_the_model_and_copies_of_the_embedding(mapping: dict[str, Any]) -> None:
    """Without tensor parallelism, under which every rank has all norms."""
    assume(mapping["layout"]["tp"] == 1)
    scenario = Scenario.from_mapping(mapping)
    plan, layout = build_plan(scenario), scenario.layout
    held = [build_footprint(scenario, plan).weights_by_group(rank) for rank in range(layout.pp)]
    spread = {"dense": 1, "narrow": 1, "experts": layout.ep * layout.effective_etp}
    copies = (len(plan.embedding_ranks) - 1) * scenario.model.vocab * scenario.model.hidden
    whole = sum(count * spread[name] for item in held for name, (count, _) in item.items())
    assert whole == parameter_count(scenario.model) + copies
