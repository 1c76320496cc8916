"""Fit of the in-training constants of accelerators and frameworks to published training steps.

Two kinds of constants: an accelerator's arithmetic rate within a step relative to isolated kernels
(`training_derating.sustained_ratio`), and a framework's launch time of a forward and a backward kernel (`host.launch`,
`host.backward_launch`). They minimize the macro average over sources of |log(predicted / measured)|. A
constant that too few cases depend on is not searched. Two more were evaluated, the bandwidth of memory-bound
kernels within a step and the host's time before a pass: each lowered the error by less than a tenth of a
percentage point, and is left out.

Steps that another simulator predicted are no measurements: no constant is fitted to them, and they do not
displace measured cases when cases are subsampled.

Leave-one-publisher-out: the constants are fitted again without the sources of a publisher, which they then
predict. `--out-of-sample FOLDER` writes the resulting errors of every case, to which `fit-prediction-interval`
fits intervals: of dense steps in BF16, and of MoE steps and steps in FP8 and narrower formats, to which nothing
here is fitted (`transferred_steps`). `--low-precision` fits only the rates of these formats
(`low_precision_steps`).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.fit.low_precision_steps import (
    LowPrecisionStep,
    fit_low_precision_rates,
    low_precision_json,
    low_precision_lines,
    tabulate_low_precision,
)
from calibrate.fit.out_of_sample import OutOfSampleStep, out_of_sample_path, write_out_of_sample
from calibrate.fit.step_table import CARRIED_OVER, FITTED_ACCELERATORS, TabulatedStep, host_framework, tabulate_step
from calibrate.fit.transferred_steps import SustainedRates, TransferredStep, evaluate_transferred
from clustersim.common.arrays import FloatArray
from clustersim.common.data_files import list_names
from clustersim.common.files import require_writable, write_text_atomically
from clustersim.common.processes import usable_cpu_count, worker_pool
from clustersim.common.units import Seconds
from clustersim.model.framework_files import load_framework
from clustersim.uncertainty.model_file import DENSE_STEPS
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.cases import ValidationCase
from clustersim.validation.publishers import by_source, publisher_of
from clustersim.validation.steps import read_steps

RATE_GRID: Final = np.round(np.arange(0.5, 1.2001, 0.01), 2)  # search grid
LAUNCH_GRID: Final = np.round(np.arange(0.0, 60.1, 1.0) * 1e-6, 7)
BACKWARD_LAUNCH_GRID: Final = np.round(np.arange(0.0, 150.1, 1.0) * 1e-6, 7)
FALLBACK_ACCELERATORS: Final[Mapping[str, str]] = {"h100-sxm-96gb": "h100-sxm-80gb"}
"""Accelerators with too few cases and the one whose constants they take; others keep those of isolated kernels."""
MIN_CASES: Final = 4  # cases that a constant needs
FULL_WEIGHT_CASES: Final = 5  # number of cases from which a source has full weight
MAX_CASES_PER_SOURCE: Final = 150  # sources with more cases are subsampled to at most this many
CONSTANT_NAMES: Final = ("sustained", "launch", "backward")
MAX_SWEEPS: Final = 12  # of coordinate descent, which stops earlier at convergence


@dataclass(frozen=True, slots=True)
class StepConstants:
    """sustained: rate ratio by accelerator; launch, backward: seconds by framework."""

    sustained: Mapping[str, float]
    launch: Mapping[str, Seconds]
    backward: Mapping[str, Seconds]

    def for_step(self, step: TabulatedStep) -> tuple[float, Seconds, Seconds]:
        """The constants of a step; an accelerator without a fitted rate has that which its file carries over."""
        accelerator = CARRIED_OVER.get(step.accelerator, step.accelerator)
        launch = self.launch[step.framework], self.backward[step.framework]
        return self.sustained.get(accelerator, 1.0), *launch


def subsample_cases(
    cases: Sequence[ValidationCase], max_per_source: int = MAX_CASES_PER_SOURCE
) -> list[ValidationCase]:
    """Measured dense cases of quality A and B; of sources with more than `max_per_source`, every n-th."""
    groups: dict[str, list[ValidationCase]] = {}
    for case in cases:
        if case_uncertainty_model(case) == DENSE_STEPS:
            groups.setdefault(case.text("source"), []).append(case)
    return [case for group in groups.values() for case in group[:: -(-len(group) // max_per_source)]]


def fit_step_constants(steps: Sequence[TabulatedStep]) -> StepConstants:
    """The constants with the least macro-averaged error, by coordinate descent; deterministic.

    Runs with unidentified software are ignored. A source with fewer than `FULL_WEIGHT_CASES` cases has
    proportionally less weight.
    """
    steps = [step for step in steps if step.is_software_identified]
    constants = StepConstants(
        sustained=dict.fromkeys(FITTED_ACCELERATORS, 1.0),
        launch={name: load_framework(name).launch_seconds for name in list_names("frameworks")},
        backward={name: load_framework(name).backward_launch_seconds for name in list_names("frameworks")},
    )
    for _ in range(MAX_SWEEPS):
        previous = asdict(constants)
        for name, candidates in _search_space(steps):
            constants = _coordinate_step(steps, constants, name, candidates)
        if previous == asdict(constants):
            break
    return _with_fallbacks(steps, constants)


_Candidates = Mapping[str, FloatArray]
"""Values of constants that are varied jointly, by name of the constant: [candidates] each."""


def _search_space(steps: Sequence[TabulatedStep]) -> Iterator[tuple[str, _Candidates]]:
    """The constants that enough cases depend on; a host's two launch times jointly."""
    accelerators, hosts = (
        [step.accelerator for step in steps],
        [tabulated_step for tabulated_step in steps if tabulated_step.is_launch_sensitive()],
    )
    for name in FITTED_ACCELERATORS:
        if accelerators.count(name) >= MIN_CASES:
            yield name, {"sustained": RATE_GRID}
    launch, backward = (array.reshape(-1) for array in np.meshgrid(LAUNCH_GRID, BACKWARD_LAUNCH_GRID, indexing="ij"))
    for name in dict.fromkeys(host.framework for host in hosts):
        if sum(framework.framework == name for framework in hosts) >= MIN_CASES:
            yield name, {"launch": launch, "backward": backward}


