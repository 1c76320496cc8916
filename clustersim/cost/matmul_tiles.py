"""How long do a matmul's tiles and memory traffic take, for every tile and split that a library has?

See `cost.roofline`, whose model this is: tiles run in waves of one tile per compute unit; a tile of m x n
over k costs 2 m n (k + p) FLOP, at a fraction of the peak that falls with its perimeter; k may be split.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.common.units import FlopPerSecond, Seconds
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import MatmulShape

K_SPLITS: Final = (1, 2, 4, 8, 16)  # split-k factors that libraries offer
PARTIAL_BYTES: Final = 8.0  # a partial sum is written and read once in FP32


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Seconds of a kernel's arithmetic and of its memory traffic, each without the other.

    host_seconds: least time that its host needs; combined: seconds of arithmetic and memory traffic with
    partial overlap, None: the longer hides the other.
    """

    compute: Seconds
    memory: Seconds
    host_seconds: Seconds = 0.0
    combined: Seconds | None = None

    @property
    def seconds(self) -> Seconds:
        """Seconds for which the device is busy."""
        return max(self.compute, self.memory) if self.combined is None else self.combined


def matmul_rate(accelerator: Accelerator, dtype: DType) -> FlopPerSecond:
    """FLOP/s of all compute units inside the main loop of the library's largest tile."""
    return accelerator.peak_flops(dtype) * accelerator.efficiency.matmul.peak_fraction_of(dtype)


def alignment_rate(accelerator: Accelerator, dtype: DType, shape: MatmulShape) -> float:
    """Rate of a matmul relative to one with fully vectorizable rows; results count at least 16 bits per element."""
    *operands, result = shape.contiguous_elements
    row_bytes = [
        *(elements * dtype.unscaled_bytes for elements in operands),
        result * max(dtype.unscaled_bytes, DType.BF16.bytes),
    ]
    return accelerator.alignment.relative_rate(row_bytes, batched=shape.batch > 1)


def matmul_options(
    accelerator: Accelerator, dtype: DType, sizes: FloatArray, moved_bytes: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Compute and memory seconds of aligned matmuls for every tile and split of the library.

    sizes: [4, matmuls] rows m, n, k, batch; moved_bytes: [matmuls] bytes if every operand is read once; both
    results are [matmuls, options].
    """
    matmul, units = accelerator.efficiency.matmul, accelerator.compute_units
    options = np.array([(m, n, split) for m, n in matmul.tiles for split in K_SPLITS], dtype=np.float64).T
    tile_m, tile_n, split = options[:, None, :]
    m, n, k, batch = sizes[:, :, None]
    perimeter = (1.0 + matmul.edge / tile_m) * (1.0 + matmul.edge / tile_n)
    tile_flops = 2.0 * tile_m * tile_n * (k / split + matmul.prologue_of(dtype)) * perimeter / perimeter.min()
    waves = np.ceil(np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch * split / units)
    compute = waves * tile_flops * units / matmul_rate(accelerator, dtype)
    partial = np.where(split > 1.0, split * m * n * batch * PARTIAL_BYTES, 0.0)
    bandwidth = accelerator.efficiency.reached_bandwidth(accelerator.memory_bandwidth)
    memory = (moved_bytes[:, None] + partial) / bandwidth
    return compute, memory
