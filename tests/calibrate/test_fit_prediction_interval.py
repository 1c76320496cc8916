"""The band of steps nobody has seen: known variances come back, and it holds nine of ten of what it has not seen."""

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
    out_of_sample_deviations,
    student_t_ratio,
    validated_domain,
    variance_data,
)
from calibrate.fit.repeatability import repeat_deviation
from clustersim.common.errors import InputError
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import DENSE_STEPS, MODEL_NAMES, load_uncertainty_model, model_to_dict
from clustersim.uncertainty.prediction_interval import ALL_STEPS, VARIANCE_COMPONENTS, BaseComponent
from clustersim.uncertainty.step_features import Feature, StepFeatures, extract_step_features
from clustersim.validation.steps import build_scenario
from tests.validation.sample_cases import case

EXPERTS = {
    **{"tp": "1", "pp": "1", "dp": "8", "schedule": "", "mlp": "swiglu", "zero_stage": "1", "ep": "8"},
    **{"experts": "16", "top_k": "4", "moe_ffn_hidden": "512", "shared_experts": "2"},
}
PLAIN = StepFeatures(
    frozenset({"h100-sxm-80gb"}),
    frozenset({"DDP"}),
    {"GPUs": 8, "tokens": 4096, "tp": 1, "cp": 1, "pp": 1},
    dict.fromkeys(Feature, 0.0),
)
PIPED = replace(PLAIN, feature_shares={**PLAIN.feature_shares, Feature.PIPELINE: 1.0})
ANY, PIPELINE = 0.05, 0.12


def made(sources: int = 20, cases: int = 10, seed: int = 1) -> list[OutOfSampleStep]:
    """Every second case has a pipeline; errors of a source are half its own, half each case's."""
    draw = np.random.default_rng(seed)
    rows = []
    for source in range(sources):
        shared = draw.normal()
        for number in range(cases):
            facts = PIPED if number % 2 else PLAIN
            deviation = np.hypot(ANY, PIPELINE) if number % 2 else ANY
            error = deviation * (shared + draw.normal()) / np.sqrt(2.0)
            rows.append(OutOfSampleStep(f"{source}-{number}", f"source {source}", float(error), facts))
    return rows


def test_known_variances_come_back() -> None:
    found = dict(zip(VARIANCE_COMPONENTS, np.sqrt(fit_variances(variance_data(made(100, 6)))), strict=True))
    assert found[BaseComponent.ANY] == pytest.approx(ANY, rel=0.1)
    assert found[Feature.PIPELINE] == pytest.approx(PIPELINE, rel=0.1)


def test_a_term_without_support_is_as_uncertain_as_steps_are_on_average() -> None:
    rows = made()
    found = dict(zip(VARIANCE_COMPONENTS, fit_variances(variance_data(rows)), strict=True))
    mean = np.mean([row.log_error**2 for row in rows])
    assert [found[gap] for gap in BaseComponent if gap is not BaseComponent.ANY] == pytest.approx([mean] * 3)
    assert found[Feature.TENSOR] == pytest.approx(mean)


def test_what_only_one_source_has_counts_as_not_measured() -> None:
    """Its own steps say how wrong steps are where nobody else measured."""
    odd = [replace(row, features=replace(row.features, categories=frozenset({"fp8"}))) for row in made(1)]
    rows = [*odd, *(replace(row, source=f"other {row.source}") for row in made(5))]
    place = VARIANCE_COMPONENTS.index(BaseComponent.KIND)
    assert variance_data(rows).loads[:, place].tolist() == [1.0] * len(odd) + [0.0] * 50


def test_every_source_counts_once_however_many_cases_it_has() -> None:
    rows = made(8)
    again = [row for row in rows for _ in range(3 if row.source == "source 0" else 1)]
    assert fit_variances(variance_data(again)) == pytest.approx(fit_variances(variance_data(rows)))


def test_nine_of_ten_deviations_of_unseen_sources_are_within_the_quantile_and_students_surplus() -> None:
    rows = made(12)
    sizes, weight = out_of_sample_deviations(rows)
    within = fit_uncertainty_model(rows, 0.0).quantile / student_t_ratio(11)
    inside = weight @ (sizes <= within * 1.001) / weight.sum()
    assert 0.9 - 1e-9 <= inside <= 0.92


