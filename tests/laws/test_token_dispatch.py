"""Laws of steps with experts hold whatever sends the tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.program.task import TokenDispatcher
from tests.conftest import examples
from tests.laws.timelines import same

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "sequence_parallel": True},
    {"tp": 2, "ep": 8, "etp": 1, "sequence_parallel": True},
    {"pp": 2, "ep": 8},
    {"tp": 2, "ep": 4, "etp": 2, "sequence_parallel": True},
    {"ep": 16},
]


@st.composite
def mixtures(draw: st.DrawFn) -> Scenario:
    """Steps of 16 GPUs on two nodes of a small mixture."""
    way = draw(st.sampled_from(TokenDispatcher))
    limited = {"groups": 4, "limit": draw(st.sampled_from([1, 2]))} if draw(st.booleans()) else {}
    experts = {"count": 16, "top_k": 2, "ffn": 512} | limited
    model = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "experts": experts}
    cluster = {"name": draw(st.sampled_from(["dgx-h100", "gb200-nvl72"])), "gpus": 16}
    training = {"sequence": 512, "global_batch": 32}
    layout = draw(st.sampled_from(LAYOUTS)) | {"dispatcher": way.value}
    return Scenario.from_mapping({"model": model, "cluster": cluster, "layout": layout, "training": training})


@given(mixtures())
@examples(12)
def test_folded_is_unfolded_and_coalesced_is_fine(scenario: Scenario) -> None:
    folded = simulate(scenario)
    same(folded.trace, simulate(scenario.with_overrides("cost.symmetry=off")).trace, relative=1e-9)
    fine = simulate(scenario.with_overrides("cost.coalesce=false"))
    assert fine.step_time == pytest.approx(folded.step_time, rel=1e-9)


@given(mixtures())
@examples(8)
def test_folded_is_unfolded_on_a_shared_network(scenario: Scenario) -> None:
    shared = scenario.with_overrides("cost.network=shared")
    folded = simulate(shared)
    same(folded.trace, simulate(shared.with_overrides("cost.symmetry=off")).trace, relative=1e-9)


def test_one_group_that_shares_its_links_with_nobody_takes_what_it_takes_uncontended() -> None:
    """All experts of 8 GPUs in one node: exchanges of one role on ports of their own."""
    for way in TokenDispatcher:
        model = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 1024}
        experts = {"count": 16, "top_k": 2, "ffn": 512}
        mapping = {
            "model": model | {"experts": experts},
            "cluster": {"name": "dgx-h100", "gpus": 8},
            "layout": {"ep": 8, "dispatcher": way.value},
            "training": {"sequence": 512, "global_batch": 8},
        }
        alone = Scenario.from_mapping(mapping)
        times = [simulate(scenario).step_time for scenario in (alone, alone.with_overrides("cost.network=shared"))]
        assert times[1] == pytest.approx(times[0], rel=1e-9), way
