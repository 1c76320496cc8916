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
from clustersim.cost.calibration_record import Conditions, Device, KernelRow, Origin, Record, Spread, StepRow
from clustersim.cost.record_file import record_text, write_record
from clustersim.cost.record_scaling import scaled
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel
from clustersim.results.simulation_result import Answer
from clustersim.uncertainty.expected_error import Expectation
from clustersim.uncertainty.holdout import Tried, tried
from clustersim.uncertainty.model_file import load_experience
from clustersim.uncertainty.prediction_interval import Measured
from clustersim.uncertainty.step_features import facts_of
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
    StepRow("3 layers, 2 microbatches of 1", 1.02, 1.0, 0.1),
    StepRow("3 layers, 1 microbatch of 2", 0.97, 1.0, 0.1),
)
SENTENCE = "predicted 2 real steps that it was not measured for within 3.0% (largest error; bias -0.5%)"


def steps(errors: Sequence[float], of_rows: float = 1.0) -> Tried:
    """Steps that were off by these logarithms of measured over predicted time."""
    return Tried(GPU, [StepRow(f"{at} layers", 1.0, exp(error), of_rows) for at, error in enumerate(errors)])


def width(found: Tried, what: Expectation) -> float:
    return log(experience().expected(SEEN, found.measured(what)).high)


parts = st.floats(0.0, 1.0)
errors = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4)
expectations = st.builds(
    lambda kernels, own, rest: Expectation(kernels * own + rest, 1.0 - kernels, kernels, kernels * own),
    parts, st.floats(0.0, 0.5), st.floats(0.0, 0.3),
)  # fmt: skip


@examples(200)
@given(errors, expectations, st.integers(0, 3), st.floats(1.0, 3.0))
def test_a_larger_error_never_narrows_the_band(found: list[float], what: Expectation, which: int, times: float) -> None:
    larger = list(found)
    larger[which % len(found)] *= times
    assert width(steps(larger), what) >= width(steps(found), what) - 1e-12
    assert width(steps([*found, larger[which % len(found)]]), what) >= width(steps(found), what) - 1e-12