def _coordinate_step(
    steps: Sequence[TabulatedStep], current: StepConstants, name: str, candidates: _Candidates
) -> StepConstants:
    """The constants with the best candidate of one accelerator or framework, by the weighted error of its steps."""
    sources, candidate_count = [step.source for step in steps], len(next(iter(candidates.values())))
    loss = np.zeros(candidate_count)
    for tabulated_step in steps:
        if name in (tabulated_step.accelerator, tabulated_step.framework):
            constants = dict(zip(CONSTANT_NAMES, current.for_step(tabulated_step), strict=True))
            values = [candidates.get(kind, np.full(candidate_count, constants[kind])) for kind in CONSTANT_NAMES]
            loss += np.abs(tabulated_step.log_errors(*values)) / max(
                sources.count(tabulated_step.source), FULL_WEIGHT_CASES
            )
    best = int(np.argmin(loss))
    return replace(
        current,
        **{kind: {**getattr(current, kind), name: float(candidate[best])} for kind, candidate in candidates.items()},
    )


def _with_fallbacks(steps: Sequence[TabulatedStep], constants: StepConstants) -> StepConstants:
    """Copy constants of siblings to accelerators with too few cases, and those of their hosts to frameworks."""
    searched_names = [name for name, _ in _search_space(steps)]
    fallbacks = {
        name: constants.sustained[source_name]
        for name, source_name in FALLBACK_ACCELERATORS.items()
        if name not in searched_names
    }
    launch, backward = (
        {name: constant[host_framework(name)] for name in constant}
        for constant in (constants.launch, constants.backward)
    )
    return StepConstants({**constants.sustained, **fallbacks}, launch, backward)


@dataclass(frozen=True, slots=True)
class SourceQuality:
    """n: cases; mape, bias: with the constants of all sources; loo_mape, loo_bias: with its publisher held out."""

    source: str
    n: int
    mape: float
    bias: float
    loo_mape: float
    loo_bias: float


