"""How much faster is a step in a narrow format, or with experts served otherwise: is it predicted as it was measured?

A pair are two cases of one source that differ in nothing else. Of formats one is in bf16 or fp16, one in a format with
scales. Where several wide ones fit, those of the same place in the source are taken, so that releases of a software
are compared each with itself, and of what is left the mean. Recipes for one format are not always those for another:
other layouts are no pair, since their ratio says more of the layout than of the format. Of mixtures both are in the
same place of the source, and differ in one thing of how experts get their tokens (`mixtures.token_dispatch_options`), with
whatever else the notes say that came with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Final

from clustersim.common.units import Seconds
from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import ErrorStatistics, group_by, summarize_errors
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.moe_settings import DEFAULT_DISPATCHER, token_dispatch_options
from clustersim.validation.training_precision import is_high_precision, is_low_precision

_RESULT_COLUMNS: Final = ("step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct", "flop_convention")
_IGNORED_COLUMNS: Final = frozenset(("case_id", "notes", "quality", *_RESULT_COLUMNS))
_LOCATOR_COLUMN: Final = "locator"


@dataclass(frozen=True, slots=True)
class SpeedupPair:
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
class SpeedupPairs:
    """All pairs of a kind."""

    pairs: tuple[SpeedupPair, ...]

    def statistics_by_change(self) -> dict[str, ErrorStatistics]:
        """How far predicted ratios are from measured ones, by what the second cases have otherwise."""
        groups = group_by(self.pairs, lambda each: each.change)
        return {
            name: summarize_errors([speedup_pair.error for speedup_pair in group]) for name, group in groups.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Errors, overall and by change, and every pair."""
        overall = summarize_errors([pair.error for pair in self.pairs]).to_json()
        by_change = {name: error_statistics.to_json() for name, error_statistics in self.statistics_by_change().items()}
        return {
            "overall": overall,
            "by_change": by_change,
            "list": [speedup_pair.to_json() for speedup_pair in self.pairs],
        }


def precision_speedups(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> SpeedupPairs:
    """Those of formats of which both have a prediction; comparisons: of these cases, in their order."""
    sets = group_by(_predicted_runs(cases, comparisons), lambda run: run.matching_key(_LOCATOR_COLUMN, "precision"))
    return SpeedupPairs(tuple(pair for runs in sets.values() for pair in _precision_pairs(runs)))


def moe_comm_speedups(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> SpeedupPairs:
    """Those of mixtures of which both have a prediction, so likewise; the plainer one is the first."""
    runs = [run for run in _predicted_runs(cases, comparisons) if has_experts(run.case)]
    sets = group_by(runs, lambda run: run.matching_key())
    return SpeedupPairs(
        tuple(pair for item in sets.values() for two in combinations(item, 2) for pair in _moe_comm_pairs(*two))
    )


def _predicted_runs(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> list["_PredictedRun"]:
    return [
        _PredictedRun(case, comparison)
        for case, comparison in zip(cases, comparisons, strict=True)
        if comparison.predicted is not None
    ]


@dataclass(frozen=True, slots=True)
class _PredictedRun:
    """A case with its prediction."""

    case: ValidationCase
    comparison: CaseComparison

    def matching_key(self, *ignored_columns: str) -> tuple[tuple[str, str], ...]:
        """All that is the same in a pair; a column that one table lacks is an empty cell. apart: what may differ."""
        cells = self.case.cells.items()
        return tuple(
            sorted(
                (column, cell) for column, cell in cells if cell and column not in {*_IGNORED_COLUMNS, *ignored_columns}
            )
        )

    @property
    def predicted(self) -> Seconds:
        """The predicted time."""
        return self.comparison.predicted or 0.0


def _precision_pairs(runs: Sequence[_PredictedRun]) -> Iterator[SpeedupPair]:
    baselines = [run for run in runs if is_high_precision(run.case)]
    for run in runs:
        if baselines and is_low_precision(run.case):
            yield _speedup_pair(_same_locator_runs(run, baselines), run, run.case.text("precision"))


def _same_locator_runs(low_precision_run: _PredictedRun, baselines: Sequence[_PredictedRun]) -> Sequence[_PredictedRun]:
    """Of the wide ones those of the same place, if there are any."""
    locator = low_precision_run.case.text(_LOCATOR_COLUMN)
    return [run for run in baselines if run.case.text(_LOCATOR_COLUMN) == locator] or baselines


def _moe_comm_pairs(first: _PredictedRun, second: _PredictedRun) -> Iterator[SpeedupPair]:
    first_options, second_options = token_dispatch_options(first.case), token_dispatch_options(second.case)
    changed = [key for key in first_options if first_options[key] != second_options[key]]
    if len(changed) != 1:
        return
    (key,) = changed
    if not second_options[key] or second_options[key] == DEFAULT_DISPATCHER:
        first, second, second_options = second, first, first_options
    yield _speedup_pair([first], second, f"{key} {second_options[key]}".removesuffix(" True"))


def _speedup_pair(first: Sequence[_PredictedRun], second: _PredictedRun, change: str) -> SpeedupPair:
    measured = fmean(run.comparison.measured for run in first) / second.comparison.measured
    predicted = fmean(run.predicted for run in first) / second.predicted
    case = second.case
    return SpeedupPair(
        case.text("source"), first[0].case.text("case_id"), case.text("case_id"), change, measured, predicted
    )
