"""Fit of the 90 % prediction interval from out-of-sample errors.

Estimates the variance components of `clustersim.uncertainty.prediction_interval` from the errors of steps
that were not used to fit the constants (`out_of_sample`):

1. The validated domain of a step is always what the *other* publishers measured (`validation.publishers`). So a
   publisher that is the only one with an accelerator, a format or a context length shows how wrong predictions are
   where these were not measured. A class of steps with too few publishers is held out by source.
2. The variances maximize the Gaussian likelihood of the errors; every publisher has the same weight. They are
   found by multiplicative updates that never decrease the likelihood (majorization-minimization; the same as
   for non-negative matrices by Fevotte and Idier 2011, arXiv:1010.1763, with the Itakura-Saito divergence,
   to which this likelihood is equivalent).
3. A component that fewer than `MIN_GROUPS_PER_COMPONENT` have keeps the mean variance of all steps.
   A pseudo-publisher of that variance, spread evenly over the components, is added (shrinkage where data are
   few). The variance of an extrapolation component is bounded below by that of any step: what was not
   measured is at least as uncertain as what was.
4. Each publisher's errors are divided by the standard deviation from components fitted without it. Their median is
   the center of the intervals, and the distances from it that contain 90 % and 50 % of them, macro-averaged over
   publishers, are the half widths (conformal prediction by cross-validation, Barber et al. 2021, arXiv:1905.02928,
   with publishers in place of cases), widened by the ratio of Student's t to the normal quantile for the number of
   publishers. Two quantiles, one for each side, cover less of what they have not seen where publishers are few.
5. Steps are in the table twice, with their software stated and without. The second have quantiles of their own, in
   standard deviations of the first.

Coverage is that of an interval that was fitted without the publisher: components, quantiles and validated
domain. How far two runs of one job are apart is in `same_job`.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
import yaml

from calibrate.fit.out_of_sample import OutOfSampleStep, out_of_sample_path, read_out_of_sample
from calibrate.fit.repeatability import repeat_deviation
from calibrate.fit.same_job import fit_same_job, same_job_pairs
from calibrate.fit.step_constants import MIN_CASES
from calibrate.fit.step_table import SAME_CHIP
from calibrate.fit.student_t import student_t_ratio
from calibrate.fit.weighted_quantile import group_weights, weighted_quantile
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.data_files import find_file, list_names, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.files import write_text_atomically
from clustersim.uncertainty.model_file import DENSE_STEPS, MODEL_NAMES, component_key, model_to_dict
from clustersim.uncertainty.prediction_interval import (
    ALL_STEPS,
    INTERVAL_COVERAGE,
    LIKELY_COVERAGE,
    UNSTATED_SOFTWARE,
    VARIANCE_COMPONENTS,
    BaseComponent,
    ErrorQuantiles,
    StratumCoverage,
    UncertaintyModel,
    VarianceComponent,
    component_loads,
)
from clustersim.uncertainty.reference_runs import SameJobErrors, read_reference_runs
from clustersim.uncertainty.step_features import MIN_VISIBLE_SHARE
from clustersim.uncertainty.validated_domain import ValidatedDomain
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.framework_defaults import framework_defaults
from clustersim.validation.publishers import publisher_of
from clustersim.validation.steps import read_steps

MIN_GROUPS: Final = 4
MIN_GROUPS_PER_COMPONENT: Final = 3  # that a component needs for a variance of its own
MAX_ITERATIONS: Final = 500  # of the variance updates
_MEDIAN: Final = 0.5
EXTRAPOLATION_COMPONENTS: Final = tuple(BaseComponent)[1:]


def with_groups(steps: Sequence[OutOfSampleStep]) -> list[OutOfSampleStep]:
    """The steps with the group that is held out together: publishers where there are enough, else sources.

    One more than an interval needs, since it is fitted without each.
    """
    publishers = {publisher_of(step.source) for step in steps}
    if len(publishers) <= MIN_GROUPS:
        return list(steps)
    return [replace(step, group=publisher_of(step.source)) for step in steps]


def validated_domain(steps: Sequence[OutOfSampleStep]) -> ValidatedDomain:
    """The validated domain of some steps, each of which may be predicted with and without its software."""
    counts = Counter(
        name for step in {step.case_id: step for step in steps}.values() for name in step.features.accelerators
    )
    chip_counts: Counter[str] = Counter()
    for name, count in counts.items():
        chip_counts[SAME_CHIP.get(name, name)] += count
    measured = [name for name, count in counts.items() if count >= MIN_CASES]
    same_chip = [name for name in list_names("accelerators") if chip_counts[SAME_CHIP.get(name, name)] >= MIN_CASES]
    return ValidatedDomain.from_steps((step.features for step in steps), measured, same_chip)


@dataclass(frozen=True, slots=True)
class VarianceData:
    """Steps as arrays.

    loads: [steps, components], by the validated domain of the other publishers; errors: [steps] logarithms;
    weights: [steps], those of one publisher sum to 1; group_ids: [steps].
    """

    loads: FloatArray
    errors: FloatArray
    weights: FloatArray
    group_ids: IntArray


def variance_data(steps: Sequence[OutOfSampleStep]) -> VarianceData:
    """Arrays of the steps from which variance components are estimated: those that state their software."""
    return _step_arrays([step for step in steps if step.features.states_software], steps)


def _step_arrays(steps: Sequence[OutOfSampleStep], others: Sequence[OutOfSampleStep]) -> VarianceData:
    """Arrays of steps. others: all steps, of which those of other groups are the validated domain of a step."""
    domains = {
        group: validated_domain([step for step in others if step.group != group])
        for group in dict.fromkeys(step.group for step in steps)
    }
    loads = [
        [step_loads[component] for component in VARIANCE_COMPONENTS]
        for step in steps
        for step_loads in (component_loads(step.features, domains[step.group]),)
    ]
    return VarianceData(
        np.array(loads),
        np.array([step.log_error for step in steps]),
        group_weights([step.group for step in steps]),
        np.array([list(domains).index(step.group) for step in steps]),
    )


def fit_variances(data: VarianceData) -> FloatArray:
    """Maximum-likelihood variance: [components]; of extrapolation components at least that of any step."""
    mean_square, component_count = float(data.weights @ data.errors**2 / data.weights.sum()), len(VARIANCE_COMPONENTS)
    loads, squares = (
        np.vstack([data.loads, np.eye(component_count)]),
        np.append(data.errors**2, np.full(component_count, mean_square)),
    )
    weights, is_free = (
        np.append(data.weights, np.full(component_count, 1.0 / component_count)),
        _has_enough_groups(data),
    )
    estimate = np.full(component_count, mean_square)
    for _ in range(MAX_ITERATIONS):
        total = loads @ estimate
        factor = np.sqrt((loads.T @ (weights * squares / total**2)) / (loads.T @ (weights / total)))
        estimate = np.where(is_free, estimate * factor, estimate)
    return np.where(
        [component in EXTRAPOLATION_COMPONENTS for component in VARIANCE_COMPONENTS],
        np.maximum(estimate, estimate[0]),
        estimate,
    )


def _has_enough_groups(data: VarianceData) -> BoolArray:
    """Whether enough publishers have each component: [components]."""
    columns = (data.loads >= MIN_VISIBLE_SHARE).T
    return np.array(
        [len(np.unique(data.group_ids[has_component])) >= MIN_GROUPS_PER_COMPONENT for has_component in columns]
    )


def held_out_variances(steps: Sequence[OutOfSampleStep]) -> dict[str, FloatArray]:
    """By group, the variances fitted without it: [components]."""
    return {
        group: fit_variances(variance_data([step for step in steps if step.group != group]))
        for group in dict.fromkeys(step.group for step in steps)
    }


def error_quantiles(
    steps: Sequence[OutOfSampleStep], variances: Mapping[str, FloatArray], *, states_software: bool
) -> ErrorQuantiles:
    """Where out-of-sample errors lie. Arguments as those of `out_of_sample_deviations`.

    Raise InputError if there are too few publishers.
    """
    groups = len({step.group for step in steps})
    if groups < MIN_GROUPS:
        raise InputError(
            f"{groups} publishers of out-of-sample steps are too few for an interval; {MIN_GROUPS} are needed"
        )
    deviations, weights = out_of_sample_deviations(steps, variances, states_software=states_software)
    center = weighted_quantile(deviations, weights, _MEDIAN)
    distances = np.abs(deviations - center)
    interval, likely = (
        student_t_ratio(groups - 1, coverage) * weighted_quantile(distances, weights, coverage)
        for coverage in (INTERVAL_COVERAGE, LIKELY_COVERAGE)
    )
    return ErrorQuantiles(round(center, 3), round(interval, 3), round(likely, 3))


def out_of_sample_deviations(
    steps: Sequence[OutOfSampleStep], variances: Mapping[str, FloatArray], *, states_software: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Errors in standard deviations fitted to the other groups, and weights, of which those of a group sum to 1.

    [steps] both. variances: `held_out_variances`; states_software: which of the steps, those that state their
    software or those that do not.
    """
    selected = [step for step in steps if step.features.states_software == states_software]
    data = _step_arrays(selected, steps)
    step_variances = np.array([variances[step.group] for step in selected])
    return data.errors / np.sqrt((data.loads * step_variances).sum(axis=1)), data.weights


