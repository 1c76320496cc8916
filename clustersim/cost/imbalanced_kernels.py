"""How long do kernels take whose rows are more or fewer than the mean rank's?

Times are worked out at every 64th of the mean rows and are straight lines between: real experts' rows differ from each
other, so that no tile's edge is met by all at once. A kernel over the mean rows takes exactly what it takes.
"""

from dataclasses import dataclass, field
from typing import Final

from clustersim.cost.timing import KernelCost, Timing
from clustersim.model.kernels import Kernel

_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """Times kernels over so many times their rows, and remembers the times in between by the kernels' identity."""

    kernels: KernelCost
    _known: dict[tuple[int, int], Timing] = field(default_factory=dict)
    _seen: dict[int, Kernel] = field(default_factory=dict)  # so that no other takes the place of one

    def kernel(self, kernel: Kernel, rows: float) -> Timing:
        """A kernel over `rows` times its rows."""
        whole, part = divmod(rows * _STEPS, 1.0)
        below = self._at(kernel, int(whole))
        if part == 0.0:
            return below
        above = self._at(kernel, int(whole) + 1)
        seconds = below.seconds + part * (above.seconds - below.seconds)
        return Timing(seconds, below.provenance, above.bound, below.error, below.longer)

    def _at(self, kernel: Kernel, step: int) -> Timing:
        key = id(kernel), step
        known = self._known.get(key)
        if known is None:
            self._seen[id(kernel)] = kernel
            more = kernel if step == _STEPS else kernel.loaded(step / _STEPS)
            known = self._known[key] = self.kernels.kernel(more)
        return known
