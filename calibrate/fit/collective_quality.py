"""How well does the model of collectives predict published benchmarks, and which constants fit them best?

The constants that are fitted are those of `collective_constants`; everything else in `topologies/libraries/nccl.yaml`
is NCCL's own, a datasheet's, or read off one table that it names. Errors are also given left out by source: each source
as constants predict it that were fitted to all other sources, which is what a new table may expect. Tables with what a
framework does on the host before each call take no part, nor in launches those whose process drives several GPUs; they
are judged all the same.

    python -m calibrate fit-collectives            print the errors with the shipped constants, and left out by source
    python -m calibrate fit-collectives --fit      search the constants; print them and the errors with them

Source of the measurements: clustersim/validation/published/collectives.csv, one row per message size with its source.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.fit.collective_constants import Fit, fit
from calibrate.fit.fit_quality import Quality
from calibrate.fit.published_collectives import Benchmark, read_benchmarks
from clustersim.collectives.library import Library, load_library
from clustersim.collectives.tuner import VariantCosts, select_variants
from clustersim.validation.error_statistics import grouped


@dataclass(frozen=True, slots=True)
class Errors:
    """Predicted over measured for each size of a benchmark."""

    benchmark: Benchmark
    ratios: tuple[float, ...]
    algorithms: tuple[str, ...]

    def mape(self, *, large: bool) -> float:
        """Mean absolute percentage error of the sizes from 1 MiB on, or below; nan if there are none."""
        errors = np.abs(np.array(self.ratios)[self.benchmark.large == large] - 1) * 100
        return float(errors.mean()) if errors.size else float("nan")


@dataclass(frozen=True, slots=True)
class Judged:
    """A table as constants predict it that were fitted to all tables, and to those of all other sources."""

    errors: Errors
    left_out: Errors

    @property
    def table(self) -> Benchmark:
        """What was measured."""
        return self.errors.benchmark


def compare(benchmark: Benchmark, choices: VariantCosts) -> Errors:
    """Predict every size of a benchmark; the slowest group counts."""
    predicted = [select_variants(choices, size) for size in benchmark.sizes]
    ratios = benchmark.ratios(np.array([selection.seconds.max() for selection in predicted]))
    return Errors(benchmark, tuple(ratios.tolist()), tuple(item.slowest_variant.name for item in predicted))


def survey(library: Library) -> dict[Benchmark, VariantCosts]:
    """Cost the library's offers for every published table that it is about."""
    tables = (table for table in read_benchmarks() if table.place.machine.library == library.name)
    return {table: table.place.survey(library) for table in tables}


def judge_tables(library: Library, fits: Fit) -> list[Judged]:
    """Every table with a library's constants, and with those that fit all sources but its own best."""
    tables = survey(library)
    others = {source: fits.best(source) for source in dict.fromkeys(table.source for table in tables)}
    return [_judged(table, choices, others[table.source]) for table, choices in tables.items()]


def _judged(table: Benchmark, choices: VariantCosts, others: Library) -> Judged:
    """Networks' constants are in what was surveyed, so the others' survey is their own."""
    return Judged(compare(table, choices), compare(table, table.place.survey(others)))


def judge(library: Library) -> list[Quality]:
    """How well the library predicts collectives of each GPU, and with constants fitted to all other sources."""
    judged = judge_tables(library, fit(survey(library), library))
    kinds = sorted({item.table.place.kind for item in judged})
    return [_quality(kind, judged, large=large) for kind in kinds for large in (True, False)]


def _quality(kind: str, judged: Sequence[Judged], *, large: bool) -> Quality:
    mine = [item for item in judged if item.table.place.kind == kind]
    return Quality(
        accelerator=kind,
        kind=f"collectives {'>=' if large else '<'} 1 MiB",
        n=sum(int((element.table.large == large).sum()) for element in mine),
        mape=_mape([entry.errors for entry in mine], large=large) / 100.0,
        loo_mape=_mape([each.left_out for each in mine], large=large) / 100.0,
    )


def macro(judged: Iterable[Judged], *, large: bool, left_out: bool) -> float:
    """Mean over sources of the mean over a source's tables; percent."""
    sources = grouped(judged, lambda each: each.table.source).values()
    each = np.array([_mape([_side(one, left_out=left_out) for one in source], large=large) for source in sources])
    return float(np.nanmean(each))


