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

from calibrate.fit.grid_search import GridOptimum, geometric_grid
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.common.units import FlopPerSecond, Seconds
from clustersim.cost.calibration_record import KernelSample
from clustersim.hardware.accelerator import Accelerator

RATE_MARGIN: Final = 4.0  # how far above the best measured rate one is searched that no datasheet bounds
SHARE_GRID: Final = geometric_grid(0.01, 1.0, 1.01)  # of a constant that is searched alone
_NEAR_RANGE: Final = (0.7, 2.5)  # where a share is searched beside other constants, around what it is alone
_NEAR_RATIO: Final = 1.015
_LATENCY_COUNT: Final = 17  # from none to what the shortest kernel took


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A row that was measured, and its place among them."""

    index: int
    sample: KernelSample
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class FitState:
    """unbounded: whether no datasheet bounds the device's rates; left_out: seconds of rows, by place."""

    accelerator: Accelerator
    unbounded: bool
    leave_one_out: Mapping[int, Seconds] = field(default_factory=dict)

    def with_fit(self, timed_kernels: Sequence[TimedKernel], optimum: GridOptimum, **constants: Any) -> "FitState":
        """With the constants that a search of these rows found."""
        seconds = {
            timed.index: float(held_out_seconds)
            for timed, held_out_seconds in zip(timed_kernels, optimum.leave_one_out, strict=True)
        }
        return replace(self, accelerator=with_constants(self.accelerator, **constants)).with_predictions(seconds)

    def with_predictions(self, seconds: Mapping[int, Seconds]) -> "FitState":
        """With more rows predicted from the others."""
        return replace(self, leave_one_out={**self.leave_one_out, **seconds})

    def with_peak(self, dtype: DType, peak: FlopPerSecond) -> "FitState":
        """With what stands for the peak of a format."""
        return replace(self, accelerator=with_peak(self.accelerator, dtype, peak))

    def rate_scale(self, nominal: float, best_measured: float) -> "RateScale":
        """Of a rate with this datasheet value (0: none) and this best measured one."""
        bounded = not self.unbounded and best_measured <= nominal
        return RateScale(nominal if bounded else max(RATE_MARGIN * best_measured, nominal), best_measured, bounded)


@dataclass(frozen=True, slots=True)
class RateScale:
    """A rate of which parts are searched."""

    rate: float
    best_measured: float
    is_bounded: bool

    def effective_peak(self, share: float) -> float:
        """What stands for the datasheet's once this part was found."""
        return self.rate if self.is_bounded else max(share * self.rate, self.best_measured)


def with_constants(accelerator: Accelerator, **constants: Any) -> Accelerator:
    """Other constants of the kernel model."""
    return replace(accelerator, efficiency=replace(accelerator.efficiency, **constants))


def with_peak(accelerator: Accelerator, dtype: DType, peak: FlopPerSecond) -> Accelerator:
    """Another peak of one format."""
    return replace(accelerator, peak={**accelerator.peak, dtype: peak})


def shares_near(optimum: GridOptimum) -> FloatArray:
    """Shares around the one that a search of the share alone found (its first constant)."""
    low, high = (optimum.constants[0] * factor for factor in _NEAR_RANGE)
    return geometric_grid(min(low, 1.0 / _NEAR_RANGE[1]), min(high, 1.0), _NEAR_RATIO)


def latency_grid(timed_kernels: Iterable[TimedKernel]) -> FloatArray:
    """No device kernel's latency is longer than the shortest kernel."""
    return np.linspace(0.0, min(timed.seconds / timed.sample.launches for timed in timed_kernels), _LATENCY_COUNT)


def measured_seconds(timed_kernels: Iterable[TimedKernel]) -> FloatArray:
    """Measured: [rows]."""
    return np.array([timed.seconds for timed in timed_kernels])


def group_by_format(timed_kernels: Iterable[TimedKernel]) -> dict[DType, list[TimedKernel]]:
    """Rows of each number format."""
    formats: dict[DType, list[TimedKernel]] = {}
    for timed in timed_kernels:
        formats.setdefault(timed.sample.dtype, []).append(timed)
    return formats


def best_rate(timed_kernels: Iterable[TimedKernel]) -> FlopPerSecond:
    """Of the fastest row."""
    return max(timed.sample.flops / timed.seconds for timed in timed_kernels)
