"""Which constants of training steps do published steps support?

Two kinds, few: how fast an accelerator's arithmetic is within a step relative to single kernels
(`in_training.sustained`), and what a framework's host needs to launch a kernel of forward and one of backward
(`host.launch`, `host.backward_launch`). They minimise the macro
mean over sources of the absolute logarithm of predicted over measured, so that every source counts once. A constant
that too few cases depend on is not searched. Two more were tried, the bandwidth of streaming kernels within a step and
the host's time before a pass: each lowered the error by less than a tenth of a point, and is left out.

What another simulator predicted is no measurement: no constant rests on it, and it thins out no measured cases.

Leave one source out: the constants are found again without a source, which they then predict. `--left-out FOLDER`
writes what every case is then off by, from which `fit-band` finds how wide a band must be: of dense steps in
BF16, and of mixtures of experts and steps in FP8 and narrower formats, which nothing here is fitted to
(`transferred_steps`). `--narrow` finds the rates of these formats alone (`low_precision_steps`).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.fit.low_precision_steps import Narrow, fit_narrow, narrow_json, narrow_lines, tabulated
from calibrate.fit.out_of_sample import LeftOut, left_out_file, write_left_out
from calibrate.fit.step_table import ACCELERATORS, HOSTS, Tabulated, tabulate
from calibrate.fit.transferred_steps import Paces, Unfitted, judge_unfitted
from clustersim.common.arrays import FloatArray
from clustersim.common.data_files import list_names
from clustersim.common.files import write_text_atomically
from clustersim.common.units import Seconds
from clustersim.model.framework import load_framework
from clustersim.uncertainty.model_file import DENSE_STEPS
from clustersim.validation.case_scenario import experience_of
from clustersim.validation.cases import Case
from clustersim.validation.steps import read_steps

RATES: Final = np.round(np.arange(0.5, 1.2001, 0.01), 2)  # what is searched
LAUNCHES: Final = np.round(np.arange(0.0, 60.1, 1.0) * 1e-6, 7)
BACKWARD: Final = np.round(np.arange(0.0, 150.1, 1.0) * 1e-6, 7)
LIKE: Final[Mapping[str, str]] = {"h100-sxm-96gb": "h100-sxm-80gb"}
"""Whose constants an accelerator with too few cases takes; others keep those of single kernels."""
LEAST: Final = 4  # cases that a constant needs
FULL: Final = 5  # cases of a source that counts as one
STRIDE_ABOVE: Final = 150  # of a source with more cases, an even choice of no more than these is predicted
KINDS: Final = ("sustained", "launch", "backward")
ROUNDS: Final = 12  # of the coordinate search, which ends earlier where nothing changes


@dataclass(frozen=True, slots=True)
class Constants:
    """sustained: by accelerator; launch, backward: seconds by framework."""

    sustained: Mapping[str, float]
    launch: Mapping[str, Seconds]
    backward: Mapping[str, Seconds]

    def of(self, case: Tabulated) -> tuple[float, Seconds, Seconds]:
        """The constants of a case; an accelerator without one has single kernels' rate."""
        launch = self.launch[case.framework], self.backward[case.framework]
        return self.sustained.get(case.accelerator, 1.0), *launch


