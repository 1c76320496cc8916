"""Which layout is fastest: would the prediction have chosen well?

A set are cases of one source that differ in nothing but their layout: the same model, batch, machine, software, number
format and recomputation. How the data-parallel exchanges overlap follows from the layout in some software, so it may
differ too. Runs of a set with the same layout count as one, with the mean of their times.

regret: what the choice costs, measured time of the layout that is predicted to be fastest over the fastest measured,
less one; by chance: what it costs on average to choose any, each as likely. Kendall's tau-b: agreement of the two
orders, 1 the same, -1 reversed (M. G. Kendall, "The treatment of ties in ranking problems", Biometrika 33, 1945).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Final

from clustersim.common.units import Seconds
from clustersim.validation.cases import Case
from clustersim.validation.comparison import Comparison

LAYOUT: Final = ("tp", "pp", "vpp", "dp", "cp", "micro_batch", "zero_stage", "sequence_parallel", "schedule")
_FOLLOWING: Final = ("overlap_grad_reduce", "overlap_param_gather")
_RESULTS: Final = ("step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct", "flop_convention")
_WORDS: Final = ("case_id", "locator", "notes", "quality", "year")
_APART: Final = frozenset((*LAYOUT, *_FOLLOWING, *_RESULTS, *_WORDS))


@dataclass(frozen=True, slots=True)
class LayoutSet:
    """One set. fastest, chosen: cases with the layouts that were measured and predicted to be fastest.

    by_chance: the mean regret of all choices; tau: None where all are measured, or predicted, to be equally fast.
    """

    source: str
    cases: tuple[str, ...]
    layouts: int
    fastest: str
    chosen: str
    regret: float
    by_chance: float
    tau: float | None

    def to_json(self) -> dict[str, Any]:
        """The set as plain data."""
        return {
            "source": self.source,
            "layouts": self.layouts,
            "fastest": self.fastest,
            "chosen": self.chosen,
            "regret": self.regret,
            "regret_by_chance": self.by_chance,
            "kendall_tau": self.tau,
            "cases": list(self.cases),
        }


@dataclass(frozen=True, slots=True)
class Ranking:
    """All sets."""

    sets: tuple[LayoutSet, ...]

    @property
    def cases(self) -> int:
        """Cases that are in some set."""
        return sum(len(layout_set.cases) for layout_set in self.sets)

    @property
    def regret(self) -> float | None:
        """The mean regret over sets; None if there are none."""
        return fmean(layout_set.regret for layout_set in self.sets) if self.sets else None

    @property
    def by_chance(self) -> float | None:
        """The mean regret of whoever chooses blindly; None if there are no sets."""
        return fmean(layout_set.by_chance for layout_set in self.sets) if self.sets else None

    @property
    def tau(self) -> float | None:
        """The mean of tau over the sets that have one."""
        found = [layout_set.tau for layout_set in self.sets if layout_set.tau is not None]
        return fmean(found) if found else None

    @property
    def right(self) -> int:
        """Sets of which the fastest layout was chosen."""
        return sum(layout_set.regret == 0.0 for layout_set in self.sets)

    def by_source(self) -> dict[str, "Ranking"]:
        """The sets of every source."""
        names = dict.fromkeys(layout_set.source for layout_set in self.sets)
        return {name: Ranking(tuple(item for item in self.sets if item.source == name)) for name in names}

    def to_json(self) -> dict[str, Any]:
        """Means, overall and by source, and every set."""
        by_source = {name: ranking.means() for name, ranking in self.by_source().items()}
        return {**self.means(), "by_source": by_source, "list": [layout_set.to_json() for layout_set in self.sets]}

    def means(self) -> dict[str, Any]:
        """What is said of all sets together."""
        return {
            "sets": len(self.sets),
            "cases": self.cases,
            "fastest_chosen": self.right,
            "mean_regret": self.regret,
            "mean_regret_by_chance": self.by_chance,
            "mean_kendall_tau": self.tau,
        }


def rank_layouts(cases: Sequence[Case], comparisons: Sequence[Comparison]) -> Ranking:
    """The sets of at least two layouts with a prediction; comparisons: of these cases, in their order."""
    sets: dict[tuple[str, ...], list[tuple[Case, Comparison]]] = {}
    for case, comparison in zip(cases, comparisons, strict=True):
        if comparison.predicted is not None:
            key = tuple(cell for column, cell in case.cells.items() if column not in _APART)
            sets.setdefault(key, []).append((case, comparison))
    found = (_ranked(pairs) for pairs in sets.values())
    return Ranking(tuple(item for item in found if item is not None))


def kendall_tau_b(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Agreement of two orders of the same things; None where one of them puts all on one place.

    >>> kendall_tau_b([1, 2, 3], [10, 20, 30]), kendall_tau_b([1, 2], [2, 1]), kendall_tau_b([1, 1], [1, 2])
    (1.0, -1.0, None)
    """
    signs = [(_sign(a - b), _sign(c - d)) for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2)]
    agreeing = sum(one * other for one, other in signs)
    untied = [sum(abs(pair[place]) for pair in signs) for place in (0, 1)]
    return agreeing / math.sqrt(untied[0] * untied[1]) if all(untied) else None


@dataclass(frozen=True, slots=True)
class _Layout:
    """One layout of a set, with mean times."""

    case_id: str
    measured: Seconds
    predicted: Seconds


def _ranked(pairs: Sequence[tuple[Case, Comparison]]) -> LayoutSet | None:
    """The set; None of a single layout."""
    layouts = list(_layouts(pairs))
    if len(layouts) < 2:
        return None
    fastest = min(layouts, key=lambda each: each.measured)
    chosen = min(layouts, key=lambda each: (each.predicted, -each.measured))  # of equal ones the worst
    tau = kendall_tau_b([layout.measured for layout in layouts], [item.predicted for item in layouts])
    names = tuple(comparison.case_id for _, comparison in pairs)
    regret = chosen.measured / fastest.measured - 1.0
    by_chance = fmean(element.measured for element in layouts) / fastest.measured - 1.0
    return LayoutSet(pairs[0][1].source, names, len(layouts), fastest.case_id, chosen.case_id, regret, by_chance, tau)


def _layouts(pairs: Iterable[tuple[Case, Comparison]]) -> Iterable[_Layout]:
    """The distinct layouts."""
    same: dict[tuple[str, ...], list[Comparison]] = {}
    for case, comparison in pairs:
        same.setdefault(tuple(case.text(column) for column in LAYOUT), []).append(comparison)
    for runs in same.values():
        predicted = fmean(run.predicted for run in runs if run.predicted is not None)
        yield _Layout(runs[0].case_id, fmean(item.measured for item in runs), predicted)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
