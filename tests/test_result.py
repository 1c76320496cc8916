"""The answer as numbers and as plain data."""

import json
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.model.transformer import matrix_parameter_count
from clustersim.report.rendered_result import RenderedResult
from clustersim.results.simulation_result import HEALTHY_CLUSTER_NOTE, MODEL_LIMITATIONS, NETWORK_LIMITATIONS
from clustersim.scenario import Contention

# What the JSON answer promised when it was first published: keys are added, never renamed or dropped.
PROMISED = [
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "hfu", "bubble_fraction",
    "exposed_communication_fraction", "peak_memory_bytes", "memory_capacity_bytes", "fits", "breakdown_s",
    "provenance_share", "ranks", "simulated_ranks", "spans", "simulate_wall_s", "warnings", "not_modelled",
]  # fmt: skip
KEYS = [
    *PROMISED, "name", "scenario", "experience", "flop_convention", "critical_path_s", "stages", "network",
    "step_times_s", "step_time_distribution_s", "stragglers", "step_time_band_s", "host_memory",
    "mfu_causal", "in_step", "regimes", "unmeasured", "record_steps", "gpu_hours_per_trillion_tokens",
    "expert_loads", "formats", "economics", "collectives", "step_time_alone_s", "jobs",
]  # fmt: skip
STAGE_KEYS = {"pipeline_rank", "breakdown_s", "waits_s", "peak_memory_bytes", "memory_bytes"}

MAPPING: dict[str, Any] = {
    "name": "a test",
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 4, "pp": 2, "dp": 2, "sequence_parallel": True},
    "training": {"sequence": 4096, "global_batch": 16},
}


@pytest.fixture(scope="module")
def result() -> RenderedResult:
    return simulate(Scenario.from_mapping(MAPPING))


@pytest.fixture(scope="module")
def answer(result: RenderedResult) -> dict[str, Any]:
    return result.to_json()


def test_the_answer_has_the_promised_keys(answer: dict[str, Any]) -> None:
    assert set(answer) == set(KEYS)
    assert all(set(stage) == STAGE_KEYS for stage in answer["stages"])


def test_the_answer_is_plain_data(answer: dict[str, Any]) -> None:
    """It survives JSON unchanged: no numpy numbers, no NaN."""
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_breakdowns_sum_to_the_step(answer: dict[str, Any]) -> None:
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"])
    for stage in answer["stages"]:
        assert sum(stage["breakdown_s"].values()) == pytest.approx(answer["step_time_s"])


def test_the_critical_path_sums_to_the_step(answer: dict[str, Any]) -> None:
    assert sum(answer["critical_path_s"].values()) == pytest.approx(answer["step_time_s"])


def test_provenance_sums_to_one(answer: dict[str, Any]) -> None:
    assert sum(answer["provenance_share"].values()) == pytest.approx(1.0)


def test_memory_by_stage_sums_to_its_peak_and_the_fullest_is_the_answer(answer: dict[str, Any]) -> None:
    peaks = [stage["peak_memory_bytes"] for stage in answer["stages"]]
    assert [stage["pipeline_rank"] for stage in answer["stages"]] == [0, 1]
    assert answer["peak_memory_bytes"] == max(peaks)
    for stage in answer["stages"]:
        assert sum(stage["memory_bytes"].values()) == pytest.approx(stage["peak_memory_bytes"])
    assert answer["fits"] is (max(peaks) <= answer["memory_capacity_bytes"])


def test_rates_follow_from_the_step_time(answer: dict[str, Any]) -> None:
    tokens = 16 * 4096
    assert answer["tokens_per_s"] == pytest.approx(tokens / answer["step_time_s"])
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(answer["tokens_per_s"] / 16)
    assert answer["mfu"] == pytest.approx(answer["model_tflops_per_gpu"] * 1e12 / 989.4e12, rel=1e-3)


def test_model_flop_are_six_per_parameter_and_token_and_attention(
    result: RenderedResult, answer: dict[str, Any]
) -> None:
    """PaLM appendix B: 6 N + 12 L H Q T per token, full attention matrix."""
    model = result.scenario.model
    per_token = 6 * matrix_parameter_count(model) + 12 * 32 * 32 * 128 * 4096
    expected = per_token * answer["tokens_per_s_per_gpu"] / 1e12
    assert answer["model_tflops_per_gpu"] == pytest.approx(expected)


def test_with_causal_attention_a_query_counts_the_keys_before_it(
    result: RenderedResult, answer: dict[str, Any]
) -> None:
    """6 N + 12 L H Q (T + 1)/2 per token."""
    attention = 12 * 32 * 32 * 128 * 4096
    products = 6 * matrix_parameter_count(result.scenario.model)
    expected = (products + attention * 4097 / 8192) / (products + attention)
    assert answer["mfu_causal"] / answer["mfu"] == pytest.approx(expected)


