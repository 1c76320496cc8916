"""Validation of the collective cost model against published benchmarks, and fit of its constants.

The fitted constants are those of `collective_constants`; everything else in `topologies/libraries/nccl.yaml`
is from NCCL itself, a datasheet, or one table that the file names. Errors are also given by
leave-one-source-out cross-validation: each source is predicted with constants fitted to all others, which is
the error to expect for a new table. Tables that include host work of a framework before each call are
excluded from the fit, and tables whose process drives several GPUs from the fit of launch overheads; their
errors are reported all the same.

    python -m calibrate fit-collectives            print the errors with the packaged constants
    python -m calibrate fit-collectives --fit      search the constants; print them and the errors with them

Source of the measurements: clustersim/validation/published/collectives.csv, one row per message size with
its source.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.fit.collective_constants import CollectiveConstantsFit, fit_collective_constants
from calibrate.fit.fit_quality import FitQuality
from calibrate.fit.published_collectives import BenchmarkTable, read_benchmarks
from clustersim.collectives.library import Library
from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import VariantCosts, select_variants
from clustersim.validation.error_statistics import group_by


@dataclass(frozen=True, slots=True)
class BenchmarkErrors:
    """Ratio of predicted to measured time for each size of a benchmark, and the selected algorithm."""

    table: BenchmarkTable
    ratios: tuple[float, ...]
    algorithms: tuple[str, ...]

    def mape(self, *, large: bool) -> float:
        """Mean absolute percentage error of the sizes from 1 MiB (large) or below; nan if there are none."""
        errors = np.abs(np.array(self.ratios)[self.table.is_large == large] - 1) * 100
        return float(errors.mean()) if errors.size else float("nan")


@dataclass(frozen=True, slots=True)
class BenchmarkEvaluation:
    """Errors of a benchmark with constants fitted to all sources, and to all sources but its own."""

    in_sample: BenchmarkErrors
    out_of_sample: BenchmarkErrors

    @property
    def table(self) -> BenchmarkTable:
        """The measured benchmark."""
        return self.in_sample.table


def compare_benchmark(table: BenchmarkTable, variant_costs: VariantCosts) -> BenchmarkErrors:
    """Predict every size of a benchmark; the slowest group determines the time."""
    selections = [select_variants(variant_costs, size) for size in table.sizes]
    ratios = table.ratios(np.array([selection.seconds.max() for selection in selections]))
    return BenchmarkErrors(
        table, tuple(ratios.tolist()), tuple(selection.slowest_variant.name for selection in selections)
    )


def cost_benchmarks(library: Library) -> dict[BenchmarkTable, VariantCosts]:
    """Costs of the library's algorithm variants on every published benchmark of that library."""
    tables = (table for table in read_benchmarks() if table.benchmark.link_rates.library == library.name)
    return {table: table.benchmark.evaluate_variants(library) for table in tables}


def evaluate_benchmarks(library: Library, fits: CollectiveConstantsFit) -> list[BenchmarkEvaluation]:
    """Evaluate every benchmark in sample and with its source held out."""
    tables = cost_benchmarks(library)
    held_out_libraries = {
        source: fits.best_library(source) for source in dict.fromkeys(table.source for table in tables)
    }
    return [_evaluate(table, choices, held_out_libraries[table.source]) for table, choices in tables.items()]


def _evaluate(table: BenchmarkTable, variant_costs: VariantCosts, held_out_library: Library) -> BenchmarkEvaluation:
    """Network constants are part of the variant costs, so they are evaluated again for the held-out library."""
    return BenchmarkEvaluation(
        compare_benchmark(table, variant_costs),
        compare_benchmark(table, table.benchmark.evaluate_variants(held_out_library)),
    )


def collective_fit_quality(library: Library) -> list[FitQuality]:
    """Prediction error of the library for each GPU, in sample and by leave-one-source-out."""
    evaluations = evaluate_benchmarks(library, fit_collective_constants(cost_benchmarks(library), library))
    kinds = sorted({evaluation.table.benchmark.gpu_family for evaluation in evaluations})
    return [_gpu_quality(kind, evaluations, large=large) for kind in kinds for large in (True, False)]


def _gpu_quality(kind: str, evaluations: Sequence[BenchmarkEvaluation], *, large: bool) -> FitQuality:
    selected = [evaluation for evaluation in evaluations if evaluation.table.benchmark.gpu_family == kind]
    return FitQuality(
        accelerator=kind,
        kind=f"collectives {'>=' if large else '<'} 1 MiB",
        n=sum(int((evaluation.table.is_large == large).sum()) for evaluation in selected),
        mape=_mean_mape([evaluation.in_sample for evaluation in selected], large=large) / 100.0,
        loo_mape=_mean_mape([evaluation.out_of_sample for evaluation in selected], large=large) / 100.0,
    )


def macro_mape(evaluations: Iterable[BenchmarkEvaluation], *, large: bool, out_of_sample: bool) -> float:
    """Macro average over sources of the mean over a source's tables, in percent."""
    sources = group_by(evaluations, lambda source_mapes: source_mapes.table.source).values()
    source_mapes = np.array(
        [
            _mean_mape([_select_errors(evaluation, out_of_sample=out_of_sample) for evaluation in source], large=large)
            for source in sources
        ]
    )
    return float(np.nanmean(source_mapes))


