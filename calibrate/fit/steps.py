"""Which constants of training steps do published steps support?

Two kinds, few: how fast an accelerator's arithmetic is within a step relative to single kernels
(`in_training.sustained`), and what a framework's host needs to launch a kernel (`host.launch`). Every shipped step is
predicted on a small table of both (its accelerator's, its framework's); between the table's points the step is taken as
linear in the time per FLOP and in the launch. The constants then minimise the macro mean of the absolute logarithm of
predicted over measured: every source counts once. A constant that too few cases depend on is not searched.

Leave one source out: the constants are found again without a source, which they then predict.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clustersim.report.files import write_text_atomically
from clustersim.scenario import Scenario
from clustersim.shipped import names
from clustersim.simulation import simulate
from clustersim.units import Seconds
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.steps import read_steps, scenario_of
from clustersim.workload.framework import load_framework

FloatArray = NDArray[np.float64]

SUSTAINED: Final = (0.6, 0.8, 1.1)  # of the table
LAUNCHES: Final = (0.0, 20e-6, 40e-6, 50e-6, 60e-6, 70e-6, 90e-6)
SHARES: Final = np.round(np.arange(0.5, 1.2001, 0.01), 2)  # what is searched
LAUNCH_STEPS: Final = np.round(np.arange(0.0, 90.1, 1.0) * 1e-6, 7)
SIBLINGS: Final = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "h200-sxm-141gb": "h100-sxm-80gb",
    "h800-sxm-80gb": "h100-sxm-80gb",
    "b300-sxm-288gb": "b200-sxm-180gb",
}
"""Accelerators of the same chip share a constant; GB200, cooled otherwise, has no dense bf16 cases to speak of."""

ACCELERATORS: Final = ("a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "h100-sxm-96gb")
LIKE: Final = {"h100-sxm-96gb": "h100-sxm-80gb"}
"""Where an accelerator has too few cases, whose constant it takes; the others keep the rate of single kernels."""

LEAST: Final = 4  # cases that a constant needs
VISIBLE: Final = 0.01  # of a step: what depends on a launch less than this does not count
STRIDE_ABOVE: Final = 150  # of a source with more cases, only so many are predicted, evenly spread
FORMATS: Final = ("bf16", "fp16")
ROUNDS: Final = 6  # of the coordinate search, which ends earlier where nothing changes


@dataclass(frozen=True, slots=True)
class Constants:
    """sustained: by accelerator; launch: seconds by framework."""

    sustained: Mapping[str, float]
    launch: Mapping[str, Seconds]


@dataclass(frozen=True, slots=True)
class Tabulated:
    """One case. seconds: [1 / SUSTAINED, LAUNCHES] what is predicted."""

    case_id: str
    source: str
    accelerator: str
    framework: str
    measured: Seconds
    seconds: FloatArray

    def errors(self, sustained: FloatArray, launch: FloatArray) -> FloatArray:
        """Logarithm of predicted over measured, for pairs of constants."""
        slow = _place(1.0 / sustained, 1.0 / np.array(SUSTAINED)[::-1])
        late = _place(launch, np.array(LAUNCHES))
        table = self.seconds[::-1]
        rows = [table[slow[0] + at] * weight[..., None] for at, weight in ((0, 1.0 - slow[1]), (1, slow[1]))]
        row = rows[0] + rows[1]
        seconds = sum(
            np.take_along_axis(row, (late[0] + at)[..., None], axis=-1)[..., 0] * weight
            for at, weight in ((0, 1.0 - late[1]), (1, late[1]))
        )
        logarithms: FloatArray = np.log(seconds / self.measured)
        return logarithms


def _place(values: FloatArray, nodes: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
    """The interval of ascending nodes in which values lie, and where in it (beyond the ends it goes on)."""
    at = np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, len(nodes) - 2)
    return at, (values - nodes[at]) / (nodes[at + 1] - nodes[at])


def thinned(cases: Sequence[Case]) -> list[Case]:
    """Dense cases of quality A and B; of sources with very many, an even choice."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        dense = case.text("experts") in ("", "0", "1") and case.text("precision") in FORMATS
        if dense and case.text("quality") in ("A", "B"):
            groups.setdefault(case.text("source"), []).append(case)
    return [case for group in groups.values() for case in group[:: -(-len(group) // STRIDE_ABOVE)]]


def tabulate(case: Case) -> Tabulated | None:
    """Predict one case on the table; None where it cannot be predicted."""
    try:
        scenario, measured = scenario_of(case), case.number("step_time_s")
    except CannotPredictError:
        return None
    soonest, latest = (_seconds(scenario, SUSTAINED[1], launch) for launch in (LAUNCHES[0], LAUNCHES[-1]))
    launches = LAUNCHES if latest > (1.0 + VISIBLE) * soonest else LAUNCHES[:1] * len(LAUNCHES)
    known = {
        (sustained, late): _seconds(scenario, sustained, late) for sustained in SUSTAINED for late in set(launches)
    }
    seconds = [[known[sustained, late] for late in launches] for sustained in SUSTAINED]
    own = scenario.cluster.accelerator.name
    return Tabulated(
        case.text("case_id"),
        case.text("source"),
        SIBLINGS.get(own, own),
        scenario.framework.name,
        measured,
        np.array(seconds),
    )


def _seconds(scenario: Scenario, sustained: float, launch: Seconds) -> Seconds:
    """The step under other constants."""
    accelerator = scenario.cluster.accelerator
    pace = replace(accelerator.in_training, sustained=sustained)
    cluster = replace(scenario.cluster, accelerator=replace(accelerator, in_training=pace))
    result = simulate(replace(scenario, cluster=cluster, framework=replace(scenario.framework, launch=launch)))
    return float(result.step_times[-1])


def fit(table: Sequence[Tabulated]) -> Constants:
    """The constants with the least macro error, found by turns; deterministic."""
    sustained = dict.fromkeys(ACCELERATORS, 1.0)
    launch = {name: load_framework(name).launch for name in names("frameworks")}
    for _ in range(ROUNDS):
        before = dict(sustained), dict(launch)
        now = Constants(sustained, launch)
        for name in _searched(table, sustained):
            _improve(table, now, sustained, name, SHARES)
        for name in _depended_on(table, launch):
            _improve(table, now, launch, name, LAUNCH_STEPS)
        if before == (sustained, launch):
            break
    for name, other in LIKE.items():
        if name not in _searched(table, sustained):
            sustained[name] = sustained[other]
    return Constants(sustained, launch)


def _searched(table: Sequence[Tabulated], known: Iterable[str]) -> list[str]:
    """Accelerators with enough cases."""
    return [name for name in known if sum(each.accelerator == name for each in table) >= LEAST]


def _depended_on(table: Sequence[Tabulated], known: Iterable[str]) -> list[str]:
    """Frameworks of which enough cases take another time with another launch."""
    moved = [each.framework for each in table if each.seconds[1, -1] > (1.0 + VISIBLE) * each.seconds[1, 0]]
    return [name for name in known if moved.count(name) >= LEAST]


def _improve(
    table: Sequence[Tabulated], now: Constants, searched: dict[str, float], name: str, values: FloatArray
) -> None:
    """Set one constant to the value with the least error of the cases that have it, each weighed by its source."""
    sources = [each.source for each in table]
    loss = np.zeros(len(values))
    for each in table:
        if name not in (each.accelerator, each.framework):
            continue
        sustained = np.full(len(values), now.sustained.get(each.accelerator, 1.0))
        launch = np.full(len(values), now.launch[each.framework])
        pair = (values, launch) if searched is now.sustained else (sustained, values)
        loss += np.abs(each.errors(*pair)) / sources.count(each.source)
    searched[name] = float(values[int(np.argmin(loss))])


@dataclass(frozen=True, slots=True)
class SourceQuality:
    """n: cases; mape, bias: with the constants of all; loo_mape, loo_bias: of constants found without this source."""

    source: str
    n: int
    mape: float
    bias: float
    loo_mape: float
    loo_bias: float


def judged(table: Sequence[Tabulated], found: Constants) -> list[SourceQuality]:
    """Each source under the constants, and under constants that have not seen it."""
    return [_judge(table, source, found) for source in dict.fromkeys(each.source for each in table)]


def _judge(table: Sequence[Tabulated], source: str, found: Constants) -> SourceQuality:
    own = [each for each in table if each.source == source]
    others = fit([each for each in table if each.source != source])
    seen, unseen = _errors(own, found), _errors(own, others)
    return SourceQuality(
        source,
        len(own),
        float(np.abs(seen).mean()),
        float(seen.mean()),
        float(np.abs(unseen).mean()),
        float(unseen.mean()),
    )


def _errors(cases: Sequence[Tabulated], constants: Constants) -> FloatArray:
    """Predicted over measured, less one."""
    pairs = ((each, constants.sustained.get(each.accelerator, 1.0), constants.launch[each.framework]) for each in cases)
    return np.array([np.exp(float(each.errors(np.array([s]), np.array([late]))[0])) - 1.0 for each, s, late in pairs])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the constants and errors as JSON to FILE, or - for stdout"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), metavar="N", help="processes; default: all cores"
    )


def command(options: argparse.Namespace) -> None:
    """Tabulate, fit, and print what was found."""
    cases = thinned(read_steps())
    with ProcessPoolExecutor(options.workers) as pool:
        table = [each for each in pool.map(tabulate, cases, chunksize=4) if each is not None]
    if len(table) < len(cases):
        print(f"{len(cases) - len(table)} of {len(cases)} cases cannot be predicted", file=sys.stderr)
    found = fit(table)
    report(found, judged(table, found), table, options.json)


def report(
    found: Constants, qualities: Sequence[SourceQuality], table: Iterable[Tabulated], target: str | None
) -> None:
    """Print a table, or write JSON."""
    if target is not None:
        content = {**asdict(found), "by_source": [asdict(each) for each in qualities]}
        text = json.dumps(content, indent=2) + "\n"
        if target == "-":
            sys.stdout.write(text)
        else:
            write_text_atomically(target, text)
        return
    counts = [*(each.accelerator for each in table), *(each.framework for each in table)]
    for name, value in sorted(found.sustained.items()):
        print(f"{name:20s} sustained {value:.2f}  ({counts.count(name)} cases)")
    for name, value in found.launch.items():
        print(f"{name:20s} launch {value * 1e6:.0f} us  ({counts.count(name)} cases)")
    print(f"\n{'source':20s} {'cases':>5s} {'MAPE':>7s} {'bias':>7s} {'left out':>9s} {'bias':>7s}")
    for each in qualities:
        errors = f"{each.mape:7.1%} {each.bias:+7.1%} {each.loo_mape:9.1%} {each.loo_bias:+7.1%}"
        print(f"{each.source:20s} {each.n:5d} {errors}")
    means = [np.mean([getattr(each, name) for each in qualities]) for name in ("mape", "bias", "loo_mape", "loo_bias")]
    print(f"{'macro mean':20s} {'':5s} {means[0]:7.1%} {means[1]:+7.1%} {means[2]:9.1%} {means[3]:+7.1%}")
