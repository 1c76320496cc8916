"""Invariants of MoE steps for every token dispatcher."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.program.task import TokenDispatcher
from tests.conftest import examples
from tests.laws.timelines import assert_same_trace

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "sequence_parallel": True},
    {"tp": 2, "ep": 8, "etp": 1, "sequence_parallel": True},
    {"pp": 2, "ep": 8},
    {"tp": 2, "ep": 4, "etp": 2, "sequence_parallel": True},
    {"ep": 16},
]

NVIDIA_DISPATCHERS = tuple(dispatcher for dispatcher in TokenDispatcher if dispatcher is not TokenDispatcher.MORI)


@st.composite
def moe_scenarios(draw: st.DrawFn) -> Scenario:
    """Steps of a small MoE model on 16 GPUs of two nodes."""
    dispatcher = draw(st.sampled_from(NVIDIA_DISPATCHERS))
    group_limit = {"num_groups": 4, "group_topk": draw(st.sampled_from([1, 2]))} if draw(st.booleans()) else {}
    experts = {"count": 16, "top_k": 2, "ffn": 512} | group_limit
    model = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "experts": experts}
    cluster = {"name": draw(st.sampled_from(["dgx-h100", "gb200-nvl72"])), "gpus": 16}
    training = {"sequence": 512, "global_batch": 32}
    layout = draw(st.sampled_from(LAYOUTS)) | {"dispatcher": dispatcher.value}
    return Scenario.from_mapping({"model": model, "cluster": cluster, "layout": layout, "training": training})


@given(moe_scenarios())
@examples(12)
def test_dispatchers_folding_and_coalescing_change_no_time(scenario: Scenario) -> None:
    folded = simulate(scenario)
    assert_same_trace(folded.trace, simulate(scenario.with_overrides("cost.symmetry=off")).trace, relative=1e-9)
    fine_grained = simulate(scenario.with_overrides("cost.coalesce=false"))
    assert fine_grained.step_time == pytest.approx(folded.step_time, rel=1e-9)


@given(moe_scenarios())
@examples(8)
def test_dispatchers_folded_equals_unfolded_on_a_shared_network(scenario: Scenario) -> None:
    shared = scenario.with_overrides("cost.network=shared")
    folded = simulate(shared)
    assert_same_trace(folded.trace, simulate(shared.with_overrides("cost.symmetry=off")).trace, relative=1e-9)


def test_one_group_without_link_sharing_takes_its_uncontended_time() -> None:
    """All experts on 8 GPUs of one node: collectives of one group on ports of their own."""
    for dispatcher in NVIDIA_DISPATCHERS:
        model = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 1024}
        experts = {"count": 16, "top_k": 2, "ffn": 512}
        mapping = {
            "model": model | {"experts": experts},
            "cluster": {"name": "dgx-h100", "gpus": 8},
            "layout": {"ep": 8, "dispatcher": dispatcher.value},
            "training": {"sequence": 512, "global_batch": 8},
        }
        uncontended = Scenario.from_mapping(mapping)
        times = [
            simulate(variant).step_time for variant in (uncontended, uncontended.with_overrides("cost.network=shared"))
        ]
        assert times[1] == pytest.approx(times[0], rel=1e-9), dispatcher
