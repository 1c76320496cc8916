"""How well does the model of collectives predict published benchmarks, and which pipeline constants fit them best?

Two constants of a library are fitted: the share of a payload that is one chunk, and the largest chunk. One pair for all
GPUs, sizes and algorithms, by the least mean of |log(predicted / measured)| over the tables in `FITTED`; all other tables
only judge. Everything else in `topologies/libraries/nccl.yaml` is NCCL's own or a datasheet's.

    python -m calibrate.fit_collectives            print the errors with the shipped constants
    python -m calibrate.fit_collectives --fit      search the two constants and print the errors with them

Source of the measurements: calibrate/published/collectives.csv, one row per message size with its source.
"""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.collectives.choose import Choices, Surveyor, choose
from clustersim.collectives.library import Library, Pipeline, load_library
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.routing import Spread
from clustersim.hardware.shape import Leaf, Network, Nics, Node, NvLink, Port
from clustersim.program.task import Collective
from clustersim.units import Bytes, Seconds

PUBLISHED: Final = Path(__file__).parent / "published" / "collectives.csv"
FITTED: Final = frozenset({"azure", "dgxc-nccl", "vtrain", "gtc24-s62129"})
_MEBIBYTE: Final = 2**20
_NVLINK: Final = {"a100": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9}  # bytes/s of a GPU's port, datasheets
_NIC: Final = {"a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9}  # bytes/s of network per GPU in these tables
_PCIE: Final = {"a100": 32e9, "h100": 64e9, "h200": 64e9, "b200": 64e9}  # Gen4 x16, Gen5 x16
_FRACTIONS: Final = np.arange(0.1, 1.51, 0.1)
_CHUNKS: Final = np.arange(2e6, 40.1e6, 2e6)


@dataclass(frozen=True)
class Benchmark:
    """One table: a collective at many sizes. algorithm: "" if the library chose; sizes: bytes; measured: seconds."""

    source: str
    gpu: str
    gpus: int
    per_node: int
    collective: Collective
    algorithm: str
    sizes: tuple[Bytes, ...]
    measured: tuple[Seconds, ...]

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


def fit_pipeline(surveys: Mapping[Benchmark, Choices], library: Library) -> Pipeline:
    """The pair of constants on a grid with the least mean |log ratio| over the fitted benchmarks, sizes >= 1 MiB."""
    grid = [Pipeline(float(fraction), float(chunk)) for fraction in _FRACTIONS for chunk in _CHUNKS]
    return min(grid, key=lambda pipeline: _misfit(surveys, replace(library, pipeline=pipeline)))


def _misfit(surveys: Mapping[Benchmark, Choices], library: Library) -> float:
    each = [
        np.mean(
            [
                abs(np.log(ratio))
                for size, ratio in zip(benchmark.sizes, errors.ratios, strict=True)
                if size >= _MEBIBYTE
            ]
        )
        for benchmark, choices in surveys.items()
        for errors in [compare(benchmark, replace(choices, library=library))]
    ]
    return float(np.mean(each))


def report(errors: Iterable[Errors]) -> str:
    """One line per benchmark and one per GPU type."""
    lines = [f"{'source':<18}{'gpu':<15}{'gpus':>6} {'collective':<16}{'>= 1 MiB':>9}{'< 1 MiB':>9}{'sizes':>7}"]
    by_gpu: dict[str, list[Errors]] = {}
    for each in errors:
        known = each.benchmark
        mark = "*" if known.source in FITTED else " "
        what = f"{known.collective.value}{' ' + known.algorithm if known.algorithm else ''}"
        lines.append(
            f"{known.source + mark:<18}{known.gpu:<15}{known.gpus:>6} {what:<22}"
            f"{each.mape(large=True):>6.1f} %{each.mape(large=False):>6.1f} %{len(known.sizes):>6}"
        )
        by_gpu.setdefault(known.gpu.split("-")[0], []).append(each)
    lines += [_summary(gpu, members) for gpu, members in by_gpu.items()]
    return "\n".join(lines)


def _summary(gpu: str, members: Sequence[Errors]) -> str:
    """Mean over a GPU type's benchmarks."""
    large, small = (np.array([each.mape(large=flag) for each in members]) for flag in (True, False))
    return f"mean over tables  {gpu:<43}{np.nanmean(large):>6.1f} %" + (
        f"{np.nanmean(small):>6.1f} %" if np.isfinite(small).any() else ""
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print how predicted and published times compare; `--fit` searches the pipeline constants first."""
    parser = argparse.ArgumentParser(prog="fit_collectives", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="search the two pipeline constants")
    parser.add_argument("--detail", action="store_true", help="print every size")
    options = parser.parse_args(argv)
    library = load_library("nccl")
    surveys = {benchmark: benchmark.survey(library) for benchmark in read_benchmarks()}
    if options.fit:
        fitted = {benchmark: choices for benchmark, choices in surveys.items() if benchmark.source in FITTED}
        library = replace(library, pipeline=fit_pipeline(fitted, library))
        print(f"fraction {library.pipeline.fraction:.2f}, chunk {library.pipeline.chunk / 1e6:.0f} MB")
    errors = [compare(benchmark, replace(choices, library=library)) for benchmark, choices in surveys.items()]
    if options.detail:
        print("\n".join(_detail(each) for each in errors))
    print(report(errors))
    return 0


def _detail(errors: Errors) -> str:
    """Every size of one benchmark."""
    known = errors.benchmark
    rows = zip(known.sizes, known.measured, errors.ratios, errors.algorithms, strict=True)
    lines = [f"{known.source} {known.gpu} {known.gpus} {known.collective.value}"]
    return "\n".join(
        lines + [f"{size:>14.0f} B {m * 1e6:>10.1f} us x {ratio:.2f} {name}" for size, m, ratio, name in rows]
    )


if __name__ == "__main__":
    raise SystemExit(main())
