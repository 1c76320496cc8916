"""On what does each rank's kernels run?

A machine is an accelerator in the state that it is in: its kernels take what its source of durations says, and longer
while a collective runs beside them on the same GPU (`cost.interference`). A host launches them one after the other.
Ranks on equal machines share one.
"""

from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.cost.host_launch import Host, Launching
from clustersim.cost.interference import NONE, Interference
from clustersim.cost.timing import KernelCost, Timing
from clustersim.model.kernels import Kernel


def slowest(gpus: int) -> float:
    """By how many standard deviations the slowest of so many GPUs is expected to be slower than the mean one.

    The expected largest of a normal sample, by Blom's approximation (Statistical Estimates and Transformed
    Beta-Variables, 1958). A step waits for all of its ranks, so the slowest sets the pace.
    """
    return 0.0 if gpus < 2 else NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))


@dataclass(frozen=True, slots=True)
class Machine:
    """kernels: how long they take alone; interference: how they and collectives slow each other.

    launching: what the host needs to launch them.
    """

    kernels: KernelCost
    interference: Interference = NONE
    launching: Host = field(default_factory=Launching)


@dataclass(frozen=True, slots=True)
class Slowed:
    """Kernels at a part `speed` of their normal speed (a `KernelCost`)."""

    kernels: KernelCost
    speed: float

    def kernel(self, kernel: Kernel) -> Timing:
        """Time one kernel alone."""
        timing = self.kernels.kernel(kernel)
        return replace(timing, seconds=timing.seconds / self.speed)


@dataclass(frozen=True, slots=True, eq=False)
class Machines:
    """kinds: the machines there are; of: [ranks] number of each rank's machine."""

    kinds: tuple[Machine, ...]
    of: IntArray

    @classmethod
    def equal(cls, machine: Machine, ranks: int) -> "Machines":
        """The same machine for all ranks."""
        return cls((machine,), np.zeros(ranks, dtype=np.int64))
