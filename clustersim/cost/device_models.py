"""On what does each rank's kernels run?

A machine is an accelerator in the state that it is in: its kernels take what its source of durations says, and longer
while a collective runs beside them on the same GPU (`cost.interference`). A host launches them one after the other.
Ranks on equal machines share one.
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
    """By how many standard deviations the slowest of so many GPUs is expected to be slower than the mean one.

    The expected largest of a normal sample, by Blom's approximation (Statistical Estimates and Transformed
    Beta-Variables, 1958). A step waits for all of its ranks, so the slowest sets the pace.
    """
    return 0.0 if gpu_count < 2 else NormalDist().inv_cdf((gpu_count - 0.375) / (gpu_count + 0.25))


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """kernels: how long they take alone; interference: how they and collectives slow each other.

    launching: what the host needs to launch them.
    """

    kernels: KernelCost
    interference: Interference = NO_INTERFERENCE
    host: HostModel = field(default_factory=AsyncHost)


@dataclass(frozen=True, slots=True)
class ThrottledKernels:
    """Kernels at a part `speed` of their normal speed (a `KernelCost`)."""

    kernels: KernelCost
    speed: float

    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """Time one kernel alone."""
        timing = self.kernels.time_kernel(kernel)
        return replace(timing, seconds=timing.seconds / self.speed)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModels:
    """kinds: the machines there are; of: [ranks] number of each rank's machine."""

    models: tuple[DeviceModel, ...]
    index_of_rank: IntArray

    @classmethod
    def uniform(cls, model: DeviceModel, rank_count: int) -> "DeviceModels":
        """The same machine for all ranks."""
        return cls((model,), np.zeros(rank_count, dtype=np.int64))
