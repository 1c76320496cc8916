"""How far has the fit of a record come?

An accelerator whose constants are replaced one kind of kernel after the other, and what rows were predicted to take by
the constants that the others supported.

Rates (FLOP/s of a number format, bytes/s of the memory) are searched as parts of a scale. Where a datasheet bounds
them, on a GPU that does not beat it, the scale is the datasheet's and stays. Elsewhere it only gives the search room,
and what stands for the datasheet's afterwards is the fitted rate, or the best measured one if that is higher.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from calibrate.fit.grid_search import Winner, factors
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.common.units import FlopPerSecond, Seconds
from clustersim.cost.calibration_record import KernelSample
from clustersim.hardware.accelerator import Accelerator

ROOM: Final = 4.0  # how far above the best measured rate one is searched that no datasheet bounds
SHARES: Final = factors(0.01, 1.0, 1.01)  # of a constant that is searched alone
_NEAR: Final = (0.7, 2.5)  # where a share is searched beside other constants, around what it is alone
_STEP: Final = 1.015
_LATENCIES: Final = 17  # from none to what the shortest kernel took


@dataclass(frozen=True, slots=True)
class Timed:
    """A row that was measured, and its place among them."""

    place: int
    row: KernelSample
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class State:
    """unbounded: whether no datasheet bounds the device's rates; left_out: seconds of rows, by place."""

    accelerator: Accelerator
    unbounded: bool
    left_out: Mapping[int, Seconds] = field(default_factory=dict)

    def fitted(self, rows: Sequence[Timed], winner: Winner, **constants: Any) -> "State":
        """With the constants that a search of these rows found."""
        seconds = {timed.place: float(left) for timed, left in zip(rows, winner.left_out, strict=True)}
        return replace(self, accelerator=with_constants(self.accelerator, **constants)).seen(seconds)

    def seen(self, seconds: Mapping[int, Seconds]) -> "State":
        """With more rows predicted from the others."""
        return replace(self, left_out={**self.left_out, **seconds})

    def with_peak(self, dtype: DType, peak: FlopPerSecond) -> "State":
        """With what stands for the peak of a format."""
        return replace(self, accelerator=with_peak(self.accelerator, dtype, peak))

    def scale(self, nominal: float, best: float) -> "Scale":
        """Of a rate with this datasheet value (0: none) and this best measured one."""
        bounded = not self.unbounded and best <= nominal
        return Scale(nominal if bounded else max(ROOM * best, nominal), best, bounded)


@dataclass(frozen=True, slots=True)
class Scale:
    """A rate of which parts are searched."""

    rate: float
    best: float
    bounded: bool

    def nominal(self, part: float) -> float:
        """What stands for the datasheet's once this part was found."""
        return self.rate if self.bounded else max(part * self.rate, self.best)


def with_constants(accelerator: Accelerator, **constants: Any) -> Accelerator:
    """Other constants of the kernel model."""
    return replace(accelerator, efficiency=replace(accelerator.efficiency, **constants))


def with_peak(accelerator: Accelerator, dtype: DType, peak: FlopPerSecond) -> Accelerator:
    """Another peak of one format."""
    return replace(accelerator, peak={**accelerator.peak, dtype: peak})


def near(winner: Winner) -> FloatArray:
    """Shares around the one that a search of the share alone found (its first constant)."""
    low, high = (winner.constants[0] * item for item in _NEAR)
    return factors(min(low, 1.0 / _NEAR[1]), min(high, 1.0), _STEP)


def latencies(rows: Iterable[Timed]) -> FloatArray:
    """No device kernel's latency is longer than the shortest kernel."""
    return np.linspace(0.0, min(timed.seconds / timed.row.launches for timed in rows), _LATENCIES)


def seconds_of(rows: Iterable[Timed]) -> FloatArray:
    """Measured: [rows]."""
    return np.array([timed.seconds for timed in rows])


def by_format(rows: Iterable[Timed]) -> dict[DType, list[Timed]]:
    """Rows of each number format."""
    formats: dict[DType, list[Timed]] = {}
    for timed in rows:
        formats.setdefault(timed.row.dtype, []).append(timed)
    return formats


def best_rate(rows: Iterable[Timed]) -> FlopPerSecond:
    """Of the fastest row."""
    return max(timed.row.flops / timed.seconds for timed in rows)
