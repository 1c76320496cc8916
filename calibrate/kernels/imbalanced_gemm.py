"""Slowdown of grouped matmuls with imbalanced group sizes.

The same kernel is timed with equal group sizes, and right after with imbalanced ones of the same total
(`calibrate.imbalanced_shares`). For each kind, format and operand layout that was requested, the matmul with
the most FLOP is taken. Imbalanced groups have partial tiles at the end of each group and, on streams or in a
loop, one long matmul that the others cannot hide. In block-scaled formats groups are padded to full blocks.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.imbalanced_shares import VARIATIONS, integer_shares
from calibrate.kernels.measure import ActionFactory, distinct_kernels, measure_kernel, time_kernel
from calibrate.kernels.pytorch_ops import grouped_gemm
from calibrate.kernels.pytorch_ops.scaled_matmul import ALIGNMENTS
from calibrate.kernels.timing import MeasurementMethod
from clustersim.cost.calibration_record import CalibrationRecord, ImbalancedGemmSample, KernelSignature, signature_of
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, Kernel, MatmulLayout, MatmulShape

ImbalancedCase = tuple[Kernel, tuple[int, ...]]


def imbalanced_cases(kernels: Iterable[Kernel]) -> list[ImbalancedCase]:
    """The largest grouped matmuls, with their imbalanced group sizes."""
    heaviest: dict[tuple[object, ...], Kernel] = {}
    for kernel in distinct_kernels(kernels):
        match kernel.shape:
            case MatmulShape(batch=groups) as shape if kernel.kind in GROUPED_MATMUL_KINDS and groups > 1:
                key = kernel.kind, kernel.dtype, shape.operands, shape.accumulated
                if key not in heaviest or kernel.flops > heaviest[key].flops:
                    heaviest[key] = kernel
    return [(kernel, _group_sizes(kernel, variation)) for kernel in heaviest.values() for variation in VARIATIONS]


def missing_cases(kernels: Iterable[Kernel], record: CalibrationRecord) -> list[ImbalancedCase]:
    """Cases that a record lacks, and whose balanced kernel it has a time of."""
    measured = {(sample.kernel.signature, sample.tokens_per_group) for sample in record.imbalanced_gemms}
    timed_signatures: set[KernelSignature | None] = {
        sample.signature for sample in record.kernels if sample.time is not None
    }
    return [
        (kernel, group_sizes)
        for kernel, group_sizes in imbalanced_cases(kernels)
        if signature_of(kernel) in timed_signatures and (signature_of(kernel), group_sizes) not in measured
    ]


def measure_imbalanced(
    cases: Iterable[ImbalancedCase], device: TorchDevice, method: MeasurementMethod
) -> Iterator[ImbalancedGemmSample]:
    """Measure each case, skipping those whose balanced kernel the device cannot run."""
    for kernel, group_sizes in cases:
        balanced = measure_kernel(kernel, device, method)
        if balanced.time is not None:
            statistics, _ = time_kernel(kernel, device, method, _action_factory(group_sizes))
            device.release_memory()
            yield ImbalancedGemmSample(balanced, group_sizes, statistics)


def _action_factory(group_sizes: Sequence[int]) -> ActionFactory:
    def prepare(kernel: Kernel, device: torch.device) -> Action:
        if not isinstance(kernel.shape, MatmulShape):
            raise TypeError(f"{kernel.name} has no sizes")
        return grouped_gemm.prepare_grouped(kernel, kernel.shape, device, group_sizes)

    return prepare


def _group_sizes(kernel: Kernel, variation: float) -> tuple[int, ...]:
    shape = kernel.shape
    if not isinstance(shape, MatmulShape):
        raise TypeError(f"{kernel.name} has no sizes")
    mean_size = shape.k if shape.operands is MatmulLayout.TN else shape.m
    block = ALIGNMENTS.get(kernel.dtype, 1)
    return tuple(
        block * block_count for block_count in integer_shares(shape.batch, variation, mean_size * shape.batch // block)
    )
