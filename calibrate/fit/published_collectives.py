"""Published collective benchmarks to which constants are fitted.

The rows of the packaged table of measurements (`clustersim/validation/published/collectives.csv`) whose
`in_fit` is yes: either in-place or out-of-place where both are printed, on machines whose network is known.
A benchmark is one table: one collective at many sizes on one machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.validation.cases import ValidationCase
from clustersim.validation.collectives import (
    MEBIBYTE,
    PUBLISHED_TABLE,
    CollectiveBenchmark,
    measured_seconds,
    parse_benchmark,
    read_collectives,
)
from clustersim.validation.dispatch_benchmark import COLLECTIVE_BY_NAME
from clustersim.validation.error_statistics import group_by

_TABLE_KEY_COLUMNS: Final = (
    "source",
    "locator",
    "gpu",
    "n_gpus",
    "gpus_per_node",
    "interconnect",
    "library",
    "collective",
    "algo",
)


@dataclass(frozen=True)
class BenchmarkTable:
    """One table. sizes: bytes; measured_seconds: one time for each size."""

    source: str
    locator: str
    benchmark: CollectiveBenchmark
    sizes: tuple[Bytes, ...]
    measured_seconds: tuple[Seconds, ...]

    @property
    def is_fitted(self) -> bool:
        """Whether the table is used in a fit."""
        return not self.benchmark.is_timed_per_call

    @property
    def crosses_network(self) -> bool:
        """Whether its GPUs span several NVLink domains."""
        return self.benchmark.gpu_count > self.benchmark.nvlink_domain_size

    @cached_property
    def is_large(self) -> BoolArray:
        """Mask of the sizes of 1 MiB or more."""
        return np.array(self.sizes) >= MEBIBYTE

    def ratios(self, seconds: FloatArray, size_indices: IntArray | None = None) -> FloatArray:
        """Predicted over measured time: [..., sizes]; seconds: predicted collective times.

        size_indices: selected sizes, None: all.
        """
        measured = np.array(self.measured_seconds)
        ratios: FloatArray = self.benchmark.benchmark_seconds(seconds) / (
            measured if size_indices is None else measured[size_indices]
        )
        return ratios


def read_benchmarks() -> tuple[BenchmarkTable, ...]:
    """Benchmarks of the packaged table that are used in fits."""
    fitted_cases = (
        read_collective
        for read_collective in read_collectives(PUBLISHED_TABLE)
        if read_collective.boolean("in_fit") and read_collective.text("collective") not in COLLECTIVE_BY_NAME
    )
    tables = group_by(fitted_cases, lambda case: tuple(case.text(column) for column in _TABLE_KEY_COLUMNS))
    return tuple(map(_build_benchmark, tables.values()))


def _build_benchmark(cases: Sequence[ValidationCase]) -> BenchmarkTable:
    first = cases[0]
    return BenchmarkTable(
        source=first.text("source"),
        locator=first.text("locator"),
        benchmark=parse_benchmark(first),
        sizes=tuple(case.positive_float("bytes") for case in cases),
        measured_seconds=tuple(map(measured_seconds, cases)),
    )
