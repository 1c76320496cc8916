"""Results as numbers and as JSON."""

import json
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.model.transformer import matrix_parameter_count
from clustersim.report.rendered_result import RenderedResult
from clustersim.results.model_limitations import HEALTHY_CLUSTER_NOTE, MODEL_LIMITATIONS, NETWORK_LIMITATIONS
from clustersim.scenario import Contention

# Keys of the JSON report as first published: keys are added, never renamed or removed.
STABLE_KEYS = [
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "hfu", "bubble_fraction",
    "exposed_communication_fraction", "peak_memory_bytes", "memory_capacity_bytes", "fits", "fit_probability",
    "breakdown_s",
    "provenance_share", "ranks", "simulated_ranks", "software", "spans", "simulate_wall_s", "warnings", "not_modelled",
]  # fmt: skip
KEYS = [
    *STABLE_KEYS, "name", "scenario", "interval_basis", "flop_convention", "critical_path_s", "stages", "network",
    "step_times_s", "step_time_distribution_s", "stragglers", "step_time_interval_s", "host_memory",
    "hfu_causal", "leading_mfu", "leading_mfu_attention", "likely_step_time_interval_s", "mfu_causal", "in_situ",
    "strata", "unmeasured", "holdout_validation", "gpu_hours_per_trillion_tokens",
    "expert_loads", "natural_routing", "formats", "economics", "collectives", "step_time_isolated_s", "jobs",
    "losses_s", "published_run", "timing_sensitivity", "memory_suggestions",
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
def report(result: RenderedResult) -> dict[str, Any]:
    return result.to_json()


def test_the_json_report_has_the_stable_keys(report: dict[str, Any]) -> None:
    assert set(report) == set(KEYS)
    assert all(set(stage) == STAGE_KEYS for stage in report["stages"])


def test_the_json_report_is_plain_data(report: dict[str, Any]) -> None:
    """It survives JSON unchanged: no numpy scalars, no NaN."""
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_breakdowns_sum_to_the_step(report: dict[str, Any]) -> None:
    assert sum(report["breakdown_s"].values()) == pytest.approx(report["step_time_s"])
    for stage in report["stages"]:
        assert sum(stage["breakdown_s"].values()) == pytest.approx(report["step_time_s"])


def test_losses_sum_to_the_step(report: dict[str, Any]) -> None:
    assert sum(report["losses_s"].values()) == pytest.approx(report["step_time_s"])


def test_the_critical_path_sums_to_the_step(report: dict[str, Any]) -> None:
    assert sum(report["critical_path_s"].values()) == pytest.approx(report["step_time_s"])


def test_provenance_sums_to_one(report: dict[str, Any]) -> None:
    assert sum(report["provenance_share"].values()) == pytest.approx(1.0)


def test_stage_memory_sums_to_its_peak_and_the_maximum_is_reported(report: dict[str, Any]) -> None:
    peaks = [stage["peak_memory_bytes"] for stage in report["stages"]]
    assert [stage["pipeline_rank"] for stage in report["stages"]] == [0, 1]
    assert report["peak_memory_bytes"] == max(peaks)
    for stage in report["stages"]:
        assert sum(stage["memory_bytes"].values()) == pytest.approx(stage["peak_memory_bytes"])
    assert report["fits"] is (max(peaks) <= report["memory_capacity_bytes"])


def test_rates_follow_from_the_step_time(report: dict[str, Any]) -> None:
    tokens = 16 * 4096
    assert report["tokens_per_s"] == pytest.approx(tokens / report["step_time_s"])
    assert report["tokens_per_s_per_gpu"] == pytest.approx(report["tokens_per_s"] / 16)
    assert report["mfu"] == pytest.approx(report["model_tflops_per_gpu"] * 1e12 / 989.4e12, rel=1e-3)


def test_model_flop_are_six_per_parameter_and_token_and_attention(
    result: RenderedResult, report: dict[str, Any]
) -> None:
    """PaLM appendix B: 6 N + 12 L H Q T per token, full attention matrix."""
    model = result.scenario.model
    per_token = 6 * matrix_parameter_count(model) + 12 * 32 * 32 * 128 * 4096
    expected = per_token * report["tokens_per_s_per_gpu"] / 1e12
    assert report["model_tflops_per_gpu"] == pytest.approx(expected)


def test_causal_mfu_counts_the_keys_before_each_query(result: RenderedResult, report: dict[str, Any]) -> None:
    """6 N + 12 L H Q (T + 1)/2 per token."""
    attention = 12 * 32 * 32 * 128 * 4096
    matmuls = 6 * matrix_parameter_count(result.scenario.model)
    expected = (matmuls + attention * 4097 / 8192) / (matmuls + attention)
    assert report["mfu_causal"] / report["mfu"] == pytest.approx(expected)


def test_without_recomputation_hfu_is_mfu(report: dict[str, Any]) -> None:
    assert report["hfu"] == report["mfu"]


def test_full_recomputation_adds_a_forward_of_the_layers() -> None:
    """HFU / MFU = (3 + 1) / 3 for the layers; the logits are not recomputed."""
    mapping = {**MAPPING, "training": {**MAPPING["training"], "recompute": {"mode": "full", "early_stop": False}}}
    recomputed = simulate(Scenario.from_mapping(mapping))
    model = recomputed.scenario.model
    logits = 2 * model.vocab * model.hidden
    forward = 2 * matrix_parameter_count(model) + 4 * 32 * 32 * 128 * 4096
    assert recomputed.hfu / recomputed.mfu == pytest.approx((4 * forward - logits) / (3 * forward))


def test_fractions_are_between_zero_and_one(report: dict[str, Any]) -> None:
    for key in ("mfu", "hfu", "bubble_fraction", "exposed_communication_fraction"):
        assert 0.0 <= report[key] <= 1.0


def test_model_limitations_are_listed(report: dict[str, Any]) -> None:
    assert report["not_modelled"] == [NETWORK_LIMITATIONS[Contention.SHARED], HEALTHY_CLUSTER_NOTE, *MODEL_LIMITATIONS]


def test_the_network_mode_is_reported(report: dict[str, Any]) -> None:
    assert report["network"] == "shared"
    uncontended = simulate(Scenario.from_mapping(MAPPING, overrides=["cost.network=uncontended"])).to_json()
    assert uncontended["network"] == "uncontended"
    assert uncontended["not_modelled"] == [
        NETWORK_LIMITATIONS[Contention.UNCONTENDED],
        HEALTHY_CLUSTER_NOTE,
        *MODEL_LIMITATIONS,
    ]


def test_name_scenario_and_rank_counts_are_reported(report: dict[str, Any]) -> None:
    assert report["name"] == "a test"
    assert report["scenario"] == MAPPING
    assert report["ranks"] == 16
    assert 1 <= report["simulated_ranks"] <= 16
    assert report["spans"] > 100
    assert report["simulate_wall_s"] > 0
    assert report["warnings"] == []


def test_suggestions_are_warnings() -> None:
    mapping = {**MAPPING, "layout": {"dp": 16}}
    oom_result = simulate(Scenario.from_mapping(mapping))
    assert not oom_result.fits_in_memory
    assert oom_result.to_json()["warnings"] == [
        *oom_result.scenario.warnings,
        *(suggestion.description for suggestion in oom_result.oom_suggestions),
    ]
    assert oom_result.oom_suggestions
    for suggestion, data in zip(oom_result.oom_suggestions, oom_result.to_json()["memory_suggestions"], strict=True):
        assert tuple(data["set"]) == suggestion.overrides
        assert data["peak_memory_bytes"] == suggestion.peak


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
    assert result.hfu > 1
    assert any("HFU above 100 %" in warning for warning in result.warnings)


def test_the_step_time_is_the_mean_and_its_distribution_is_reported() -> None:
    report = simulate(Scenario.from_mapping(MAPPING, overrides=["steps=3", "degradations.jitter=5%"])).to_json()
    times = report["step_times_s"]
    assert len(set(times)) == 3
    assert report["step_time_s"] == pytest.approx(sum(times) / 3)
    spread = report["step_time_distribution_s"]
    assert (spread["min"], spread["p50"], spread["max"]) == pytest.approx(tuple(sorted(times)))
    assert sum(report["breakdown_s"].values()) == pytest.approx(report["step_time_s"])
    assert HEALTHY_CLUSTER_NOTE not in report["not_modelled"]


def test_a_slow_gpu_is_the_straggler_and_waits_least_of_its_pipeline_rank(report: dict[str, Any]) -> None:
    assert report["stragglers"] == {"ranks": 0, "slowest": []}
    slow = simulate(Scenario.from_mapping(MAPPING, overrides=["degradations.slow={gpu: 9, speed: 0.8}"])).to_json()
    assert slow["stragglers"]["ranks"] == 1
    (straggler,) = slow["stragglers"]["slowest"]
    assert (straggler["ranks"], straggler["pipeline_rank"]) == ([9], 1)
    assert straggler["slowdown_vs_median"] == pytest.approx(0.25)
    assert straggler["waits_s"] == pytest.approx(slow["stages"][1]["waits_s"]["min"])
    assert json.loads(json.dumps(slow, allow_nan=False)) == slow
