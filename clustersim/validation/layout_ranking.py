"""Which layout is fastest: would the prediction have selected well?

A layout set consists of cases of one source that differ in nothing but their layout: same model, batch,
cluster, software, precision and recomputation. How data-parallel communication overlaps depends on the
layout in some frameworks, so it may differ too. Runs of a set with the same layout are averaged.

Regret: measured time of the layout that is predicted to be fastest over the fastest measured time, minus
one. Random regret: its expectation for a layout selected uniformly at random. Kendall's tau-b: rank
correlation of measured and predicted times, 1: same order, -1: reversed (M. G. Kendall, "The treatment of
ties in ranking problems", Biometrika 33, 1945).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Final

from clustersim.common.units import Seconds
from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison

LAYOUT_COLUMNS: Final = ("tp", "pp", "vpp", "dp", "cp", "micro_batch", "zero_stage", "sequence_parallel", "schedule")
_LAYOUT_DEPENDENT_COLUMNS: Final = ("overlap_grad_reduce", "overlap_param_gather")
_RESULT_COLUMNS: Final = ("step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct", "flop_convention")
_NOTE_COLUMNS: Final = ("case_id", "locator", "notes", "quality", "year")
_IGNORED_COLUMNS: Final = frozenset((*LAYOUT_COLUMNS, *_LAYOUT_DEPENDENT_COLUMNS, *_RESULT_COLUMNS, *_NOTE_COLUMNS))


@dataclass(frozen=True, slots=True)
class LayoutSet:
    """Cases of one source that differ in their layout only.

    cases: ids; layout_count: distinct layouts; measured_fastest, predicted_fastest: ids of cases with these
    layouts; regret, random_regret: fractions; kendall_tau: tau-b, None if all layouts are measured, or
    predicted, to be equally fast.
    """

    source: str
    cases: tuple[str, ...]
    layout_count: int
    measured_fastest: str
    predicted_fastest: str
    regret: float
    random_regret: float
    kendall_tau: float | None

    def to_json(self) -> dict[str, Any]:
        """The set as JSON data."""
        return {
            "source": self.source,
            "layouts": self.layout_count,
            "fastest": self.measured_fastest,
            "chosen": self.predicted_fastest,
            "regret": self.regret,
            "random_regret": self.random_regret,
            "kendall_tau": self.kendall_tau,
            "cases": list(self.cases),
        }


@dataclass(frozen=True, slots=True)
class LayoutRanking:
    """All layout sets of a table."""

    sets: tuple[LayoutSet, ...]

    @property
    def case_count(self) -> int:
        """Number of cases in all sets."""
        return sum(len(layout_set.cases) for layout_set in self.sets)

    @property
    def mean_regret(self) -> float | None:
        """Mean regret over the sets; None without sets."""
        return fmean(layout_set.regret for layout_set in self.sets) if self.sets else None

    @property
    def mean_random_regret(self) -> float | None:
        """Mean random regret over the sets; None without sets."""
        return fmean(layout_set.random_regret for layout_set in self.sets) if self.sets else None

    @property
    def mean_kendall_tau(self) -> float | None:
        """Mean Kendall tau-b over the sets that have one; None if none has."""
        taus = [layout_set.kendall_tau for layout_set in self.sets if layout_set.kendall_tau is not None]
        return fmean(taus) if taus else None

    @property
    def correct_count(self) -> int:
        """Number of sets whose fastest layout was selected (zero regret)."""
        return sum(layout_set.regret == 0.0 for layout_set in self.sets)

    def by_source(self) -> dict[str, "LayoutRanking"]:
        """The ranking of each source."""
        names = dict.fromkeys(layout_set.source for layout_set in self.sets)
        return {
            name: LayoutRanking(tuple(layout_set for layout_set in self.sets if layout_set.source == name))
            for name in names
        }

    def to_json(self) -> dict[str, Any]:
        """Means, overall and by source, and every set, as JSON data."""
        by_source = {name: layout_ranking.means_json() for name, layout_ranking in self.by_source().items()}
        return {**self.means_json(), "by_source": by_source, "list": [layout_set.to_json() for layout_set in self.sets]}

    def means_json(self) -> dict[str, Any]:
        """Counts and means over all sets."""
        return {
            "sets": len(self.sets),
            "cases": self.case_count,
            "fastest_chosen": self.correct_count,
            "mean_regret": self.mean_regret,
            "mean_random_regret": self.mean_random_regret,
            "mean_kendall_tau": self.mean_kendall_tau,
        }


def rank_layouts(cases: Sequence[ValidationCase], comparisons: Sequence[CaseComparison]) -> LayoutRanking:
    """The sets of at least two layouts with predictions; comparisons: in the order of the cases."""
    sets: dict[tuple[str, ...], list[tuple[ValidationCase, CaseComparison]]] = {}
    for case, comparison in zip(cases, comparisons, strict=True):
        if comparison.predicted is not None:
            key = tuple(cell for column, cell in case.cells.items() if column not in _IGNORED_COLUMNS)
            sets.setdefault(key, []).append((case, comparison))
    layout_sets = (_layout_set(pairs) for pairs in sets.values())
    return LayoutRanking(tuple(layout_set for layout_set in layout_sets if layout_set is not None))


def kendall_tau_b(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two sequences; None if one of them is constant.

    >>> kendall_tau_b([1, 2, 3], [10, 20, 30]), kendall_tau_b([1, 2], [2, 1]), kendall_tau_b([1, 1], [1, 2])
    (1.0, -1.0, None)
    """
    signs = [(_sign(a - b), _sign(c - d)) for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2)]
    concordance = sum(first_sign * second_sign for first_sign, second_sign in signs)
    untied_counts = [sum(abs(pair[side]) for pair in signs) for side in (0, 1)]
    return concordance / math.sqrt(untied_counts[0] * untied_counts[1]) if all(untied_counts) else None


