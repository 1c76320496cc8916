"""How does PyTorch bring operands into formats with scales? The formulas of `kernels.quantization_formulas`, compiled for a GPU.

How often an operand is read tells which: once where the scale is known or found on the way (in a row, in a block), more
often where it is found first. Of a cast that a norm has made itself the transposition is left. Weights of a step are
many matrices, counted as one column: a matrix of as many elements stands for them. PyTorch has no cast to NVFP4's four
bits, and no Hadamard transform of its operands.
"""

from collections.abc import Callable, Mapping
from math import gcd
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from calibrate.devices.matmul_support import eight_bits
from calibrate.devices.stopwatch import Action
from calibrate.kernels import quantization_formulas
from calibrate.kernels.formulas import Unsupported, compiled
from calibrate.kernels.pytorch_ops.actions import Kept
from calibrate.kernels.pytorch_ops.random_tensors import normal
from calibrate.kernels.pytorch_ops.scaled_matmul import BLOCKS
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import MemoryBoundShape

Formula = Callable[..., quantization_formulas.Copies]

_MATRIX: Final = 4096  # columns of what stands for many matrices
_KNOWN: Final = MappingProxyType[int, Formula]({1: quantization_formulas.known, 2: quantization_formulas.known_both})
_FOUND: Final = MappingProxyType[DType, Mapping[int, Formula]](
    {
        DType.FP8: {1: quantization_formulas.searched, 2: quantization_formulas.searched_both},
        DType.FP8_ROWWISE: {1: quantization_formulas.rows, 2: quantization_formulas.rows_both},
        DType.FP8_BLOCKWISE: {1: quantization_formulas.blocks, 2: quantization_formulas.blocks_both},
        DType.MXFP8: {1: quantization_formulas.microscaled, 2: quantization_formulas.microscaled_both},
    }
)
"""By how many copies are made."""


def prepare(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """A cast of random operands; raise Unsupported where there is no such kernel."""
    if device.type == "cpu":
        raise Unsupported(f"{shape.routine.value}: PyTorch has no fused kernel for it on a CPU")
    formula, operands = chosen(shape, dtype, device)
    run: Callable[..., Any] = compiled(formula)
    return Kept(lambda: run(*operands))


def chosen(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> tuple[Formula, tuple[Tensor, ...]]:
    """A formula and its operands; raise Unsupported where PyTorch has none."""
    narrow, copies, reads = shape.formats[0], len(shape.formats), shape.table
    if DType.NVFP4 in (narrow, dtype):
        raise Unsupported(f"{shape.routine.value}: PyTorch has no cast to {DType.NVFP4.value}")
    rows, width = _sizes(shape)
    if dtype in LOW_PRECISION_DTYPES or not reads:
        return quantization_formulas.transposed, (normal(device, narrow, rows, width),)
    _require(shape, rows if copies > 1 else 0, width)
    x, like = normal(device, dtype, rows, width), torch.empty(0, dtype=eight_bits(device), device=device)
    if narrow is DType.FP8 and reads == 1:
        return _KNOWN[copies], (x, torch.ones((), device=device), like)
    if narrow is DType.FP8_ROWWISE and copies == 1 and reads > 1:
        return quantization_formulas.columns, (x, like)
    return _FOUND[narrow][copies], (x, like)


def _sizes(shape: MemoryBoundShape) -> tuple[int, int]:
    if shape.width > 1:
        return shape.rows, shape.width
    columns = gcd(shape.rows, _MATRIX)
    return shape.rows // columns, columns


def _require(shape: MemoryBoundShape, *sizes: int) -> None:
    narrow = shape.formats[0]
    block = BLOCKS[narrow]
    if any(size % block for size in sizes):
        raise Unsupported(
            f"{shape.routine.value}: {narrow.value} shares scales in blocks of {block}, which "
            f"{shape.rows} x {shape.width} elements are not cut into"
        )