def fit_uncertainty_model(steps: Sequence[OutOfSampleStep], repeat_deviation: float) -> UncertaintyModel:
    """The uncertainty model fitted to some steps, whose validated domain is all of them."""
    standard_deviations = np.sqrt(fit_variances(variance_data(steps))).tolist()
    deviations: dict[VarianceComponent, float] = {
        component: round(deviation, 4)
        for component, deviation in zip(VARIANCE_COMPONENTS, standard_deviations, strict=True)
    }
    is_by_publisher, variances = any(step.group != step.source for step in steps), held_out_variances(steps)
    has_unstated = not all(step.features.states_software for step in steps)
    return UncertaintyModel(
        len({step.case_id for step in steps}),
        len({step.source for step in steps}),
        "publisher" if is_by_publisher else "source",
        error_quantiles(steps, variances, states_software=True),
        error_quantiles(steps, variances, states_software=not has_unstated),
        round(repeat_deviation, 4),
        deviations,
        validated_domain(steps),
        coverage_by_stratum={},
    )


@dataclass(frozen=True, slots=True)
class IntervalCheck:
    """A step against an interval that was fitted without its publisher. low, high: relative to the prediction."""

    step: OutOfSampleStep
    strata: tuple[str, ...]
    low: float
    high: float

    @property
    def is_covered(self) -> bool:
        """Whether the measured time is within the interval."""
        return self.low <= math.exp(self.step.log_error) <= self.high


