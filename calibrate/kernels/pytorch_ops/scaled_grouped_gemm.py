"""How does PyTorch multiply experts' rows with their matrices, in formats with scales?

In one kernel with scales of rows on Hopper and in MXFP8 on the first Blackwell (pytorch/pytorch,
aten/src/ATen/native/cuda/GroupedBlas.cpp, torch/testing/_internal/common_cuda.py; MXFP8's needs a build with MSLK);
else one product after the other, as Transformer Engine's `GroupedLinear` runs them. Scales of MXFP8 begin a tile of
their own for each expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from calibrate.devices.matmul_support import groups
from calibrate.kernels.pytorch_ops import scaled_matmul
from calibrate.kernels.pytorch_ops.random_tensors import normal
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MatmulLayout, MatmulShape

_TRIED: Final = 128  # rows, columns and sums of the products that show whether there is such a kernel


def one_by_one(
    shape: MatmulShape, dtype: DType, device: torch.device, rows: Sequence[int]
) -> list[Callable[[], Tensor]]:
    """A product of each expert; rows: of each. Raise Unsupported where PyTorch has none of these sizes."""
    return [scaled_matmul.multiply(expert, dtype, device) for expert in _experts(shape, rows)]


def in_one(shape: MatmulShape, dtype: DType, device: torch.device, rows: Sequence[int]) -> Callable[[], Tensor]:
    """All products in one kernel; raise Unsupported where PyTorch has none of these sizes."""
    for expert in _experts(shape, rows):
        scaled_matmul.require(expert, dtype)
    a, b = _operands(shape, dtype, device, rows)
    of_a, of_b = (_rows_scales if dtype is DType.FP8_ROWWISE else _tiles_scales)(shape, device, rows)
    ends = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    fast = scaled_matmul.fast_accumulation(shape, dtype)

    def run() -> Tensor:
        made: Tensor = torch._scaled_grouped_mm(
            a, b, of_a, of_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return made

    return run


@cache
def there(dtype: DType, device: torch.device) -> bool:
    """Whether PyTorch has one kernel for all experts, on this device and in this format."""
    if device.type != "cuda" or not groups(device.index, dtype):
        return False
    try:
        in_one(MatmulShape(_TRIED, _TRIED, _TRIED, 2), dtype, device, (_TRIED, _TRIED))()
    except RuntimeError:
        return False
    return True


def _experts(shape: MatmulShape, rows: Sequence[int]) -> list[MatmulShape]:
    """The product of each."""
    one = replace(shape, batch=1)
    return [replace(one, k=item) if shape.operands is MatmulLayout.TN else replace(one, m=item) for item in rows]


def _operands(shape: MatmulShape, dtype: DType, device: torch.device, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows of all experts [rows, k] and their matrices [experts, k, n]; of a weights' gradient [m, rows], [rows, n]."""
    if shape.operands is MatmulLayout.TN:
        return normal(device, dtype, shape.m, sum(rows)), normal(device, dtype, shape.n, sum(rows)).t()
    matrices = normal(device, dtype, len(rows), shape.n, shape.k).transpose(-2, -1)
    return normal(device, dtype, sum(rows), shape.k), matrices


def _rows_scales(shape: MatmulShape, device: torch.device, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """FP32, of rows; in a weights' gradient of each expert's."""
    many = len(rows)
    if shape.operands is MatmulLayout.TN:
        return torch.ones(shape.m * many, device=device), torch.ones(shape.n * many, device=device)
    return torch.ones(sum(rows), device=device), torch.ones(many, shape.n, device=device)


def _tiles_scales(shape: MatmulShape, device: torch.device, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """E8M0, of blocks of 32, in tiles."""
    if shape.operands is MatmulLayout.TN:
        blocks = sum(scaled_matmul.tiled_blocks(DType.MXFP8, item) for item in rows)
        of_a, of_b = (
            scaled_matmul.of_blocks(DType.MXFP8, device, scaled_matmul.tiled(element), blocks)
            for element in (shape.m, shape.n)
        )
        return of_a, of_b
    blocks, many = scaled_matmul.tiled_blocks(DType.MXFP8, shape.k), sum(map(scaled_matmul.tiled, rows))
    whole = scaled_matmul.of_blocks(DType.MXFP8, device, many, blocks)
    return whole, scaled_matmul.of_blocks(DType.MXFP8, device, len(rows), blocks * scaled_matmul.tiled(shape.n))