def fit_publisher_held_out(steps: Sequence[TabulatedStep]) -> dict[str, StepConstants]:
    """By source, the constants fitted without its publisher."""
    return by_source(
        (step.source for step in steps),
        lambda publisher: fit_step_constants([step for step in steps if publisher_of(step.source) != publisher]),
    )


def out_of_sample_steps(
    steps: Sequence[TabulatedStep], held_out_constants: Mapping[str, StepConstants]
) -> list[OutOfSampleStep]:
    """Out-of-sample errors of every step, by the constants fitted without its publisher."""
    return [
        prediction
        for step in steps
        for error in relative_errors([step], held_out_constants[step.source])
        for prediction in OutOfSampleStep.predictions(
            step.case_id, step.source, -float(np.log1p(error)), step.features, step.unstated
        )
    ]


def step_quality(
    steps: Sequence[TabulatedStep], constants: StepConstants, held_out_constants: Mapping[str, StepConstants]
) -> list[SourceQuality]:
    """Errors of each source, in sample and with its publisher held out."""
    groups = {
        source: source_steps
        for source in held_out_constants
        if (source_steps := [step for step in steps if step.source == source])
    }
    return [
        _evaluate_source(source_steps, constants, held_out_constants[source]) for source, source_steps in groups.items()
    ]


def _evaluate_source(
    steps: Sequence[TabulatedStep], constants: StepConstants, held_out_constants: StepConstants
) -> SourceQuality:
    return _source_quality(
        steps[0].source, relative_errors(steps, constants), relative_errors(steps, held_out_constants)
    )


def _source_quality(source: str, in_sample: FloatArray, out_of_sample: FloatArray) -> SourceQuality:
    means = (np.abs(in_sample).mean(), in_sample.mean(), np.abs(out_of_sample).mean(), out_of_sample.mean())
    return SourceQuality(source, len(in_sample), *map(float, means))


def transfer_quality(steps: Sequence[TransferredStep]) -> list[SourceQuality]:
    """Errors of each source's transferred steps, in sample and with its publisher held out."""
    sources = dict.fromkeys(step.source for step in steps)
    groups = {source: [step for step in steps if step.source == source] for source in sources}
    return [
        _source_quality(
            source,
            np.array([step.in_sample_error for step in source_steps]),
            np.array([step.out_of_sample_error for step in source_steps]),
        )
        for source, source_steps in groups.items()
    ]


def relative_errors(steps: Sequence[TabulatedStep], constants: StepConstants) -> FloatArray:
    """Predicted over measured minus 1: [steps]."""
    logarithms = [step.log_errors(*(np.array([value]) for value in constants.for_step(step)))[0] for step in steps]
    ratios: FloatArray = np.expm1(np.array(logarithms))
    return ratios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("--json", metavar="FILE", help="write the constants and errors as JSON; - is stdout")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes; default: one per usable CPU")
    parser.add_argument(
        "--max-cases", type=int, default=MAX_CASES_PER_SOURCE, metavar="N",
        help=f"maximum number of cases per source, subsampled evenly; default: {MAX_CASES_PER_SOURCE}",
    )  # fmt: skip
    parser.add_argument(
        "--out-of-sample",
        metavar="FOLDER",
        help="write the errors of each case (leave-one-publisher-out) to FOLDER, one CSV per class of steps",
    )
    parser.add_argument(
        "--low-precision",
        action="store_true",
        help="fit only the rates of FP8 and narrower formats",
    )


