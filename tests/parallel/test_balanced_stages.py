"""Stages that are balanced by model FLOP: no other partition has a smaller largest stage."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.common.errors import InputError
from clustersim.model.flops import layer_token_flops, token_flops
from clustersim.model.layer_stack import layer_specs
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.presets import load_preset
from clustersim.parallel.layer_partition import BalancedFlops
from clustersim.program.placement import looped_placement
from tests.conftest import examples


def _largest(flops: list[int], head: int, counts: tuple[int, ...]) -> int:
    ends = [sum(counts[:index]) for index in range(len(counts) + 1)]
    stages = [sum(flops[first:last]) for first, last in pairwise(ends)]
    return max(*stages[:-1], stages[-1] + head) if len(stages) > 1 else stages[0] + head


@examples(60)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=9), st.integers(0, 12), st.integers(2, 4))
def test_no_partition_has_a_smaller_largest_stage(flops: list[int], head: int, stages: int) -> None:
    counts = BalancedFlops(tuple(map(float, flops)), float(head)).layer_counts(len(flops), looped_placement(stages))
    assert sum(counts) == len(flops)
    assert min(counts) >= 1
    cuts = combinations(range(1, len(flops)), stages - 1)
    others = (tuple(b - a for a, b in pairwise((0, *cut, len(flops)))) for cut in cuts)
    assert _largest(flops, head, counts) == min(_largest(flops, head, other) for other in others)


def test_flop_of_layers_and_logits_are_those_of_the_model() -> None:
    model = load_preset("nemotron-h-8b")
    layers = sum(layer_token_flops(model, spec, 8192) for spec in layer_specs(model.stack))
    causal = token_flops(model, 8192, convention=AttentionFlopConvention.CAUSAL)
    assert layers + 6 * model.vocab * model.hidden == pytest.approx(causal, rel=1e-12)


def _scenario(split: str, pp: int = 4) -> Scenario:
    return Scenario.from_mapping(
        {
            "model": "nemotron-h-8b",
            "cluster": {"name": "dgx-h100", "gpus": 32},
            "layout": {"tp": 4, "pp": pp, "dp": 8 // pp, "layers_per_stage": split},
            "training": {"sequence": 4096, "global_batch": 32},
        }
    )


def test_a_hybrid_is_faster_with_balanced_stages() -> None:
    even, balanced = (_scenario(split) for split in ("even", "balanced"))
    counts = [stage.layer_count for stage in build_plan(balanced).stages]
    assert counts[-1] < counts[0]  # the logits count
    assert simulate(balanced).step_time < simulate(even).step_time


def test_a_rule_with_it_is_refused() -> None:
    split = {"layers_per_stage": {"balanced": True, "first": 1}}
    with pytest.raises(InputError, match="more than one of"):
        Scenario.from_mapping({**_scenario("even").to_mapping(), "layout": split})
