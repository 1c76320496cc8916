"""How wide must a band be to hold nine of ten steps that nobody has seen?

From errors of steps that the fit of the constants did not see (`left_out`) the terms of `clustersim.uncertainty.prediction_interval`:

1. What is known is always what the *other* sources measured, so that a source which alone has an accelerator, a format
   or a length of context shows how wrong steps are where these were not measured.
2. The variances of the terms are those under which the errors, as normal ones, are the likeliest; every source weighs
   the same. They are found by multiplicative steps that never make the likelihood less (majorization; the same for
   non-negative matrices by Fevotte and Idier 2011, arXiv:1010.1763, with the Itakura-Saito divergence, to which this
   likelihood is equal).
3. A term that fewer than `SUPPORT` sources have is off by as much as all steps are on average. So is each term by
   itself in one source that is added to the others, which holds back what little tells. A term of what was not measured
   is not below that of any step: what nobody measured is at least as uncertain as all that was.
4. Each source's errors are counted in deviations of terms that have not seen it, and the quantile of these, sources
   counted alike, is taken (conformal prediction by cross-validation, Barber et al. 2021, arXiv:1905.02928, with sources
   in the place of cases). It is longer by Student's t over the normal quantile for so many sources, as few sources tell
   little about how much sources differ.

Coverage is that of a band that has not seen the source either: terms, quantile and what is known from the others.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, Final

import numpy as np
import yaml

from calibrate.fit.out_of_sample import LeftOut, left_out_file, read_left_out
from calibrate.fit.repeatability import repeat_deviation
from calibrate.fit.step_constants import LEAST
from calibrate.fit.step_table import SIBLINGS
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.data_files import find_file, list_names, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.files import write_text_atomically
from clustersim.uncertainty.model_file import DENSE_STEPS, MODEL_NAMES, component_key, model_to_dict
from clustersim.uncertainty.prediction_interval import (
    ALL_STEPS,
    INTERVAL_COVERAGE,
    VARIANCE_COMPONENTS,
    BaseComponent,
    StratumCoverage,
    UncertaintyModel,
    VarianceComponent,
    component_loads,
    strata_of,
)
from clustersim.uncertainty.step_features import MIN_VISIBLE_SHARE
from clustersim.uncertainty.validated_domain import ValidatedDomain
from clustersim.validation.case_scenario import experience_of
from clustersim.validation.framework_defaults import software_of
from clustersim.validation.steps import read_steps

FEWEST: Final = 4  # sources
SUPPORT: Final = 3  # sources that a term needs for a variance of its own
ROUNDS: Final = 500  # of the search for variances
_ROUNDING: Final = 1e-9
GAPS: Final = tuple(BaseComponent)[1:]


def known_of(rows: Sequence[LeftOut]) -> ValidatedDomain:
    """What some steps measured."""
    counts = Counter(name for row in rows for name in row.facts.accelerators)
    chips: Counter[str] = Counter()
    for name, count in counts.items():
        chips[SIBLINGS.get(name, name)] += count
    measured = [name for name, count in counts.items() if count >= LEAST]
    siblings = [name for name in list_names("accelerators") if chips[SIBLINGS.get(name, name)] >= LEAST]
    return ValidatedDomain.from_steps((row.facts for row in rows), measured, siblings)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Steps as numbers. load: [steps, terms], what is known being what other sources measured; error: [steps].

    weight: [steps], those of a source sum to 1; source: [steps], its number.
    """

    load: FloatArray
    error: FloatArray
    weight: FloatArray
    source: IntArray


def evidence(rows: Sequence[LeftOut]) -> Evidence:
    """What some steps tell about terms."""
    counts = Counter(row.source for row in rows)
    known = {source: known_of([row for row in rows if row.source != source]) for source in counts}
    load = [
        [found[term] for term in VARIANCE_COMPONENTS]
        for row in rows
        for found in (component_loads(row.facts, known[row.source]),)
    ]
    return Evidence(
        np.array(load),
        np.array([row.error for row in rows]),
        np.array([1.0 / counts[row.source] for row in rows]),
        np.array([list(counts).index(row.source) for row in rows]),
    )


