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
from clustersim.validation.comparison import Comparison

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quality:
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
class Macro:
    """Means over sources: of their mean absolute errors and of their biases."""

    sources: int
    mape: float
    bias: float


@dataclass(frozen=True, slots=True)
class Inside:
    """Of cases with a band, of so many sources: the share inside, sources counted alike."""

    n: int
    sources: int
    share: float


def quality(comparisons: Sequence[Comparison]) -> Quality:
    """The quality of a group."""
    errors = [comparison.error for comparison in comparisons if comparison.error is not None]
    owed = sum(item.expressible for item in comparisons)
    covered = len(errors) / owed if owed else None
    return replace(quality_of(errors), skipped=len(comparisons) - len(errors), covered=covered)


def quality_of(errors: Sequence[float]) -> Quality:
    """The quality of errors of which none is missing."""
    if not errors:
        return Quality(0, 0, None, None, None, None, None)
    sizes = [abs(error) for error in errors]
    return Quality(len(errors), 0, fmean(sizes), median(sizes), fmean(errors), max(errors, key=abs), 1.0)


def grouped(things: Iterable[T], of: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Things (comparisons, cases) by what `of` says of them, groups in order of first appearance."""
    groups: dict[Any, list[T]] = {}
    for thing in things:
        groups.setdefault(of(thing), []).append(thing)
    return groups


def by_source(comparisons: Iterable[Comparison]) -> dict[str, Quality]:
    """The quality of every source."""
    return {source: quality(group) for source, group in grouped(comparisons, lambda each: each.source).items()}


def by_factor(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Quality]]:
    """The quality by every value of every factor that some comparison has."""
    names = dict.fromkeys(name for comparison in comparisons for name in comparison.factors)
    found: dict[str, dict[str, Quality]] = {}
    for name in names:
        having = [item for item in comparisons if name in item.factors]
        groups = grouped(having, lambda each, name=name: each.groupings[name])  # type: ignore[misc]
        found[name] = {value: quality(groups[value]) for value in sorted(groups, key=_counted)}
    return found


def _counted(value: str) -> tuple[int, str]:
    """Numbers by their size, before words."""
    return (int(value) if value.isdecimal() else sys.maxsize, value)


def macro(qualities: Iterable[Quality]) -> Macro | None:
    """The mean over sources that have predictions; None if there are none."""
    pairs = [(item.mape, item.bias) for item in qualities if item.mape is not None and item.bias is not None]
    if not pairs:
        return None
    return Macro(len(pairs), fmean(mape for mape, _ in pairs), fmean(bias for _, bias in pairs))


def insides(comparisons: Iterable[Comparison]) -> dict[str, Inside]:
    """How many measurements lie in their bands: of all, and of every regime, those of most cases first."""
    judged = [comparison for comparison in comparisons if comparison.band is not None]
    groups: dict[str, list[Comparison]] = {ALL_STEPS: judged} if judged else {}
    for element in judged:
        for regime in element.band.regimes if element.band is not None else ():
            groups.setdefault(regime, []).append(element)
    return {regime: _inside(group) for regime, group in sorted(groups.items(), key=lambda item: -len(item[1]))}


def _inside(comparisons: Sequence[Comparison]) -> Inside:
    shares = [
        fmean(bool(comparison.inside) for comparison in group) for group in grouped(comparisons, _source).values()
    ]
    return Inside(len(comparisons), len(shares), fmean(shares))


def _source(comparison: Comparison) -> str:
    return comparison.source
