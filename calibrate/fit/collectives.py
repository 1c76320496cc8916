"""How well does the model of collectives predict published benchmarks, and which constants fit them best?

Constants of the library that are fitted: what a collective's launch adds, for each generation of GPUs, to sizes below
1 MiB (what nccl-tests measures beyond NCCL's own latencies differs between them, and their hosts); and, for all, the
share of a payload that is one chunk, and the largest chunk, to sizes from 1 MiB on. They are of a grid, those with the
least mean over sources of the mean over a source's tables of |log(predicted / measured)|. Two kinds of tables do not
take part, but are judged all the same: those over AWS EFA, another network, whose latency is its plugin's, and those
with what a framework does on the host before each call. Everything else in `topologies/libraries/nccl.yaml` is NCCL's
own or a datasheet's.

    python -m calibrate fit-collectives            print the errors with the shipped constants
    python -m calibrate fit-collectives --fit      search the constants; print them, the errors with them, and the
                                                   errors of each table with constants fitted to all other tables

Source of the measurements: clustersim/validation/published/collectives.csv, one row per message size with its source.
"""

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.published_collectives import Benchmark, read_benchmarks
from calibrate.fit.quality import Quality
from clustersim.arrays import FloatArray, IntArray
from clustersim.collectives.choose import Choices, choose, costs
from clustersim.collectives.library import Library, Pipeline, load_library
from clustersim.hardware.technology import Technology
from clustersim.units import Seconds

_FRACTIONS: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
_CHUNKS: Final = (4e6, 8e6, 12e6, 16e6, 20e6)
PIPELINES: Final = tuple(itertools.starmap(Pipeline, itertools.product(_FRACTIONS, _CHUNKS)))
LAUNCHES: Final[Sequence[Seconds]] = tuple(each * 1e-6 for each in range(31))


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


def compare(benchmark: Benchmark, choices: Choices) -> Errors:
    """Predict every size of a benchmark; the slowest group counts."""
    predicted = [choose(choices, size) for size in benchmark.sizes]
    ratios = benchmark.ratios(np.array([each.seconds.max() for each in predicted]))
    return Errors(benchmark, tuple(ratios.tolist()), tuple(each.offer.name for each in predicted))


@dataclass(frozen=True)
class Fit:
    """Misfits of tables with every candidate: below 1 MiB and from there on, each [tables, pipelines, launches].

    tables: those that take part; generations: of each. Misfits are nan where a table has no such sizes.
    """

    library: Library
    tables: tuple[Benchmark, ...]
    generations: tuple[Technology, ...]
    small: FloatArray
    large: FloatArray

    def best(self, without: Benchmark | None = None) -> Library:
        """The library with the constants that fit all tables but one best."""
        kept = [place for place, table in enumerate(self.tables) if table is not without]
        launches = {name: self._launches(name, kept) for name in dict.fromkeys(self.generations)}
        pipelines = np.arange(len(PIPELINES))
        at_best = [self.large[place][pipelines, launches[self.generations[place]]] for place in kept]
        best = int(self._mean(kept, np.array(at_best)).argmin())
        found = {name: LAUNCHES[int(each[best])] for name, each in launches.items()}
        return _with(self.library, PIPELINES[best], found)

    def _launches(self, generation: Technology, kept: Sequence[int]) -> IntArray:
        """Number of the best launch time of a generation with each pipeline, by sizes below 1 MiB."""
        mine = [place for place in kept if self.generations[place] == generation]
        best: IntArray = self._mean(mine, self.small[mine]).argmin(axis=1)
        return best

    def _mean(self, places: Sequence[int], misfits: FloatArray) -> FloatArray:
        """Over sources, of the means over a source's tables that have such sizes."""
        known = [number for number in range(len(places)) if np.isfinite(misfits[number]).all()]
        sources = [self.tables[places[number]].source for number in known]
        weights = np.array([1.0 / sources.count(source) for source in sources])
        mean: FloatArray = np.tensordot(weights, misfits[known], axes=1)
        return mean


def _with(library: Library, pipeline: Pipeline, launches: Mapping[Technology | None, Seconds]) -> Library:
    known = library.generations.items()
    generations = {make: replace(each, launch=launches.get(make, each.launch)) for make, each in known}
    return replace(library, pipeline=pipeline, generations=generations)


def fit(surveys: Mapping[Benchmark, Choices], library: Library) -> Fit:
    """Judge every candidate by every table that takes part."""
    tables = tuple(table for table in surveys if table.fitted)
    misfits = np.array([_misfits(table, surveys[table], library) for table in tables])
    generations = tuple(table.place.generation for table in tables)
    return Fit(library, tables, generations, small=misfits[:, 0], large=misfits[:, 1])


def _misfits(table: Benchmark, choices: Choices, library: Library) -> FloatArray:
    """Mean |log(predicted / measured)| with each candidate, of small and of large sizes: [2, pipelines, launches]."""
    generation = table.place.generation
    libraries = [_with(library, pipeline, {generation: 0.0}) for pipeline in PIPELINES]
    misfits = np.array([_logarithms(table, replace(choices, library=each)) for each in libraries])
    parts = (misfits[..., ~table.large], misfits[..., table.large])
    return np.array([part.mean(axis=-1) if part.size else np.full(part.shape[:-1], np.nan) for part in parts])


