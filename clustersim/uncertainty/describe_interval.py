"""How is a band said? In a sentence: what is expected, how far unseen steps of such a regime were, what widens it."""

from typing import Final

from clustersim.common.units import Seconds, format_step_time
from clustersim.uncertainty.prediction_interval import (
    INTERVAL_COVERAGE,
    BaseComponent,
    RelativeInterval,
    UncertaintyModel,
)

_BASE_LABELS: Final = frozenset(gap.value for gap in BaseComponent)
_MAX_LISTED: Final = 4  # of what was not measured that is named


def describe_interval(
    model: UncertaintyModel, interval: RelativeInterval, seconds_range: tuple[Seconds, Seconds], local_label: str
) -> str:
    """The sentence; known: what was measured on the machine itself, empty where nothing was."""
    low, high = map(format_step_time, seconds_range)
    clauses = (
        f"expect {low} to {high} ({interval.low - 1.0:+.0%} to {interval.high - 1.0:+.0%}): ",
        _describe_coverage(model, interval),
        f"; nothing like {_join_limited(interval.extrapolations)} was measured: wider"
        if interval.extrapolations
        else "",
        f"; {local_label}: narrower, but for what a framework adds (clustersim calibrate --check)"
        if local_label
        else "",
    )
    return "".join(clauses)


def _describe_coverage(model: UncertaintyModel, interval: RelativeInterval) -> str:
    """How far unseen steps were, and of how many sources the steps of each of its regimes are."""
    sources_by_stratum = {
        name: model.coverage_by_stratum[name].source_count
        for name in interval.strata
        if name in model.coverage_by_stratum
    }
    strata = ", ".join(f"{name} {sources}" for name, sources in sources_by_stratum.items() if name not in _BASE_LABELS)
    return (
        f"{INTERVAL_COVERAGE:.0%} of {model.step_count} published steps were so near, predicted without their source "
        f"(sources: {model.source_count}{', ' if strata else ''}{strata})"
    )


def _join_limited(names: tuple[str, ...]) -> str:
    remainder = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return " or ".join(names[:_MAX_LISTED]) + remainder
