"""Which published benchmarks of collectives are constants fitted to?

Those rows of the shipped table of measurements (`clustersim/validation/published/collectives.csv`) that say so in
`in_fit`: one of in place and out of place where both are printed, on machines whose network is known. A benchmark is a
table: one collective at many sizes, in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.validation.cases import Case
from clustersim.validation.collectives import MEBIBYTE, SHIPPED, Place, place_of, read_collectives, seconds_of
from clustersim.validation.dispatch_benchmark import KINDS
from clustersim.validation.error_statistics import grouped

_TABLE: Final = ("source", "locator", "gpu", "n_gpus", "gpus_per_node", "interconnect", "library", "collective", "algo")


@dataclass(frozen=True)
class Benchmark:
    """One table. sizes: bytes; measured: seconds."""

    source: str
    locator: str
    place: Place
    sizes: tuple[Bytes, ...]
    measured: tuple[Seconds, ...]

    @property
    def fitted(self) -> bool:
        """Whether the table takes part in a fit."""
        return not self.place.called

    @property
    def between(self) -> bool:
        """Whether it crosses a network."""
        return self.place.gpus > self.place.domain

    @cached_property
    def large(self) -> BoolArray:
        """Which sizes are 1 MiB or more."""
        return np.array(self.sizes) >= MEBIBYTE

    def ratios(self, seconds: FloatArray, places: IntArray | None = None) -> FloatArray:
        """What the benchmark sees of collectives that take so long, over what was measured: [..., sizes].

        places: which sizes, None: all.
        """
        measured = np.array(self.measured)
        found: FloatArray = self.place.seen(seconds) / (measured if places is None else measured[places])
        return found


def read_benchmarks(path: Path = SHIPPED) -> tuple[Benchmark, ...]:
    """Group the rows of the shipped table that take part."""
    cases = (
        read_collective
        for read_collective in read_collectives(path)
        if read_collective.is_yes("in_fit") and read_collective.text("collective") not in KINDS
    )
    tables = grouped(cases, lambda case: tuple(case.text(column) for column in _TABLE))
    return tuple(map(_benchmark, tables.values()))


def _benchmark(cases: Sequence[Case]) -> Benchmark:
    first = cases[0]
    return Benchmark(
        source=first.text("source"),
        locator=first.text("locator"),
        place=place_of(first),
        sizes=tuple(case.number("bytes") for case in cases),
        measured=tuple(map(seconds_of, cases)),
    )
