"""How is a prediction interval described? The interval, the out-of-sample coverage, what widens it."""

from typing import Final

from clustersim.common.units import Seconds, format_step_time
from clustersim.uncertainty.prediction_interval import (
    INTERVAL_COVERAGE,
    BaseComponent,
    RelativeInterval,
    UncertaintyModel,
)

_BASE_LABELS: Final = frozenset(gap.value for gap in BaseComponent)
_MAX_LISTED: Final = 4  # unmeasured items that are named


def describe_interval(
    model: UncertaintyModel, interval: RelativeInterval, seconds_range: tuple[Seconds, Seconds], local_label: str
) -> str:
    """The sentence. seconds_range: interval in seconds; local_label: what was measured here, empty if nothing."""
    low, high = map(format_step_time, seconds_range)
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


def _describe_coverage(model: UncertaintyModel, interval: RelativeInterval) -> str:
    """Out-of-sample coverage, and the number of sources of each of the step's strata."""
    sources_by_stratum = {
        name: model.coverage_by_stratum[name].source_count
        for name in interval.strata
        if name in model.coverage_by_stratum
    }
    strata = ", ".join(f"{sources} {name}" for name, sources in sources_by_stratum.items() if name not in _BASE_LABELS)
    return (
        f"{model.step_count} published steps ({model.source_count} sources, leave-one-source-out"
        f"{'; ' if strata else ''}{strata})"
    )


def _join_limited(names: tuple[str, ...]) -> str:
    """The first names, and how many more there are."""
    remainder = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + remainder