def cross_validate(steps: Sequence[OutOfSampleStep], repeat_deviation: float) -> list[IntervalCheck]:
    """Check every step against the interval fitted to the other publishers (leave-one-publisher-out)."""
    return [
        check
        for group in dict.fromkeys(step.group for step in steps)
        for check in _check_group(steps, group, repeat_deviation)
    ]


def _check_group(steps: Sequence[OutOfSampleStep], group: str, repeat_deviation: float) -> Iterator[IntervalCheck]:
    model = fit_uncertainty_model([step for step in steps if step.group != group], repeat_deviation)
    for step in steps:
        if step.group == group:
            interval = model.prediction_interval(step.features)
            yield IntervalCheck(step, interval.strata, interval.low, interval.high)


def coverage_of(checks: Sequence[IntervalCheck]) -> StratumCoverage:
    """Fraction of steps within their interval, macro-averaged over publishers."""
    by_group: dict[str, list[bool]] = {}
    for check in checks:
        by_group.setdefault(check.step.group, []).append(check.is_covered)
    return StratumCoverage(len(checks), len(by_group), round(fmean(fmean(covered) for covered in by_group.values()), 3))


def coverage_by_stratum(checks: Sequence[IntervalCheck]) -> dict[str, StratumCoverage]:
    """Coverage of all steps that state their software, of each stratum of these, and of those that do not."""
    stated = [check for check in checks if check.step.features.states_software]
    names = dict.fromkeys(name for check in stated for name in check.strata)
    groups = {name: [check for check in stated if name in check.strata] for name in names}
    unstated = [check for check in checks if not check.step.features.states_software]
    if unstated:
        groups[UNSTATED_SOFTWARE] = unstated
    return {ALL_STEPS: coverage_of(stated), **{name: coverage_of(groups[name]) for name in sorted(groups)}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument(
        "out_of_sample", nargs="?", type=Path, metavar="FILE",
        help="out-of-sample errors written by fit-steps --out-of-sample; default: the packaged ones",
    )  # fmt: skip
    parser.add_argument(
        "--kind",
        choices=MODEL_NAMES,
        default=DENSE_STEPS,
        help=f"class of steps whose interval is fitted; default: {DENSE_STEPS}",
    )
    parser.add_argument(
        "--write", metavar="FILE", help="write the uncertainty model (a file as topologies/uncertainty/dense.yaml)"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table of strata in Markdown")


def command(options: argparse.Namespace) -> None:
    """Fit the model, print its components and its out-of-sample coverage, and write it if asked."""
    cases = [case for case in read_steps() if case_uncertainty_model(case) == options.kind]
    identified = [
        case for case in cases if framework_defaults(case).is_verified
    ]  # unknown software may differ in version
    steps, deviation = (
        with_groups(read_out_of_sample(options.out_of_sample or out_of_sample_path(options.kind))),
        repeat_deviation(identified),
    )
    checks = cross_validate(steps, deviation)
    model = replace(
        fit_uncertainty_model(steps, deviation),
        coverage_by_stratum=coverage_by_stratum(checks),
        same_job=same_job_errors(steps),
    )
    lines = strata_table(model, checks)
    print("\n".join(lines) if options.markdown else "\n".join([*_component_lines(model), "", *_aligned_columns(lines)]))
    if options.write is not None:
        write_uncertainty_model(model, options.write, options.kind)


def same_job_errors(steps: Sequence[OutOfSampleStep]) -> SameJobErrors | None:
    """How far those of the steps are apart that are runs of one job; None if these are too few."""
    case_ids = {step.case_id for step in steps}
    return fit_same_job(same_job_pairs([run for run in read_reference_runs() if run.case_id in case_ids]))


def _component_lines(model: UncertaintyModel) -> Iterator[str]:
    yield f"{model.step_count} out-of-sample steps of {model.source_count} sources"
    for component, deviation in model.deviations.items():
        yield f"{component_key(component):13s} {deviation:7.1%}  {component.value}"
    yield f"{'repeatability':13s} {model.repeat_deviation:7.1%}  equal steps, published twice"
    yield _quantile_line(model.quantiles)
    yield f"{_quantile_line(model.unstated_quantiles)}, software not stated"
    if model.same_job is not None:
        errors = model.same_job
        yield (
            f"{INTERVAL_COVERAGE:.0%} of {errors.pair_count} pairs of runs of one job ({errors.source_count} sources) "
            f"within {errors.quantile:.1%}; coverage {errors.covered_share:.0%}"
        )


def _quantile_line(quantiles: ErrorQuantiles) -> str:
    return (
        f"{INTERVAL_COVERAGE:.0%} within {quantiles.interval:.2f} standard deviations of a median of "
        f"{quantiles.center:+.2f}, {LIKELY_COVERAGE:.0%} within {quantiles.likely:.2f}"
    )


HEADER: Final = ("stratum", "cases", "{held_out}s", "median error", "interval", "coverage")


def strata_table(model: UncertaintyModel, checks: Sequence[IntervalCheck]) -> list[str]:
    """A Markdown table of the out-of-sample error (median absolute) and coverage of each stratum."""
    lines = [f"| {' | '.join(HEADER).format(held_out=model.held_out)} |", "|---|---:|---:|---:|---:|---:|"]
    for name, stratum in model.coverage_by_stratum.items():
        matching = [
            check
            for check in checks
            if name in (ALL_STEPS, *check.strata) and check.step.features.states_software == (name != UNSTATED_SOFTWARE)
        ]
        median_error, low, high = (
            weighted_median([(check.step.group, metric(check)) for check in matching])
            for metric in (_absolute_error, lambda check: check.low, lambda check: check.high)
        )
        cells = (
            name,
            stratum.step_count,
            stratum.group_count,
            f"{median_error:.0%}",
            f"{low - 1.0:+.0%} to {high - 1.0:+.0%}",
            f"{stratum.covered_share:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _absolute_error(check: IntervalCheck) -> float:
    return abs(math.expm1(-check.step.log_error))


def weighted_median(values: Sequence[tuple[str, float]]) -> float:
    """The median of (group, value) pairs in which every publisher has the same total weight."""
    groups, numbers = zip(*values, strict=True)
    return weighted_quantile(np.array(numbers), group_weights(groups), _MEDIAN)


def _aligned_columns(lines: Sequence[str]) -> Iterator[str]:
    table_rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line_index, line in enumerate(lines)
        if line_index != 1
    ]
    widths = [max(map(len, column)) for column in zip(*table_rows, strict=True)]
    for name, *figures in table_rows:
        cells = (f"{figure:>{width}}" for figure, width in zip(figures, widths[1:], strict=True))
        yield f"{name:<{widths[0]}}  {'  '.join(cells)}"


def write_uncertainty_model(model: UncertaintyModel, path: str, name: str) -> None:
    """Write the model, keeping description and sources of the packaged file.

    Raise OutputError if it cannot be written.
    """
    texts: Mapping[str, Any] = read_mapping(find_file("uncertainty", name))
    content = {"description": texts["description"], **model_to_dict(model), "sources": texts["sources"]}
    write_text_atomically(path, yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True))