def command(options: argparse.Namespace) -> None:
    """Tabulate the published steps, fit, and print the constants and their errors."""
    published, workers = read_steps(), options.workers or usable_cpu_count()
    if options.out_of_sample is not None:
        require_writable(out_of_sample_path(DENSE_STEPS, Path(options.out_of_sample)))
    if options.low_precision:
        with worker_pool(workers) as pool:
            steps = tabulate_low_precision(published, pool)
        _write_output(options.json, low_precision_json(steps), low_precision_lines(steps))
        return
    cases = subsample_cases(published, options.max_cases)
    with worker_pool(workers) as pool:
        tabulated_steps = [
            tabulated for tabulated in pool.map(tabulate_step, cases, chunksize=4) if tabulated is not None
        ]
        if len(tabulated_steps) < len(cases):
            print(f"{len(cases) - len(tabulated_steps)} of {len(cases)} cases cannot be predicted", file=sys.stderr)
        constants, held_out_constants = fit_step_constants(tabulated_steps), fit_publisher_held_out(tabulated_steps)
        transferred = evaluate_transferred(
            published, *_sustained_rates(constants, held_out_constants, tabulate_low_precision(published, pool)), pool
        )
    qualities = {DENSE_STEPS: step_quality(tabulated_steps, constants, held_out_constants)}
    qualities |= {model_name: transfer_quality(steps) for model_name, steps in transferred.items()}
    if options.out_of_sample is not None:
        errors_by_model = {DENSE_STEPS: out_of_sample_steps(tabulated_steps, held_out_constants)}
        errors_by_model |= {
            model_name: [prediction for step in steps for prediction in step.out_of_sample]
            for model_name, steps in transferred.items()
        }
        for model_name, errors in errors_by_model.items():
            write_out_of_sample(errors, out_of_sample_path(model_name, Path(options.out_of_sample)))
    by_source = {
        model_name: [asdict(source_quality) for source_quality in source_qualities]
        for model_name, source_qualities in qualities.items()
    }
    text = json.dumps({**asdict(constants), "by_source": by_source}, indent=2) + "\n"
    lines = [
        line
        for model_name, source_qualities in qualities.items()
        for line in ("", model_name, *_quality_table(source_qualities))
    ]
    _write_output(options.json, text, [*_constant_lines(constants, tabulated_steps), *lines])


def _sustained_rates(
    constants: StepConstants,
    held_out_constants: Mapping[str, StepConstants],
    low_precision_steps: Sequence[LowPrecisionStep],
) -> tuple[SustainedRates, dict[str, SustainedRates]]:
    """Rates fitted to all steps, and by source those fitted without its publisher."""
    low_precision = by_source(
        [*held_out_constants, *(step.source for step in low_precision_steps)],
        lambda publisher: fit_low_precision_rates(
            [step for step in low_precision_steps if publisher_of(step.source) != publisher]
        ),
    )
    held_out_rates = {
        source: SustainedRates(held_out_constants.get(source, constants).sustained, rates)
        for source, rates in low_precision.items()
    }
    return SustainedRates(constants.sustained, fit_low_precision_rates(low_precision_steps)), held_out_rates


def _write_output(path: str | None, text: str, lines: Sequence[str]) -> None:
    """Print lines, or write text to a file (- for stdout)."""
    if path is None:
        print("\n".join(lines))
    elif path == "-":
        sys.stdout.write(text)
    else:
        write_text_atomically(path, text)


def _constant_lines(constants: StepConstants, steps: Sequence[TabulatedStep]) -> Iterator[str]:
    for name in sorted(constants.sustained):
        cases = sum(step.accelerator == name for step in steps)
        yield f"{name:20s} sustained {constants.sustained[name]:.2f}  ({cases} cases)"
    for name, launch in constants.launch.items():
        cases = sum(step.framework == name and step.is_launch_sensitive() for step in steps)
        launch_text = f"launch {launch * 1e6:.0f} us, backward {constants.backward[name] * 1e6:.0f} us"
        yield f"{name:20s} {launch_text}  ({cases} cases depend on them)"


def _quality_table(qualities: Sequence[SourceQuality]) -> Iterator[str]:
    yield f"{'source':20s} {'cases':>5s} {'MAPE':>7s} {'bias':>7s} {'held out':>9s} {'bias':>7s}"
    for quality in qualities:
        figures = f"{quality.mape:7.1%} {quality.bias:+7.1%} {quality.loo_mape:9.1%} {quality.loo_bias:+7.1%}"
        yield f"{quality.source:20s} {quality.n:5d} {figures}"
    columns = ("mape", "bias", "loo_mape", "loo_bias")
    mape, bias, loo_mape, loo_bias = (np.mean([getattr(quality, name) for quality in qualities]) for name in columns)
    yield f"{'macro mean':20s} {'':5s} {mape:7.1%} {bias:+7.1%} {loo_mape:9.1%} {loo_bias:+7.1%}"
