"""What is said of a table of cases? Its errors, overall and by source and factor, and what is missing from them.

A source that mixes two kinds of runs, of which a mean says little, is also told apart (`SUBSETS`). Times that another
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

from clustersim.validation.case_scenario import is_dense, is_known, is_measured, is_mixture
from clustersim.validation.cases import Case
from clustersim.validation.comparison import Comparison
from clustersim.validation.error_statistics import (
    Inside,
    Macro,
    Quality,
    by_factor,
    by_source,
    grouped,
    insides,
    macro,
    quality,
)
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.layout_ranking import Ranking, rank_layouts
from clustersim.validation.memory import Verdict
from clustersim.validation.speedup_pairs import Pairs, served_otherwise, speed_ups
from clustersim.validation.training_precision import is_narrow

DENSE: Final = "dense bf16/fp16, quality A and B"
MIXTURES: Final = "mixtures of experts bf16/fp16, quality A and B"
NARROW_DENSE: Final = "dense in narrow formats, quality A and B"
NARROW_MIXTURES: Final = "mixtures of experts in narrow formats, quality A and B"
_KINDS: Final = "layers"  # the factor that tells dense models from mixtures
_PLACE: Final = re.compile(r"^line \d+: ")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many cases of those that should have a prediction have one."""

    predicted: int
    expressible: int

    @property
    def share(self) -> float | None:
        """Predicted over expressible; None if there are none."""
        return self.predicted / self.expressible if self.expressible else None

    def to_json(self) -> dict[str, Any]:
        """The counts and the share."""
        return {"predicted": self.predicted, "expressible": self.expressible, "share": self.share}


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one table. kind: of `cli.validation_kinds`; covered: of kinds of cases by name, of steps only.

    simulated: cases whose time another simulator predicted, in none of the other figures; subsets: parts of sources, by
    name; layouts: which is fastest, and pairs: by what they differ in, of steps only; fits: of memory only; notes:
    sentences about the table.
    """

    kind: str
    comparisons: tuple[Comparison, ...]
    simulated: tuple[Comparison, ...] = ()
    covered: Mapping[str, Coverage] = field(default_factory=dict)
    subsets: Mapping[str, Quality] | None = None
    layouts: Ranking | None = None
    pairs: Mapping[str, Pairs] = field(default_factory=dict)
    fits: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def overall(self) -> Quality:
        """The quality of all cases."""
        return quality(self.comparisons)

    @property
    def sources(self) -> dict[str, Quality]:
        """The quality of every source."""
        return by_source(self.comparisons)

    @property
    def macro(self) -> Macro | None:
        """Means over sources."""
        return macro(self.sources.values())

    @property
    def macros(self) -> dict[str, Macro]:
        """Means over sources of dense models and of mixtures apart, where a table has both."""
        having = [comparison for comparison in self.comparisons if _KINDS in comparison.factors]
        groups = grouped(having, lambda each: each.factors[_KINDS])
        means = {kind: macro(by_source(group).values()) for kind, group in groups.items()}
        found = {kind: mean for kind, mean in means.items() if mean is not None}
        return found if len(found) > 1 else {}

    @property
    def factors(self) -> dict[str, dict[str, Quality]]:
        """The quality by every value of every factor."""
        return by_factor(self.comparisons)

    @property
    def bands(self) -> dict[str, Inside]:
        """How many measured steps lie in their bands, overall and by regime; empty where nothing has a band."""
        return insides(self.comparisons)

    @property
    def coverage(self) -> Coverage:
        """Of what every case says of itself."""
        owed = [comparison for comparison in self.comparisons if comparison.expressible]
        return Coverage(sum(item.predicted is not None for item in owed), len(owed))

    @property
    def unfit(self) -> tuple[str, ...]:
        """Ids of cases with a measurement, so that they ran, which are predicted not to fit in memory; each once."""
        return tuple(dict.fromkeys(comparison.case_id for comparison in self.comparisons if comparison.fits is False))

    @property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """Why cases were skipped, with their ids; the reason of most cases first."""
        skipped = [comparison for comparison in (*self.comparisons, *self.simulated) if comparison.skipped is not None]
        groups = grouped(skipped, lambda each: _PLACE.sub("", each.skipped or ""))
        found = {reason: tuple(element.case_id for element in group) for reason, group in groups.items()}
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, without infinities and NaN."""
        means = self.macro
        found = {
            "kind": self.kind,
            "overall": self.overall.to_json(),
            "macro": {"sources": 0, "mape": None, "bias": None} if means is None else asdict(means),
            "by_source": _plain_each(self.sources),
            "simulated_by_others": _plain_each(by_source(self.simulated)),
            "subsets": _plain_each(self.subsets or {}),
            "by_factor": {factor: _plain_each(values) for factor, values in self.factors.items()},
            "coverage": self._coverage_json(),
            "skipped_reasons": {reason: len(cases) for reason, cases in self.reasons.items()},
            "ran_but_does_not_fit": list(self.unfit),
            "cases": [comparison.to_json() for comparison in self.comparisons],
            "simulated_cases": [item.to_json() for item in self.simulated],
        }
        macros = (
            {"macro_by_layers": {kind: asdict(element) for kind, element in self.macros.items()}} if self.macros else {}
        )
        ranking = {} if self.layouts is None else {"layouts": self.layouts.to_json()}
        ranking |= {"pairs": {name: pair.to_json() for name, pair in self.pairs.items()}} if self.pairs else {}
        fits = {"fits": self._fits_json()} if self.fits else {}
        bands = {"bands": {regime: asdict(band) for regime, band in self.bands.items()}} if self.bands else {}
        return finite(found | macros | ranking | fits | bands)  # type: ignore[no-any-return]

    def _fits_json(self) -> dict[str, Any]:
        judged = [fit for fit in self.fits if fit.predicted is not None]
        return {
            "n": len(judged),
            "skipped": len(self.fits) - len(judged),
            "right": sum(verdict.right for verdict in judged),
            "cases": [
                {
                    "case_id": item.case_id,
                    "source": item.source,
                    "stated": item.stated,
                    "predicted": item.predicted,
                    "skipped_reason": item.skipped,
                }
                for item in self.fits
            ],
        }

    def _coverage_json(self) -> dict[str, Any]:
        return self.coverage.to_json() | {kind: coverage.to_json() for kind, coverage in self.covered.items()}


