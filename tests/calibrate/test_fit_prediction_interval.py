"""The uncertainty model: known variances are recovered, and intervals cover nine of ten held-out steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from calibrate.fit.out_of_sample import OutOfSampleStep, out_of_sample_path, read_out_of_sample, write_out_of_sample
from calibrate.fit.prediction_interval import (
    coverage_by_stratum,
    coverage_of,
    cross_validate,
    fit_uncertainty_model,
    fit_variances,
    held_out_variances,
    out_of_sample_deviations,
    same_job_errors,
    validated_domain,
    variance_data,
    with_groups,
)
from calibrate.fit.repeatability import repeat_deviation
from calibrate.fit.student_t import student_t_ratio
from clustersim.common.errors import InputError
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import DENSE_STEPS, MODEL_NAMES, load_uncertainty_model, model_to_dict
from clustersim.uncertainty.prediction_interval import ALL_STEPS, VARIANCE_COMPONENTS, BaseComponent
from clustersim.uncertainty.step_features import Feature, StepFeatures, extract_step_features
from clustersim.validation.steps import build_scenario
from tests.validation.sample_cases import step_case

MOE_COLUMNS = {
    **{"tp": "1", "pp": "1", "dp": "8", "schedule": "", "mlp": "swiglu", "zero_stage": "1", "ep": "8"},
    **{"experts": "16", "top_k": "4", "moe_ffn_hidden": "512", "shared_experts": "2"},
}
BASE_FEATURES = StepFeatures(
    frozenset({"h100-sxm-80gb"}),
    frozenset({"DDP"}),
    {"GPUs": 8, "tokens": 4096, "tp": 1, "cp": 1, "pp": 1},
    dict.fromkeys(Feature, 0.0),
)
PIPELINE_FEATURES = replace(BASE_FEATURES, feature_shares={**BASE_FEATURES.feature_shares, Feature.PIPELINE: 1.0})
BASE_DEVIATION, PIPELINE_DEVIATION = 0.05, 0.12


def synthetic_steps(sources: int = 20, cases: int = 10, seed: int = 1) -> list[OutOfSampleStep]:
    """Every second case has a pipeline; half of the error variance is shared by the cases of a source."""
    random = np.random.default_rng(seed)
    steps = []
    for source in range(sources):
        source_error = random.normal()
        for index in range(cases):
            features = PIPELINE_FEATURES if index % 2 else BASE_FEATURES
            deviation = np.hypot(BASE_DEVIATION, PIPELINE_DEVIATION) if index % 2 else BASE_DEVIATION
            error = deviation * (source_error + random.normal()) / np.sqrt(2.0)
            name = f"source {source}"
            steps.append(OutOfSampleStep(f"{source}-{index}", name, float(error), features, name))
    return steps


def test_variances_are_recovered() -> None:
    deviations = dict(
        zip(VARIANCE_COMPONENTS, np.sqrt(fit_variances(variance_data(synthetic_steps(100, 6)))), strict=True)
    )
    assert deviations[BaseComponent.ANY] == pytest.approx(BASE_DEVIATION, rel=0.1)
    assert deviations[Feature.PIPELINE] == pytest.approx(PIPELINE_DEVIATION, rel=0.1)


def test_unsupported_component_has_the_mean_variance() -> None:
    steps = synthetic_steps()
    variance_by_component = dict(zip(VARIANCE_COMPONENTS, fit_variances(variance_data(steps)), strict=True))
    mean = np.mean([step.log_error**2 for step in steps])
    assert [variance_by_component[gap] for gap in BaseComponent if gap is not BaseComponent.ANY] == pytest.approx(
        [mean] * 3
    )
    assert variance_by_component[Feature.TENSOR] == pytest.approx(mean)


def test_features_of_a_single_source_count_as_unmeasured() -> None:
    """Its own steps show the error where no other source measured."""
    single_source = [
        replace(step, features=replace(step.features, categories=frozenset({"fp8"}))) for step in synthetic_steps(1)
    ]
    steps = [*single_source, *(replace(step, group=f"other {step.source}") for step in synthetic_steps(5))]
    column = VARIANCE_COMPONENTS.index(BaseComponent.CATEGORY)
    assert variance_data(steps).loads[:, column].tolist() == [1.0] * len(single_source) + [0.0] * 50


def test_groups_have_equal_weight_whatever_their_case_count() -> None:
    steps = synthetic_steps(8)
    repeated = [step for step in steps for _ in range(3 if step.source == "source 0" else 1)]
    assert fit_variances(variance_data(repeated)) == pytest.approx(fit_variances(variance_data(steps)))


def test_out_of_sample_deviations_are_within_the_conformal_quantile() -> None:
    """Around their median; each of 120 errors has 1/120 of the weight."""
    steps = synthetic_steps(12)
    deviations, weight = out_of_sample_deviations(steps, held_out_variances(steps))
    quantiles = fit_uncertainty_model(steps, 0.0).quantiles
    assert abs(weight @ (deviations <= quantiles.center) / weight.sum() - 0.5) <= 0.01
    for half_width, coverage in ((quantiles.interval, 0.9), (quantiles.likely, 0.5)):
        limit = half_width / student_t_ratio(11, coverage)
        share = weight @ (np.abs(deviations - quantiles.center) <= limit + 1e-3) / weight.sum()
        assert coverage - 1e-9 <= share <= coverage + 0.02


def test_errors_that_are_all_slow_move_the_interval_to_the_slow_side() -> None:
    """Their median is above the prediction, and the interval reaches further there."""
    steps = [replace(step, log_error=abs(step.log_error)) for step in synthetic_steps(12)]
    quantiles = fit_uncertainty_model(steps, 0.0).quantiles
    low, high = quantiles.ends(quantiles.interval)
    assert quantiles.center > 0.0
    assert -low < high


def test_publishers_are_held_out_where_there_are_enough() -> None:
    """Two sources of NVIDIA's are one group beside four others; with three others sources stay alone."""
    sources = ["dgxc", "megatron-bridge", "bloom", "vtrain", "internevo", "fms-fsdp"]
    steps = [replace(step, source=name, group=name) for name, step in zip(sources, synthetic_steps(6, 1), strict=True)]
    assert [step.group for step in with_groups(steps)] == ["NVIDIA", "NVIDIA", *sources[2:]]
    assert [step.group for step in with_groups(steps[:-1])] == sources[:-1]


