"""Small calibration records whose times follow a formula that the test states."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveFit,
    CollectiveSample,
    DeviceInfo,
    FitResidual,
    KernelFit,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.program.task import CollectiveType

H100 = load_accelerator("h100-sxm-80gb")
MODEL = Roofline(H100)
DEVICE = DeviceInfo("h100-sxm-80gb", "NVIDIA H100 80GB HBM3")
CONDITIONS = MeasurementConditions("2025-01-01", "clustersim calibrate", "median")


def spread(seconds: float, dispersion: float = 0.0) -> TimeStatistics:
    return TimeStatistics(seconds, seconds * (1.0 - dispersion), seconds * (1.0 + dispersion), 20)


def matmul_kernel(shape: MatmulShape, dtype: DType = DType.BF16) -> Kernel:
    m, n, k = shape.m, shape.n, shape.k
    moved_bytes = dtype.bytes * shape.batch * (m * k + k * n + m * n)
    return Kernel("matmul", KernelKind.MATMUL, dtype, 2.0 * shape.batch * m * n * k, float(moved_bytes), shape)


def attention_kernel(shape: AttentionShape) -> Kernel:
    scores = shape.batch * shape.heads * shape.query * shape.key * (0.5 if shape.causal else 1.0)
    moved_bytes = 8.0 * shape.batch * shape.heads * shape.query * shape.head_dim
    return Kernel(
        "attention", KernelKind.ATTENTION_FORWARD, DType.BF16, 4.0 * scores * shape.head_dim, moved_bytes, shape
    )


def norm_kernel(rows: int, width: int, routine: MemoryBoundOp = MemoryBoundOp.RMSNORM) -> Kernel:
    shape = MemoryBoundShape(routine, rows, width, fused=True)
    return Kernel("norm", KernelKind.NORM, DType.BF16, 0.0, 4.0 * rows * width, shape)


def kernel_sample(kernel: Kernel, seconds: float, dispersion: float = 0.0) -> KernelSample:
    assert kernel.shape is not None
    return KernelSample(
        kernel.name,
        kernel.kind,
        kernel.dtype,
        kernel.shape,
        kernel.flops,
        kernel.bytes,
        kernel.launches,
        spread(seconds, dispersion),
    )


def record_of(
    kernels: Sequence[Kernel], kernel_seconds: Callable[[Kernel], float], dispersion: float = 0.0
) -> CalibrationRecord:
    """The record of kernels that take the time that a function gives."""
    return CalibrationRecord(
        DEVICE, CONDITIONS, tuple(kernel_sample(kernel, kernel_seconds(kernel), dispersion) for kernel in kernels)
    )


def kernel_fit_of(accelerator: Accelerator = H100, **errors: float) -> KernelFit:
    """The accelerator's own constants as a fit, with held-out errors by family (`_` for spaces)."""
    return KernelFit(
        peak=dict(accelerator.peak),
        memory_bandwidth=accelerator.memory_bandwidth,
        compute_units=accelerator.compute_units,
        efficiency=replace(accelerator.efficiency, published=False),
        factors={},
        residuals={name.replace("_", " "): FitResidual(10, error / 2.0, error) for name, error in errors.items()},
    )


def collective_samples(
    seconds: dict[float, float], ranks: int = 8, nodes: int = 1, collective: CollectiveType = CollectiveType.ALL_REDUCE
) -> tuple[CollectiveSample, ...]:
    """Samples of one collective by payload."""
    return tuple(
        CollectiveSample(CollectiveCall(collective, size, ranks, nodes), spread(time)) for size, time in seconds.items()
    )


def collective_fit(alpha: float, beta: float, error: float, ranks: int = 8, nodes: int = 1) -> CollectiveFit:
    return CollectiveFit(CollectiveType.ALL_REDUCE, ranks, nodes, alpha, beta, FitResidual(5, error / 2.0, error))
