"""The range of a balanced step if tokens chose their experts freely, against closed forms, simulations and pairs."""

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clustersim import RenderedResult, Scenario, simulate
from clustersim.report.run_page import run_page
from clustersim.report.terminal.run import render_run
from clustersim.results import natural_routing as module
from clustersim.results.natural_routing import NATURAL_VARIATIONS, expected_load_factors, natural_routing
from tests.conftest import examples

RANKS = 8
MIXTURE: dict[str, Any] = {
    "model": {
        "layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000,
        "experts": {"count": RANKS, "top_k": 2, "ffn": 4096},
    },
    "cluster": {"name": "dgx-h100", "gpus": RANKS},
    "layout": {"ep": RANKS, "dispatcher": "alltoall"},
    "framework": "ideal",
    "training": {"sequence": 4096, "global_batch": 2 * RANKS},
}  # fmt: skip


def mixture(*overrides: str) -> Scenario:
    return Scenario.from_mapping(MIXTURE, overrides=list(overrides))


def ratio_at(result: RenderedResult, variation: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """The ratio of a balanced result to one whose ranks have this coefficient of variation."""
    monkeypatch.setattr(module, "NATURAL_VARIATIONS", (variation, variation))
    natural = natural_routing(result.scenario, result.trace_table, result.cost.time_segment, result.breakdown)
    assert natural is not None
    return natural.ratios[0]


@pytest.mark.parametrize("variation", [0.1, 0.3])
def test_the_larger_of_two_loads_is_the_mean_deviation_of_a_beta_variate(variation: float) -> None:
    """Two normalized gamma variates of shape a = 1/v^2 are Beta(a, a), whose mean deviation is 4^-a / (a B(a, a))."""
    shape = 1.0 / variation**2
    log_beta = 2.0 * math.lgamma(shape) - math.lgamma(2.0 * shape)
    deviation = math.exp(-shape * math.log(4.0) - math.log(shape) - log_beta)
    factor = expected_load_factors(mixture("cluster.gpus=2", "layout.ep=2"), variation).rank
    assert factor - 1.0 == pytest.approx(2.0 * deviation, rel=0.1)


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
@pytest.mark.parametrize("gpus", [8, 16])
@pytest.mark.parametrize("variation", [0.1, 0.4])
def test_it_is_that_of_simulated_random_loads(
    dispatcher: str, gpus: int, variation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert per rank, so that the loads of experts are those of ranks; on one node or two.

    The excess is within a third: latencies of messages, which it scales, do not grow with loads.
    """
    layout = (f"cluster.gpus={gpus}", f"layout.ep={gpus}", f"model.experts.count={gpus}")
    balanced = mixture(*layout, f"layout.dispatcher={dispatcher}", "model.layers=32")
    random = balanced.with_overrides(f"training.expert_load={variation}")
    result = simulate(balanced)
    excess = simulate(random).step_time / result.step_time - 1.0
    assert ratio_at(result, variation, monkeypatch) - 1.0 == pytest.approx(excess, rel=0.35)


def test_waiting_is_longer_by_the_load_of_the_fullest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With even loads nothing is longer; otherwise kernels of experts and tokens on their way are, and nothing else."""
    result = simulate(mixture())
    assert ratio_at(result, 0.0, monkeypatch) == pytest.approx(1.0, abs=1e-12)
    rank_factor = expected_load_factors(result.scenario, 0.3).rank
    assert 1.0 < ratio_at(result, 0.3, monkeypatch) < rank_factor


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.sampled_from([2, 4, 8, 16]))
@examples(20)
def test_more_variation_loads_the_fullest_rank_more(first: float, second: float, ranks: int) -> None:
    scenario = mixture(f"cluster.gpus={ranks}", f"layout.ep={ranks}", "model.experts.count=16")
    low, high = (expected_load_factors(scenario, variation) for variation in sorted((first, second)))
    assert 1.0 - 1e-9 <= low.rank <= high.rank * 1.02
    assert low.comm <= low.rank + 1e-9


@pytest.mark.parametrize(
    "overrides",
    [
        ("layout.ep=1",),
        ("model.experts.capacity_factor=1.0",),
        ("training.expert_load=0.3",),
        ("model.experts=null", "model.ffn=4096", "layout={dp: 8}"),
    ],
)
def test_there_is_none_where_routing_changes_nothing_or_is_given(overrides: tuple[str, ...]) -> None:
    result = simulate(mixture(*overrides))
    assert result.natural_routing is None
    assert result.to_json()["natural_routing"] is None


def test_gathered_tokens_do_not_depend_on_routing() -> None:
    assert expected_load_factors(mixture("layout.dispatcher=allgather"), 0.4).comm == 1.0


def test_every_answer_has_the_range() -> None:
    result = simulate(mixture())
    natural = result.natural_routing
    assert natural is not None
    low, high = natural.ratios
    assert 1.0 < low < high
    assert natural.step_times == pytest.approx((low * result.step_time, high * result.step_time))
    as_json = result.to_json()["natural_routing"]
    assert as_json == {
        "step_time_s": list(natural.step_times), "ratios": [low, high], "rank_variations": list(NATURAL_VARIATIONS),
    }  # fmt: skip
    words = f"{low:.2f} to {high:.2f} times the balanced step"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_run(result))
    assert words in " ".join(console.export_text().split())
    assert words in run_page(result)


@pytest.mark.parametrize(
    ("mapping", "published"),
    [
        (  # 30.29 s natural, 24.71 s forced
            {
                "model": "qwen3-30b-a3b",
                "cluster": {"name": "dgx-h100", "gpus": 16},
                "layout": {"ep": 16, "etp": 1, "dispatcher": "hybridep", "data": "zero1"},
                "training": {"sequence": 4096, "global_batch": 32},
                "framework": {"name": "megatron-bridge", "recipe": "performance"},
            },
            30.29 / 24.71,
        ),
        (  # 295 TFLOP/s forced, 237 natural, at a full batch
            {
                "model": "qwen3-235b-a22b",
                "cluster": {"name": "dgx-h100", "gpus": 256},
                "layout": {
                    "tp": 4, "pp": 8, "ep": 8, "etp": 1, "sequence_parallel": True,
                    "data": {"zero": {"stage": 1, "overlap": True, "overlap_param_gather": True}},
                    "dispatcher": "deepep", "layers_per_stage": {"embedding": True, "head": True},
                },
                "schedule": {"interleaved": {"chunks": 4}},
                "training": {
                    "sequence": 16384, "global_batch": 64, "recompute": {"modules": ["layernorm", "moe"]},
                },
                "framework": "megatron",
            },
            295 / 237,
        ),
    ],
)  # fmt: skip
def test_published_pairs_are_in_the_range(mapping: dict[str, Any], published: float) -> None:
    """Natural over forced routing, of the publications that the module names."""
    natural = simulate(Scenario.from_mapping(mapping)).natural_routing
    assert natural is not None
    low, high = natural.ratios
    assert low < published < high


def test_a_pipeline_grows_with_its_busiest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubbles grow as passes do, so two stages of half the layers need as much longer as one of all."""
    one = simulate(mixture())
    two = simulate(
        mixture("cluster.gpus=16", "layout.pp=2", "layout.overlap_p2p_comm=true", "training.global_batch=64")
    )
    assert ratio_at(two, 0.3, monkeypatch) == pytest.approx(ratio_at(one, 0.3, monkeypatch), rel=0.1)
    assert replace(two.natural_routing, step_time=1.0).step_times == two.natural_routing.ratios
