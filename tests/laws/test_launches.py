"""Invariants of kernel launches: whatever a CUDA graph launches, the host need not."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from tests.conftest import examples
from tests.laws.test_moe_overlap import mappings as overlapped_mappings
from tests.strategies import mappings

SCOPES: tuple[object, ...] = (False, "outside_experts", True)
"""What graphs capture: nothing, all but the work of experts, everything."""
MAPPINGS = st.one_of(mappings(), overlapped_mappings())


@given(MAPPINGS, st.sampled_from(["megatron", "megatron-bridge", "pytorch"]))
@examples(25)
def test_more_in_graphs_is_never_slower(mapping: dict[str, Any], framework: str) -> None:
    steps = [
        simulate(Scenario.from_mapping({**mapping, "framework": {"name": framework, "cuda_graphs": scope}})).step_time
        for scope in SCOPES
    ]
    eager, outside_experts, everything = steps
    assert everything <= outside_experts * (1 + 1e-9)
    assert outside_experts <= eager * (1 + 1e-9)


@given(MAPPINGS, st.floats(1.0, 50.0), st.floats(1.0, 50.0))
@examples(25)
def test_a_faster_host_is_never_slower(mapping: dict[str, Any], first: float, second: float) -> None:
    fast, slow = (
        simulate(
            Scenario.from_mapping(
                {
                    **mapping,
                    "framework": {"name": "megatron", "launch": f"{launch} us", "backward_launch": f"{launch} us"},
                }
            )
        ).step_time
        for launch in sorted((first, second))
    )
    assert fast <= slow * (1 + 1e-9)