def test_without_recomputation_hfu_is_mfu(answer: dict[str, Any]) -> None:
    assert answer["hfu"] == answer["mfu"]


def test_full_recomputation_adds_a_forward_of_the_layers() -> None:
    """HFU / MFU = (3 + 1) / 3 for the layers; the logits are not computed again."""
    mapping = {**MAPPING, "training": {**MAPPING["training"], "recompute": {"mode": "full", "early_stop": False}}}
    again = simulate(Scenario.from_mapping(mapping))
    model = again.scenario.model
    logits = 2 * model.vocab * model.hidden
    forward = 2 * matrix_parameter_count(model) + 4 * 32 * 32 * 128 * 4096
    assert again.hfu() / again.mfu() == pytest.approx((4 * forward - logits) / (3 * forward))


def test_fractions_are_fractions(answer: dict[str, Any]) -> None:
    for key in ("mfu", "hfu", "bubble_fraction", "exposed_communication_fraction"):
        assert 0.0 <= answer[key] <= 1.0


def test_what_is_not_modelled_is_said(answer: dict[str, Any]) -> None:
    assert answer["not_modelled"] == [NETWORK_LIMITATIONS[Contention.SHARED], HEALTHY_CLUSTER_NOTE, *MODEL_LIMITATIONS]


def test_the_network_is_said(answer: dict[str, Any]) -> None:
    assert answer["network"] == "shared"
    alone = simulate(Scenario.from_mapping(MAPPING, overrides=["cost.network=uncontended"])).to_json()
    assert alone["network"] == "uncontended"
    assert alone["not_modelled"] == [
        NETWORK_LIMITATIONS[Contention.UNCONTENDED],
        HEALTHY_CLUSTER_NOTE,
        *MODEL_LIMITATIONS,
    ]


def test_names_and_numbers_of_ranks(answer: dict[str, Any]) -> None:
    assert answer["name"] == "a test"
    assert answer["scenario"] == MAPPING
    assert answer["ranks"] == 16
    assert 1 <= answer["simulated_ranks"] <= 16
    assert answer["spans"] > 100
    assert answer["simulate_wall_s"] > 0
    assert answer["warnings"] == []


def test_suggestions_are_warnings() -> None:
    mapping = {**MAPPING, "layout": {"dp": 16}}
    tight = simulate(Scenario.from_mapping(mapping))
    assert not tight.fits_in_memory
    assert tight.to_json()["warnings"] == [*tight.scenario.warnings, *tight.oom_suggestions]
    assert tight.oom_suggestions


def test_a_notebook_shows_a_fragment_and_a_file_the_page(result: RenderedResult, tmp_path: Any) -> None:
    assert result._repr_html_().lstrip().startswith("<")
    assert "<html" not in result._repr_html_()[:200].lower()
    page = result.save_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert page == result.to_html()
    assert page.lstrip().lower().startswith("<!doctype html")


def test_an_hfu_above_one_is_explained() -> None:
    """At 524,288 tokens the full attention matrix is most of the convention's FLOP, and kernels skip half of it."""
    training = {"sequence": 524288, "global_batch": 64, "recompute": "full"}
    long = {**MAPPING, "cluster": {"name": "dgx-a100", "gpus": 64}, "layout": {"data": "fsdp"}}
    result = simulate(Scenario.from_mapping({**long, "training": training}))
    assert result.hfu() > 1
    assert any("HFU above 100 %" in warning for warning in result.warnings)


def test_a_step_time_is_the_mean_of_several_and_their_distribution_is_told() -> None:
    answer = simulate(Scenario.from_mapping(MAPPING, overrides=["steps=3", "disturbances.jitter=5%"])).to_json()
    times = answer["step_times_s"]
    assert len(set(times)) == 3
    assert answer["step_time_s"] == pytest.approx(sum(times) / 3)
    spread = answer["step_time_distribution_s"]
    assert (spread["min"], spread["p50"], spread["max"]) == pytest.approx(tuple(sorted(times)))
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"])
    assert HEALTHY_CLUSTER_NOTE not in answer["not_modelled"]


def test_a_slow_gpu_is_the_straggler_and_waits_least_of_its_pipeline_rank(answer: dict[str, Any]) -> None:
    assert answer["stragglers"] == {"ranks": 0, "slowest": []}
    slow = simulate(Scenario.from_mapping(MAPPING, overrides=["disturbances.slow={gpu: 9, speed: 0.8}"])).to_json()
    assert slow["stragglers"]["ranks"] == 1
    (straggler,) = slow["stragglers"]["slowest"]
    assert (straggler["ranks"], straggler["pipeline_rank"]) == ([9], 1)
    assert straggler["longer_than_median"] == pytest.approx(0.25)
    assert straggler["waits_s"] == pytest.approx(slow["stages"][1]["waits_s"]["least"])
    assert json.loads(json.dumps(slow, allow_nan=False)) == slow
