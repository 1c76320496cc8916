"""What is said of a table of cases? Its errors, overall and by source and factor, and what is missing from them.

A source that mixes two kinds of runs, of which a mean says little, is also told apart (`SOURCE_SUBSETS`). Times that another
simulator predicted are no measurements: they are compared, but beside all that is said of the others. Coverage is
predicted over expressible, where each case says for itself whether it is expressible; and, more strictly, over all
steps whose inputs are known (quality A and B), whatever they say, of dense models and of mixtures of experts, in bf16
or fp16 and in formats with scales, each apart.
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
MOE_COVERAGE: Final = "mixtures of experts bf16/fp16, quality A and B"
LOW_PRECISION_DENSE_COVERAGE: Final = "dense in narrow formats, quality A and B"
LOW_PRECISION_MOE_COVERAGE: Final = "mixtures of experts in narrow formats, quality A and B"
_MODEL_TYPE_GROUPING: Final = "layers"  # the factor that tells dense models from mixtures
_LINE_PREFIX: Final = re.compile(r"^line \d+: ")


@dataclass(frozen=True, slots=True)
class PredictionCoverage:
    """How many cases of those that should have a prediction have one."""

    predicted_count: int
    expressible_count: int

    @property
    def share(self) -> float | None:
        """Predicted over expressible; None if there are none."""
        return self.predicted_count / self.expressible_count if self.expressible_count else None

    def to_json(self) -> dict[str, Any]:
        """The counts and the share."""
        return {"predicted": self.predicted_count, "expressible": self.expressible_count, "share": self.share}


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """Of one table. kind: of `cli.validation_kinds`; covered: of kinds of cases by name, of steps only.

    simulated: cases whose time another simulator predicted, in none of the other figures; subsets: parts of sources, by
    name; layouts: which is fastest, and pairs: by what they differ in, of steps only; fits: of memory only; notes:
    sentences about the table.
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
        """The quality of all cases."""
        return summarize_comparisons(self.comparisons)

    @property
    def statistics_by_source(self) -> dict[str, ErrorStatistics]:
        """The quality of every source."""
        return statistics_by_source(self.comparisons)

    @property
    def macro_average(self) -> MacroAverage | None:
        """Means over sources."""
        return macro_average(self.statistics_by_source.values())

    @property
    def macro_by_model_type(self) -> dict[str, MacroAverage]:
        """Means over sources of dense models and of mixtures apart, where a table has both."""
        labelled = [comparison for comparison in self.comparisons if _MODEL_TYPE_GROUPING in comparison.groupings]
        groups = group_by(labelled, lambda each: each.groupings[_MODEL_TYPE_GROUPING])
        means = {
            model_type: macro_average(statistics_by_source(group).values()) for model_type, group in groups.items()
        }
        averages = {model_type: mean for model_type, mean in means.items() if mean is not None}
        return averages if len(averages) > 1 else {}

    @property
    def statistics_by_grouping(self) -> dict[str, dict[str, ErrorStatistics]]:
        """The quality by every value of every factor."""
        return statistics_by_grouping(self.comparisons)

    @property
    def interval_coverage(self) -> dict[str, IntervalCoverage]:
        """How many measured steps lie in their bands, overall and by regime; empty where nothing has a band."""
        return interval_coverage(self.comparisons)

    @property
    def coverage(self) -> PredictionCoverage:
        """Of what every case says of itself."""
        expressible = [comparison for comparison in self.comparisons if comparison.is_expressible]
        return PredictionCoverage(
            sum(case_comparison.predicted is not None for case_comparison in expressible), len(expressible)
        )

    @property
    def measured_but_unfit(self) -> tuple[str, ...]:
        """Ids of cases with a measurement, so that they ran, which are predicted not to fit in memory; each once."""
        return tuple(
            dict.fromkeys(comparison.case_id for comparison in self.comparisons if comparison.fits_in_memory is False)
        )

    @property
    def skip_reasons(self) -> dict[str, tuple[str, ...]]:
        """Why cases were skipped, with their ids; the reason of most cases first."""
        skipped = [
            comparison
            for comparison in (*self.comparisons, *self.simulated_by_others)
            if comparison.skip_reason is not None
        ]
        groups = group_by(skipped, lambda each: _LINE_PREFIX.sub("", each.skip_reason or ""))
        case_ids = {
            reason: tuple(case_comparison.case_id for case_comparison in group) for reason, group in groups.items()
        }
        return dict(sorted(case_ids.items(), key=lambda item: -len(item[1])))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, without infinities and NaN."""
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
            {"macro_by_layers": {model_type: asdict(item) for model_type, item in self.macro_by_model_type.items()}}
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
            {"bands": {stratum: asdict(element) for stratum, element in self.interval_coverage.items()}}
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
                    "case_id": item.case_id,
                    "source": item.source,
                    "stated": item.stated,
                    "predicted": item.predicted,
                    "skipped_reason": item.skip_reason,
                }
                for item in self.fit_verdicts
            ],
        }

    def _coverage_json(self) -> dict[str, Any]:
        return self.coverage.to_json() | {
            category: prediction_coverage.to_json()
            for category, prediction_coverage in self.coverage_by_category.items()
        }


def summarize_steps(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> ValidationSummary:
    """The summary of a table of steps; comparisons: of these cases, in their order."""
    case_comparisons = list(zip(cases, comparisons, strict=True))
    measured = [(case, case_comparison) for case, case_comparison in case_comparisons if is_measured(case)]
    simulated = tuple(item for case, item in case_comparisons if not is_measured(case))
    measured_cases, measured_comparisons = [case for case, _ in measured], tuple(element for _, element in measured)
    categories = {
        DENSE_COVERAGE: is_high_precision_dense,
        MOE_COVERAGE: is_high_precision_moe,
        LOW_PRECISION_DENSE_COVERAGE: _is_low_precision_dense,
        LOW_PRECISION_MOE_COVERAGE: _is_low_precision_moe,
    }
    coverage = {
        name: _coverage([entry for case, entry in measured if is_in_category(case)])
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
    """Plain data with null for every number that JSON cannot say."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: replace_non_finite(item) for key, item in value.items()}
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
    """The parts of the sources that have parts; source: whose; those of which `is_other` holds come second."""
    statistics: dict[str, ErrorStatistics] = {}
    for source, is_other, first_label, second_label in SOURCE_SUBSETS:
        of_source = [pair for pair in case_comparisons if pair[1].source == source]
        for name, expected in ((first_label, False), (second_label, True)):
            subset = [case_comparison for case, case_comparison in of_source if is_other(case) is expected]
            if subset:
                statistics[f"{source} {name}"] = summarize_comparisons(subset)
    return statistics