@pytest.mark.parametrize("freedom", [5, 10, 20])
def test_students_surplus_is_that_of_tables(freedom: int) -> None:
    """T of 90 %, two-sided: 2.015, 1.812 and 1.725."""
    told = {5: 2.015, 10: 1.812, 20: 1.725}[freedom]
    assert student_t_ratio(freedom) * NormalDist().inv_cdf(0.95) == pytest.approx(told, rel=0.005)


def test_too_few_sources_are_refused() -> None:
    with pytest.raises(InputError, match="2 sources of left-out steps are too few"):
        fit_uncertainty_model(made(2), 0.0)


@pytest.mark.slow
def test_unseen_sources_are_inside_as_often_as_is_promised() -> None:
    """Over several worlds of made-up sources."""
    inside = [coverage_of(cross_validate(made(10, 6, seed), 0.0)).covered_share for seed in range(6)]
    assert 0.85 <= np.mean(inside) <= 0.95


def test_a_table_that_is_written_is_read_again(tmp_path: Path) -> None:
    rows = [replace(row, log_error=round(row.log_error, 4)) for row in made(2, 3)]
    write_out_of_sample(rows, tmp_path / "left_out.csv")
    assert read_out_of_sample(tmp_path / "left_out.csv") == rows
    (tmp_path / "other.csv").write_text("case_id,source\na,b\n")
    with pytest.raises(InputError, match=r"other\.csv: is no table of fit-steps --left-out"):
        read_out_of_sample(tmp_path / "other.csv")


def test_siblings_have_a_measured_chip() -> None:
    few = validated_domain(made(1, 3))
    assert not few.accelerators
    enough = validated_domain(made(1, 4))
    assert enough.accelerators == {"h100-sxm-80gb"}
    assert "h200-sxm-141gb" in enough.same_chip_accelerators


def test_equal_steps_differ_by_their_deviation() -> None:
    """exp(0.1) apart: a variance of 0.1 squared over 2."""
    times = [{"step_time_s": "1.0", "year": "2023"}, {"step_time_s": str(np.exp(0.1)), "year": "2024"}]
    cases = [case(**time) for time in (*times, {"tp": "4", "dp": "1"})]
    assert repeat_deviation(cases) == pytest.approx(0.1 / np.sqrt(2.0))
    assert repeat_deviation(cases[1:]) == 0.0


@pytest.fixture(scope="module")
def shipped() -> Sequence[OutOfSampleStep]:
    return read_out_of_sample(out_of_sample_path(DENSE_STEPS))


@pytest.mark.slow
def test_the_shipped_band_is_what_the_shipped_errors_support(shipped: Sequence[OutOfSampleStep]) -> None:
    told = load_uncertainty_model()
    found = replace(
        fit_uncertainty_model(shipped, told.repeat_deviation),
        coverage_by_stratum=coverage_by_stratum(cross_validate(shipped, told.repeat_deviation)),
    )
    assert model_to_dict(found) == model_to_dict(told)
    assert 0.85 <= found.coverage_by_stratum[ALL_STEPS].covered_share <= 0.95


@pytest.mark.parametrize("kind", [kind for kind in MODEL_NAMES if kind != DENSE_STEPS])
def test_the_shipped_band_of_a_kind_is_what_its_own_errors_support(kind: str) -> None:
    rows, told = read_out_of_sample(out_of_sample_path(kind)), load_uncertainty_model(kind)
    found = replace(
        fit_uncertainty_model(rows, told.repeat_deviation),
        coverage_by_stratum=coverage_by_stratum(cross_validate(rows, told.repeat_deviation)),
    )
    assert model_to_dict(found) == model_to_dict(told)


def test_a_step_tells_about_one_kind_only() -> None:
    ids = [row.case_id for kind in MODEL_NAMES for row in read_out_of_sample(out_of_sample_path(kind))]
    assert len(ids) == len(set(ids))


NARROW = {"precision": "fp8", "gpu": "h100-sxm-80gb", "year": "2024"}


@pytest.mark.parametrize(
    ("kind", "cells"),
    [("steps", {}), ("mixtures", EXPERTS), ("narrow", NARROW), ("narrow_mixtures", {**EXPERTS, **NARROW})],
)
def test_an_answer_rests_on_steps_of_its_kind(kind: str, cells: dict[str, str]) -> None:
    """Each with errors of its own."""
    told, result = load_uncertainty_model(kind), simulate(build_scenario(case(**cells)))
    assert result.relative_interval == told.prediction_interval(
        extract_step_features(result.scenario, result.breakdown.launch_share)
    )
    assert f"of {told.step_count} published steps" in result.interval_description
