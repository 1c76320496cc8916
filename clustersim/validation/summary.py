"""What is reported of a validation table? Errors, overall and by source and grouping, and coverage.

A source that mixes two kinds of runs, for which one mean says little, is also split (`SOURCE_SUBSETS`).
Step times that another simulator predicted are not measurements: they are compared, but enter no other
statistic. Coverage is predicted over expressible cases, where each case says whether it is expressible. A
stricter coverage is over all steps whose inputs are known (quality A and B), expressible or not, separately
for dense and MoE models and for bf16/fp16 and low precision.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from clustersim.validation.case_scenario import (
    is_fully_specified,
    is_high_precision_dense,
    is_high_precision_moe,
    is_measured,
)
from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import (
    ErrorStatistics,
    IntervalCoverage,
    MacroAverage,
    group_by,
    interval_coverage,
    macro_average,
    statistics_by_grouping,
    statistics_by_source,
    summarize_comparisons,
)
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.layout_ranking import LayoutRanking, rank_layouts
from clustersim.validation.memory import MemoryFitVerdict
from clustersim.validation.speedup_pairs import SpeedupPairs, moe_comm_speedups, precision_speedups
from clustersim.validation.training_precision import is_low_precision

DENSE_COVERAGE: Final = "dense bf16/fp16, quality A and B"
MOE_COVERAGE: Final = "MoE bf16/fp16, quality A and B"
LOW_PRECISION_DENSE_COVERAGE: Final = "dense in low precision, quality A and B"
LOW_PRECISION_MOE_COVERAGE: Final = "MoE in low precision, quality A and B"
_MODEL_TYPE_GROUPING: Final = "layers"  # the grouping that separates dense from MoE models
_LINE_PREFIX: Final = re.compile(r"^line \d+: ")


@dataclass(frozen=True, slots=True)
class PredictionCoverage:
    """How many of the expressible cases have a prediction."""

    predicted_count: int
    expressible_count: int

    @property
    def share(self) -> float | None:
        """Predicted over expressible; None if no case is expressible."""
        return self.predicted_count / self.expressible_count if self.expressible_count else None

    def to_json(self) -> dict[str, Any]:
        """The counts and the fraction as JSON data."""
        return {"predicted": self.predicted_count, "expressible": self.expressible_count, "share": self.share}


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """Summary of one table. table_kind: one of `cli.validation_kinds`.

    comparisons: measured cases; simulated_by_others: cases whose time another simulator predicted, in no other
    statistic; subsets: error statistics of subsets of sources, by name; fit_verdicts: memory tables only;
    notes: sentences about the table. Tables of steps only: coverage_by_category: by name, layout_ranking: how
    well the fastest layout is selected, speedup_pairs: by what the runs of a pair differ in.
    """

    table_kind: str
    comparisons: tuple[CaseComparison, ...]
    simulated_by_others: tuple[CaseComparison, ...] = ()
    coverage_by_category: Mapping[str, PredictionCoverage] = field(default_factory=dict)
    subsets: Mapping[str, ErrorStatistics] | None = None
    layout_ranking: LayoutRanking | None = None
    speedup_pairs: Mapping[str, SpeedupPairs] = field(default_factory=dict)
    fit_verdicts: tuple[MemoryFitVerdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def overall(self) -> ErrorStatistics:
        """Error statistics of all measured cases."""
        return summarize_comparisons(self.comparisons)

    @property
    def statistics_by_source(self) -> dict[str, ErrorStatistics]:
        """Error statistics of each source."""
        return statistics_by_source(self.comparisons)

    @property
    def macro_average(self) -> MacroAverage | None:
        """Macro-average over sources; None without predictions."""
        return macro_average(self.statistics_by_source.values())

    @property
    def macro_by_model_type(self) -> dict[str, MacroAverage]:
        """Macro-averages over sources of dense and of MoE models; empty unless the table has both."""
        labelled = [comparison for comparison in self.comparisons if _MODEL_TYPE_GROUPING in comparison.groupings]
        groups = group_by(labelled, lambda comparison: comparison.groupings[_MODEL_TYPE_GROUPING])
        means = {
            model_type: macro_average(statistics_by_source(group).values()) for model_type, group in groups.items()
        }
        averages = {model_type: mean for model_type, mean in means.items() if mean is not None}
        return averages if len(averages) > 1 else {}

    @property
    def statistics_by_grouping(self) -> dict[str, dict[str, ErrorStatistics]]:
        """Error statistics by grouping and label."""
        return statistics_by_grouping(self.comparisons)

    @property
    def interval_coverage(self) -> dict[str, IntervalCoverage]:
        """Empirical coverage of the prediction intervals, overall and by stratum; empty if no case has an interval."""
        return interval_coverage(self.comparisons)

    @property
    def coverage(self) -> PredictionCoverage:
        """Coverage of the cases that are expressible."""
        expressible = [comparison for comparison in self.comparisons if comparison.is_expressible]
        return PredictionCoverage(
            sum(case_comparison.predicted is not None for case_comparison in expressible), len(expressible)
        )

    @property
    def measured_but_unfit(self) -> tuple[str, ...]:
        """Distinct ids of cases that were measured, so that they ran, but are predicted not to fit in memory."""
        return tuple(
            dict.fromkeys(comparison.case_id for comparison in self.comparisons if comparison.fits_in_memory is False)
        )

    @property
    def skip_reasons(self) -> dict[str, tuple[str, ...]]:
        """Ids of the skipped cases by reason, most frequent reason first."""
        skipped = [
            comparison
            for comparison in (*self.comparisons, *self.simulated_by_others)
            if comparison.skip_reason is not None
        ]
        groups = group_by(skipped, lambda comparison: _LINE_PREFIX.sub("", comparison.skip_reason or ""))
        case_ids = {
            reason: tuple(case_comparison.case_id for case_comparison in group) for reason, group in groups.items()
        }
        return dict(sorted(case_ids.items(), key=lambda reason_ids: -len(reason_ids[1])))

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON data, without infinities and NaN."""
        average = self.macro_average
        document = {
            "kind": self.table_kind,
            "overall": self.overall.to_json(),
            "macro": {"sources": 0, "mape": None, "bias": None} if average is None else asdict(average),
            "by_source": _statistics_json(self.statistics_by_source),
            "simulated_by_others": _statistics_json(statistics_by_source(self.simulated_by_others)),
            "subsets": _statistics_json(self.subsets or {}),
            "by_factor": {
                grouping: _statistics_json(values) for grouping, values in self.statistics_by_grouping.items()
            },
            "coverage": self._coverage_json(),
            "skipped_reasons": {reason: len(cases) for reason, cases in self.skip_reasons.items()},
            "ran_but_does_not_fit": list(self.measured_but_unfit),
            "cases": [comparison.to_json() for comparison in self.comparisons],
            "simulated_cases": [simulated_by_other.to_json() for simulated_by_other in self.simulated_by_others],
        }
        macro_entry = (
            {"macro_by_layers": {model_type: asdict(error) for model_type, error in self.macro_by_model_type.items()}}
            if self.macro_by_model_type
            else {}
        )
        ranking_entries = {} if self.layout_ranking is None else {"layouts": self.layout_ranking.to_json()}
        ranking_entries |= (
            {"pairs": {name: speedup_pair.to_json() for name, speedup_pair in self.speedup_pairs.items()}}
            if self.speedup_pairs
            else {}
        )
        fit_entry = {"fits": self._fits_json()} if self.fit_verdicts else {}
        coverage_entry = (
            {"interval_coverage": {stratum: asdict(coverage) for stratum, coverage in self.interval_coverage.items()}}
            if self.interval_coverage
            else {}
        )
        return replace_non_finite(document | macro_entry | ranking_entries | fit_entry | coverage_entry)  # type: ignore[no-any-return]

    def _fits_json(self) -> dict[str, Any]:
        predicted = [fit_verdict for fit_verdict in self.fit_verdicts if fit_verdict.predicted is not None]
        return {
            "n": len(predicted),
            "skipped": len(self.fit_verdicts) - len(predicted),
            "right": sum(memory_fit_verdict.is_correct for memory_fit_verdict in predicted),
            "cases": [
                {
                    "case_id": verdict.case_id,
                    "source": verdict.source,
                    "stated": verdict.stated,
                    "predicted": verdict.predicted,
                    "skipped_reason": verdict.skip_reason,
                }
                for verdict in self.fit_verdicts
            ],
        }

    def _coverage_json(self) -> dict[str, Any]:
        return self.coverage.to_json() | {
            category: prediction_coverage.to_json()
            for category, prediction_coverage in self.coverage_by_category.items()
        }


