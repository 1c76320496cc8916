"""How long do kernels take whose rows are more or fewer than the mean rank's?

Times are worked out at every 64th of the mean rows and are straight lines between: real experts' rows differ from each
other, so that no tile's edge is met by all at once. A kernel over the mean rows takes exactly what it takes.
"""

from dataclasses import dataclass, field
from typing import Final

from clustersim.cost.timing import KernelCost, KernelTiming
from clustersim.model.kernels import Kernel

_STEPS_PER_LOAD: Final = 64


@dataclass(frozen=True, slots=True)
class ImbalancedKernels:
    """Times kernels over so many times their rows, and remembers the times in between by the kernels' identity."""

    kernels: KernelCost
    _cache: dict[tuple[int, int], KernelTiming] = field(default_factory=dict)
    _pinned: dict[int, Kernel] = field(default_factory=dict)  # so that no other takes the place of one

    def time_kernel(self, kernel: Kernel, load_factor: float) -> KernelTiming:
        """A kernel over `rows` times its rows."""
        step, fraction = divmod(load_factor * _STEPS_PER_LOAD, 1.0)
        below = self._time_at_step(kernel, int(step))
        if fraction == 0.0:
            return below
        above = self._time_at_step(kernel, int(step) + 1)
        seconds = below.seconds + fraction * (above.seconds - below.seconds)
        return KernelTiming(seconds, below.provenance, above.bottleneck, below.error, below.in_situ_slowdown)

    def _time_at_step(self, kernel: Kernel, step: int) -> KernelTiming:
        key = id(kernel), step
        cached = self._cache.get(key)
        if cached is None:
            self._pinned[id(kernel)] = kernel
            scaled = kernel if step == _STEPS_PER_LOAD else kernel.scale_rows(step / _STEPS_PER_LOAD)
            cached = self._cache[key] = self.kernels.time_kernel(scaled)
        return cached
