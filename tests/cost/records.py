"""Small records of an accelerator on which everything follows from a law that the test states."""

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


def product(shape: MatmulShape, dtype: DType = DType.BF16) -> Kernel:
    m, n, k = shape.m, shape.n, shape.k
    moved = dtype.bytes * shape.batch * (m * k + k * n + m * n)
    return Kernel("matmul", KernelKind.MATMUL, dtype, 2.0 * shape.batch * m * n * k, float(moved), shape)


def attention(shape: AttentionShape) -> Kernel:
    scores = shape.batch * shape.heads * shape.query * shape.key * (0.5 if shape.causal else 1.0)
    moved = 8.0 * shape.batch * shape.heads * shape.query * shape.head_dim
    return Kernel("attention", KernelKind.ATTENTION_FORWARD, DType.BF16, 4.0 * scores * shape.head_dim, moved, shape)


def streamed(rows: int, width: int, routine: MemoryBoundOp = MemoryBoundOp.RMSNORM) -> Kernel:
    shape = MemoryBoundShape(routine, rows, width, fused=True)
    return Kernel("norm", KernelKind.NORM, DType.BF16, 0.0, 4.0 * rows * width, shape)


def row(kernel: Kernel, seconds: float, dispersion: float = 0.0) -> KernelSample:
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


def measured(kernels: Sequence[Kernel], law: Callable[[Kernel], float], dispersion: float = 0.0) -> CalibrationRecord:
    """The record of kernels that take what a law says."""
    return CalibrationRecord(DEVICE, CONDITIONS, tuple(row(kernel, law(kernel), dispersion) for kernel in kernels))


def fit(accelerator: Accelerator = H100, **left_out: float) -> KernelFit:
    """The accelerator's own constants as a fit, with residuals by family (`_` for spaces)."""
    return KernelFit(
        peak=dict(accelerator.peak),
        memory_bandwidth=accelerator.memory_bandwidth,
        compute_units=accelerator.compute_units,
        efficiency=replace(accelerator.efficiency, published=False),
        factors={},
        residuals={name.replace("_", " "): FitResidual(10, error / 2.0, error) for name, error in left_out.items()},
    )


def calls(
    seconds: dict[float, float], ranks: int = 8, nodes: int = 1, collective: CollectiveType = CollectiveType.ALL_REDUCE
) -> tuple[CollectiveSample, ...]:
    """Rows of one collective by payload."""
    return tuple(
        CollectiveSample(CollectiveCall(collective, size, ranks, nodes), spread(item)) for size, item in seconds.items()
    )


def line(alpha: float, beta: float, left_out: float, ranks: int = 8, nodes: int = 1) -> CollectiveFit:
    return CollectiveFit(CollectiveType.ALL_REDUCE, ranks, nodes, alpha, beta, FitResidual(5, left_out / 2.0, left_out))