def thinned(cases: Sequence[Case], most: int = STRIDE_ABOVE) -> list[Case]:
    """Measured dense cases of quality A and B; of sources with more than `most`, an even choice."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if experience_of(case) == DENSE_STEPS:
            groups.setdefault(case.text("source"), []).append(case)
    return [case for group in groups.values() for case in group[:: -(-len(group) // most)]]


def fit(table: Sequence[Tabulated]) -> Constants:
    """The constants with the least macro error, found by turns; deterministic.

    Runs of software whose habits are not known say nothing about accelerators. A source of fewer than `FULL` cases
    counts as many parts of one.
    """
    table = [item for item in table if item.known]
    found = Constants(
        sustained=dict.fromkeys(ACCELERATORS, 1.0),
        launch={name: load_framework(name).launch_seconds for name in list_names("frameworks")},
        backward={name: load_framework(name).backward_launch_seconds for name in list_names("frameworks")},
    )
    for _ in range(ROUNDS):
        before = asdict(found)
        for name, choices in _searched(table):
            found = _improved(table, found, name, choices)
        if before == asdict(found):
            break
    return _carried_over(table, found)


_Choices = Mapping[str, FloatArray]
"""Values of kinds of constants that are tried together: [choices] of each."""


def _searched(table: Sequence[Tabulated]) -> Iterator[tuple[str, _Choices]]:
    """The constants that enough cases depend on; the two of a host by pairs, since most steps depend on both."""
    accelerators, hosts = (
        [item.accelerator for item in table],
        [element for element in table if element.depends_on_launch()],
    )
    for name in ACCELERATORS:
        if accelerators.count(name) >= LEAST:
            yield name, {"sustained": RATES}
    launch, backward = (array.reshape(-1) for array in np.meshgrid(LAUNCHES, BACKWARD, indexing="ij"))
    for name in dict.fromkeys(host.framework for host in hosts):
        if sum(entry.framework == name for entry in hosts) >= LEAST:
            yield name, {"launch": launch, "backward": backward}


def _improved(table: Sequence[Tabulated], now: Constants, name: str, choices: _Choices) -> Constants:
    """With those values of one name that have the least error of the cases that have it, each weighed by its source."""
    sources, number = [item.source for item in table], len(next(iter(choices.values())))
    loss = np.zeros(number)
    for element in table:
        if name in (element.accelerator, element.framework):
            constants = dict(zip(KINDS, now.of(element), strict=True))
            tried = [choices.get(kind, np.full(number, constants[kind])) for kind in KINDS]
            loss += np.abs(element.errors(*tried)) / max(sources.count(element.source), FULL)
    best = int(np.argmin(loss))
    return replace(now, **{kind: {**getattr(now, kind), name: float(choice[best])} for kind, choice in choices.items()})


def _carried_over(table: Sequence[Tabulated], found: Constants) -> Constants:
    """With the constants of siblings where an accelerator has too few cases of its own, and with those of hosts."""
    searched = [name for name, _ in _searched(table)]
    taken = {name: found.sustained[other] for name, other in LIKE.items() if name not in searched}
    launch, backward = (
        {**item, **{name: item[other] for name, other in HOSTS.items()}} for item in (found.launch, found.backward)
    )
    return Constants({**found.sustained, **taken}, launch, backward)


@dataclass(frozen=True, slots=True)
class SourceQuality:
    """n: cases; mape, bias: with the constants of all; loo_mape, loo_bias: of constants found without this source."""

    source: str
    n: int
    mape: float
    bias: float
    loo_mape: float
    loo_bias: float


def fitted_without(table: Sequence[Tabulated]) -> dict[str, Constants]:
    """For each source the constants that have not seen it."""
    sources = dict.fromkeys(item.source for item in table)
    return {source: fit([element for element in table if element.source != source]) for source in sources}


def left_out(table: Sequence[Tabulated], without: Mapping[str, Constants]) -> list[LeftOut]:
    """By what every case is off under the constants that have not seen its source."""
    return [
        LeftOut(item.case_id, item.source, -float(np.log1p(error)), item.facts)
        for item in table
        for error in errors([item], without[item.source])
    ]


def judged(table: Sequence[Tabulated], found: Constants, without: Mapping[str, Constants]) -> list[SourceQuality]:
    """Each source under the constants, and under constants that have not seen it."""
    groups = {source: own for source in without if (own := [item for item in table if item.source == source])}
    return [_judge(own, found, without[source]) for source, own in groups.items()]


def _judge(own: Sequence[Tabulated], found: Constants, others: Constants) -> SourceQuality:
    return _quality(own[0].source, errors(own, found), errors(own, others))


def _quality(source: str, seen: FloatArray, unseen: FloatArray) -> SourceQuality:
    means = (np.abs(seen).mean(), seen.mean(), np.abs(unseen).mean(), unseen.mean())
    return SourceQuality(source, len(seen), *map(float, means))


def judged_unfitted(steps: Sequence[Unfitted]) -> list[SourceQuality]:
    """Each source's steps under the constants, and under constants that have not seen the source."""
    sources = dict.fromkeys(step.source for step in steps)
    groups = {source: [unfitted for unfitted in steps if unfitted.source == source] for source in sources}
    return [
        _quality(source, np.array([item.seen for item in own]), np.array([element.unseen for element in own]))
        for source, own in groups.items()
    ]