@dataclass(frozen=True, slots=True)
class _LayoutTimes:
    """Mean measured and predicted times of one layout of a set."""

    case_id: str
    measured: Seconds
    predicted: Seconds


def _layout_set(case_comparisons: Sequence[tuple[ValidationCase, CaseComparison]]) -> LayoutSet | None:
    """The set; None if it has a single layout."""
    layouts = list(_distinct_layouts(case_comparisons))
    if len(layouts) < 2:
        return None
    measured_fastest = min(layouts, key=lambda layout: layout.measured)
    predicted_fastest = min(layouts, key=lambda layout: (layout.predicted, -layout.measured))  # ties: the slowest
    kendall_tau = kendall_tau_b(
        [layout.measured for layout in layouts], [layout_times.predicted for layout_times in layouts]
    )
    case_ids = tuple(case_comparison.case_id for _, case_comparison in case_comparisons)
    regret = predicted_fastest.measured / measured_fastest.measured - 1.0
    random_regret = fmean(layout.measured for layout in layouts) / measured_fastest.measured - 1.0
    return LayoutSet(
        case_comparisons[0][1].source,
        case_ids,
        len(layouts),
        measured_fastest.case_id,
        predicted_fastest.case_id,
        regret,
        random_regret,
        kendall_tau,
    )


def _distinct_layouts(case_comparisons: Iterable[tuple[ValidationCase, CaseComparison]]) -> Iterable[_LayoutTimes]:
    """The distinct layouts with their mean times."""
    runs_by_layout: dict[tuple[str, ...], list[CaseComparison]] = {}
    for case, comparison in case_comparisons:
        runs_by_layout.setdefault(tuple(case.text(column) for column in LAYOUT_COLUMNS), []).append(comparison)
    for runs in runs_by_layout.values():
        predicted = fmean(run.predicted for run in runs if run.predicted is not None)
        yield _LayoutTimes(runs[0].case_id, fmean(case_comparison.measured for case_comparison in runs), predicted)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
