"""How long do the grouped GEMMs of several experts take?

All have the same sizes, each with a weight matrix of its own. Two ways to run them:

- on several streams: a library matmul is launched for each expert, round robin over a few streams
  (Transformer Engine's `GroupedLinear`, four). The library picks the fastest tile of each matmul as if it
  ran by itself; on the device the tiles of all matmuls follow one another, so that only the last wave is
  partly filled. The host needs `call` for each matmul, so that many small ones are host bound;
- in one kernel (CUTLASS's grouped GEMM, `torch._grouped_mm`): the tile that is fastest for all of them at
  once, and one launch.

Arithmetic and memory traffic overlap only partly: tiles with few columns of k (weight gradients of few
tokens) load, compute and store in sequence, and a group's matrix is read for few rows. With c and m seconds
of each without the other, sqrt(c² + m²) is assumed: halfway between full and no overlap where they are
equal. Other constants are those of matmuls (`cost.matmul_tiles`) with a share, prologue and edge of their
own. In block-scaled formats the ratios of matmuls between formats are applied to both, unless the fused
kernel's own share is known.

In a training step the power limit caps the rate of matmuls (`in_step_rate`): grouped GEMMs that are slower
in isolation already are not slowed further.

References: NVIDIA/TransformerEngine, transformer_engine/common/gemm/cublaslt_gemm.cu
(nvte_multi_stream_cublas_gemm) and common/util/multi_stream.cpp; pytorch/pytorch,
aten/src/ATen/native/cuda/GroupMM.cu; MooreThreads/SimuMax,
simu_tools/efficency_test/test_grouped_gemm_efficiency.py (its times are the host's clock over 40 calls).
"""

from dataclasses import replace

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.matmul_tiles import KernelWork, alignment_rate, matmul_options
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import KernelEfficiency
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape


def grouped_work(accelerator: Accelerator, kernel: Kernel, in_step_rate: float) -> KernelWork:
    """Compute, memory and host time of a grouped GEMM.

    in_step_rate: arithmetic rate within a training step relative to isolated kernels.
    """
    if not isinstance(kernel.shape, MatmulShape):
        raise TypeError(f"{kernel.name} has no sizes")
    shape, multi_stream = kernel.shape, kernel.kind is KernelKind.STREAMED_MATMULS
    sizes = np.array([[shape.m], [shape.n], [shape.k], [shape.batch]], dtype=np.float64)
    compute, memory = grouped_seconds(
        accelerator, kernel.dtype, sizes, np.array([kernel.bytes]), multi_stream=multi_stream
    )
    alignment = alignment_rate(accelerator, kernel.dtype, shape)
    compute_seconds = float(compute[0]) / (
        alignment * _sustained_rate(accelerator.efficiency, kernel.dtype, in_step_rate, multi_stream=multi_stream)
    )
    memory_seconds = float(memory[0]) / alignment
    host_seconds = shape.batch * accelerator.efficiency.expert_matmul.host_launch if multi_stream else 0.0
    return KernelWork(compute_seconds, memory_seconds, host_seconds, float(np.hypot(compute_seconds, memory_seconds)))


def grouped_seconds(
    accelerator: Accelerator, dtype: DType, sizes: FloatArray, moved_bytes: FloatArray, *, multi_stream: bool
) -> tuple[FloatArray, FloatArray]:
    """[matmuls] compute and memory seconds of aligned grouped GEMMs, on several streams or in one kernel.

    sizes: [4, matmuls] rows m, n, k, groups; moved_bytes: [matmuls] bytes of all groups if every operand is
    read once.
    """
    grouped_accelerator = _with_grouped_constants(accelerator, dtype, multi_stream=multi_stream)
    single_sizes = sizes.copy()
    single_sizes[3] = 1.0
    compute, memory = matmul_options(grouped_accelerator, dtype, sizes, moved_bytes)
    criterion = (
        np.hypot(*matmul_options(grouped_accelerator, dtype, single_sizes, moved_bytes / sizes[3]))
        if multi_stream
        else np.hypot(compute, memory)
    )
    best = np.argmin(criterion, axis=1)[:, None]
    return np.take_along_axis(compute, best, 1)[:, 0], np.take_along_axis(memory, best, 1)[:, 0]


def _with_grouped_constants(accelerator: Accelerator, dtype: DType, *, multi_stream: bool) -> Accelerator:
    """The accelerator with the matmul constants of grouped GEMMs in a format."""
    efficiency = accelerator.efficiency
    matmul, grouped = efficiency.matmul, efficiency.expert_matmul
    single_share = matmul.with_uniform_fraction(_peak_share(efficiency, dtype, multi_stream=multi_stream))
    prologue = grouped.prologue + (matmul.prologue_of(dtype) - matmul.prologue)
    constants = replace(single_share, prologue=prologue, edge=grouped.edge, prologue_by_format={})
    return replace(accelerator, efficiency=replace(efficiency, matmul=constants))


def _peak_share(efficiency: KernelEfficiency, dtype: DType, *, multi_stream: bool) -> float:
    """Fraction of a format's peak that grouped GEMMs reach."""
    matmul, grouped = efficiency.matmul, efficiency.expert_matmul
    share = grouped.multi_stream_peak_fraction if multi_stream else grouped.kernel_peak_fraction
    scaled_share = (
        share * matmul.peak_fraction_of(dtype) / matmul.peak_fraction if dtype in LOW_PRECISION_DTYPES else share
    )
    return scaled_share if multi_stream else grouped.kernel_peak_fraction_by_format.get(dtype, scaled_share)


def _sustained_rate(efficiency: KernelEfficiency, dtype: DType, in_step_rate: float, *, multi_stream: bool) -> float:
    """Rate of grouped GEMMs in a step relative to isolation: 1 where they are below what matmuls sustain anyway."""
    peak_share = _peak_share(efficiency, dtype, multi_stream=multi_stream)
    return min(max(1.0, in_step_rate), in_step_rate * max(1.0, efficiency.matmul.peak_fraction_of(dtype) / peak_share))
