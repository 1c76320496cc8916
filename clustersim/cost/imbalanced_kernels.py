"""How long do kernels take on ranks with more or fewer tokens than the mean rank?

Times are computed at every 64th of the mean token count and interpolated linearly: token counts of real
experts differ from each other, so that they do not all cross a tile boundary at once. A kernel at the mean
count keeps its exact time.
"""

from dataclasses import dataclass, field
from typing import Final

from clustersim.common.interning import Interner
from clustersim.cost.timing import KernelCost, KernelTiming
from clustersim.model.kernels import Kernel

_STEPS_PER_LOAD: Final = 64


@dataclass(frozen=True, slots=True)
class ImbalancedKernels:
    """Times kernels at a multiple of their token count; the grid times are cached."""

    kernels: KernelCost
    _kernels: Interner[Kernel] = field(default_factory=Interner)
    _cache: dict[tuple[int, int], KernelTiming] = field(default_factory=dict)

    def time_kernel(self, kernel: Kernel, load_factor: float) -> KernelTiming:
        """Time of a kernel with `load_factor` times its tokens."""
        step, fraction = divmod(load_factor * _STEPS_PER_LOAD, 1.0)
        index = self._kernels.index_of(kernel)
        below = self._time_at_step(kernel, index, int(step))
        if fraction == 0.0:
            return below
        above = self._time_at_step(kernel, index, int(step) + 1)
        seconds = below.seconds + fraction * (above.seconds - below.seconds)
        return KernelTiming(seconds, below.provenance, above.bottleneck, below.error, below.in_situ_slowdown)

    def _time_at_step(self, kernel: Kernel, index: int, step: int) -> KernelTiming:
        key = index, step
        cached = self._cache.get(key)
        if cached is None:
            scaled = kernel if step == _STEPS_PER_LOAD else kernel.scale_rows(step / _STEPS_PER_LOAD)
            cached = self._cache[key] = self.kernels.time_kernel(scaled)
        return cached
