"""Summaries of validation tables: counts, reasons and coverage of synthetic comparisons."""

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
from tests.sentences import parts
from tests.validation.sample_cases import make_comparison, step_case


def test_reasons_are_counted_without_the_line_that_they_are_on() -> None:
    comparisons = [CaseComparison(str(n), "s", 1.0, None, f"line {n}: tp is not stated") for n in range(3)]
    summary = ValidationSummary("steps", (*comparisons, CaseComparison("x", "s", 1.0, None, "other")))
    assert summary.skip_reasons == {"tp is not stated": ("0", "1", "2"), "other": ("x",)}


def test_coverage_of_dense_cases_does_not_ask_the_case() -> None:
    """Of four cases one is a mixture of experts and one of unknown quality; one of the other two is predicted."""
    cases = [step_case(), step_case(tp="3"), step_case(experts="8"), step_case(quality="C")]
    comparisons = [
        make_comparison(cases[0], 0.1),
        CaseComparison("b", "s", 1.0, None, "impossible", is_expressible=False),
        CaseComparison("c", "s", 1.0, None, "experts", is_expressible=False),
        make_comparison(cases[3], 0.1),
    ]
    summary = summarize_steps(cases, comparisons)
    assert summary.coverage.share == 1.0
    assert summary.coverage_by_category[DENSE_COVERAGE].share == 0.5
    assert summary.coverage_by_category[MOE_COVERAGE] == PredictionCoverage(0, 1)
    assert summary.to_json()["coverage"][DENSE_COVERAGE] == {"predicted": 1, "expressible": 2, "share": 0.5}


def test_dense_and_moe_means_are_separate() -> None:
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


def test_sources_with_two_kinds_of_runs_are_split() -> None:
    cases = [
        step_case(source="megatron-2021", zero_stage="3"),
        step_case(source="megatron-2021"),
        step_case(source="nobody", zero_stage="3"),
    ]
    summary = summarize_steps(
        cases, [make_comparison(validation_case, 0.1 * (n + 1)) for n, validation_case in enumerate(cases)]
    )
    subsets = summary.subsets or {}
    assert {name: subset.bias for name, subset in subsets.items()} == pytest.approx(
        {
            "megatron-2021 with ZeRO-3": 0.0,
            "megatron-2021 without ZeRO-3": 1.0,
        }
    )


def test_simulated_times_are_reported_separately() -> None:
    """Two layouts were measured; a third of the same job was simulated, and its error of 0.5 is in no figure."""
    cases = [
        step_case(),
        step_case(tp="2", dp="4"),
        step_case(tp="4", dp="2", step_time_origin="simulated by somebody"),
    ]
    comparisons = [
        make_comparison(validation_case, predicted)
        for validation_case, predicted in zip(cases, (0.11, 0.13, 0.15), strict=True)
    ]
    summary = summarize_steps(cases, comparisons)
    report = summary.to_json()
    assert (report["overall"]["n"], report["overall"]["mape"]) == (2, pytest.approx(0.2))
    assert report["coverage"][DENSE_COVERAGE]["expressible"] == report["layouts"]["cases"] == len(report["cases"]) == 2
    (simulated,) = report["simulated_by_others"].values()
    assert (simulated["n"], simulated["mape"]) == (1, pytest.approx(0.5))
    assert len(report["simulated_cases"]) == 1
    skipped = summarize_steps(cases, [*comparisons[:2], make_comparison(cases[2], None, "no reason")])
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


def test_fit_verdicts_count_judged_runs_only() -> None:
    verdicts = (
        MemoryFitVerdict("a", "s", True, True),
        MemoryFitVerdict("b", "s", False, True),
        MemoryFitVerdict("c", "s", True, None, "why"),
    )
    report = ValidationSummary("memory", (), fit_verdicts=verdicts).to_json()["fits"]
    assert (report["n"], report["right"], report["skipped"]) == (2, 1, 1)


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
    assert parts("would not fit in memory as predicted: 1 of 2 runs: too large").search(note)
