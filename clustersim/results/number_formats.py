"""In which number formats is a step computed, and what do casts into them cost?

FLOP are those that products execute on all ranks (a causal attention kernel skips the masked half, and counts what it
does). Casts are kernels that bring operands into formats with scales; their time is busy time, wherever it hides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clustersim.common.dtypes import DType
from clustersim.common.units import Flop, FlopPerSecond, Seconds
from clustersim.model.kernels import TENSOR_CORE_KINDS, Kernel, KernelKind
from clustersim.program.task import Segment
from clustersim.results.provenance import Item
from clustersim.results.trace_table import Rows


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of one step.

    flops: of all ranks' products by format, largest first; casts: seconds of casts on a rank, the mean; peak: the
    format to whose peak FLOP are compared; peak_flops: FLOP/s of a GPU in it; wide: the format of activations;
    wide_flops: FLOP/s in that.
    """

    flops: Mapping[DType, Flop]
    casts: Seconds
    peak: DType
    peak_flops: FlopPerSecond
    wide: DType
    wide_flops: FlopPerSecond

    @property
    def shares(self) -> dict[DType, float]:
        """Part of all FLOP by format; they sum to 1."""
        whole = sum(self.flops.values())
        return {dtype: flop / whole for dtype, flop in self.flops.items()}

    def of_wide(self, mfu: float) -> float:
        """A utilisation of `peak_flops` as one of `wide_flops`."""
        return mfu * self.peak_flops / self.wide_flops


def executed_flops(rows: Rows, steps: int) -> dict[DType, Flop]:
    """FLOP of products that all ranks together execute in one of several steps, by format, largest first."""
    found: dict[DType, Flop] = {}
    for count, block in zip(rows.runs, rows.blocks, strict=True):
        for dtype, flops in _flops(block).items():
            found[dtype] = found.get(dtype, 0.0) + count * flops / steps
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def cast_seconds(items: Iterable[Item], *, ranks: int, steps: int) -> Seconds:
    """Seconds that a rank's casts take in one of several steps, the mean over ranks."""
    casts = (item.seconds for item in items if isinstance(item.does, Kernel) and item.does.kind is KernelKind.CAST)
    return sum(casts) / (ranks * steps)


def _flops(block: Segment) -> dict[DType, Flop]:
    """FLOP of a block's products by format."""
    found: dict[DType, Flop] = {}
    for kernel in (operation.kernel for operation in block.operations):
        if kernel is not None and kernel.kind in TENSOR_CORE_KINDS:
            found[kernel.dtype] = found.get(kernel.dtype, 0.0) + kernel.flops
    return found
