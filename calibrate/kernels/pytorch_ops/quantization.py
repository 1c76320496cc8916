"""Quantization to scaled formats in PyTorch: formulas of `quantization_formulas`, compiled for a GPU.

The number of reads of the operand selects the formula: one if the scale is known or found on the fly (per
row or block), more if amax is a separate pass. If a norm has already quantized, only the transpose remains.
A step's weights are many matrices, counted as one column: one matrix with as many elements represents them.
PyTorch has no cast to NVFP4's four bits, and no Hadamard transform of its operands.
"""

from collections.abc import Callable, Mapping
from math import gcd
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from calibrate.devices.matmul_support import fp8_dtype
from calibrate.devices.stopwatch import Action
from calibrate.kernels import quantization_formulas
from calibrate.kernels.formulas import UnsupportedKernel, compiled
from calibrate.kernels.pytorch_ops.actions import ResultRetainingAction
from calibrate.kernels.pytorch_ops.random_tensors import normal_tensor
from calibrate.kernels.pytorch_ops.scaled_matmul import ALIGNMENTS
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import MemoryBoundShape

Formula = Callable[..., quantization_formulas.QuantizedTensors]

_MAX_COLUMNS: Final = 4096  # columns of the matrix that represents many matrices
_DELAYED_FORMULAS: Final = MappingProxyType[int, Formula](
    {1: quantization_formulas.delayed_scaling, 2: quantization_formulas.delayed_scaling_transposed}
)
_AMAX_FORMULAS: Final = MappingProxyType[DType, Mapping[int, Formula]](
    {
        DType.FP8: {1: quantization_formulas.current_scaling, 2: quantization_formulas.current_scaling_transposed},
        DType.FP8_ROWWISE: {1: quantization_formulas.rowwise, 2: quantization_formulas.rowwise_and_columnwise},
        DType.FP8_BLOCKWISE: {1: quantization_formulas.blockwise, 2: quantization_formulas.blockwise_transposed},
        DType.MXFP8: {1: quantization_formulas.mx_scaling, 2: quantization_formulas.mx_scaling_transposed},
    }
)
"""By format and number of quantized copies."""


def prepare_quantization(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """Quantization of random operands; raise UnsupportedKernel if there is no such kernel."""
    if device.type == "cpu":
        raise UnsupportedKernel(f"{shape.routine.value}: PyTorch has no fused kernel for it on a CPU")
    formula, operands = select_formula(shape, dtype, device)
    run: Callable[..., Any] = compiled(formula)
    return ResultRetainingAction(lambda: run(*operands))


def select_formula(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> tuple[Formula, tuple[Tensor, ...]]:
    """A formula and its operands; raise UnsupportedKernel if PyTorch has none."""
    output_format, copies, reads = shape.formats[0], len(shape.formats), shape.table
    if not shape.fused:
        raise UnsupportedKernel(f"{shape.routine.value}: casts that are not compiled are not measured")
    if DType.NVFP4 in (output_format, dtype):
        raise UnsupportedKernel(f"{shape.routine.value}: PyTorch has no cast to {DType.NVFP4.value}")
    row_count, width = _matrix_size(shape)
    if dtype in LOW_PRECISION_DTYPES or not reads:
        return quantization_formulas.transpose_copy, (normal_tensor(device, output_format, row_count, width),)
    _require_divisible(shape, row_count if copies > 1 else 0, width)
    x, target = normal_tensor(device, dtype, row_count, width), torch.empty(0, dtype=fp8_dtype(device), device=device)
    if output_format is DType.FP8 and reads == 1:
        return _DELAYED_FORMULAS[copies], (x, torch.ones((), device=device), target)
    if output_format is DType.FP8_ROWWISE and copies == 1 and reads > 1:
        return quantization_formulas.columnwise, (x, target)
    return _AMAX_FORMULAS[output_format][copies], (x, target)


def _matrix_size(shape: MemoryBoundShape) -> tuple[int, int]:
    if shape.width > 1:
        return shape.rows, shape.width
    columns = gcd(shape.rows, _MAX_COLUMNS)
    return shape.rows // columns, columns


def _require_divisible(shape: MemoryBoundShape, *sizes: int) -> None:
    output_format = shape.formats[0]
    block = ALIGNMENTS[output_format]
    if any(size % block for size in sizes):
        raise UnsupportedKernel(
            f"{shape.routine.value}: {output_format.value} shares scales in blocks of {block}, which "
            f"{shape.rows} x {shape.width} elements are not cut into"
        )
