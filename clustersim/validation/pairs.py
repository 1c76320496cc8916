"""How much faster is a step in a narrow format: does the prediction say what was measured?

A pair are two cases of one source that differ in nothing but their number format: one in bf16 or fp16, one in a format
with scales. Where several wide ones fit, those of the same place in the source are taken, so that releases of a
software are compared each with itself, and of what is left the mean. Recipes for one format are not always those for
another: other layouts are no pair, since their ratio says more of the layout than of the format.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from clustersim.units import Seconds
from clustersim.validation.cases import Case
from clustersim.validation.comparison import Comparison
from clustersim.validation.precision import is_narrow, is_wide
from clustersim.validation.quality import Quality, grouped, quality_of

_RESULTS: Final = ("step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct", "flop_convention")
_APART: Final = frozenset(("precision", "case_id", "locator", "notes", "quality", *_RESULTS))
_PLACE: Final = "locator"


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """One pair. wide, narrow: its cases; measured, predicted: time of the wide one over that of the narrow one."""

    source: str
    wide: str
    narrow: str
    precision: str
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
class SpeedUps:
    """All pairs."""

    pairs: tuple[SpeedUp, ...]

    def by_format(self) -> dict[str, Quality]:
        """How far predicted ratios are from measured ones, by the narrow format."""
        groups = grouped(self.pairs, lambda each: each.precision)
        return {name: quality_of([each.error for each in group]) for name, group in groups.items()}

    def to_json(self) -> dict[str, Any]:
        """Errors, overall and by format, and every pair."""
        overall = quality_of([each.error for each in self.pairs]).to_json()
        by_format = {name: each.to_json() for name, each in self.by_format().items()}
        return {"overall": overall, "by_format": by_format, "list": [each.to_json() for each in self.pairs]}


def speed_ups(cases: Sequence[Case], comparisons: Sequence[Comparison]) -> SpeedUps:
    """The pairs of which both have a prediction; comparisons: of these cases, in their order."""
    known = [_Run(case, each) for case, each in zip(cases, comparisons, strict=True) if each.predicted is not None]
    sets = grouped(known, lambda run: run.key)
    return SpeedUps(tuple(pair for runs in sets.values() for pair in _pairs(runs)))


@dataclass(frozen=True, slots=True)
class _Run:
    """A case with its prediction."""

    case: Case
    comparison: Comparison

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """All that is the same in a pair; a column that one table lacks is an empty cell."""
        cells = self.case.cells.items()
        return tuple(sorted((column, cell) for column, cell in cells if cell and column not in _APART))

    @property
    def predicted(self) -> Seconds:
        """The predicted time."""
        return self.comparison.predicted or 0.0


def _pairs(runs: Sequence[_Run]) -> Iterator[SpeedUp]:
    wide = [run for run in runs if is_wide(run.case)]
    for run in runs:
        if wide and is_narrow(run.case):
            yield _pair(_beside(run, wide), run)


def _beside(narrow: _Run, wide: Sequence[_Run]) -> Sequence[_Run]:
    """Of the wide ones those of the same place, if there are any."""
    place = narrow.case.text(_PLACE)
    return [run for run in wide if run.case.text(_PLACE) == place] or wide


def _pair(wide: Sequence[_Run], narrow: _Run) -> SpeedUp:
    measured = fmean(run.comparison.measured for run in wide) / narrow.comparison.measured
    predicted = fmean(run.predicted for run in wide) / narrow.predicted
    case = narrow.case
    names = (case.text("source"), wide[0].case.text("case_id"), case.text("case_id"))
    return SpeedUp(*names, case.text("precision"), measured, predicted)
