"""Matmul of operands in scaled low-precision formats in PyTorch.

`torch.nn.functional.scaled_mm`, whose operands are contiguous along the reduction dimension whatever the
layout (TN in cuBLAS's column-major terms; frameworks keep transposed copies), so all layouts are measured as
that one; results are BF16. Scales are as its kernels read them (pytorch/pytorch,
aten/src/ATen/native/cuda/ScaledBlas.cpp): one value per tensor; one per row; for blocks of 128 those of
adjacent rows, and for weights (128 x 128) those of columns, in multiples of four; for MXFP8 and NVFP4 tiles
of 128 rows and four blocks, which AMD GPUs store unswizzled. In a weight gradient neither operand is a
weight. The scale values do not affect the time and are one. NVFP4's tensor scale is a factor of the full
result, which PyTorch would apply in a separate kernel: it is left out.

Fast accumulation is used in the forward (Transformer Engine), and with row scales in all three matmuls
(pytorch/ao, torchao/float8/config.py: its kernels "are only fast with use_fast_accum=True"). Experts:
`scaled_grouped_gemm`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.pytorch_ops.random_tensors import normal_tensor
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MatmulLayout, MatmulShape

ALIGNMENTS: Final = MappingProxyType(
    {DType.FP8: 16, DType.FP8_ROWWISE: 16, DType.FP8_BLOCKWISE: 128, DType.MXFP8: 32, DType.NVFP4: 32}
)
"""Multiple to which rows of operands must be aligned: the values that share a scale, and 16 bytes."""
_OUTPUT_ALIGNMENT: Final = 16  # multiple to which rows of results must be aligned
_SCALE_TILE: Final = (128, 4)  # rows and blocks of a tile of scales
_VALUES_PER_SCALE: Final = MappingProxyType({DType.MXFP8: 32, DType.NVFP4: 16})  # values that share a block scale


@dataclass(frozen=True, slots=True)
class OperandScales:
    """Scales of one operand, their granularity, and their layout in memory."""

    values: Tensor
    scaling_type: ScalingType
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE


def random_scaled_matmul(shape: MatmulShape, dtype: DType, device: torch.device) -> Callable[[], Tensor]:
    """A function that multiplies random operands once; raise UnsupportedKernel if PyTorch has no such matmul."""
    require_supported(shape, dtype)
    if shape.batch > 1:
        raise UnsupportedKernel(f"PyTorch has no batched matmul in {dtype.value}")
    a, b = normal_tensor(device, dtype, shape.m, shape.k), normal_tensor(device, dtype, shape.n, shape.k).t()
    return scaled_matmul(shape, dtype, a, b)


def scaled_matmul(shape: MatmulShape, dtype: DType, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """A function that multiplies a [m, k] and b [k, n], the transpose of a row-major matrix."""
    has_weights = shape.operands is not MatmulLayout.TN
    a_scales, b_scales = (
        _operand_scales(dtype, a, shape.k),
        _operand_scales(dtype, b.t(), shape.k, is_weight=has_weights),
    )
    b_scale_values = b_scales.values.t() if b_scales.scaling_type is ScalingType.RowWise else b_scales.values
    fast_accum = uses_fast_accumulation(shape, dtype)

    def run() -> Tensor:
        return scaled_mm(
            a,
            b,
            a_scales.values,
            a_scales.scaling_type,
            b_scale_values,
            b_scales.scaling_type,
            a_scales.swizzle,
            b_scales.swizzle,
            use_fast_accum=fast_accum,
        )

    return run


def uses_fast_accumulation(shape: MatmulShape, dtype: DType) -> bool:
    """Whether sums are kept in the tensor cores' own precision."""
    return dtype is DType.FP8_ROWWISE or (dtype is DType.FP8 and shape.operands is MatmulLayout.NT)


def require_supported(shape: MatmulShape, dtype: DType) -> None:
    """Raise UnsupportedKernel if PyTorch has no matmul of these sizes, or if it accumulates."""
    if shape.accumulated is not None:
        raise UnsupportedKernel(f"PyTorch has no matmul in {dtype.value} that is accumulated")
    block = ALIGNMENTS[dtype]
    columns = block if dtype is DType.FP8_BLOCKWISE else _OUTPUT_ALIGNMENT
    if shape.k % block or shape.n % columns:
        raise UnsupportedKernel(
            f"operands in {dtype.value} are cut to multiples of {block} along k and of {columns} along n; "
            f"k is {shape.k}, n is {shape.n}"
        )


def _operand_scales(dtype: DType, operand: Tensor, k: int, *, is_weight: bool = False) -> OperandScales:
    """Scales of a matrix with rows of k values."""
    device, row_count = operand.device, operand.shape[0]
    match dtype:
        case DType.FP8:
            return OperandScales(torch.ones((), device=device), ScalingType.TensorWise)
        case DType.FP8_ROWWISE:
            return OperandScales(torch.ones(row_count, 1, device=device), ScalingType.RowWise)
        case DType.FP8_BLOCKWISE if is_weight:
            columns = round_up(k // ALIGNMENTS[dtype], _SCALE_TILE[1])
            return OperandScales(
                torch.ones(row_count // ALIGNMENTS[dtype], columns, device=device).t(), ScalingType.BlockWise128x128
            )
        case DType.FP8_BLOCKWISE:
            return OperandScales(
                torch.ones(k // ALIGNMENTS[dtype], row_count, device=device).t(), ScalingType.BlockWise1x128
            )
    scale_count = (
        row_count * k // _VALUES_PER_SCALE[dtype]
        if torch.version.hip
        else padded_scale_rows(row_count) * padded_scale_columns(dtype, k)
    )
    swizzle = SwizzleType.NO_SWIZZLE if torch.version.hip else SwizzleType.SWIZZLE_32_4_4
    scaling_type = ScalingType.BlockWise1x32 if dtype is DType.MXFP8 else ScalingType.BlockWise1x16
    return OperandScales(block_scales(dtype, device, scale_count), scaling_type, swizzle)


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def padded_scale_rows(samples: int) -> int:
    """Number of rows of the scale tensor, padded to full tiles."""
    return round_up(samples, _SCALE_TILE[0])


def padded_scale_columns(dtype: DType, k: int) -> int:
    """Number of scales per row of k values, padded to full tiles."""
    return round_up(-(-k // _VALUES_PER_SCALE[dtype]), _SCALE_TILE[1])


def block_scales(dtype: DType, device: torch.device, *sizes: int) -> Tensor:
    """A tensor of block scales, in their own format."""
    scale_dtype = torch.float8_e8m0fnu if dtype is DType.MXFP8 else torch.float8_e4m3fn
    return torch.ones(sizes, device=device).to(scale_dtype)
