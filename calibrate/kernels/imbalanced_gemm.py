"""How much slower are products of experts whose groups have different numbers of rows?

The same kernel twice, one behind the other: with as many rows in each group, and with uneven ones that are as many
together (`calibrate.imbalanced_shares`). Of each kind, format and layout of operands that was asked for the product with the most
FLOP is taken. A product that is uneven has the tiles of each group's last rows to fill, and, on streams or in a loop,
one long product that the others cannot hide. In formats with scales groups are padded to whole blocks.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.imbalanced_shares import VARIATIONS, whole_rows
from calibrate.kernels.measure import Preparation, distinct, row, timed
from calibrate.kernels.pytorch_ops import grouped_gemm
from calibrate.kernels.pytorch_ops.scaled_matmul import BLOCKS
from calibrate.kernels.timing import Method
from clustersim.cost.calibration_record import CalibrationRecord, ImbalancedGemmSample, KernelSignature, signature_of
from clustersim.model.kernels import GROUPED_MATMUL_KINDS, Kernel, MatmulLayout, MatmulShape

Asked = tuple[Kernel, tuple[int, ...]]


def uneven(kernels: Iterable[Kernel]) -> list[Asked]:
    """The heaviest products of experts, and rows of their groups."""
    heaviest: dict[tuple[object, ...], Kernel] = {}
    for kernel in distinct(kernels):
        match kernel.shape:
            case MatmulShape(batch=groups) as shape if kernel.kind in GROUPED_MATMUL_KINDS and groups > 1:
                key = kernel.kind, kernel.dtype, shape.operands, shape.accumulated
                if key not in heaviest or kernel.flops > heaviest[key].flops:
                    heaviest[key] = kernel
    return [(kernel, _rows(kernel, variation)) for kernel in heaviest.values() for variation in VARIATIONS]


def missing(kernels: Iterable[Kernel], record: CalibrationRecord) -> list[Asked]:
    """Those that a record lacks, and whose even kernel it has a time of."""
    known = {
        (imbalanced_gemm_sample.kernel.signature, imbalanced_gemm_sample.rows)
        for imbalanced_gemm_sample in record.uneven
    }
    timed: set[KernelSignature | None] = {
        kernel_sample.signature for kernel_sample in record.kernels if kernel_sample.time is not None
    }
    return [
        (kernel, rows)
        for kernel, rows in uneven(kernels)
        if signature_of(kernel) in timed and (signature_of(kernel), rows) not in known
    ]


def uneven_rows(asked: Iterable[Asked], device: TorchDevice, method: Method) -> Iterator[ImbalancedGemmSample]:
    """Each of them measured; the even kernel's row says where the device cannot run it."""
    for kernel, rows in asked:
        even = row(kernel, device, method)
        if even.time is not None:
            time, _ = timed(kernel, device, method, _preparing(rows))
            device.release()
            yield ImbalancedGemmSample(even, rows, time)


def _preparing(rows: Sequence[int]) -> Preparation:
    def prepare(kernel: Kernel, device: torch.device) -> Action:
        if not isinstance(kernel.shape, MatmulShape):
            raise TypeError(f"{kernel.name} has no sizes")
        return grouped_gemm.prepare(kernel, kernel.shape, device, rows)

    return prepare


def _rows(kernel: Kernel, variation: float) -> tuple[int, ...]:
    shape = kernel.shape
    if not isinstance(shape, MatmulShape):
        raise TypeError(f"{kernel.name} has no sizes")
    each = shape.k if shape.operands is MatmulLayout.TN else shape.m
    block = BLOCKS.get(kernel.dtype, 1)
    return tuple(block * many for many in whole_rows(shape.batch, variation, each * shape.batch // block))