def summarize_steps(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> ValidationSummary:
    """The summary of a table of steps; comparisons: in the order of the cases."""
    case_comparisons = list(zip(cases, comparisons, strict=True))
    measured = [(case, case_comparison) for case, case_comparison in case_comparisons if is_measured(case)]
    simulated = tuple(comparison for case, comparison in case_comparisons if not is_measured(case))
    measured_cases, measured_comparisons = (
        [case for case, _ in measured],
        tuple(comparison for _, comparison in measured),
    )
    categories = {
        DENSE_COVERAGE: is_high_precision_dense,
        MOE_COVERAGE: is_high_precision_moe,
        LOW_PRECISION_DENSE_COVERAGE: _is_low_precision_dense,
        LOW_PRECISION_MOE_COVERAGE: _is_low_precision_moe,
    }
    coverage = {
        name: _coverage([comparison for case, comparison in measured if is_in_category(case)])
        for name, is_in_category in categories.items()
    }
    ranking = rank_layouts(measured_cases, measured_comparisons)
    speedups = {
        "formats": precision_speedups(measured_cases, measured_comparisons),
        "experts": moe_comm_speedups(measured_cases, measured_comparisons),
    }
    return ValidationSummary(
        "steps", measured_comparisons, simulated, coverage, _subset_statistics(measured), ranking, speedups
    )


def _is_low_precision_dense(case: ValidationCase) -> bool:
    return is_fully_specified(case) and is_low_precision(case) and not has_experts(case)


def _is_low_precision_moe(case: ValidationCase) -> bool:
    return is_fully_specified(case) and is_low_precision(case) and has_experts(case)


def _coverage(comparisons: Sequence[CaseComparison]) -> PredictionCoverage:
    return PredictionCoverage(sum(comparison.predicted is not None for comparison in comparisons), len(comparisons))


def replace_non_finite(value: Any) -> Any:
    """JSON data with null for every non-finite number."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: replace_non_finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [replace_non_finite(item) for item in value]
    return value


def _statistics_json(statistics: Mapping[str, ErrorStatistics]) -> dict[str, Any]:
    return {name: statistic.to_json() for name, statistic in statistics.items()}


def _is_zero3(case: ValidationCase) -> bool:
    return case.text("zero_stage") == "3"


SOURCE_SUBSETS: Final[tuple[tuple[str, Callable[[ValidationCase], bool], str, str], ...]] = (
    ("megatron-2021", _is_zero3, "without ZeRO-3", "with ZeRO-3"),
)


def _subset_statistics(case_comparisons: Sequence[tuple[ValidationCase, CaseComparison]]) -> dict[str, ErrorStatistics]:
    """Error statistics of the subsets of the sources that are split."""
    statistics: dict[str, ErrorStatistics] = {}
    for source, is_other, first_label, second_label in SOURCE_SUBSETS:
        of_source = [pair for pair in case_comparisons if pair[1].source == source]
        for name, expected in ((first_label, False), (second_label, True)):
            subset = [case_comparison for case, case_comparison in of_source if is_other(case) is expected]
            if subset:
                statistics[f"{source} {name}"] = summarize_comparisons(subset)
    return statistics
