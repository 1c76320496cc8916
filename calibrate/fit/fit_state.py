"""Intermediate state of the fit of a record.

An accelerator whose constants are replaced for one kind of kernel after the other, and leave-one-out
predictions of the samples so far.

Rates (FLOP/s of a number format, bytes/s of memory) are searched as fractions of a scale. If a datasheet
bounds them, on a GPU that does not exceed it, the scale is the datasheet value. Otherwise it only bounds the
search, and the effective peak afterwards is the fitted rate, or the best measured one if that is higher.
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

RATE_MARGIN: Final = 4.0  # upper limit of the search of unbounded rates, relative to the best measured one
SHARE_GRID: Final = geometric_grid(0.01, 1.0, 1.01)  # of a constant that is searched by itself
_NEAR_RANGE: Final = (
    0.7,
    2.5,
)  # range of a share searched jointly with other constants, relative to its single-constant optimum
_NEAR_RATIO: Final = 1.015
_LATENCY_COUNT: Final = 17  # from zero to the shortest kernel


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A measured kernel sample, its index among them, and its time."""

    index: int
    sample: KernelSample
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class FitState:
    """unbounded: no datasheet bounds the device's rates; leave_one_out: predicted seconds by index of the sample."""

    accelerator: Accelerator
    unbounded: bool
    leave_one_out: Mapping[int, Seconds] = field(default_factory=dict)

    def with_fit(self, timed_kernels: Sequence[TimedKernel], optimum: GridOptimum, **constants: Any) -> "FitState":
        """The state with the constants of a search over these kernels."""
        seconds = {
            timed.index: float(held_out_seconds)
            for timed, held_out_seconds in zip(timed_kernels, optimum.leave_one_out, strict=True)
        }
        return replace(self, accelerator=with_constants(self.accelerator, **constants)).with_predictions(seconds)

    def with_predictions(self, seconds: Mapping[int, Seconds]) -> "FitState":
        """The state with more leave-one-out predictions."""
        return replace(self, leave_one_out={**self.leave_one_out, **seconds})

    def with_peak(self, dtype: DType, peak: FlopPerSecond) -> "FitState":
        """The state with another peak of a format."""
        return replace(self, accelerator=with_peak(self.accelerator, dtype, peak))

    def rate_scale(self, nominal: float, best_measured: float) -> "RateScale":
        """Search scale of a rate with this datasheet value (0: none) and this best measured value."""
        bounded = not self.unbounded and best_measured <= nominal
        return RateScale(nominal if bounded else max(RATE_MARGIN * best_measured, nominal), best_measured, bounded)


@dataclass(frozen=True, slots=True)
class RateScale:
    """A rate of which fractions are searched."""

    rate: float
    best_measured: float
    is_bounded: bool

    def effective_peak(self, share: float) -> float:
        """The effective peak once this fraction was fitted."""
        return self.rate if self.is_bounded else max(share * self.rate, self.best_measured)


def with_constants(accelerator: Accelerator, **constants: Any) -> Accelerator:
    """The accelerator with other constants of the kernel model."""
    return replace(accelerator, efficiency=replace(accelerator.efficiency, **constants))


def with_peak(accelerator: Accelerator, dtype: DType, peak: FlopPerSecond) -> Accelerator:
    """The accelerator with another peak of one format."""
    return replace(accelerator, peak={**accelerator.peak, dtype: peak})


def shares_near(optimum: GridOptimum) -> FloatArray:
    """Shares around the first constant of an optimum of the share alone."""
    low, high = (optimum.constants[0] * factor for factor in _NEAR_RANGE)
    return geometric_grid(min(low, 1.0 / _NEAR_RANGE[1]), min(high, 1.0), _NEAR_RATIO)


def latency_grid(timed_kernels: Iterable[TimedKernel]) -> FloatArray:
    """Candidate kernel latencies, from zero to the shortest kernel."""
    return np.linspace(0.0, min(timed.seconds / timed.sample.launches for timed in timed_kernels), _LATENCY_COUNT)


def measured_seconds(timed_kernels: Iterable[TimedKernel]) -> FloatArray:
    """Measured seconds: [samples]."""
    return np.array([timed.seconds for timed in timed_kernels])


def group_by_format(timed_kernels: Iterable[TimedKernel]) -> dict[DType, list[TimedKernel]]:
    """Kernels of each number format."""
    formats: dict[DType, list[TimedKernel]] = {}
    for timed in timed_kernels:
        formats.setdefault(timed.sample.dtype, []).append(timed)
    return formats


def best_rate(timed_kernels: Iterable[TimedKernel]) -> FlopPerSecond:
    """FLOP/s of the fastest kernel."""
    return max(timed.sample.flops / timed.seconds for timed in timed_kernels)
