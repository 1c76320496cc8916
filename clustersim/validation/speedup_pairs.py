"""How much faster is a step in low precision, or with other MoE communication: predicted as measured?

A pair consists of two cases of one source that differ in nothing else. Precision: one run in bf16 or fp16,
one in a scaled format (FP8, MXFP8, NVFP4). If several bf16/fp16 runs match, those with the same locator are
preferred, so that each release of a software is compared with itself, and the remaining ones are averaged.
Runs with different layouts are not paired: their ratio says more about the layout than about the format.
MoE communication: both runs have the same locator and differ in one option of the token dispatch
(`moe_settings.token_dispatch_options`) and in whatever else the notes say that came with it.
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
    """Two cases. change: what the second changes; measured, predicted: first step time over the second.

    Fields are JSON keys (`asdict`).
    """

    source: str
    first: str
    second: str
    change: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the ratio, predicted / measured - 1."""
        return self.predicted / self.measured - 1.0

    def to_json(self) -> dict[str, Any]:
        """The pair as JSON data."""
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True, slots=True)
class SpeedupPairs:
    """All pairs of one kind (precision or MoE communication)."""

    pairs: tuple[SpeedupPair, ...]

    def statistics_by_change(self) -> dict[str, ErrorStatistics]:
        """Error statistics of the predicted ratios, by change."""
        groups = group_by(self.pairs, lambda pair: pair.change)
        return {
            name: summarize_errors([speedup_pair.error for speedup_pair in group]) for name, group in groups.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Error statistics, overall and by change, and every pair, as JSON data."""
        overall = summarize_errors([pair.error for pair in self.pairs]).to_json()
        by_change = {name: error_statistics.to_json() for name, error_statistics in self.statistics_by_change().items()}
        return {
            "overall": overall,
            "by_change": by_change,
            "list": [speedup_pair.to_json() for speedup_pair in self.pairs],
        }


def precision_speedups(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> SpeedupPairs:
    """The precision pairs with two predictions; comparisons: in the order of the cases."""
    sets = group_by(_predicted_runs(cases, comparisons), lambda run: run.matching_key(_LOCATOR_COLUMN, "precision"))
    return SpeedupPairs(tuple(pair for runs in sets.values() for pair in _precision_pairs(runs)))


def moe_comm_speedups(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> SpeedupPairs:
    """The pairs of predicted MoE runs that differ in one communication option; the default comes first."""
    runs = [run for run in _predicted_runs(cases, comparisons) if has_experts(run.case)]
    sets = group_by(runs, lambda run: run.matching_key())
    return SpeedupPairs(
        tuple(
            pair
            for layouts in sets.values()
            for layout_pair in combinations(layouts, 2)
            for pair in _moe_comm_pairs(*layout_pair)
        )
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
        """The sorted non-empty cells that both runs of a pair must share; ignored_columns: may differ as well."""
        cells = self.case.cells.items()
        return tuple(
            sorted(
                (column, cell) for column, cell in cells if cell and column not in {*_IGNORED_COLUMNS, *ignored_columns}
            )
        )

    @property
    def predicted(self) -> Seconds:
        """The predicted step time."""
        return self.comparison.predicted or 0.0


def _precision_pairs(runs: Sequence[_PredictedRun]) -> Iterator[SpeedupPair]:
    baselines = [run for run in runs if is_high_precision(run.case)]
    for run in runs:
        if baselines and is_low_precision(run.case):
            yield _speedup_pair(_same_locator_runs(run, baselines), run, run.case.text("precision"))


def _same_locator_runs(low_precision_run: _PredictedRun, baselines: Sequence[_PredictedRun]) -> Sequence[_PredictedRun]:
    """The baselines with the run's locator if there are any, else all."""
    locator = low_precision_run.case.text(_LOCATOR_COLUMN)
    return [run for run in baselines if run.case.text(_LOCATOR_COLUMN) == locator] or baselines


def _moe_comm_pairs(first: _PredictedRun, second: _PredictedRun) -> Iterator[SpeedupPair]:
    first_options, second_options = (token_dispatch_options(run.case) for run in (first, second))
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
