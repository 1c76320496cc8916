"""Records whose samples follow the kernel model with known constants, up to noise."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import Accelerator
from clustersim.model import memory_bound
from clustersim.model.kernels import AttentionShape, Kernel, MatmulShape, MemoryBoundShape
from clustersim.model.layer_stack import MlpType
from clustersim.model.linear import matmul_kernel
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.transformer import Norm
from clustersim.validation.kernels import flash_kernel

CONDITIONS = MeasurementConditions(date="2026-01-01", command="synthetic", method="drawn from the model with noise")


def synthetic_record(
    accelerator: Accelerator, kernels: Iterable[Kernel], *, noise: float = 0.0, seed: int = 0
) -> CalibrationRecord:
    """A record of the modelled times of kernels on an accelerator, with log-normal noise per kernel."""
    roofline, random = Roofline(accelerator), np.random.default_rng(seed)
    samples = tuple(
        kernel_sample(kernel, roofline.time_kernel(kernel).seconds * float(np.exp(noise * random.standard_normal())))
        for kernel in kernels
    )
    device = DeviceInfo(accelerator.name, accelerator.description, compute_units=accelerator.compute_units)
    return CalibrationRecord(device, CONDITIONS, samples, launch_interval=accelerator.efficiency.launch_interval)


def kernel_sample(kernel: Kernel, seconds: float) -> KernelSample:
    """A sample of one measurement of a kernel."""
    if kernel.shape is None:
        raise ValueError(kernel.name)
    time = TimeStatistics(seconds, seconds, seconds, 1)
    fields = (kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches)
    return KernelSample(*fields, time)


def sized_matmul(m: int, n: int, k: int, dtype: DType = DType.BF16) -> Kernel:
    """One matmul."""
    return matmul_kernel("matmul", dtype, MatmulShape(m, n, k), result_bytes=2.0)


def sized_matmuls(sizes: Sequence[int], dtype: DType = DType.BF16) -> Iterator[Kernel]:
    """Matmuls of all combinations of these sizes."""
    yield from (sized_matmul(m, n, k, dtype) for m in sizes for n in sizes for k in sizes)


def memory_bound_kernels(
    token_counts: Sequence[int], widths: Sequence[int], dtype: DType = DType.BF16
) -> Iterator[Kernel]:
    """Norm and activation, forward and backward, fused and not."""
    fused_values = (True, False)
    operators = [memory_bound.norm_spec(Norm.RMSNORM, fused=fused) for fused in fused_values]
    operators += [memory_bound.activation_spec(MlpType.SWIGLU, fused=fused) for fused in fused_values]
    for operator in operators:
        for tokens in token_counts:
            for width in widths:
                yield from operator_kernels(operator, operator.shape_for(tokens, width), dtype)


def operator_kernels(operator: MemoryBoundSpec, shape: MemoryBoundShape, dtype: DType) -> Iterator[Kernel]:
    """Forward and backward of one operator on one shape."""
    yield operator.forward_kernel("stream", dtype, shape)
    yield from operator.backward_kernels("stream", dtype, shape)


def attention_kernels(sequences: Sequence[int], heads: int = 16, head_dim: int = 128) -> Iterator[Kernel]:
    """Flash attention of these sequence lengths, causal and not, forward and backward."""
    for length in sequences:
        for causal in (True, False):
            shape = AttentionShape(2, length, length, heads, heads, head_dim, causal)
            for backward in (False, True):
                yield flash_kernel(shape, DType.BF16, backward=backward)


def with_constants(accelerator: Accelerator, **constants: object) -> Accelerator:
    """The accelerator with other constants of the kernel model."""
    return replace(accelerator, efficiency=replace(accelerator.efficiency, **constants))  # type: ignore[arg-type]