@pytest.mark.slow
def test_unstated_software_has_quantiles_of_its_own() -> None:
    """Errors of 5 % with the software stated, and of 13 around -20 % without: 2.6 deviations around -4."""
    unstated, random, steps = replace(BASE_FEATURES, states_software=False), np.random.default_rng(3), []
    for index in range(60):
        name = f"source {index}"
        steps.append(OutOfSampleStep(str(index), name, float(random.normal(0.0, 0.05)), BASE_FEATURES, name))
        steps.append(OutOfSampleStep(str(index), name, float(random.normal(-0.2, 0.13)), unstated, name))
    model = fit_uncertainty_model(steps, 0.0)
    assert model.deviations[BaseComponent.ANY] == pytest.approx(0.05, rel=0.2)
    assert model.unstated_quantiles.center == pytest.approx(-0.2 / 0.05, rel=0.2)
    assert model.unstated_quantiles.interval == pytest.approx(2.6 * 1.645, rel=0.25)
    assert model.quantiles.interval == pytest.approx(1.645, rel=0.25)
    assert fit_uncertainty_model(steps[::2], 0.0).unstated_quantiles == fit_uncertainty_model(steps[::2], 0.0).quantiles


@pytest.mark.parametrize("freedom", [5, 10, 20])
def test_student_t_ratio_matches_tables(freedom: int) -> None:
    """Two-sided 90 % quantiles of Student's t: 2.015, 1.812 and 1.725."""
    expected = {5: 2.015, 10: 1.812, 20: 1.725}[freedom]
    assert student_t_ratio(freedom) * NormalDist().inv_cdf(0.95) == pytest.approx(expected, rel=0.005)


def test_too_few_sources_are_refused() -> None:
    with pytest.raises(InputError, match="2 publishers of out-of-sample steps are too few"):
        fit_uncertainty_model(synthetic_steps(2), 0.0)


@pytest.mark.slow
def test_out_of_sample_coverage_is_about_90_percent() -> None:
    """Averaged over several sets of synthetic sources."""
    coverages = [coverage_of(cross_validate(synthetic_steps(10, 6, seed), 0.0)).covered_share for seed in range(6)]
    assert 0.85 <= np.mean(coverages) <= 0.95