def variances(seen: Evidence) -> FloatArray:
    """The likeliest variance of each term; of what was not measured not below that of any step: [terms]."""
    mean, terms = float(seen.weight @ seen.error**2 / seen.weight.sum()), len(VARIANCE_COMPONENTS)
    load, squares = np.vstack([seen.load, np.eye(terms)]), np.append(seen.error**2, np.full(terms, mean))
    weight, free = np.append(seen.weight, np.full(terms, 1.0 / terms)), _supported(seen)
    found = np.full(terms, mean)
    for _ in range(ROUNDS):
        whole = load @ found
        step = np.sqrt((load.T @ (weight * squares / whole**2)) / (load.T @ (weight / whole)))
        found = np.where(free, found * step, found)
    return np.where([term in GAPS for term in VARIANCE_COMPONENTS], np.maximum(found, found[0]), found)


def _supported(seen: Evidence) -> BoolArray:
    """Whether enough sources have a term: [terms]."""
    columns = (seen.load >= MIN_VISIBLE_SHARE).T
    return np.array([len(np.unique(seen.source[there])) >= SUPPORT for there in columns])


def quantile(rows: Sequence[LeftOut]) -> float:
    """Deviations within which nine of ten unseen errors are; raise InputError for too few sources to say it."""
    sources = len({row.source for row in rows})
    if sources < FEWEST:
        raise InputError(f"{sources} sources of left-out steps are too few for a band; {FEWEST} are needed")
    sizes, weight = unseen_deviations(rows)
    order = np.argsort(sizes)
    reached = np.cumsum(weight[order]) / weight.sum()
    return student(sources - 1) * float(sizes[order][np.searchsorted(reached, INTERVAL_COVERAGE - _ROUNDING)])


def unseen_deviations(rows: Sequence[LeftOut]) -> tuple[FloatArray, FloatArray]:
    """Errors in deviations of terms that other sources support, and the weights of steps: [steps] both."""
    seen = evidence(rows)
    sizes = np.empty(len(rows))
    for source in np.unique(seen.source):
        own = seen.source == source
        others = variances(evidence([row for row, mine in zip(rows, own, strict=True) if not mine]))
        sizes[own] = np.abs(seen.error[own]) / np.sqrt(seen.load[own] @ others)
    return sizes, seen.weight


def student(freedom: int) -> float:
    """Student's t over the normal quantile, two-sided, of `SHARE` (Abramowitz and Stegun 26.7.5, two terms).

    >>> round(student(11) * 1.645, 2)
    1.8
    """
    z = NormalDist().inv_cdf((1.0 + INTERVAL_COVERAGE) / 2.0)
    return 1.0 + (z**2 + 1.0) / (4.0 * freedom) + (5.0 * z**4 + 16.0 * z**2 + 3.0) / (96.0 * freedom**2)


