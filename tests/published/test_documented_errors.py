"""Errors of collectives, kernels and unseen steps are those that README and docs/validation.md state."""

import math
from collections import defaultdict
from statistics import fmean

import pytest

from calibrate.fit.out_of_sample import OutOfSampleStep, out_of_sample_path, read_out_of_sample
from calibrate.fit.prediction_interval import cross_validate, strata_table, with_groups
from clustersim.uncertainty.memory_error import load_memory_error_model
from clustersim.uncertainty.model_file import (
    DENSE_STEPS,
    LOW_PRECISION_MOE_STEPS,
    LOW_PRECISION_STEPS,
    MOE_STEPS,
    load_uncertainty_model,
)
from clustersim.validation.collectives import compare_collectives, read_collectives
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import macro_average, statistics_by_source, summarize_comparisons
from clustersim.validation.kernels import compare_kernels, read_kernels
from tests.published.documents import ROOT, VALIDATION_PAGE, assert_states, percent


@pytest.fixture(scope="module")
def collectives_by_size() -> dict[str, list[CaseComparison]]:
    groups: dict[str, list[CaseComparison]] = defaultdict(list)
    for comparison in compare_collectives(read_collectives()):
        groups[comparison.groupings["size"]].append(comparison)
    return groups


def test_errors_of_collectives(collectives_by_size: dict[str, list[CaseComparison]]) -> None:
    large, small = collectives_by_size[">= 1 MiB"], collectives_by_size["below 1 MiB"]
    statistics, macro = summarize_comparisons(large), macro_average(statistics_by_source(large).values())
    assert macro is not None
    error, median = percent(statistics.mape), percent(statistics.median_ape)
    assert_states(
        VALIDATION_PAGE,
        f"of 1 MiB and more, {statistics.n:,} measurements of {macro.sources} sources: {error} (median {median}; macro "
        f"mean {percent(macro.mape)}); smaller ones {percent(summarize_comparisons(small).mape)} (median "
        f"{percent(summarize_comparisons(small).median_ape)})",
    )
    assert_states(
        "README.md",
        f"| collectives of 1 MiB and more | {statistics.n:,} | {macro.sources} | {error} (median {median}) |",
    )


def test_errors_of_dispatch_and_combine(collectives_by_size: dict[str, list[CaseComparison]]) -> None:
    """Tables of dispatchers state tokens, not bytes."""
    dispatch = collectives_by_size["not stated"]
    macro = macro_average(statistics_by_source(dispatch).values())
    assert macro is not None
    statistics = summarize_comparisons(dispatch)
    assert_states(
        VALIDATION_PAGE,
        f"of MoE models, {statistics.n} measurements: {percent(statistics.mape)} (macro mean {percent(macro.mape)})",
    )


def test_errors_of_kernels() -> None:
    comparisons = compare_kernels(read_kernels())
    statistics = summarize_comparisons(comparisons)
    grouped = summarize_comparisons([item for item in comparisons if item.groupings["op"] == "grouped_gemm"])
    error, median = percent(statistics.mape), percent(statistics.median_ape)
    assert_states(
        VALIDATION_PAGE,
        f"**Kernels**, {statistics.n:,} measurements: {error} (median {median})",
        f"of grouped GEMMs {percent(grouped.mape)}",
    )


def test_headroom_of_searches() -> None:
    model = load_memory_error_model()
    headroom = {name: percent(model.default_headroom(name), 1) for name in ("megatron", "pytorch")}
    covered = {family.name: percent(model.out_of_sample_coverage(family)) for family in model.families}
    assert_states(
        "docs/search.md",
        f"{headroom['megatron']} for Megatron-LM, {headroom['pytorch']} for PyTorch",
        f"the other sources ask for in {covered['megatron']} and {covered['pytorch']} of cases",
    )


def stated_steps(kind: str) -> list[OutOfSampleStep]:
    """The out-of-sample predictions with the software stated."""
    return [step for step in read_out_of_sample(out_of_sample_path(kind)) if step.features.states_software]


def out_of_sample_errors(kind: str) -> tuple[int, int, float]:
    """Number of steps and sources, and macro mean of the errors, of steps whose publisher no constant was fitted to."""
    steps, by_source = stated_steps(kind), defaultdict(list)
    for step in steps:
        by_source[step.source].append(abs(math.expm1(-step.log_error)))
    return len(steps), len(by_source), fmean(fmean(errors) for errors in by_source.values())


def test_errors_of_unseen_sources() -> None:
    steps, sources, dense = out_of_sample_errors(DENSE_STEPS)
    _, _, moe = out_of_sample_errors(MOE_STEPS)
    low_precision, low_precision_moe = (
        out_of_sample_errors(kind) for kind in (LOW_PRECISION_STEPS, LOW_PRECISION_MOE_STEPS)
    )
    assert_states(
        VALIDATION_PAGE,
        f"{steps} measured dense steps of {sources} sources, at most 11 of each",
        f"the macro mean of the {sources} sources of `fit-steps` is {percent(dense, 1)}",
        f"({percent(moe)} with constants that have not seen its publisher's dense steps)",
        f"Leave-one-publisher-out it is {percent(low_precision[2])} and {percent(low_precision_moe[2])} "
        f"({low_precision[0]} and {low_precision_moe[0]} steps",
    )


def test_steps_behind_the_prediction_interval() -> None:
    model = load_uncertainty_model()
    basis = f"from {model.step_count} published steps ({model.source_count} sources, leave-one-{model.held_out}-out)"
    assert_states("README.md", basis)
    assert_states(
        VALIDATION_PAGE,
        basis,
        f"Equal steps that were published twice deviate by {percent(model.repeat_deviation, 1)} (standard deviation)",
    )


@pytest.mark.slow
def test_coverage_of_strata() -> None:
    model, steps = load_uncertainty_model(), with_groups(read_out_of_sample(out_of_sample_path(DENSE_STEPS)))
    table = strata_table(model, cross_validate(steps, model.repeat_deviation))
    assert "\n".join(table) in (ROOT / VALIDATION_PAGE).read_text(encoding="utf-8")
