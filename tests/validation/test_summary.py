"""What is said of a table? Counts, reasons and coverage of made-up comparisons."""

import json

import pytest

from clustersim.cli.validation_table import coverage_notes, simulated_rows
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.memory import MemoryFitVerdict
from clustersim.validation.summary import (
    DENSE_COVERAGE,
    MOE_COVERAGE,
    PredictionCoverage,
    ValidationSummary,
    replace_non_finite,
    summarize_steps,
)
from tests.validation.sample_cases import case, compared


def test_reasons_are_counted_without_the_line_that_they_are_on() -> None:
    comparisons = [CaseComparison(str(n), "s", 1.0, None, f"line {n}: tp is not stated") for n in range(3)]
    summary = ValidationSummary("steps", (*comparisons, CaseComparison("x", "s", 1.0, None, "other")))
    assert summary.skip_reasons == {"tp is not stated": ("0", "1", "2"), "other": ("x",)}


def test_coverage_of_dense_cases_does_not_ask_the_case() -> None:
    """Of four cases one is a mixture of experts and one of unknown quality; one of the other two is predicted."""
    cases = [case(), case(tp="3"), case(experts="8"), case(quality="C")]
    comparisons = [
        compared(cases[0], 0.1),
        CaseComparison("b", "s", 1.0, None, "impossible", is_expressible=False),
        CaseComparison("c", "s", 1.0, None, "experts", is_expressible=False),
        compared(cases[3], 0.1),
    ]
    summary = summarize_steps(cases, comparisons)
    assert summary.coverage.share == 1.0
    assert summary.coverage_by_category[DENSE_COVERAGE].share == 0.5
    assert summary.coverage_by_category[MOE_COVERAGE] == PredictionCoverage(0, 1)
    assert summary.to_json()["coverage"][DENSE_COVERAGE] == {"predicted": 1, "expressible": 2, "share": 0.5}


def test_means_of_dense_models_and_of_mixtures_are_told_apart() -> None:
    kinds = {"a": ("dense", 0.1), "b": ("mixtures of experts", 0.3), "c": ("mixtures of experts", -0.5)}
    comparisons = [
        CaseComparison(name, name, 1.0, 1.0 + error, groupings={"layers": kind})
        for name, (kind, error) in kinds.items()
    ]
    macros = ValidationSummary("steps", tuple(comparisons)).macro_by_model_type
    assert {kind: macro.sources for kind, macro in macros.items()} == {"dense": 1, "mixtures of experts": 2}
    assert macros["mixtures of experts"].mape == pytest.approx(0.4)
    assert macros["mixtures of experts"].bias == pytest.approx(-0.1)
    assert not ValidationSummary("steps", tuple(comparisons[1:])).macro_by_model_type


def test_sources_that_mix_two_kinds_of_runs_are_told_apart() -> None:
    cases = [
        case(source="megatron-2021", zero_stage="3"),
        case(source="megatron-2021"),
        case(source="nobody", zero_stage="3"),
    ]
    summary = summarize_steps(
        cases, [compared(validation_case, 0.1 * (n + 1)) for n, validation_case in enumerate(cases)]
    )
    subsets = summary.subsets or {}
    assert {name: subset.bias for name, subset in subsets.items()} == pytest.approx(
        {
            "megatron-2021 with ZeRO-3": 0.0,
            "megatron-2021 without ZeRO-3": 1.0,
        }
    )


def test_times_of_another_simulator_are_beside_those_that_were_measured() -> None:
    """Two layouts were measured; a third of the same job was simulated, and its error of 0.5 is in no figure."""
    cases = [case(), case(tp="2", dp="4"), case(tp="4", dp="2", step_time_origin="simulated by somebody")]
    comparisons = [
        compared(validation_case, predicted)
        for validation_case, predicted in zip(cases, (0.11, 0.13, 0.15), strict=True)
    ]
    summary = summarize_steps(cases, comparisons)
    told = summary.to_json()
    assert (told["overall"]["n"], told["overall"]["mape"]) == (2, pytest.approx(0.2))
    assert told["coverage"][DENSE_COVERAGE]["expressible"] == told["layouts"]["cases"] == len(told["cases"]) == 2
    (beside,) = told["simulated_by_others"].values()
    assert (beside["n"], beside["mape"]) == (1, pytest.approx(0.5))
    assert len(told["simulated_cases"]) == 1
    skipped = summarize_steps(cases, [*comparisons[:2], compared(cases[2], None, "no reason")])
    assert skipped.skip_reasons == {"no reason": ("made-up",)}
    ((name, cells),) = simulated_rows(summary)
    assert "not measured" in name
    assert "50.0%" in cells


def test_json_holds_null_where_there_is_no_number() -> None:
    comparisons = (
        CaseComparison("a", "s", float("nan"), None, "no measurement"),
        CaseComparison("b", "s", 1e-320, 1.0),
    )
    text = json.dumps(ValidationSummary("steps", comparisons).to_json(), allow_nan=False)
    assert json.loads(text)["cases"][0]["measured"] is None
    assert replace_non_finite({"a": [float("inf"), (1.0, float("nan"))]}) == {"a": [None, [1.0, None]]}


def test_whether_runs_fit_counts_those_that_are_judged() -> None:
    verdicts = (
        MemoryFitVerdict("a", "s", True, True),
        MemoryFitVerdict("b", "s", False, True),
        MemoryFitVerdict("c", "s", True, None, "why"),
    )
    told = ValidationSummary("memory", (), fit_verdicts=verdicts).to_json()["fits"]
    assert (told["n"], told["right"], told["skipped"]) == (2, 1, 1)


def test_an_empty_table_has_a_summary() -> None:
    plain = ValidationSummary("memory", ()).to_json()
    assert plain["overall"]["n"] == 0
    assert plain["macro"] == {"sources": 0, "mape": None, "bias": None}
    assert plain["coverage"]["share"] is None


def test_runs_that_were_measured_but_are_predicted_not_to_fit_are_named_once() -> None:
    fits = {"fits one": True, "too large": False, "not known": None}
    comparisons = [
        CaseComparison(name, "nobody", 1.0, 1.0, fits_in_memory=fit) for name, fit in fits.items() for _ in range(2)
    ]
    summary = ValidationSummary("steps", tuple(comparisons))
    assert summary.measured_but_unfit == ("too large",)
    assert summary.to_json()["ran_but_does_not_fit"] == ["too large"]
    (note,) = [coverage_note for coverage_note in coverage_notes(summary) if "would not fit" in coverage_note]
    assert note == "ran, but would not fit in memory as predicted: 1 of 2 runs: too large"