def fit(rows: Sequence[LeftOut], repeat: float) -> UncertaintyModel:
    """The band that some steps support; what is known is all of them."""
    found = np.sqrt(variances(evidence(rows))).tolist()
    deviations: dict[VarianceComponent, float] = {
        term: round(item, 4) for term, item in zip(VARIANCE_COMPONENTS, found, strict=True)
    }
    sources = len({row.source for row in rows})
    return UncertaintyModel(
        len(rows),
        sources,
        round(quantile(rows), 3),
        round(repeat, 4),
        deviations,
        known_of(rows),
        coverage_by_stratum={},
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """A step under a band that has not seen its source. width: logarithm of the band's upper end."""

    row: LeftOut
    regimes: tuple[str, ...]
    width: float

    @property
    def inside(self) -> bool:
        """Whether what was measured is within the band."""
        return abs(self.row.error) <= self.width


def judged(rows: Sequence[LeftOut], repeat: float) -> list[Judged]:
    """Every step under the band of the other sources."""
    return [item for source in dict.fromkeys(row.source for row in rows) for item in _judge(rows, source, repeat)]


def _judge(rows: Sequence[LeftOut], source: str, repeat: float) -> Iterator[Judged]:
    band = fit([row for row in rows if row.source != source], repeat)
    for row in rows:
        if row.source == source:
            words = strata_of(row.facts, band.domain)
            yield Judged(row, words, math.log(band.prediction_interval(row.facts).high))


def coverage(steps: Sequence[Judged]) -> StratumCoverage:
    """How many are inside, sources counted alike."""
    by_source: dict[str, list[bool]] = {}
    for step in steps:
        by_source.setdefault(step.row.source, []).append(step.inside)
    return StratumCoverage(len(steps), len(by_source), round(fmean(fmean(inside) for inside in by_source.values()), 3))


def unseen(steps: Sequence[Judged]) -> dict[str, StratumCoverage]:
    """The coverage of all steps, and of those of each regime."""
    names_of = dict.fromkeys(name for step in steps for name in step.regimes)
    parts = {name: [item for item in steps if name in item.regimes] for name in names_of}
    return {ALL_STEPS: coverage(steps), **{name: coverage(parts[name]) for name in sorted(parts)}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument(
        "left_out", nargs="?", type=Path, metavar="FILE",
        help="left-out errors, as fit-steps --left-out writes them; default: the shipped ones",
    )  # fmt: skip
    parser.add_argument(
        "--kind",
        choices=MODEL_NAMES,
        default=DENSE_STEPS,
        help=f"steps that have a band of their own; default: {DENSE_STEPS}",
    )
    parser.add_argument("--write", metavar="FILE", help="write the band, as to topologies/experience/steps.yaml")
    parser.add_argument("--markdown", action="store_true", help="print the table of regimes as Markdown")


def command(options: argparse.Namespace) -> None:
    """Fit, print what was found and how it holds for unseen sources, and write it if that is asked for."""
    of_kind = [case for case in read_steps() if experience_of(case) == options.kind]
    known = [case for case in of_kind if software_of(case).known]  # elsewhere versions differ
    rows, repeat = read_left_out(options.left_out or left_out_file(options.kind)), repeat_deviation(known)
    steps = judged(rows, repeat)
    experience = replace(fit(rows, repeat), coverage_by_stratum=unseen(steps))
    lines = regime_lines(experience, steps)
    print("\n".join(lines) if options.markdown else "\n".join([*_terms(experience), "", *_plain(lines)]))
    if options.write is not None:
        write_experience(experience, options.write, options.kind)


def _terms(experience: UncertaintyModel) -> Iterator[str]:
    yield f"{experience.step_count} left-out steps of {experience.source_count} sources"
    for term, deviation in experience.deviations.items():
        yield f"{component_key(term):12s} {deviation:7.1%}  {term.value}"
    yield f"{'repeat':12s} {experience.repeat_deviation:7.1%}  equal steps, published twice"
    yield f"expected within {experience.quantile:.2f} deviations"


HEAD: Final = ("regime", "cases", "sources", "typical error", "band", "inside")


def regime_lines(experience: UncertaintyModel, steps: Sequence[Judged]) -> list[str]:
    """A Markdown table of how unseen steps of each regime were met: typical errors are medians of absolute ones."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|---:|---:|---:|---:|---:|"]
    for name, covered in experience.coverage_by_stratum.items():
        mine = [step for step in steps if name in (ALL_STEPS, *step.regimes)]
        typical, width = (weighted_median([(item.row.source, of(item)) for item in mine]) for of in (_size, _width))
        cells = (
            name,
            covered.step_count,
            covered.source_count,
            f"{typical:.0%}",
            _ends(width),
            f"{covered.covered_share:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _size(step: Judged) -> float:
    return abs(math.expm1(-step.row.error))


def _width(step: Judged) -> float:
    return step.width


def _ends(width: float) -> str:
    return f"{math.expm1(-width):+.0%} to {math.expm1(width):+.0%}"


def weighted_median(values: Sequence[tuple[str, float]]) -> float:
    """The median of values, each with its source; sources counted alike."""
    counts, ordered = Counter(source for source, _ in values), sorted(values, key=lambda each: each[1])
    reached = np.cumsum([1.0 / counts[source] for source, _ in ordered])
    return ordered[int(np.searchsorted(reached, reached[-1] / 2))][1]


def _plain(lines: Sequence[str]) -> Iterator[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for number, line in enumerate(lines) if number != 1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        cells = (f"{figure:>{width}}" for figure, width in zip(figures, widths[1:], strict=True))
        yield f"{name:<{widths[0]}}  {'  '.join(cells)}"


def write_experience(experience: UncertaintyModel, path: str, name: str = DENSE_STEPS) -> None:
    """Write the file with the texts of a shipped one; raise OutputError if it cannot be written."""
    texts: Mapping[str, Any] = read_mapping(find_file("experience", name))
    content = {"description": texts["description"], **model_to_dict(experience), "sources": texts["sources"]}
    write_text_atomically(path, yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True))
