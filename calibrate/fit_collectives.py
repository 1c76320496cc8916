"""How well does the model of collectives predict published benchmarks, and which constants fit them best?

Three constants of a library are fitted: the launch time of a collective, the share of a payload that is one chunk, and
the largest chunk. One triple serves all GPUs, sizes and algorithms: of a grid, the one with the least mean over sources
of the mean over a source's tables of |log(predicted / measured)|. Tables over AWS EFA, whose latency nothing here
models, do not take part; they are judged all the same. Everything else in `topologies/libraries/nccl.yaml` is NCCL's
own or a datasheet's.

    python -m calibrate fit-collectives            print the errors with the shipped constants
    python -m calibrate fit-collectives --fit      search the constants; print them, the errors with them, and the
                                                   errors of each source with constants fitted to all other sources

Source of the measurements: calibrate/published/collectives.csv, one row per message size with its source.
"""

import argparse
import csv
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.collectives.choose import Choices, Surveyor, choose
from clustersim.collectives.library import Library, Pipeline, load_library
from clustersim.collectives.phase import FloatArray
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.routing import Spread
from clustersim.hardware.shape import Leaf, Network, Nics, Node, NvLink, Port
from clustersim.program.task import Collective
from clustersim.units import Bytes, Seconds

PUBLISHED: Final = Path(__file__).parent / "published" / "collectives.csv"
_MEBIBYTE: Final = 2**20
_NVLINK: Final = {"a100": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9}  # bytes/s of a GPU's port, datasheets
_NIC: Final = {"a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9}  # bytes/s of network per GPU in these tables
_PCIE: Final = {"a100": 32e9, "h100": 64e9, "h200": 64e9, "b200": 64e9}  # Gen4 x16, Gen5 x16
_FRACTIONS: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
_CHUNKS: Final = (4e6, 8e6, 12e6, 16e6, 20e6)
_LAUNCHES: Final = (0.0, 2e-6, 4e-6, 6e-6, 8e-6, 10e-6)


@dataclass(frozen=True)
class Benchmark:
    """One table: a collective at many sizes. algorithm: "" if the library chose; sizes: bytes; measured: seconds."""

    source: str
    gpu: str
    gpus: int
    per_node: int
    interconnect: str
    collective: Collective
    algorithm: str
    sizes: tuple[Bytes, ...]
    measured: tuple[Seconds, ...]

    @property
    def fitted(self) -> bool:
        """Whether the table takes part in a fit."""
        return "efa" not in self.interconnect

    @cached_property
    def fabric(self) -> ClosFabric:
        """Nodes with NVSwitch and one network port per GPU, under one tier of rail switches."""
        kind = self.gpu.split("-")[0]
        node = Node(
            gpus=self.per_node,
            pcie=Port(_PCIE[kind], 0.5e-6),
            nvlink=NvLink(self.per_node, Port(_NVLINK[kind], 0.5e-6)),
            nics=Nics(self.per_node, Port(_NIC[kind], 0.5e-6)),
        )
        nodes = -(-self.gpus // self.per_node)
        return ClosFabric(node, Network(Leaf(nodes, self.per_node, 0.5e-6), Spread()), nodes * self.per_node)

    def survey(self, library: Library) -> Choices:
        """Cost all offers; nccl-tests' send/recv sends from each rank to the next."""
        members = np.arange(self.gpus)[None]
        if self.collective is Collective.SEND_RECV:
            members = np.stack([members[0], np.roll(members[0], -1)], axis=1)
        return Surveyor(self.fabric, library).survey(self.collective, members, self.algorithm or None)


@dataclass(frozen=True, slots=True)
class Errors:
    """Predicted over measured for each size of a benchmark."""

    benchmark: Benchmark
    ratios: tuple[float, ...]
    algorithms: tuple[str, ...]

    def mape(self, *, large: bool) -> float:
        """Mean absolute percentage error of the sizes from 1 MiB on, or below; nan if there are none."""
        chosen = np.array([size >= _MEBIBYTE for size in self.benchmark.sizes]) == large
        errors = np.abs(np.array(self.ratios)[chosen] - 1) * 100
        return float(errors.mean()) if errors.size else float("nan")


def read_benchmarks(path: Path = PUBLISHED) -> tuple[Benchmark, ...]:
    """Group the rows of the published tables."""
    tables: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    keys = ("source", "locator", "gpu", "gpus", "gpus_per_node", "interconnect", "library", "collective", "algorithm")
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tables.setdefault(tuple(row[key] for key in keys), []).append(row)
    return tuple(_benchmark(rows) for rows in tables.values())


def _benchmark(rows: Sequence[Mapping[str, str]]) -> Benchmark:
    first = rows[0]
    return Benchmark(
        source=first["source"],
        gpu=first["gpu"],
        gpus=int(first["gpus"]),
        per_node=int(first["gpus_per_node"]),
        interconnect=first["interconnect"],
        collective=Collective(first["collective"]),
        algorithm=first["algorithm"],
        sizes=tuple(float(row["bytes"]) for row in rows),
        measured=tuple(float(row["time_us"]) * 1e-6 for row in rows),
    )


def compare(benchmark: Benchmark, choices: Choices) -> Errors:
    """Predict every size of a benchmark; the slowest group counts."""
    predicted = [choose(choices, size) for size in benchmark.sizes]
    ratios = (float(each.seconds.max()) / seconds for each, seconds in zip(predicted, benchmark.measured, strict=True))
    return Errors(benchmark, tuple(ratios), tuple(each.offer.name for each in predicted))


def candidates(library: Library) -> tuple[Library, ...]:
    """The library with every triple of constants on the grid."""
    return tuple(
        replace(library, launch=launch, pipeline=Pipeline(fraction, chunk))
        for launch, fraction, chunk in itertools.product(_LAUNCHES, _FRACTIONS, _CHUNKS)
    )


def misfits(surveys: Mapping[Benchmark, Choices], libraries: Sequence[Library]) -> Mapping[str, FloatArray]:
    """Mean |log(predicted / measured)| of each source's tables with each library: [libraries] by source."""
    by_source: dict[str, list[list[float]]] = {}
    for table, choices in surveys.items():
        if table.fitted:
            misfit = [_misfit(compare(table, replace(choices, library=library))) for library in libraries]
            by_source.setdefault(table.source, []).append(misfit)
    return {source: np.array(tables).mean(axis=0) for source, tables in by_source.items()}


def _misfit(errors: Errors) -> float:
    return float(np.mean(np.abs(np.log(errors.ratios))))


def report(errors: Iterable[Errors]) -> str:
    """One line per benchmark and one per GPU type."""
    lines = [f"{'source':<18}{'gpu':<15}{'gpus':>6} {'collective':<22}{'>= 1 MiB':>8}{'< 1 MiB':>8}{'sizes':>6}"]
    by_gpu: dict[str, list[Errors]] = {}
    for each in errors:
        known = each.benchmark
        mark = " " if known.fitted else "*"
        what = f"{known.collective.value}{' ' + known.algorithm if known.algorithm else ''}"
        lines.append(
            f"{known.source + mark:<18}{known.gpu:<15}{known.gpus:>6} {what:<22}"
            f"{each.mape(large=True):>6.1f} %{each.mape(large=False):>6.1f} %{len(known.sizes):>6}"
        )
        by_gpu.setdefault(known.gpu.split("-")[0], []).append(each)
    lines += [_summary(gpu, members) for gpu, members in by_gpu.items()]
    return "\n".join([*lines, "* not fitted: a network whose latency is not modelled"])


def _summary(gpu: str, members: Sequence[Errors]) -> str:
    """Mean over a GPU type's benchmarks."""
    return f"mean over tables  {gpu:<46}{_mape(members, large=True):>6.1f} %{_mape(members, large=False):>6.1f} %"


def fit(surveys: Mapping[Benchmark, Choices], library: Library) -> tuple[Library, str]:
    """The best constants, and how each source is predicted by constants fitted to the others."""
    libraries = candidates(library)
    by_source = misfits(surveys, libraries)
    lines = ["each source with constants fitted to all others:"]
    for source in by_source:
        best = _best(libraries, [misfit for other, misfit in by_source.items() if other != source])
        tables = {table: choices for table, choices in surveys.items() if table.fitted and table.source == source}
        errors = [compare(table, replace(choices, library=best)) for table, choices in tables.items()]
        percent = f"{_mape(errors, large=True):>6.1f} %{_mape(errors, large=False):>6.1f} %"
        lines.append(f"  {source:<20}{_constants(best):<44}{percent}")
    best = _best(libraries, list(by_source.values()))
    return best, "\n".join([f"fitted: {_constants(best)}", *lines])


def _best(libraries: Sequence[Library], by_source: Sequence[FloatArray]) -> Library:
    return libraries[int(np.mean(by_source, axis=0).argmin())]


def _constants(library: Library) -> str:
    chunk, fraction = library.pipeline.chunk / 1e6, library.pipeline.fraction
    return f"launch {library.launch * 1e6:.0f} us, fraction {fraction:.1f}, chunk {chunk:.0f} MB"


def _mape(errors: Sequence[Errors], *, large: bool) -> float:
    """Mean over tables that have such sizes; nan if none has."""
    each = np.array([known.mape(large=large) for known in errors])
    return float(np.nanmean(each)) if np.isfinite(each).any() else float("nan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `print_errors`."""
    parser.add_argument("--fit", action="store_true", help="search the fitted constants first, and print them")
    parser.add_argument("--detail", action="store_true", help="print every size")


def print_errors(options: argparse.Namespace) -> None:
    """Print how predicted and published times compare."""
    library = load_library("nccl")
    surveys = {benchmark: benchmark.survey(library) for benchmark in read_benchmarks()}
    if options.fit:
        library, text = fit(surveys, library)
        print(text)
    errors = [compare(benchmark, replace(choices, library=library)) for benchmark, choices in surveys.items()]
    if options.detail:
        print("\n".join(_detail(each) for each in errors))
    print(report(errors))


def _detail(errors: Errors) -> str:
    """Every size of one benchmark."""
    known = errors.benchmark
    rows = zip(known.sizes, known.measured, errors.ratios, errors.algorithms, strict=True)
    lines = [f"{size:>14.0f} B {time * 1e6:>10.1f} us x {ratio:.2f} {name}" for size, time, ratio, name in rows]
    return "\n".join([f"{known.source} {known.gpu} {known.gpus} {known.collective.value}", *lines])
