"""What a simulated step is expected to take: wider where nothing was measured, and the same for whoever asks."""

import pytest

from clustersim import Scenario, simulate
from clustersim.results.simulation_result import SimulationResult
from clustersim.uncertainty.model_file import load_uncertainty_model, model_to_dict
from clustersim.uncertainty.prediction_interval import VARIANCE_COMPONENTS, BaseComponent
from clustersim.uncertainty.step_features import Feature
from clustersim.validation.steps import compare_step
from tests.validation.sample_cases import case

H100 = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "layout": {"tp": 8, "dp": 8, "data": "fsdp"},
    "training": {"sequence": 8192, "global_batch": 16, "microbatch": 1, "precision": "bf16", "recompute": "full"},
}


def step(*overrides: str) -> SimulationResult:
    return simulate(Scenario.from_mapping(H100, overrides, default_name="step"))


def width(result: SimulationResult) -> float:
    low, high = result.step_time_interval
    assert low < result.step_time < high
    return high / low


@pytest.fixture(scope="module")
def h100() -> float:
    return width(step())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cluster.name=mi300x"], "accelerator mi300x"),
        (["cluster.name=gb300-nvl72"], "accelerator gb300"),
        (["layout.tp=64", "layout.dp=1", "model=llama3-405b"], "tp 64"),
        (["training.sequence=1048576"], "tokens 1,048,576"),
        (["training.precision.compute=tf32"], "precision tf32"),
    ],
)
def test_what_nobody_measured_is_wider_than_64_h100_and_says_why(h100: float, overrides: list[str], says: str) -> None:
    result = step(*overrides)
    assert width(result) > h100
    assert any(says in extrapolation for extrapolation in result.relative_interval.extrapolations)
    assert says in result.interval_description
    assert "wider" in result.interval_description


def test_a_stranger_is_wider_than_a_sibling() -> None:
    assert width(step("cluster.name=mi300x")) > width(step("cluster.name=hgx-h200"))


def test_the_further_beyond_the_wider() -> None:
    lengths = [width(step(f"training.sequence={tokens}", "layout.dp=8")) for tokens in (2**18, 2**19, 2**20)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_a_step_is_of_the_regimes_that_its_scenario_says() -> None:
    fields = step(
        "layout.tp=1", "layout.dp=32", "layout.pp=2", "layout.data=ddp", "training.global_batch=64"
    ).relative_interval
    assert Feature.NODES.value in fields.strata
    assert Feature.PIPELINE.value in fields.strata
    assert Feature.SHARDED.value not in fields.strata
    assert "one node" in step("cluster.gpus=8", "layout.dp=1").relative_interval.strata


def test_a_case_has_the_band_of_its_scenario() -> None:
    """Of validation and of `run`: the same."""
    from clustersim.validation.steps import build_scenario

    compared, result = compare_step(case()), simulate(build_scenario(case()))
    assert compared.interval is not None
    assert (compared.interval.low, compared.interval.high) == pytest.approx(result.step_time_interval)
    plain = compared.to_json()
    assert (plain["expected_low_s"], plain["expected_high_s"]) == pytest.approx(result.step_time_interval)
    assert plain["inside_band"] is (plain["expected_low_s"] <= plain["measured"] <= plain["expected_high_s"])
    assert compare_step(case(tp="3")).interval is None


def test_what_is_shipped_never_trusts_what_nobody_measured_more() -> None:
    found = load_uncertainty_model()
    assert all(found.deviations[gap] >= found.deviations[BaseComponent.ANY] > 0.0 for gap in BaseComponent)
    assert found.source_count >= 12
    assert 0.85 <= found.coverage_by_stratum["all steps"].covered_share <= 0.95
    assert set(model_to_dict(found)["deviations"]) == {term.name.lower() for term in VARIANCE_COMPONENTS}