def _logarithms(table: Benchmark, choices: Choices) -> FloatArray:
    """|log(predicted / measured)| with every launch time: [launches, sizes]."""
    launched = np.array([offer.launched for offer in choices.offers])
    extra = np.multiply.outer(LAUNCHES, launched)[:, :, None]
    costed = (costs(choices, size).seconds for size in table.sizes)
    seconds = np.stack([(extra + each).min(axis=1).max(axis=1) for each in costed], axis=1)
    misfits: FloatArray = np.abs(np.log(table.ratios(seconds)))
    return misfits


def survey(library: Library) -> dict[Benchmark, Choices]:
    """Cost the library's offers for every published table."""
    return {benchmark: benchmark.place.survey(library) for benchmark in read_benchmarks()}


def judge(library: Library) -> list[Quality]:
    """How well the library predicts collectives of each GPU, and with constants fitted to all other tables."""
    surveys = survey(library)
    fits = fit(surveys, library)
    errors = [compare(table, choices) for table, choices in surveys.items()]
    left_out = [_left_out(table, choices, fits) for table, choices in surveys.items()]
    kinds = sorted({each.benchmark.place.kind for each in errors})
    parts = [(kind, large) for kind in kinds for large in (True, False)]
    return [_quality(kind, errors, left_out, large=large) for kind, large in parts]


def _left_out(table: Benchmark, choices: Choices, fits: Fit) -> Errors:
    """A table as constants predict it that were fitted to all others."""
    return compare(table, replace(choices, library=fits.best(without=table)))


def _quality(kind: str, errors: Sequence[Errors], left_out: Sequence[Errors], *, large: bool) -> Quality:
    mine = [each for each in errors if each.benchmark.place.kind == kind]
    others = [each for each in left_out if each.benchmark.place.kind == kind]
    return Quality(
        accelerator=kind,
        kind=f"collectives {'>=' if large else '<'} 1 MiB",
        n=sum(int((each.benchmark.large == large).sum()) for each in mine),
        mape=_mape(mine, large=large) / 100.0,
        loo_mape=_mape(others, large=large) / 100.0,
    )


def report(errors: Iterable[Errors]) -> str:
    """One line per benchmark and one per GPU type."""
    lines = [f"{'source':<18}{'gpu':<15}{'gpus':>6} {'collective':<22}{'>= 1 MiB':>8}{'< 1 MiB':>8}{'sizes':>6}"]
    by_gpu: dict[str, list[Errors]] = {}
    for each in errors:
        lines.append(f"{_named(each)}{_percent([each])}{len(each.ratios):>6}")
        by_gpu.setdefault(each.benchmark.place.kind, []).append(each)
    lines += [f"mean over tables  {gpu:<44}{_percent(members)}" for gpu, members in by_gpu.items()]
    lines += ["* not fitted: over AWS EFA, or with what a framework does on the host before each call"]
    return "\n".join(lines)


def _named(errors: Errors) -> str:
    known = errors.benchmark.place
    mark = " " if errors.benchmark.fitted else "*"
    what = f"{known.collective.value}{' ' + known.algorithm if known.algorithm else ''}"
    return f"{errors.benchmark.source + mark:<18}{known.gpu:<15}{known.gpus:>6} {what:<22}"


def _percent(errors: Sequence[Errors]) -> str:
    return f"{_mape(errors, large=True):>6.1f} %{_mape(errors, large=False):>6.1f} %"


def _mape(errors: Sequence[Errors], *, large: bool) -> float:
    """Mean over tables that have such sizes; nan if none has."""
    each = np.array([known.mape(large=large) for known in errors])
    return float(np.nanmean(each)) if np.isfinite(each).any() else float("nan")


def _constants(library: Library) -> str:
    chunk, fraction = library.pipeline.chunk / 1e6, library.pipeline.fraction
    launches = (
        f"{make.value} {each.launch * 1e6:.0f} us" for make, each in library.generations.items() if make and each.launch
    )
    return f"launch {', '.join(launches)}; fraction {fraction:.1f}, chunk {chunk:.0f} MB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("--fit", action="store_true", help="search the fitted constants first, and print them")
    parser.add_argument("--detail", action="store_true", help="print every size")


def command(options: argparse.Namespace) -> None:
    """Print how predicted and published times compare."""
    library = load_library("nccl")
    surveys = survey(library)
    if options.fit:
        fits = fit(surveys, library)
        library = fits.best()
        print(f"fitted: {_constants(library)}\neach table with constants fitted to all others:")
        print("\n".join(_beside(_left_out(table, surveys[table], fits), fits.best(table)) for table in surveys))
    errors = [compare(benchmark, replace(choices, library=library)) for benchmark, choices in surveys.items()]
    if options.detail:
        print("\n".join(_detail(each) for each in errors))
    print(report(errors))


def _beside(errors: Errors, library: Library) -> str:
    return f"  {_named(errors)}{_percent([errors])}  {_constants(library)}"


def _detail(errors: Errors) -> str:
    """Every size of one benchmark."""
    known = errors.benchmark
    rows = zip(known.sizes, known.measured, errors.ratios, errors.algorithms, strict=True)
    lines = [f"{size:>14.0f} B {time * 1e6:>10.1f} us x {ratio:.2f} {name}" for size, time, ratio, name in rows]
    place = known.place
    return "\n".join([f"{known.source} {place.gpu} {place.gpus} {place.collective.value}", *lines])
