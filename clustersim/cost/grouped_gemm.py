"""How long do the products of several experts take?

All are of the same sizes, each with a matrix of its own. Two ways to run them:

- on streams: a library's product is launched for each expert, in turns on a few streams (Transformer Engine's
  `GroupedLinear`, on four). The library picks the fastest tile of each product as if it were alone; on the device the
  tiles of all flow behind one another, so that only the last wave is partly filled. The host needs `call` for each
  product, so that many small ones take as long as it does;
- in one kernel (CUTLASS's grouped GEMM, `torch._grouped_mm`): the tile that is fastest for all of them together, and
  one launch.

Arithmetic and memory traffic hide each other only in part: tiles of few columns of k (weight gradients of few tokens)
load, compute and store one after the other, and a group's matrix is read for few rows. With c and m seconds of each
alone, sqrt(c² + m²) is assumed: of equal ones, halfway between hidden and not. Other constants are those of products
(`cost.matmul_tiles`) with a share, prologue and edge of their own. In formats with scales both keep the distance that other
products have there from those in the others, unless one kernel's own share is known.

In a training step the power limit caps the rate of products (`rate`): those that are slower by themselves already are
not slowed further.

References: NVIDIA/TransformerEngine, transformer_engine/common/gemm/cublaslt_gemm.cu (nvte_multi_stream_cublas_gemm)
and common/util/multi_stream.cpp; pytorch/pytorch, aten/src/ATen/native/cuda/GroupMM.cu; MooreThreads/SimuMax,
simu_tools/efficency_test/test_grouped_gemm_efficiency.py (its times are the host's clock over 40 calls).
"""

from dataclasses import replace

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import NARROW, DType
from clustersim.cost.matmul_tiles import Work, alignment_rate, matmul_options
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import Efficiency
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape


def grouped_work(accelerator: Accelerator, kernel: Kernel, rate: float) -> Work:
    """Of products of experts; rate: arithmetic within a training step relative to kernels by themselves."""
    if not isinstance(kernel.shape, MatmulShape):
        raise TypeError(f"{kernel.name} has no sizes")
    shape, streamed = kernel.shape, kernel.kind is KernelKind.STREAMED_MATMULS
    sizes = np.array([[shape.m], [shape.n], [shape.k], [shape.batch]], dtype=np.float64)
    compute, memory = grouped_seconds(accelerator, kernel.dtype, sizes, np.array([kernel.bytes]), streamed=streamed)
    slower = alignment_rate(accelerator, kernel.dtype, shape)
    busy = float(compute[0]) / (slower * _sustained(accelerator.efficiency, kernel.dtype, rate, streamed=streamed))
    moved = float(memory[0]) / slower
    calls = shape.batch * accelerator.efficiency.experts.call if streamed else 0.0
    return Work(busy, moved, calls, float(np.hypot(busy, moved)))


def grouped_seconds(
    accelerator: Accelerator, dtype: DType, sizes: FloatArray, moved: FloatArray, *, streamed: bool
) -> tuple[FloatArray, FloatArray]:
    """[products] arithmetic and memory seconds of many aligned groups of products, on streams or in one kernel.

    sizes: [4, products] rows m, n, k, groups; moved: [products] bytes of all groups if every operand passes once.
    """
    inside = _inside(accelerator, dtype, streamed=streamed)
    alone = sizes.copy()
    alone[3] = 1.0
    compute, memory = matmul_options(inside, dtype, sizes, moved)
    chosen = (
        np.hypot(*matmul_options(inside, dtype, alone, moved / sizes[3])) if streamed else np.hypot(compute, memory)
    )
    best = np.argmin(chosen, axis=1)[:, None]
    return np.take_along_axis(compute, best, 1)[:, 0], np.take_along_axis(memory, best, 1)[:, 0]


def _inside(accelerator: Accelerator, dtype: DType, *, streamed: bool) -> Accelerator:
    """The accelerator with the constants that products of experts have in a format."""
    efficiency = accelerator.efficiency
    matmul, grouped = efficiency.matmul, efficiency.experts
    alike = matmul.at(_share(efficiency, dtype, streamed=streamed))
    prologue = grouped.prologue + (matmul.prologue_of(dtype) - matmul.prologue)
    own = replace(alike, prologue=prologue, edge=grouped.edge, prologues={})
    return replace(accelerator, efficiency=replace(efficiency, matmul=own))


def _share(efficiency: Efficiency, dtype: DType, *, streamed: bool) -> float:
    """Their part of a format's peak."""
    matmul, grouped = efficiency.matmul, efficiency.experts
    share = grouped.share if streamed else grouped.kernel_share
    kept = share * matmul.share_of(dtype) / matmul.share if dtype in NARROW else share
    return kept if streamed else grouped.kernel_shares.get(dtype, kept)


def _sustained(efficiency: Efficiency, dtype: DType, rate: float, *, streamed: bool) -> float:
    """Their rate in a step relative to that by themselves: all of it, where that is below what products sustain."""
    own = _share(efficiency, dtype, streamed=streamed)
    return min(max(1.0, rate), rate * max(1.0, efficiency.matmul.share_of(dtype) / own))
