"""What hardware do each rank's kernels run on?

A device model is an accelerator in its current state: its kernels take what its source of durations says,
and longer while a collective overlaps them on the same GPU (`cost.interference`). A host launches them in
order. Ranks with equal devices share a model.
"""

from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.cost.host_launch import AsyncHost, HostModel
from clustersim.cost.interference import NO_INTERFERENCE, Interference
from clustersim.cost.timing import KernelCost, KernelTiming
from clustersim.model.kernels import Kernel


def slowest_deviation(gpu_count: int) -> float:
    """Expected deviation of the slowest of `gpu_count` GPUs from the mean, in standard deviations.

    Expected maximum of a normal sample, by Blom's approximation (Statistical Estimates and Transformed
    Beta-Variables, 1958). A step waits for all of its ranks, so the slowest sets its speed.
    """
    return 0.0 if gpu_count < 2 else NormalDist().inv_cdf((gpu_count - 0.375) / (gpu_count + 0.25))


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Timing model of a device.

    kernels: source of isolated kernel durations; interference: mutual slowdown of kernels and collectives;
    host: model of the host that launches them.
    """

    kernels: KernelCost
    interference: Interference = NO_INTERFERENCE
    host: HostModel = field(default_factory=AsyncHost)


@dataclass(frozen=True, slots=True)
class ThrottledKernels:
    """Kernels of a throttled device at a fraction `speed` of normal speed (a `KernelCost`)."""

    kernels: KernelCost
    speed: float

    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """Time one kernel in isolation."""
        timing = self.kernels.time_kernel(kernel)
        return replace(timing, seconds=timing.seconds / self.speed)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModels:
    """Device models of a job. models: the distinct ones; index_of_rank: [ranks] index of each rank's model."""

    models: tuple[DeviceModel, ...]
    index_of_rank: IntArray

    @classmethod
    def uniform(cls, model: DeviceModel, rank_count: int) -> "DeviceModels":
        """The same model for all ranks."""
        return cls((model,), np.zeros(rank_count, dtype=np.int64))
