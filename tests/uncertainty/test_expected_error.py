"""Prediction intervals of simulated steps: wider where nothing was measured, and the same in every interface."""

import pytest

from clustersim import Scenario, simulate
from clustersim.results.simulation_result import SimulationResult
from clustersim.uncertainty.model_file import load_uncertainty_model, model_to_dict
from clustersim.uncertainty.prediction_interval import VARIANCE_COMPONENTS, BaseComponent
from clustersim.uncertainty.step_features import Feature
from clustersim.validation.steps import compare_step
from tests.validation.sample_cases import step_case

H100 = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "layout": {"tp": 8, "dp": 8, "data": "fsdp"},
    "training": {"sequence": 8192, "global_batch": 16, "microbatch": 1, "precision": "bf16", "recompute": "full"},
}


def simulate_step(*overrides: str) -> SimulationResult:
    return simulate(Scenario.from_mapping(H100, overrides, default_name="step"))


def interval_ratio(result: SimulationResult) -> float:
    low, high = result.step_time_interval
    assert low < result.step_time < high
    return high / low


@pytest.fixture(scope="module")
def h100() -> float:
    return interval_ratio(simulate_step())


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["cluster.name=mi355x"], "accelerator mi355x"),
        (["cluster.name=gb300-nvl72"], "accelerator gb300"),
        (["layout.tp=64", "layout.dp=1", "model=llama3-405b"], "tp 64"),
        (["training.sequence=8388608"], "tokens 8,388,608"),
        (["training.precision.compute=tf32"], "precision tf32"),
    ],
)
def test_unmeasured_setups_have_wider_intervals_with_a_reason(h100: float, overrides: list[str], reason: str) -> None:
    result = simulate_step(*overrides)
    assert interval_ratio(result) > h100
    assert any(reason in extrapolation for extrapolation in result.relative_interval.extrapolations)
    assert reason in result.interval_description
    assert "widened" in result.interval_description


def test_an_unmeasured_accelerator_is_wider_than_a_sibling() -> None:
    assert interval_ratio(simulate_step("cluster.name=mi355x")) > interval_ratio(simulate_step("cluster.name=hgx-h200"))


def test_the_interval_widens_with_extrapolation() -> None:
    ratios = [
        interval_ratio(simulate_step(f"training.sequence={tokens}", "layout.dp=8")) for tokens in (2**22, 2**23, 2**24)
    ]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1]


def test_a_step_is_in_the_strata_of_its_scenario() -> None:
    expected = simulate_step(
        "layout.tp=1", "layout.dp=32", "layout.pp=2", "layout.data=ddp", "training.global_batch=64"
    ).relative_interval
    assert Feature.NODES.value in expected.strata
    assert Feature.PIPELINE.value in expected.strata
    assert Feature.SHARDED.value not in expected.strata
    assert "single-node" in simulate_step("cluster.gpus=8", "layout.dp=1").relative_interval.strata


def test_a_validation_case_has_the_interval_of_its_scenario() -> None:
    """Validation and `run` give the same interval."""
    from clustersim.validation.steps import build_scenario

    compared, result = compare_step(step_case()), simulate(build_scenario(step_case()))
    assert compared.interval is not None
    assert (compared.interval.low, compared.interval.high) == pytest.approx(result.step_time_interval)
    report = compared.to_json()
    assert (report["interval_low_s"], report["interval_high_s"]) == pytest.approx(result.step_time_interval)
    assert report["inside_interval"] is (report["interval_low_s"] <= report["measured"] <= report["interval_high_s"])
    assert compare_step(step_case(tp="3")).interval is None


def test_the_packaged_model_never_trusts_unmeasured_features_more() -> None:
    model = load_uncertainty_model()
    assert all(model.deviations[gap] >= model.deviations[BaseComponent.ANY] > 0.0 for gap in BaseComponent)
    assert model.source_count >= 12
    assert 0.85 <= model.coverage_by_stratum["all steps"].covered_share <= 0.95
    assert set(model_to_dict(model)["deviations"]) == {term.name.lower() for term in VARIANCE_COMPONENTS}