def test_out_of_sample_table_round_trip(tmp_path: Path) -> None:
    steps = [replace(step, log_error=round(step.log_error, 4)) for step in synthetic_steps(2, 3)]
    write_out_of_sample(steps, tmp_path / "out_of_sample_dense.csv")
    assert read_out_of_sample(tmp_path / "out_of_sample_dense.csv") == steps
    (tmp_path / "other.csv").write_text("case_id,source\na,b\n")
    with pytest.raises(InputError, match=r"other\.csv: is no table of fit-steps --out-of-sample"):
        read_out_of_sample(tmp_path / "other.csv")


def test_validated_domain_includes_siblings_of_measured_chips() -> None:
    too_few = validated_domain(synthetic_steps(1, 3))
    assert not too_few.accelerators
    domain_of_four = validated_domain(synthetic_steps(1, 4))
    assert domain_of_four.accelerators == {"h100-sxm-80gb"}
    assert "h800-sxm-80gb" in domain_of_four.same_chip_accelerators


def test_repeatability_of_equal_steps() -> None:
    """Times that differ by a factor of exp(0.1): a variance of 0.1 squared over 2."""
    times = [{"step_time_s": "1.0", "year": "2023"}, {"step_time_s": str(np.exp(0.1)), "year": "2024"}]
    cases = [step_case(**time) for time in (*times, {"tp": "4", "dp": "1"})]
    assert repeat_deviation(cases) == pytest.approx(0.1 / np.sqrt(2.0))
    assert repeat_deviation(cases[1:]) == 0.0


@pytest.fixture(scope="module")
def packaged_steps() -> Sequence[OutOfSampleStep]:
    return with_groups(read_out_of_sample(out_of_sample_path(DENSE_STEPS)))


@pytest.mark.slow
def test_packaged_uncertainty_model_follows_from_packaged_errors(packaged_steps: Sequence[OutOfSampleStep]) -> None:
    packaged_model = load_uncertainty_model()
    fitted_model = replace(
        fit_uncertainty_model(packaged_steps, packaged_model.repeat_deviation),
        coverage_by_stratum=coverage_by_stratum(cross_validate(packaged_steps, packaged_model.repeat_deviation)),
        same_job=same_job_errors(packaged_steps),
    )
    assert model_to_dict(fitted_model) == model_to_dict(packaged_model)
    assert 0.85 <= fitted_model.coverage_by_stratum[ALL_STEPS].covered_share <= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODEL_NAMES if kind != DENSE_STEPS])
def test_packaged_uncertainty_model_of_every_kind_follows_from_errors(kind: str) -> None:
    steps, packaged_model = with_groups(read_out_of_sample(out_of_sample_path(kind))), load_uncertainty_model(kind)
    fitted_model = replace(
        fit_uncertainty_model(steps, packaged_model.repeat_deviation),
        coverage_by_stratum=coverage_by_stratum(cross_validate(steps, packaged_model.repeat_deviation)),
        same_job=same_job_errors(steps),
    )
    assert model_to_dict(fitted_model) == model_to_dict(packaged_model)


def test_every_step_belongs_to_one_kind() -> None:
    ids = [{step.case_id for step in read_out_of_sample(out_of_sample_path(kind))} for kind in MODEL_NAMES]
    assert len(set().union(*ids)) == sum(map(len, ids))


LOW_PRECISION_COLUMNS = {"precision": "fp8", "gpu": "h100-sxm-80gb", "year": "2024"}


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        ("dense", {}),
        ("moe", MOE_COLUMNS),
        ("low_precision", LOW_PRECISION_COLUMNS),
        ("low_precision_moe", {**MOE_COLUMNS, **LOW_PRECISION_COLUMNS}),
    ],
)
def test_prediction_interval_rests_on_steps_of_its_kind(kind: str, cells: dict[str, str]) -> None:
    """Every kind has its own errors."""
    uncertainty, result = load_uncertainty_model(kind), simulate(build_scenario(step_case(**cells)))
    assert result.relative_interval == uncertainty.prediction_interval(
        extract_step_features(result.scenario, result.breakdown.launch_share)
    )
    assert f"from {uncertainty.step_count} published steps" in result.interval_description