def errors(cases: Sequence[Tabulated], constants: Constants) -> FloatArray:
    """Predicted over measured, less one: [cases]."""
    logarithms = [case.errors(*(np.array([value]) for value in constants.of(case)))[0] for case in cases]
    ratios: FloatArray = np.expm1(np.array(logarithms))
    return ratios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the constants and errors as JSON to FILE, or - for stdout"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), metavar="N", help="processes; default: all cores"
    )
    parser.add_argument(
        "--most", type=int, default=STRIDE_ABOVE, metavar="N",
        help=f"cases of one source; of one with more an even choice is predicted; default: {STRIDE_ABOVE}",
    )  # fmt: skip
    parser.add_argument(
        "--left-out",
        metavar="FOLDER",
        help="write the error of each case, its source left out, a CSV of each kind",
    )
    parser.add_argument(
        "--narrow", action="store_true", help="rates of FP8 and narrower formats, with all else as it is"
    )


def command(options: argparse.Namespace) -> None:
    """Tabulate, fit, and print what was found."""
    published = read_steps()
    if options.narrow:
        with ProcessPoolExecutor(options.workers) as pool:
            steps = tabulated(published, pool)
        _print(options.json, narrow_json(steps), narrow_lines(steps))
        return
    cases = thinned(published, options.most)
    with ProcessPoolExecutor(options.workers) as pool:
        table = [item for item in pool.map(tabulate, cases, chunksize=4) if item is not None]
        if len(table) < len(cases):
            print(f"{len(cases) - len(table)} of {len(cases)} cases cannot be predicted", file=sys.stderr)
        found, without = fit(table), fitted_without(table)
        unfitted = judge_unfitted(published, *_paces(found, without, tabulated(published, pool)), pool)
    qualities = {DENSE_STEPS: judged(table, found, without)}
    qualities |= {kind: judged_unfitted(steps) for kind, steps in unfitted.items()}
    if options.left_out is not None:
        rows = {DENSE_STEPS: left_out(table, without)}
        rows |= {kind: [step.left_out for step in steps] for kind, steps in unfitted.items()}
        for kind, element in rows.items():
            write_left_out(element, left_out_file(kind, Path(options.left_out)))
    by_source = {kind: [asdict(source_quality) for source_quality in judged] for kind, judged in qualities.items()}
    text = json.dumps({**asdict(found), "by_source": by_source}, indent=2) + "\n"
    lines = [line for kind, judged in qualities.items() for line in ("", kind, *_table(judged))]
    _print(options.json, text, [*_constants(found, table), *lines])


def _paces(
    found: Constants, without: Mapping[str, Constants], narrow: Sequence[Narrow]
) -> tuple[Paces, dict[str, Paces]]:
    """Those of all steps, and by source of all but the source's."""
    sources = dict.fromkeys([*without, *(item.source for item in narrow)])
    others = {
        source: Paces(
            without.get(source, found).sustained,
            fit_narrow([element for element in narrow if element.source != source]),
        )
        for source in sources
    }
    return Paces(found.sustained, fit_narrow(narrow)), others


def _print(path: str | None, text: str, lines: Sequence[str]) -> None:
    """Lines for people, or text for a file (- for stdout)."""
    if path is None:
        print("\n".join(lines))
    elif path == "-":
        sys.stdout.write(text)
    else:
        write_text_atomically(path, text)


def _constants(found: Constants, table: Sequence[Tabulated]) -> Iterator[str]:
    for name in sorted(found.sustained):
        cases = sum(item.accelerator == name for item in table)
        yield f"{name:20s} sustained {found.sustained[name]:.2f}  ({cases} cases)"
    for name, launch in found.launch.items():
        cases = sum(element.framework == name and element.depends_on_launch() for element in table)
        both = f"launch {launch * 1e6:.0f} us, backward {found.backward[name] * 1e6:.0f} us"
        yield f"{name:20s} {both}  ({cases} cases depend on them)"


def _table(qualities: Sequence[SourceQuality]) -> Iterator[str]:
    yield f"{'source':20s} {'cases':>5s} {'MAPE':>7s} {'bias':>7s} {'left out':>9s} {'bias':>7s}"
    for quality in qualities:
        told = f"{quality.mape:7.1%} {quality.bias:+7.1%} {quality.loo_mape:9.1%} {quality.loo_bias:+7.1%}"
        yield f"{quality.source:20s} {quality.n:5d} {told}"
    columns = ("mape", "bias", "loo_mape", "loo_bias")
    mape, bias, left, tilted = (
        np.mean([getattr(source_quality, name) for source_quality in qualities]) for name in columns
    )
    yield f"{'macro mean':20s} {'':5s} {mape:7.1%} {bias:+7.1%} {left:9.1%} {tilted:+7.1%}"
