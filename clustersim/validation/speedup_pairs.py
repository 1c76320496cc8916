"""How much faster is a step in a narrow format, or with experts served otherwise: is it predicted as it was measured?

A pair are two cases of one source that differ in nothing else. Of formats one is in bf16 or fp16, one in a format with
scales. Where several wide ones fit, those of the same place in the source are taken, so that releases of a software
are compared each with itself, and of what is left the mean. Recipes for one format are not always those for another:
other layouts are no pair, since their ratio says more of the layout than of the format. Of mixtures both are in the
same place of the source, and differ in one thing of how experts get their tokens (`mixtures.experts_served`), with
whatever else the notes say that came with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Final

from clustersim.common.units import Seconds
from clustersim.validation.cases import Case
from clustersim.validation.comparison import Comparison
from clustersim.validation.error_statistics import Quality, grouped, quality_of
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.moe_settings import PLAIN, experts_served
from clustersim.validation.training_precision import is_narrow, is_wide

_RESULTS: Final = ("step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct", "flop_convention")
_APART: Final = frozenset(("case_id", "notes", "quality", *_RESULTS))
_PLACE: Final = "locator"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two cases. change: what the second has otherwise; measured, predicted: time of the first over the second's."""

    source: str
    first: str
    second: str
    change: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0

    def to_json(self) -> dict[str, Any]:
        """The pair as plain data."""
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of a kind."""

    pairs: tuple[Pair, ...]

    def by_change(self) -> dict[str, Quality]:
        """How far predicted ratios are from measured ones, by what the second cases have otherwise."""
        groups = grouped(self.pairs, lambda each: each.change)
        return {name: quality_of([pair.error for pair in group]) for name, group in groups.items()}

    def to_json(self) -> dict[str, Any]:
        """Errors, overall and by change, and every pair."""
        overall = quality_of([pair.error for pair in self.pairs]).to_json()
        by_change = {name: quality.to_json() for name, quality in self.by_change().items()}
        return {"overall": overall, "by_change": by_change, "list": [item.to_json() for item in self.pairs]}


def speed_ups(cases: Sequence[Case], comparisons: Sequence[Comparison]) -> Pairs:
    """Those of formats of which both have a prediction; comparisons: of these cases, in their order."""
    sets = grouped(_known(cases, comparisons), lambda run: run.key(_PLACE, "precision"))
    return Pairs(tuple(pair for runs in sets.values() for pair in _of_formats(runs)))


def served_otherwise(cases: Sequence[Case], comparisons: Sequence[Comparison]) -> Pairs:
    """Those of mixtures of which both have a prediction, so likewise; the plainer one is the first."""
    runs = [run for run in _known(cases, comparisons) if has_experts(run.case)]
    sets = grouped(runs, lambda run: run.key())
    return Pairs(tuple(pair for item in sets.values() for two in combinations(item, 2) for pair in _of_experts(*two)))


def _known(cases: Sequence[Case], comparisons: Sequence[Comparison]) -> list["_Run"]:
    return [
        _Run(case, comparison)
        for case, comparison in zip(cases, comparisons, strict=True)
        if comparison.predicted is not None
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    """A case with its prediction."""

    case: Case
    comparison: Comparison

    def key(self, *apart: str) -> tuple[tuple[str, str], ...]:
        """All that is the same in a pair; a column that one table lacks is an empty cell. apart: what may differ."""
        cells = self.case.cells.items()
        return tuple(sorted((column, cell) for column, cell in cells if cell and column not in {*_APART, *apart}))

    @property
    def predicted(self) -> Seconds:
        """The predicted time."""
        return self.comparison.predicted or 0.0


def _of_formats(runs: Sequence[_Run]) -> Iterator[Pair]:
    wide = [run for run in runs if is_wide(run.case)]
    for run in runs:
        if wide and is_narrow(run.case):
            yield _pair(_beside(run, wide), run, run.case.text("precision"))


def _beside(narrow: _Run, wide: Sequence[_Run]) -> Sequence[_Run]:
    """Of the wide ones those of the same place, if there are any."""
    place = narrow.case.text(_PLACE)
    return [run for run in wide if run.case.text(_PLACE) == place] or wide


def _of_experts(one: _Run, other: _Run) -> Iterator[Pair]:
    had, has = experts_served(one.case), experts_served(other.case)
    changed = [key for key in had if had[key] != has[key]]
    if len(changed) != 1:
        return
    (key,) = changed
    if not has[key] or has[key] == PLAIN:
        one, other, has = other, one, had
    yield _pair([one], other, f"{key} {has[key]}".removesuffix(" True"))


def _pair(first: Sequence[_Run], second: _Run, change: str) -> Pair:
    measured = fmean(run.comparison.measured for run in first) / second.comparison.measured
    predicted = fmean(run.predicted for run in first) / second.predicted
    case = second.case
    return Pair(case.text("source"), first[0].case.text("case_id"), case.text("case_id"), change, measured, predicted)
