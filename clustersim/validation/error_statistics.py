"""How good are the predictions of a table? Error statistics over cases, and macro-averages over sources.

The relative error is predicted / measured - 1. A macro-average weights every source equally, so that a
source with hundreds of cases does not dominate.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import fmean, median
from typing import Any, TypeVar

from clustersim.uncertainty.prediction_interval import ALL_STEPS
from clustersim.validation.comparison import CaseComparison

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ErrorStatistics:
    """Error statistics of a group of cases. n: cases with a prediction; skipped: cases without.

    Over the predicted cases, None if there are none: mape: mean absolute relative error; median_ape: median
    absolute relative error; bias: mean relative error, negative if predictions are too fast (or too small);
    worst: signed relative error of largest magnitude. covered: fraction of the expressible cases that are
    predicted. Fields are JSON keys (`asdict`).
    """

    n: int
    skipped: int
    mape: float | None
    median_ape: float | None
    bias: float | None
    worst: float | None
    covered: float | None

    def to_json(self) -> dict[str, Any]:
        """The statistics as JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MacroAverage:
    """Macro-average over sources of MAPE and bias. Fields are JSON keys (`asdict`)."""

    sources: int
    mape: float
    bias: float


@dataclass(frozen=True, slots=True)
class IntervalCoverage:
    """Empirical coverage of the prediction intervals of n cases, macro-averaged over their sources.

    share: fraction of measurements inside their interval. Fields are JSON keys (`asdict`).
    """

    n: int
    sources: int
    share: float


def summarize_comparisons(comparisons: Sequence[CaseComparison]) -> ErrorStatistics:
    """Error statistics of a group of comparisons."""
    errors = [comparison.error for comparison in comparisons if comparison.error is not None]
    expressible_count = sum(case_comparison.is_expressible for case_comparison in comparisons)
    covered = len(errors) / expressible_count if expressible_count else None
    return replace(summarize_errors(errors), skipped=len(comparisons) - len(errors), covered=covered)


def summarize_errors(errors: Sequence[float]) -> ErrorStatistics:
    """Error statistics of relative errors, with no case skipped."""
    if not errors:
        return ErrorStatistics(0, 0, None, None, None, None, None)
    absolute_errors = [abs(error) for error in errors]
    return ErrorStatistics(
        len(errors), 0, fmean(absolute_errors), median(absolute_errors), fmean(errors), max(errors, key=abs), 1.0
    )


def group_by(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Items (comparisons, cases) grouped by key, groups in order of first appearance."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def statistics_by_source(comparisons: Iterable[CaseComparison]) -> dict[str, ErrorStatistics]:
    """Error statistics of each source."""
    return {
        source: summarize_comparisons(group)
        for source, group in group_by(comparisons, lambda comparison: comparison.source).items()
    }


def statistics_by_grouping(comparisons: Sequence[CaseComparison]) -> dict[str, dict[str, ErrorStatistics]]:
    """Error statistics by grouping and label."""
    grouping_names = dict.fromkeys(name for comparison in comparisons for name in comparison.groupings)
    statistics: dict[str, dict[str, ErrorStatistics]] = {}
    for name in grouping_names:
        labelled = [case_comparison for case_comparison in comparisons if name in case_comparison.groupings]
        groups = group_by(labelled, lambda labelled_comparison, name=name: labelled_comparison.groupings[name])  # type: ignore[misc]
        statistics[name] = {
            value: summarize_comparisons(groups[value]) for value in sorted(groups, key=_numeric_sort_key)
        }
    return statistics


def _numeric_sort_key(value: str) -> tuple[float, str]:
    """Sort key: integers by value, then other labels."""
    return (float(value) if value.isdecimal() else inf, value)


def macro_average(statistics: Iterable[ErrorStatistics]) -> MacroAverage | None:
    """Macro-average over the sources that have predictions; None if there are none."""
    source_means = [
        (statistic.mape, statistic.bias)
        for statistic in statistics
        if statistic.mape is not None and statistic.bias is not None
    ]
    if not source_means:
        return None
    return MacroAverage(
        len(source_means), fmean(mape for mape, _ in source_means), fmean(bias for _, bias in source_means)
    )


def interval_coverage(comparisons: Iterable[CaseComparison]) -> dict[str, IntervalCoverage]:
    """Empirical coverage of the prediction intervals: overall, and by stratum, largest stratum first."""
    with_interval = [comparison for comparison in comparisons if comparison.interval is not None]
    groups: dict[str, list[CaseComparison]] = {ALL_STEPS: with_interval} if with_interval else {}
    for case_comparison in with_interval:
        for stratum in case_comparison.interval.strata if case_comparison.interval is not None else ():
            groups.setdefault(stratum, []).append(case_comparison)
    return {
        stratum: _coverage(group)
        for stratum, group in sorted(groups.items(), key=lambda stratum_group: -len(stratum_group[1]))
    }


def _coverage(comparisons: Sequence[CaseComparison]) -> IntervalCoverage:
    shares = [
        fmean(bool(case_comparison.is_inside_interval) for case_comparison in group)
        for group in group_by(comparisons, _source).values()
    ]
    return IntervalCoverage(len(comparisons), len(shares), fmean(shares))


def _source(comparison: CaseComparison) -> str:
    return comparison.source