def summary_of_steps(cases: Sequence[Case], comparisons: Sequence[Comparison]) -> Summary:
    """The summary of a table of steps; comparisons: of these cases, in their order."""
    both = list(zip(cases, comparisons, strict=True))
    pairs = [(case, comparison) for case, comparison in both if is_measured(case)]
    simulated = tuple(item for case, item in both if not is_measured(case))
    runs, compared = [case for case, _ in pairs], tuple(element for _, element in pairs)
    wanted = {DENSE: is_dense, MIXTURES: is_mixture, NARROW_DENSE: _narrow_dense, NARROW_MIXTURES: _narrow_mixture}
    covered = {name: _covered([entry for case, entry in pairs if is_of(case)]) for name, is_of in wanted.items()}
    ranking = rank_layouts(runs, compared)
    ratios = {"formats": speed_ups(runs, compared), "experts": served_otherwise(runs, compared)}
    return Summary("steps", compared, simulated, covered, _subsets(pairs), ranking, ratios)


def _narrow_dense(case: Case) -> bool:
    return is_known(case) and is_narrow(case) and not has_experts(case)


def _narrow_mixture(case: Case) -> bool:
    return is_known(case) and is_narrow(case) and has_experts(case)


def _covered(owed: Sequence[Comparison]) -> Coverage:
    return Coverage(sum(comparison.predicted is not None for comparison in owed), len(owed))


def finite(value: Any) -> Any:
    """Plain data with null for every number that JSON cannot say."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(element) for element in value]
    return value


def _plain_each(qualities: Mapping[str, Quality]) -> dict[str, Any]:
    return {name: item.to_json() for name, item in qualities.items()}


def _gathers_parameters(case: Case) -> bool:
    return case.text("zero_stage") == "3"


SUBSETS: Final[tuple[tuple[str, Callable[[Case], bool], str, str], ...]] = (
    ("megatron-2021", _gathers_parameters, "without ZeRO-3", "with ZeRO-3"),
)


def _subsets(pairs: Sequence[tuple[Case, Comparison]]) -> dict[str, Quality]:
    """The parts of the sources that have parts; source: whose; those of which `is_other` holds come second."""
    found: dict[str, Quality] = {}
    for source, is_other, first, second in SUBSETS:
        mine = [pair for pair in pairs if pair[1].source == source]
        for name, wanted in ((first, False), (second, True)):
            part = [comparison for case, comparison in mine if is_other(case) is wanted]
            if part:
                found[f"{source} {name}"] = quality(part)
    return found
