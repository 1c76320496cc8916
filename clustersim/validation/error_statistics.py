"""How good are predictions of many cases?

Errors are predicted over measured, less one. A macro mean counts every source once, so that one with hundreds of cases
does not drown the rest.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any, TypeVar

from clustersim.uncertainty.prediction_interval import ALL_STEPS
from clustersim.validation.comparison import CaseComparison

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ErrorStatistics:
    """Of a group of cases. n: predicted; skipped: without a prediction; all else over those predicted, None if none.

    mape: mean absolute error; median_ape: the median; bias: mean error, negative where predictions are too fast (or
    too small); worst: the error that is farthest from 0, with its sign; covered: predicted over expressible.
    """

    n: int
    skipped: int
    mape: float | None
    median_ape: float | None
    bias: float | None
    worst: float | None
    covered: float | None

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MacroAverage:
    """Means over sources: of their mean absolute errors and of their biases."""

    sources: int
    mape: float
    bias: float


@dataclass(frozen=True, slots=True)
class IntervalCoverage:
    """Of cases with a band, of so many sources: the share inside, sources counted alike."""

    n: int
    sources: int
    share: float


def summarize_comparisons(comparisons: Sequence[CaseComparison]) -> ErrorStatistics:
    """The quality of a group."""
    errors = [comparison.error for comparison in comparisons if comparison.error is not None]
    expressible_count = sum(case_comparison.is_expressible for case_comparison in comparisons)
    covered = len(errors) / expressible_count if expressible_count else None
    return replace(summarize_errors(errors), skipped=len(comparisons) - len(errors), covered=covered)


def summarize_errors(errors: Sequence[float]) -> ErrorStatistics:
    """The quality of errors of which none is missing."""
    if not errors:
        return ErrorStatistics(0, 0, None, None, None, None, None)
    absolute_errors = [abs(error) for error in errors]
    return ErrorStatistics(
        len(errors), 0, fmean(absolute_errors), median(absolute_errors), fmean(errors), max(errors, key=abs), 1.0
    )


def group_by(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Things (comparisons, cases) by what `of` says of them, groups in order of first appearance."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def statistics_by_source(comparisons: Iterable[CaseComparison]) -> dict[str, ErrorStatistics]:
    """The quality of every source."""
    return {
        source: summarize_comparisons(group)
        for source, group in group_by(comparisons, lambda each: each.source).items()
    }


def statistics_by_grouping(comparisons: Sequence[CaseComparison]) -> dict[str, dict[str, ErrorStatistics]]:
    """The quality by every value of every factor that some comparison has."""
    grouping_names = dict.fromkeys(name for comparison in comparisons for name in comparison.groupings)
    statistics: dict[str, dict[str, ErrorStatistics]] = {}
    for name in grouping_names:
        labelled = [case_comparison for case_comparison in comparisons if name in case_comparison.groupings]
        groups = group_by(labelled, lambda each, name=name: each.groupings[name])  # type: ignore[misc]
        statistics[name] = {
            value: summarize_comparisons(groups[value]) for value in sorted(groups, key=_numeric_sort_key)
        }
    return statistics


def _numeric_sort_key(value: str) -> tuple[int, str]:
    """Numbers by their size, before words."""
    return (int(value) if value.isdecimal() else sys.maxsize, value)


def macro_average(statistics: Iterable[ErrorStatistics]) -> MacroAverage | None:
    """The mean over sources that have predictions; None if there are none."""
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
    """How many measurements lie in their bands: of all, and of every regime, those of most cases first."""
    with_interval = [comparison for comparison in comparisons if comparison.interval is not None]
    groups: dict[str, list[CaseComparison]] = {ALL_STEPS: with_interval} if with_interval else {}
    for case_comparison in with_interval:
        for stratum in case_comparison.interval.strata if case_comparison.interval is not None else ():
            groups.setdefault(stratum, []).append(case_comparison)
    return {stratum: _coverage(group) for stratum, group in sorted(groups.items(), key=lambda item: -len(item[1]))}


def _coverage(comparisons: Sequence[CaseComparison]) -> IntervalCoverage:
    shares = [
        fmean(bool(case_comparison.is_inside_interval) for case_comparison in group)
        for group in group_by(comparisons, _source).values()
    ]
    return IntervalCoverage(len(comparisons), len(shares), fmean(shares))


def _source(comparison: CaseComparison) -> str:
    return comparison.source