def _side(judged: Judged, *, left_out: bool) -> Errors:
    return judged.left_out if left_out else judged.errors


def report(judged: Sequence[Judged]) -> str:
    """One line per benchmark, one per GPU type, one per source, and the means over sources."""
    lines = [f"{'':<64}{'':<4}{'fitted':>16}  {'left out by source':>18}"]
    lines += [f"{'source':<19}{'gpu':<14}{'gpus':>6} {'network':<11}{'collective':<18}{_HEAD}  {_HEAD}{'sizes':>6}"]
    lines += [f"{_named(item.errors)}{_both([item])}{len(item.errors.ratios):>6}" for item in judged]
    lines += _grouped(judged, "mean over tables of", lambda each: each.table.place.kind)
    lines += _grouped(judged, "mean over tables of", lambda each: each.table.source)
    means = [
        f"{macro(judged, large=large, left_out=left):>6.1f} %" for left in (False, True) for large in (True, False)
    ]
    lines += [f"{'mean over sources':<68}{means[0]}{means[1]}  {means[2]}{means[3]}"]
    lines += ["* not fitted: with what a framework does on the host before each call"]
    return "\n".join(lines)


_HEAD = f"{'>= 1 MiB':>8}{'< 1 MiB':>8}"


def _grouped(judged: Iterable[Judged], words: str, of: Callable[[Judged], str]) -> list[str]:
    return [f"{words + ' ' + name:<68}{_both(group)}" for name, group in grouped(judged, of).items()]


def _named(errors: Errors) -> str:
    known = errors.benchmark.place
    mark = " " if errors.benchmark.fitted else "*"
    what = f"{known.collective.value}{' ' + known.algorithm if known.algorithm else ''}"
    network = known.network.value if errors.benchmark.between else "-"
    return f"{errors.benchmark.source + mark:<19}{known.gpu:<14}{known.gpus:>6} {network:<11}{what:<18}"[:68].ljust(68)


def _both(judged: Sequence[Judged]) -> str:
    sides = ([_side(item, left_out=left) for item in judged] for left in (False, True))
    return "  ".join(_percent(side) for side in sides)


def _percent(errors: Sequence[Errors]) -> str:
    return f"{_mape(errors, large=True):>6.1f} %{_mape(errors, large=False):>6.1f} %"


def _mape(errors: Sequence[Errors], *, large: bool) -> float:
    """Mean over tables that have such sizes; nan if none has."""
    each = np.array([known.mape(large=large) for known in errors])
    return float(np.nanmean(each)) if np.isfinite(each).any() else float("nan")


def _constants(library: Library) -> str:
    pipeline = library.pipeline
    known = library.nvlink_by_technology.items()
    launches = (
        f"{make.value} {nvlink_constants.launch_seconds * 1e6:.0f} us"
        for make, nvlink_constants in known
        if make and nvlink_constants.launch_seconds is not None
    )
    networks = (
        f"{make.value} {network_constants.message_latency * 1e6:.0f} us"
        for make, network_constants in library.network_by_technology.items()
        if make
    )
    cut = f"inside {pipeline.intra_domain_fraction:.1f}, between {pipeline.inter_domain_fraction:.1f}, chunk {pipeline.max_chunk_bytes / 1e6:.0f} MB"
    return f"launch {', '.join(launches)}; latency {', '.join(networks)}; pipeline {cut}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("--fit", action="store_true", help="search the fitted constants first, and print them")
    parser.add_argument("--detail", action="store_true", help="print every size")


def command(options: argparse.Namespace) -> None:
    """Print how predicted and published times compare."""
    library = load_library("nccl")
    fits = fit(survey(library), library)
    if options.fit:
        library = fits.best()
        print(f"fitted: {_constants(library)}")
    judged = judge_tables(library, fits)
    if options.detail:
        print("\n".join(_detail(item.errors) for item in judged))
    print(report(judged))


def _detail(errors: Errors) -> str:
    """Every size of one benchmark."""
    known = errors.benchmark
    rows = zip(known.sizes, known.measured, errors.ratios, errors.algorithms, strict=True)
    lines = [f"{size:>14.0f} B {time * 1e6:>10.1f} us x {ratio:.2f} {name}" for size, time, ratio, name in rows]
    place = known.place
    return "\n".join([f"{known.source} {place.gpu} {place.gpus} {place.collective.value}", *lines])