def _select_errors(evaluation: BenchmarkEvaluation, *, out_of_sample: bool) -> BenchmarkErrors:
    return evaluation.out_of_sample if out_of_sample else evaluation.in_sample


def format_report(evaluations: Sequence[BenchmarkEvaluation]) -> str:
    """One line per benchmark, per GPU type and per source, and the macro averages."""
    lines = [f"{'':<64}{'':<4}{'fitted':>16}  {'held-out source':>18}"]
    lines += [
        f"{'source':<19}{'gpu':<14}{'gpus':>6} {'network':<11}{'collective':<18}{_SIZE_COLUMNS}  "
        f"{_SIZE_COLUMNS}{'sizes':>6}"
    ]
    lines += [
        f"{_benchmark_label(evaluation.in_sample)}{_error_columns([evaluation])}{len(evaluation.in_sample.ratios):>6}"
        for evaluation in evaluations
    ]
    lines += _group_lines(evaluations, "mean over tables of", lambda evaluation: evaluation.table.benchmark.gpu_family)
    lines += _group_lines(evaluations, "mean over tables of", lambda evaluation: evaluation.table.source)
    means = [
        f"{macro_mape(evaluations, large=large, out_of_sample=out_of_sample):>6.1f} %"
        for out_of_sample in (False, True)
        for large in (True, False)
    ]
    lines += [f"{'mean over sources':<68}{means[0]}{means[1]}  {means[2]}{means[3]}"]
    lines += ["* not fitted: with what a framework does on the host before each call"]
    return "\n".join(lines)


_SIZE_COLUMNS = f"{'>= 1 MiB':>8}{'< 1 MiB':>8}"


def _group_lines(
    evaluations: Iterable[BenchmarkEvaluation], label: str, key: Callable[[BenchmarkEvaluation], str]
) -> list[str]:
    return [f"{label + ' ' + name:<68}{_error_columns(group)}" for name, group in group_by(evaluations, key).items()]


def _benchmark_label(errors: BenchmarkErrors) -> str:
    benchmark = errors.table.benchmark
    footnote = " " if errors.table.is_fitted else "*"
    collective = f"{benchmark.collective.value}{' ' + benchmark.algorithm if benchmark.algorithm else ''}"
    network = benchmark.network_technology.value if errors.table.crosses_network else "-"
    return (
        f"{errors.table.source + footnote:<19}{benchmark.gpu:<14}{benchmark.gpu_count:>6} {network:<11}{collective:<18}"
    )[:68].ljust(68)


def _error_columns(evaluations: Sequence[BenchmarkEvaluation]) -> str:
    columns = (
        [_select_errors(evaluation, out_of_sample=out_of_sample) for evaluation in evaluations]
        for out_of_sample in (False, True)
    )
    return "  ".join(_format_mapes(errors) for errors in columns)


def _format_mapes(errors: Sequence[BenchmarkErrors]) -> str:
    return f"{_mean_mape(errors, large=True):>6.1f} %{_mean_mape(errors, large=False):>6.1f} %"


def _mean_mape(errors: Sequence[BenchmarkErrors], *, large: bool) -> float:
    """Mean over the tables that have such sizes; nan if none has."""
    mapes = np.array([benchmark_errors.mape(large=large) for benchmark_errors in errors])
    return float(np.nanmean(mapes)) if np.isfinite(mapes).any() else float("nan")


def _format_constants(library: Library) -> str:
    pipeline = library.pipeline
    constants_by_technology = library.nvlink_by_technology.items()
    launches = (
        f"{technology.value} {constants.launch_seconds * 1e6:.0f} us"
        for technology, constants in constants_by_technology
        if technology and constants.launch_seconds is not None
    )
    networks = (
        f"{technology.value} {constants.message_latency * 1e6:.0f} us"
        for technology, constants in library.network_by_technology.items()
        if technology
    )
    chunking = (
        f"inside {pipeline.intra_domain_fraction:.1f}, between {pipeline.inter_domain_fraction:.1f}, chunk "
        f"{pipeline.max_chunk_bytes / 1e6:.0f} MB"
    )
    return f"launch {', '.join(launches)}; latency {', '.join(networks)}; pipeline {chunking}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("--fit", action="store_true", help="fit the constants first, and print them")
    parser.add_argument("--detail", action="store_true", help="print the errors of every payload size")


def command(options: argparse.Namespace) -> None:
    """Print predicted against published times."""
    library = load_library("nccl")
    fits = fit_collective_constants(cost_benchmarks(library), library)
    if options.fit:
        library = fits.best_library()
        print(f"fitted: {_format_constants(library)}")
    evaluations = evaluate_benchmarks(library, fits)
    if options.detail:
        print("\n".join(_format_sizes(evaluation.in_sample) for evaluation in evaluations))
    print(format_report(evaluations))


def _format_sizes(errors: BenchmarkErrors) -> str:
    """Every size of one benchmark."""
    table = errors.table
    sizes = zip(table.sizes, table.measured_seconds, errors.ratios, errors.algorithms, strict=True)
    lines = [f"{size:>14.0f} B {time * 1e6:>10.1f} us x {ratio:.2f} {name}" for size, time, ratio, name in sizes]
    benchmark = table.benchmark
    return "\n".join([f"{table.source} {benchmark.gpu} {benchmark.gpu_count} {benchmark.collective.value}", *lines])
