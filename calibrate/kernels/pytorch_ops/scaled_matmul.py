"""How does PyTorch multiply operands in formats with scales?

`torch.nn.functional.scaled_mm`, whose operands lie along what a product sums over whatever the layout (cuBLAS: TN in
its column-major words; frameworks keep transposed copies), so all layouts are measured as that one; results are BF16.
Scales are as its kernels read them (pytorch/pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp): one number; one of each
row; of blocks of 128 those of rows beside each other, and of weights (128 x 128) those of columns, in multiples of
four; of MXFP8 and NVFP4 tiles of 128 rows and four blocks, which AMD's GPUs have in plain order. In a weights' gradient
neither operand is weights. Their numbers change no time, and are one. NVFP4's scale of the tensor is a factor of the
whole product, which PyTorch would multiply in a kernel of its own: it is left out.

Fast accumulation is of the forward (Transformer Engine), and with scales of rows of all three products (pytorch/ao,
torchao/float8/config.py: its kernels "are only fast with use_fast_accum=True"). Experts: `scaled_grouped_gemm`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.pytorch_ops.random_tensors import normal
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MatmulLayout, MatmulShape

BLOCKS: Final = MappingProxyType(
    {DType.FP8: 16, DType.FP8_ROWWISE: 16, DType.FP8_BLOCKWISE: 128, DType.MXFP8: 32, DType.NVFP4: 32}
)
"""Numbers to a multiple of which rows of operands must be cut: what has a scale, and 16 bytes."""
_COLUMNS: Final = 16  # numbers to a multiple of which results must be cut
_TILE: Final = (128, 4)  # rows and blocks of the scales that lie together
_SHARING: Final = MappingProxyType({DType.MXFP8: 32, DType.NVFP4: 16})  # numbers that share one of these


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of one operand, of what, and how they lie in memory."""

    numbers: Tensor
    of: ScalingType
    order: SwizzleType = SwizzleType.NO_SWIZZLE


def multiply(shape: MatmulShape, dtype: DType, device: torch.device) -> Callable[[], Tensor]:
    """What multiplies random operands once; raise Unsupported where PyTorch has no such product."""
    require(shape, dtype)
    if shape.batch > 1:
        raise Unsupported(f"PyTorch has no product of a batch in {dtype.value}")
    a, b = normal(device, dtype, shape.m, shape.k), normal(device, dtype, shape.n, shape.k).t()
    return scaled(shape, dtype, a, b)


def scaled(shape: MatmulShape, dtype: DType, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """What multiplies a [m, k] and b [k, n], the transpose of rows."""
    weights = shape.operands is not MatmulLayout.TN
    of_a, of_b = _scales(dtype, a, shape.k), _scales(dtype, b.t(), shape.k, weights=weights)
    rows = of_b.numbers.t() if of_b.of is ScalingType.RowWise else of_b.numbers
    fast = fast_accumulation(shape, dtype)

    def run() -> Tensor:
        return scaled_mm(a, b, of_a.numbers, of_a.of, rows, of_b.of, of_a.order, of_b.order, use_fast_accum=fast)

    return run


def fast_accumulation(shape: MatmulShape, dtype: DType) -> bool:
    """Whether sums are kept in the tensor cores' own precision."""
    return dtype is DType.FP8_ROWWISE or (dtype is DType.FP8 and shape.operands is MatmulLayout.NT)


def require(shape: MatmulShape, dtype: DType) -> None:
    """Raise Unsupported where PyTorch has no product of these sizes, or none that is accumulated."""
    if shape.accumulated is not None:
        raise Unsupported(f"PyTorch has no product in {dtype.value} that is accumulated")
    block = BLOCKS[dtype]
    columns = block if dtype is DType.FP8_BLOCKWISE else _COLUMNS
    if shape.k % block or shape.n % columns:
        raise Unsupported(
            f"operands in {dtype.value} are cut to multiples of {block} along k and of {columns} along n; "
            f"k is {shape.k}, n is {shape.n}"
        )


def _scales(dtype: DType, rows: Tensor, k: int, *, weights: bool = False) -> Scales:
    """Of rows of k numbers."""
    device, many = rows.device, rows.shape[0]
    match dtype:
        case DType.FP8:
            return Scales(torch.ones((), device=device), ScalingType.TensorWise)
        case DType.FP8_ROWWISE:
            return Scales(torch.ones(many, 1, device=device), ScalingType.RowWise)
        case DType.FP8_BLOCKWISE if weights:
            columns = up(k // BLOCKS[dtype], _TILE[1])
            return Scales(torch.ones(many // BLOCKS[dtype], columns, device=device).t(), ScalingType.BlockWise128x128)
        case DType.FP8_BLOCKWISE:
            return Scales(torch.ones(k // BLOCKS[dtype], many, device=device).t(), ScalingType.BlockWise1x128)
    size = many * k // _SHARING[dtype] if torch.version.hip else tiled(many) * tiled_blocks(dtype, k)
    order = SwizzleType.NO_SWIZZLE if torch.version.hip else SwizzleType.SWIZZLE_32_4_4
    of = ScalingType.BlockWise1x32 if dtype is DType.MXFP8 else ScalingType.BlockWise1x16
    return Scales(of_blocks(dtype, device, size), of, order)


def up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def tiled(rows: int) -> int:
    """Rows of scales for so many rows."""
    return up(rows, _TILE[0])


def tiled_blocks(dtype: DType, k: int) -> int:
    """Scales of a row of k numbers."""
    return up(-(-k // _SHARING[dtype]), _TILE[1])


def of_blocks(dtype: DType, device: torch.device, *sizes: int) -> Tensor:
    """Scales of blocks, in their own format."""
    form = torch.float8_e8m0fnu if dtype is DType.MXFP8 else torch.float8_e4m3fn
    return torch.ones(sizes, device=device).to(form)
