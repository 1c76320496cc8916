"""How long do kernels take on ranks with more or fewer tokens than the mean rank?

Times are computed at every 64th of the mean token count and interpolated linearly: token counts of real
experts differ from each other, so that they do not all cross a tile boundary at once. A kernel at the mean
count keeps its exact time.
"""

from dataclasses import dataclass, field
from typing import Final

from clustersim.common.cached_method import cached_by
from clustersim.common.interning import Interner
from clustersim.cost.timing import KernelCost, KernelTiming
from clustersim.model.kernels import Kernel

_STEPS_PER_LOAD: Final = 64


@dataclass(frozen=True)
class ImbalancedKernels:
    """Times kernels at a multiple of their token count; the grid times are cached."""

    kernels: KernelCost
    _kernels: Interner[Kernel] = field(default_factory=Interner)

    def time_kernel(self, kernel: Kernel, load_factor: float) -> KernelTiming:
        """Time of a kernel with `load_factor` times its tokens."""
        step, fraction = divmod(load_factor * _STEPS_PER_LOAD, 1.0)
        below = self._time_at_step(kernel, int(step))
        if fraction == 0.0:
            return below
        above = self._time_at_step(kernel, int(step) + 1)
        seconds = below.seconds + fraction * (above.seconds - below.seconds)
        return KernelTiming(seconds, below.provenance, above.bottleneck, below.error, below.in_situ_slowdown)

    @cached_by(lambda self, kernel, step: (self._kernels.index_of(kernel), step))
    def _time_at_step(self, kernel: Kernel, step: int) -> KernelTiming:
        return self.kernels.time_kernel(
            kernel if step == _STEPS_PER_LOAD else kernel.scale_rows(step / _STEPS_PER_LOAD)
        )