@examples(100)
@given(errors, expectations, st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_what_is_known_worse_than_those_steps_never_narrows_it(
    found: list[float], what: Expectation, one: float, other: float
) -> None:
    worse, better = sorted((one, other))  # errors of the rows that the steps rested on
    assert width(steps(found, worse), what) >= width(steps(found, better), what) - 1e-12


@examples(100)
@given(errors, parts)
def test_of_kernels_alone_the_largest_error_is_the_band_beside_what_equal_steps_differ_by(
    found: list[float], own: float
) -> None:
    whole = Expectation(own, 0.0, 1.0, own)
    of_steps, equal = max(map(abs, found)), 2.0 * 0.03  # deviations, and `repeat`
    assert width(steps(found), whole) == pytest.approx(of_steps + equal)


def test_what_rests_on_exchanges_keeps_its_own_errors() -> None:
    """Half of the time is kernels, which were off by 4 %; exchanges err by 6 % of the whole."""
    found = steps([log(1.04)]).measured(Expectation(0.5 * 0.3 + 0.06, 0.2, 0.5, 0.5 * 0.3))
    assert found.error == pytest.approx(0.5 * 0.04 + 0.06)
    assert found.unknown == 0.2


def test_kernels_that_are_known_worse_err_by_the_difference() -> None:
    """Rows of these steps were known within 10 %, those of the scenario's kernels within 30 %."""
    found, what = steps([log(1.04)], of_rows=0.1), Expectation(0.3, 0.0, 1.0, 0.3)
    assert found.measured(what).error == pytest.approx(0.04 + 0.2)
    assert found.beyond(what) == pytest.approx(0.2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nine_of_ten_further_steps_are_inside(count: int) -> None:
    """Normal errors of up to `count` times what equal steps differ by, by which the further one differs as well."""
    shipped, random, draws = load_experience(), np.random.default_rng(17), 50_000
    for deviation in np.linspace(0.0, count * shipped.repeat, 7):
        known = np.abs(random.normal(0.0, 1.0, (draws, count))).max(axis=1) * deviation
        further = np.abs(random.normal(0.0, hypot(deviation, shipped.repeat), draws))
        assert (further <= known + shipped.quantile * shipped.repeat).mean() > 0.89


def test_what_was_tried_counts_as_measured() -> None:
    facts = replace(SEEN, accelerators=frozenset({"mine"}), kinds=frozenset({"DDP", *KINDS}), traits=NO_TRAITS)
    assert set(experience().known.unmeasured(facts)) == {"accelerator mine", *KINDS}
    found = Tried("mine", [StepRow("1 layer", 1.0, 1.0, kinds=KINDS)]).added_to(experience())
    assert found.known.unmeasured(facts) == ()
    assert found.variance(facts) < experience().variance(facts)


def test_only_a_record_of_the_machine_itself_was_tried_on_it() -> None:
    known = record(TRIED)
    assert tried(known) == Tried(GPU, TRIED)
    assert tried(None) is None
    assert tried(record(())) is None
    assert tried(replace(known, origin=Origin.PUBLISHED)) is None
    assert tried(scaled(known, compute=1.1, bandwidth=1.0)) is None


def record(of: tuple[StepRow, ...], scenario: Scenario | None = None) -> Record:
    """Every kernel of a scenario took a millisecond."""
    from clustersim.build import kernels_of

    kernels = () if scenario is None else kernels_of(scenario)
    rows = {made.signature: made for made in (taken(kernel) for kernel in kernels if kernel.shape is not None)}
    conditions = Conditions("2026-11-20", "none", "made up")
    return Record(Device(GPU, "a test's GPU"), conditions, tuple(rows.values()), steps=of)


def taken(kernel: Kernel) -> KernelRow:
    """A millisecond, give or take 2 %."""
    return replace(row(kernel, 1e-3), time=Spread(1e-3, 0.98e-3, 1.02e-3, 20))


def simulated(of: tuple[StepRow, ...], *changes: str) -> Answer:
    scenario = Scenario.from_mapping(PLAN, changes, source="plan")
    known = record(of, scenario)
    return simulate(replace(scenario, cost=replace(scenario.cost, record=known)))


def test_an_answer_has_the_band_of_its_record_s_steps() -> None:
    result = simulated(TRIED)
    assert result.tried is not None
    facts = facts_of(result.scenario, result.breakdown.launch_share)
    equal = load_experience().expected(facts, Measured(0.0, result.expectation.unknown)).high
    error = result.expectation.kernels * (1.0 / 0.97 - 1.0) + result.tried.beyond(result.expectation)
    assert result.expected.high == pytest.approx(equal * (1.0 + error), rel=1e-6)
    assert SENTENCE in result.experience
    told = result.to_json()["record_steps"]
    assert told["largest_error"] == pytest.approx(-0.03)
    assert told["bias"] == pytest.approx(-0.005)
    assert [item["what"] for item in told["steps"]] == [step_row.what for step_row in TRIED]


def test_a_larger_error_of_a_step_widens_the_answer() -> None:
    worse = (*TRIED, StepRow("1 layer", 1.3, 1.0, 0.1))
    near, far = (simulated(item).band for item in (TRIED, worse))
    assert far[0] < near[0] < near[1] < far[1]


def test_without_steps_nothing_is_said_of_them() -> None:
    result = simulated(())
    assert result.tried is None
    assert result.to_json()["record_steps"] is None
    assert "real step" not in result.experience
    found = result.expectation
    facts = facts_of(result.scenario, result.breakdown.launch_share)
    assert result.expected == load_experience().expected(facts, Measured(found.error, found.unknown))


def test_a_record_of_another_accelerator_says_nothing_of_steps() -> None:
    scenario = Scenario.from_mapping(PLAN, ["cluster.name=dgx-a100"], source="plan")
    result = simulate(replace(scenario, cost=replace(scenario.cost, record=record(TRIED, scenario))))
    assert result.tried is None


def test_one_step_has_no_bias() -> None:
    found = Tried(GPU, TRIED[:1])
    assert found.words == "predicted 1 real step that it was not measured for within 2.0% (largest error)"


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
    from clustersim.planning.explorer.explorer_data import of_record

    scenario = Scenario.from_mapping(PLAN, source="plan")
    known = replace(scenario, cost=replace(scenario.cost, record=record(TRIED)))
    assert f"simulated steps rest on the record of a test's GPU, which {SENTENCE}" in list(of_record(known))
    assert not list(of_record(scenario))
    assert not list(of_record(replace(known, cluster=replace(known.cluster, accelerator=load_accelerator("gb200")))))


def test_a_step_keeps_what_it_was_like(tmp_path: Path) -> None:
    from clustersim.cost.record_file import read_record

    known, path = record((StepRow("1 layer", 1.0, 1.0, 0.2, KINDS),)), tmp_path / "gpu.json"
    write_record(known, path)
    assert read_record(path).steps == known.steps
    older = record_text(known).replace(', "of_rows": 0.2', "").replace(f', "kinds": {json.dumps(KINDS)}', "")
    path.write_text(older, encoding="utf-8")
    assert read_record(path).steps == (StepRow("1 layer", 1.0, 1.0),)
