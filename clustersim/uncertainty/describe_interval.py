"""How is a prediction interval described? The interval, the out-of-sample coverage, what widens it."""

from typing import Final

from clustersim.common.units import Seconds, format_step_time
from clustersim.uncertainty.prediction_interval import (
    INTERVAL_COVERAGE,
    BaseComponent,
    RelativeInterval,
    UncertaintyModel,
)
from clustersim.uncertainty.reference_runs import ReferenceRun

_BASE_LABELS: Final = frozenset(gap.value for gap in BaseComponent)
_MAX_LISTED: Final = 4  # unmeasured items that are named


def describe_interval(
    model: UncertaintyModel, interval: RelativeInterval, seconds_range: tuple[Seconds, Seconds], local_label: str
) -> str:
    """The sentence. seconds_range: interval in seconds; local_label: what was measured here, empty if nothing."""
    low, high = map(format_step_time, seconds_range)
    if interval.is_of_same_job and model.same_job is not None:
        return (
            f"{INTERVAL_COVERAGE:.0%} prediction interval: {low} to {high} ({interval.low - 1.0:+.0%} to "
            f"{interval.high - 1.0:+.0%}), from the error of that run and from how far those of runs of one job are "
            f"apart ({model.same_job.pair_count} pairs of {model.same_job.source_count} sources, leave-one-source-out)"
        )
    clauses = (
        f"{INTERVAL_COVERAGE:.0%} prediction interval: {low} to {high} ({interval.low - 1.0:+.0%} to "
        f"{interval.high - 1.0:+.0%}), from ",
        _describe_coverage(model, interval),
        f"; widened: outside the validated domain in {_join_limited(interval.extrapolations)}"
        if interval.extrapolations
        else "",
        f"; narrowed: {local_label}; framework overheads are not covered (clustersim calibrate --check)"
        if local_label
        else "",
    )
    return "".join(clauses)


def describe_reference(run: ReferenceRun) -> str:
    """What a published run of the same job took, and its prediction."""
    rate = "" if run.tflops_per_gpu is None else f", {run.tflops_per_gpu:g} TFLOP/s per GPU as printed"
    unknown = ", settings that it leaves open inferred (quality C)" if run.quality == "C" else ""
    return (
        f"measured at this size: {format_step_time(run.measured)}{rate} ({run.source}, {run.locator}); we predict that "
        f"run with {format_step_time(run.predicted)} ({run.relative_error:+.1%}{unknown})"
    )


def _describe_coverage(model: UncertaintyModel, interval: RelativeInterval) -> str:
    """Out-of-sample coverage, and the number of publishers (or sources) of each of the step's strata."""
    groups_by_stratum = {
        name: model.coverage_by_stratum[name].group_count
        for name in interval.strata
        if name in model.coverage_by_stratum
    }
    strata = ", ".join(f"{count} {name}" for name, count in groups_by_stratum.items() if name not in _BASE_LABELS)
    return (
        f"{model.step_count} published steps ({model.source_count} sources, leave-one-{model.held_out}-out"
        f"{'; ' if strata else ''}{strata})"
    )


def _join_limited(names: tuple[str, ...]) -> str:
    """The first names, and how many more there are."""
    remainder = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + remainder
