"""Real steps that a record predicted are its band: no larger error narrows it, and whoever is told is told the same."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp, hypot, log
from pathlib import Path

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
    RecordOrigin,
    TimeStatistics,
)
from clustersim.cost.record_file import record_text, write_record
from clustersim.cost.record_scaling import scale_record
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel
from clustersim.results.simulation_result import SimulationResult
from clustersim.uncertainty.expected_error import ExpectedError
from clustersim.uncertainty.holdout import HoldoutResult, holdout_result
from clustersim.uncertainty.model_file import load_uncertainty_model
from clustersim.uncertainty.prediction_interval import LocalEvidence
from clustersim.uncertainty.step_features import extract_step_features
from tests.calibrate.synthetic_records import row
from tests.cli.conftest import Run, clustersim  # noqa: F401 - a fixture
from tests.conftest import examples
from tests.uncertainty.test_prediction_interval import NO_TRAITS, SEEN, experience

GPU = "h100-sxm-80gb"
KINDS = ("framework pytorch", "precision fp8")
PLAN = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 1},
    "training": {"sequence": 1024, "global_batch": 2, "microbatch": 1},
}
TRIED = (
    HoldoutStep("3 layers, 2 microbatches of 1", 1.02, 1.0, 0.1),
    HoldoutStep("3 layers, 1 microbatch of 2", 0.97, 1.0, 0.1),
)
SENTENCE = "predicted 2 real steps that it was not measured for within 3.0% (largest error; bias -0.5%)"


def steps(errors: Sequence[float], of_rows: float = 1.0) -> HoldoutResult:
    """Steps that were off by these logarithms of measured over predicted time."""
    return HoldoutResult(
        GPU, [HoldoutStep(f"{at} layers", 1.0, exp(error), of_rows) for at, error in enumerate(errors)]
    )


def width(found: HoldoutResult, what: ExpectedError) -> float:
    return log(experience().prediction_interval(SEEN, found.local_evidence(what)).high)


parts = st.floats(0.0, 1.0)
errors = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4)
expectations = st.builds(
    lambda kernels, own, rest: ExpectedError(kernels * own + rest, 1.0 - kernels, kernels, kernels * own),
    parts, st.floats(0.0, 0.5), st.floats(0.0, 0.3),
)  # fmt: skip


@examples(200)
@given(errors, expectations, st.integers(0, 3), st.floats(1.0, 3.0))
def test_a_larger_error_never_narrows_the_band(
    found: list[float], what: ExpectedError, which: int, times: float
) -> None:
    larger = list(found)
    larger[which % len(found)] *= times
    assert width(steps(larger), what) >= width(steps(found), what) - 1e-12
    assert width(steps([*found, larger[which % len(found)]]), what) >= width(steps(found), what) - 1e-12


@examples(100)
@given(errors, expectations, st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_what_is_known_worse_than_those_steps_never_narrows_it(
    found: list[float], what: ExpectedError, one: float, other: float
) -> None:
    worse, better = sorted((one, other))  # errors of the rows that the steps rested on
    assert width(steps(found, worse), what) >= width(steps(found, better), what) - 1e-12


@examples(100)
@given(errors, parts)
def test_of_kernels_alone_the_largest_error_is_the_band_beside_what_equal_steps_differ_by(
    found: list[float], own: float
) -> None:
    whole = ExpectedError(own, 0.0, 1.0, own)
    of_steps, equal = max(map(abs, found)), 2.0 * 0.03  # deviations, and `repeat`
    assert width(steps(found), whole) == pytest.approx(of_steps + equal)


def test_what_rests_on_exchanges_keeps_its_own_errors() -> None:
    """Half of the time is kernels, which were off by 4 %; exchanges err by 6 % of the whole."""
    found = steps([log(1.04)]).local_evidence(ExpectedError(0.5 * 0.3 + 0.06, 0.2, 0.5, 0.5 * 0.3))
    assert found.relative_error == pytest.approx(0.5 * 0.04 + 0.06)
    assert found.unmeasured_share == 0.2


def test_kernels_that_are_known_worse_err_by_the_difference() -> None:
    """Rows of these steps were known within 10 %, those of the scenario's kernels within 30 %."""
    found, what = steps([log(1.04)], of_rows=0.1), ExpectedError(0.3, 0.0, 1.0, 0.3)
    assert found.local_evidence(what).relative_error == pytest.approx(0.04 + 0.2)
    assert found.excess_kernel_error(what) == pytest.approx(0.2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nine_of_ten_further_steps_are_inside(count: int) -> None:
    """Normal errors of up to `count` times what equal steps differ by, by which the further one differs as well."""
    shipped, random, draws = load_uncertainty_model(), np.random.default_rng(17), 50_000
    for deviation in np.linspace(0.0, count * shipped.repeat_deviation, 7):
        known = np.abs(random.normal(0.0, 1.0, (draws, count))).max(axis=1) * deviation
        further = np.abs(random.normal(0.0, hypot(deviation, shipped.repeat_deviation), draws))
        assert (further <= known + shipped.quantile * shipped.repeat_deviation).mean() > 0.89


def test_what_was_tried_counts_as_measured() -> None:
    facts = replace(
        SEEN, accelerators=frozenset({"mine"}), categories=frozenset({"DDP", *KINDS}), feature_shares=NO_TRAITS
    )
    assert set(experience().domain.unmeasured_categories(facts)) == {"accelerator mine", *KINDS}
    found = HoldoutResult("mine", [HoldoutStep("1 layer", 1.0, 1.0, kinds=KINDS)]).extend(experience())
    assert found.domain.unmeasured_categories(facts) == ()
    assert found.error_variance(facts) < experience().error_variance(facts)


def test_only_a_record_of_the_machine_itself_was_tried_on_it() -> None:
    known = record(TRIED)
    assert holdout_result(known) == HoldoutResult(GPU, TRIED)
    assert holdout_result(None) is None
    assert holdout_result(record(())) is None
    assert holdout_result(replace(known, origin=RecordOrigin.PUBLISHED)) is None
    assert holdout_result(scale_record(known, compute=1.1, bandwidth=1.0)) is None


def record(of: tuple[HoldoutStep, ...], scenario: Scenario | None = None) -> CalibrationRecord:
    """Every kernel of a scenario took a millisecond."""
    from clustersim.build import distinct_kernels

    kernels = () if scenario is None else distinct_kernels(scenario)
    rows = {made.signature: made for made in (taken(kernel) for kernel in kernels if kernel.shape is not None)}
    conditions = MeasurementConditions("2026-11-20", "none", "made up")
    return CalibrationRecord(DeviceInfo(GPU, "a test's GPU"), conditions, tuple(rows.values()), steps=of)


def taken(kernel: Kernel) -> KernelSample:
    """A millisecond, give or take 2 %."""
    return replace(row(kernel, 1e-3), time=TimeStatistics(1e-3, 0.98e-3, 1.02e-3, 20))


def simulated(of: tuple[HoldoutStep, ...], *changes: str) -> SimulationResult:
    scenario = Scenario.from_mapping(PLAN, changes, default_name="plan")
    known = record(of, scenario)
    return simulate(replace(scenario, cost=replace(scenario.cost, record=known)))


def test_an_answer_has_the_band_of_its_record_s_steps() -> None:
    result = simulated(TRIED)
    assert result.holdout_validation is not None
    facts = extract_step_features(result.scenario, result.breakdown.launch_share)
    equal = (
        load_uncertainty_model()
        .prediction_interval(facts, LocalEvidence(0.0, result.kernel_time_uncertainty.unknown_share))
        .high
    )
    error = result.kernel_time_uncertainty.kernel_share * (
        1.0 / 0.97 - 1.0
    ) + result.holdout_validation.excess_kernel_error(result.kernel_time_uncertainty)
    assert result.relative_interval.high == pytest.approx(equal * (1.0 + error), rel=1e-6)
    assert SENTENCE in result.interval_description
    told = result.to_json()["record_steps"]
    assert told["largest_error"] == pytest.approx(-0.03)
    assert told["bias"] == pytest.approx(-0.005)
    assert [item["what"] for item in told["steps"]] == [holdout_step.what for holdout_step in TRIED]


def test_a_larger_error_of_a_step_widens_the_answer() -> None:
    worse = (*TRIED, HoldoutStep("1 layer", 1.3, 1.0, 0.1))
    near, far = (simulated(item).step_time_interval for item in (TRIED, worse))
    assert far[0] < near[0] < near[1] < far[1]


def test_without_steps_nothing_is_said_of_them() -> None:
    result = simulated(())
    assert result.holdout_validation is None
    assert result.to_json()["record_steps"] is None
    assert "real step" not in result.interval_description
    found = result.kernel_time_uncertainty
    facts = extract_step_features(result.scenario, result.breakdown.launch_share)
    assert result.relative_interval == load_uncertainty_model().prediction_interval(
        facts, LocalEvidence(found.error, found.unknown_share)
    )


def test_a_record_of_another_accelerator_says_nothing_of_steps() -> None:
    scenario = Scenario.from_mapping(PLAN, ["cluster.name=dgx-a100"], default_name="plan")
    result = simulate(replace(scenario, cost=replace(scenario.cost, record=record(TRIED, scenario))))
    assert result.holdout_validation is None


def test_one_step_has_no_bias() -> None:
    found = HoldoutResult(GPU, TRIED[:1])
    assert found.description == "predicted 1 real step that it was not measured for within 2.0% (largest error)"


def test_every_door_says_it(clustersim: Run, tmp_path: Path) -> None:  # noqa: F811
    plan, file = tmp_path / "plan.yaml", tmp_path / "gpu.json"
    plan.write_text(json.dumps(PLAN), encoding="utf-8")
    write_record(record(TRIED, Scenario.load(plan)), file)
    use = ("--set", "cost.record=gpu.json")
    printed = clustersim("run", plan, *use, "--html", tmp_path / "page.html").stdout
    assert SENTENCE in " ".join(printed.split())
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert SENTENCE in page
    assert "Real steps that the record predicted" in page
    assert "<td>1.020 s</td><td>1.000 s</td><td>+2.0%</td>" in page
    assert f"the record {SENTENCE}" in clustersim("coverage", plan, *use).stdout
    assert json.loads(clustersim("coverage", plan, *use, "--json", "-").stdout)["record_steps"]["bias"] < 0
    assert SENTENCE in " ".join(clustersim("explain", plan, *use, "--measured", "1s").stdout.split())


def test_an_explorer_says_it() -> None:
    from clustersim.planning.explorer.explorer_data import record_notes

    scenario = Scenario.from_mapping(PLAN, default_name="plan")
    known = replace(scenario, cost=replace(scenario.cost, record=record(TRIED)))
    assert f"simulated steps rest on the record of a test's GPU, which {SENTENCE}" in list(record_notes(known))
    assert not list(record_notes(scenario))
    assert not list(record_notes(replace(known, cluster=replace(known.cluster, accelerator=load_accelerator("gb200")))))


def test_a_step_keeps_what_it_was_like(tmp_path: Path) -> None:
    from clustersim.cost.record_file import read_record

    known, path = record((HoldoutStep("1 layer", 1.0, 1.0, 0.2, KINDS),)), tmp_path / "gpu.json"
    write_record(known, path)
    assert read_record(path).steps == known.steps
    older = record_text(known).replace(', "of_rows": 0.2', "").replace(f', "kinds": {json.dumps(KINDS)}', "")
    path.write_text(older, encoding="utf-8")
    assert read_record(path).steps == (HoldoutStep("1 layer", 1.0, 1.0),)
