"""Holdout steps set the prediction interval: no larger error narrows it, and all interfaces report it equally."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp, hypot, log
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    HoldoutStep,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.record_file import record_text, write_record
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.record_scaling import scale_record
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel
from clustersim.results.simulation_result import SimulationResult
from clustersim.uncertainty.expected_error import ExpectedError
from clustersim.uncertainty.holdout import HoldoutResult, holdout_result
from clustersim.uncertainty.model_file import load_uncertainty_model
from clustersim.uncertainty.prediction_interval import LocalEvidence
from clustersim.uncertainty.step_features import extract_step_features
from tests.calibrate.synthetic_records import kernel_sample
from tests.cli.conftest import CommandRunner, clustersim  # noqa: F401 - a fixture
from tests.conftest import examples
from tests.sentences import parts
from tests.uncertainty.test_prediction_interval import MEASURED_FEATURES, NO_TRAITS, make_model

GPU = "h100-sxm-80gb"
KINDS = ("framework pytorch", "precision fp8")
PLAN_CONFIG = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 1},
    "training": {"sequence": 1024, "global_batch": 2, "microbatch": 1},
}
HOLDOUT_STEPS = (
    HoldoutStep("3 layers, 2 microbatches of 1", 1.02, 1.0, 0.1),
    HoldoutStep("3 layers, 1 microbatch of 2", 0.97, 1.0, 0.1),
)
HOLDOUT = parts("2 real steps ... within 3.0% (largest error; bias -0.5%)")


def holdout_with_errors(errors: Sequence[float], record_error: float = 1.0) -> HoldoutResult:
    """Holdout steps with these errors, as logarithms of measured over predicted time."""
    return HoldoutResult(
        GPU, [HoldoutStep(f"{index} layers", 1.0, exp(error), record_error) for index, error in enumerate(errors)]
    )


def log_upper_bound(holdout: HoldoutResult, expectation: ExpectedError) -> float:
    return log(make_model().prediction_interval(MEASURED_FEATURES, holdout.local_evidence(expectation)).high)


fractions = st.floats(0.0, 1.0)
error_lists = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4)
expectations = st.builds(
    lambda kernels, kernel_error, other_error: ExpectedError(
        kernels * kernel_error + other_error, 1.0 - kernels, kernels, kernels * kernel_error
    ),
    fractions,
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.3),
)


@examples(200)
@given(error_lists, expectations, st.integers(0, 3), st.floats(1.0, 3.0))
def test_a_larger_error_never_narrows_the_interval(
    errors: list[float], expectation: ExpectedError, index: int, factor: float
) -> None:
    larger = list(errors)
    larger[index % len(errors)] *= factor
    assert (
        log_upper_bound(holdout_with_errors(larger), expectation)
        >= log_upper_bound(holdout_with_errors(errors), expectation) - 1e-12
    )
    assert (
        log_upper_bound(holdout_with_errors([*errors, larger[index % len(errors)]]), expectation)
        >= log_upper_bound(holdout_with_errors(errors), expectation) - 1e-12
    )


@examples(100)
@given(error_lists, expectations, st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_larger_record_errors_never_narrow_the_interval(
    errors: list[float], expectation: ExpectedError, first_error: float, second_error: float
) -> None:
    worse, better = sorted((first_error, second_error))  # errors of the records that the steps are based on
    assert (
        log_upper_bound(holdout_with_errors(errors, worse), expectation)
        >= log_upper_bound(holdout_with_errors(errors, better), expectation) - 1e-12
    )


@examples(100)
@given(error_lists, fractions)
def test_kernel_only_intervals_are_the_largest_error_plus_repeatability(
    errors: list[float], kernel_error: float
) -> None:
    expectation = ExpectedError(kernel_error, 0.0, 1.0, kernel_error)
    largest_error, repeatability = max(map(abs, errors)), 2.0 * 0.03  # deviations, and `repeat`
    assert log_upper_bound(holdout_with_errors(errors), expectation) == pytest.approx(largest_error + repeatability)


def test_communication_keeps_its_own_errors() -> None:
    """Half of the time is kernels, off by 4 %; communication errs by 6 % of the total."""
    measured = holdout_with_errors([log(1.04)]).local_evidence(ExpectedError(0.5 * 0.3 + 0.06, 0.2, 0.5, 0.5 * 0.3))
    assert measured.relative_error == pytest.approx(0.5 * 0.04 + 0.06)
    assert measured.unmeasured_share == 0.2


def test_larger_kernel_errors_add_the_difference() -> None:
    """The record's errors of these steps were within 10 %, those of the scenario's kernels within 30 %."""
    holdout, expectation = holdout_with_errors([log(1.04)], record_error=0.1), ExpectedError(0.3, 0.0, 1.0, 0.3)
    assert holdout.local_evidence(expectation).relative_error == pytest.approx(0.04 + 0.2)
    assert holdout.excess_kernel_error(expectation) == pytest.approx(0.2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_interval_covers_nine_of_ten_new_steps(count: int) -> None:
    """Normal errors of up to `count` times the repeatability, which the new step has as well."""
    model, random, draws = load_uncertainty_model(), np.random.default_rng(17), 50_000
    for deviation in np.linspace(0.0, count * model.repeat_deviation, 7):
        largest_errors = np.abs(random.normal(0.0, 1.0, (draws, count))).max(axis=1) * deviation
        new_errors = np.abs(random.normal(0.0, hypot(deviation, model.repeat_deviation), draws))
        limit = largest_errors + NormalDist().inv_cdf(0.95) * model.repeat_deviation
        assert (new_errors <= limit).mean() > 0.875


def test_holdout_steps_extend_the_validated_domain() -> None:
    features = replace(
        MEASURED_FEATURES,
        accelerators=frozenset({"mine"}),
        categories=frozenset({"DDP", *KINDS}),
        feature_shares=NO_TRAITS,
    )
    assert set(make_model().domain.unmeasured_categories(features)) == {"accelerator mine", *KINDS}
    extended = HoldoutResult("mine", [HoldoutStep("1 layer", 1.0, 1.0, categories=KINDS)]).extend(make_model())
    assert extended.domain.unmeasured_categories(features) == ()
    assert extended.error_variance(features) < make_model().error_variance(features)


def test_only_a_record_of_the_device_itself_is_holdout_validated() -> None:
    measured_record = make_record(HOLDOUT_STEPS)
    assert holdout_result(measured_record) == HoldoutResult(GPU, HOLDOUT_STEPS)
    assert holdout_result(None) is None
    assert holdout_result(make_record(())) is None
    assert holdout_result(replace(measured_record, origin=RecordOrigin.PUBLISHED)) is None
    assert holdout_result(scale_record(measured_record, compute=1.1, bandwidth=1.0)) is None


def make_record(steps: tuple[HoldoutStep, ...], scenario: Scenario | None = None) -> CalibrationRecord:
    """A record in which every kernel of a scenario takes a millisecond."""
    from clustersim.build import distinct_kernels

    kernels = () if scenario is None else distinct_kernels(scenario)
    kernel_records = {
        kernel_record.signature: kernel_record
        for kernel_record in (time_kernel(kernel) for kernel in kernels if kernel.shape is not None)
    }
    conditions = MeasurementConditions("2026-11-20", "none", "made up")
    return CalibrationRecord(
        DeviceInfo(GPU, "a test's GPU"), conditions, tuple(kernel_records.values()), holdout_steps=steps
    )


def time_kernel(kernel: Kernel) -> KernelSample:
    """A millisecond, give or take 2 %."""
    return replace(kernel_sample(kernel, 1e-3), time=TimeStatistics(1e-3, 0.98e-3, 1.02e-3, 20))


def simulate_plan(steps: tuple[HoldoutStep, ...], *changes: str) -> SimulationResult:
    scenario = Scenario.from_mapping(PLAN_CONFIG, changes, default_name="plan")
    measured_record = make_record(steps, scenario)
    return simulate(replace(scenario, cost=replace(scenario.cost, record=measured_record)))


def test_a_result_has_the_interval_of_its_holdout_steps() -> None:
    result = simulate_plan(HOLDOUT_STEPS)
    assert result.holdout_validation is not None
    features = extract_step_features(result.scenario, result.breakdown.launch_share)
    repeatability = (
        load_uncertainty_model()
        .prediction_interval(features, LocalEvidence(0.0, result.kernel_time_uncertainty.unknown_share))
        .high
    )
    error = result.kernel_time_uncertainty.kernel_share * (
        1.0 / 0.97 - 1.0
    ) + result.holdout_validation.excess_kernel_error(result.kernel_time_uncertainty)
    assert result.relative_interval.high == pytest.approx(repeatability * (1.0 + error), rel=1e-6)
    assert HOLDOUT.search(result.interval_description)
    report = result.to_json()["holdout_validation"]
    assert report["largest_error"] == pytest.approx(-0.03)
    assert report["bias"] == pytest.approx(-0.005)
    assert [item["description"] for item in report["steps"]] == [
        holdout_step.description for holdout_step in HOLDOUT_STEPS
    ]


def test_a_larger_holdout_error_widens_the_interval() -> None:
    worse = (*HOLDOUT_STEPS, HoldoutStep("1 layer", 1.3, 1.0, 0.1))
    narrow_interval, wide_interval = (simulate_plan(item).step_time_interval for item in (HOLDOUT_STEPS, worse))
    assert wide_interval[0] < narrow_interval[0] < narrow_interval[1] < wide_interval[1]


def test_without_holdout_steps_none_are_reported() -> None:
    result = simulate_plan(())
    assert result.holdout_validation is None
    assert result.to_json()["holdout_validation"] is None
    assert "real step" not in result.interval_description
    expectation = result.kernel_time_uncertainty
    features = extract_step_features(result.scenario, result.breakdown.launch_share)
    assert result.relative_interval == load_uncertainty_model().prediction_interval(
        features, LocalEvidence(expectation.error, expectation.unknown_share)
    )


def test_a_record_of_another_accelerator_has_no_holdout() -> None:
    scenario = Scenario.from_mapping(PLAN_CONFIG, ["cluster.name=dgx-a100"], default_name="plan")
    result = simulate(replace(scenario, cost=replace(scenario.cost, record=make_record(HOLDOUT_STEPS, scenario))))
    assert result.holdout_validation is None


def test_one_step_has_no_bias() -> None:
    holdout = HoldoutResult(GPU, HOLDOUT_STEPS[:1])
    assert parts("1 real step ... within 2.0% (largest error)").search(holdout.description)


def test_every_interface_reports_the_holdout(clustersim: CommandRunner, tmp_path: Path) -> None:  # noqa: F811
    plan, file = tmp_path / "plan.yaml", tmp_path / "gpu.json"
    plan.write_text(json.dumps(PLAN_CONFIG), encoding="utf-8")
    write_record(make_record(HOLDOUT_STEPS, Scenario.load(plan)), file)
    use = ("--set", "cost.record=gpu.json")
    printed = clustersim("run", plan, *use, "--html", tmp_path / "page.html").stdout
    assert HOLDOUT.search(" ".join(printed.split()))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert HOLDOUT.search(page)
    assert "Holdout validation of the record" in page
    assert "<td>1.020 s</td><td>1.000 s</td><td>+2.0%</td>" in page
    assert HOLDOUT.search(clustersim("coverage", plan, *use).stdout)
    assert json.loads(clustersim("coverage", plan, *use, "--json", "-").stdout)["holdout_validation"]["bias"] < 0
    assert HOLDOUT.search(" ".join(clustersim("explain", plan, *use, "--measured", "1s").stdout.split()))


def test_an_explorer_reports_the_holdout() -> None:
    from clustersim.planning.explorer.explorer_data import record_notes

    scenario = Scenario.from_mapping(PLAN_CONFIG, default_name="plan")
    recorded = replace(scenario, cost=replace(scenario.cost, record=make_record(HOLDOUT_STEPS)))
    assert any(HOLDOUT.search(note) and "the record of a test's GPU" in note for note in record_notes(recorded))
    assert not list(record_notes(scenario))
    assert not list(
        record_notes(replace(recorded, cluster=replace(recorded.cluster, accelerator=load_accelerator("gb200"))))
    )


def test_a_step_record_round_trips_with_its_features(tmp_path: Path) -> None:
    from clustersim.cost.record_file import read_record

    step_record, path = make_record((HoldoutStep("1 layer", 1.0, 1.0, 0.2, KINDS),)), tmp_path / "gpu.json"
    write_record(step_record, path)
    assert read_record(path).holdout_steps == step_record.holdout_steps
    older = (
        record_text(step_record)
        .replace(', "propagated_error": 0.2', "")
        .replace(f', "categories": {json.dumps(KINDS)}', "")
    )
    path.write_text(older, encoding="utf-8")
    assert read_record(path).holdout_steps == (HoldoutStep("1 layer", 1.0, 1.0),)
