"""On what does each rank's kernels run?

A machine is an accelerator in the state that it is in: its kernels take what its source of durations says, and longer
by a part while a collective runs beside them on the same GPU, because the collective's own kernel takes compute units
and memory bandwidth away. Ranks on equal machines share one.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clustersim.cost.timing import KernelCost, Timing
from clustersim.workload.kernels import Kernel

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Machine:
    """kernels: how long they take alone; interference: the part by which they take longer beside a collective."""

    kernels: KernelCost
    interference: float = 0.0


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
