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

from calibrate.devices.matmul_support import supports_grouped_gemm
from calibrate.kernels.pytorch_ops import scaled_matmul
from calibrate.kernels.pytorch_ops.random_tensors import normal_tensor
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MatmulLayout, MatmulShape

_PROBE_SIZE: Final = 128  # rows, columns and sums of the products that show whether there is such a kernel


def matmul_per_expert(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> list[Callable[[], Tensor]]:
    """A product of each expert; rows: of each. Raise Unsupported where PyTorch has none of these sizes."""
    return [
        scaled_matmul.random_scaled_matmul(expert_shape, dtype, device)
        for expert_shape in _expert_shapes(shape, group_sizes)
    ]


def single_kernel(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> Callable[[], Tensor]:
    """All products in one kernel; raise Unsupported where PyTorch has none of these sizes."""
    for expert_shape in _expert_shapes(shape, group_sizes):
        scaled_matmul.require_supported(expert_shape, dtype)
    a, b = _grouped_operands(shape, dtype, device, group_sizes)
    a_scales, b_scales = (_row_scales if dtype is DType.FP8_ROWWISE else _tiled_scales)(shape, device, group_sizes)
    group_ends = torch.tensor(list(accumulate(group_sizes)), dtype=torch.int32, device=device)
    fast_accum = scaled_matmul.uses_fast_accumulation(shape, dtype)

    def run() -> Tensor:
        result: Tensor = torch._scaled_grouped_mm(
            a, b, a_scales, b_scales, offs=group_ends, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
        )
        return result

    return run


@cache
def has_grouped_kernel(dtype: DType, device: torch.device) -> bool:
    """Whether PyTorch has one kernel for all experts, on this device and in this format."""
    if device.type != "cuda" or not supports_grouped_gemm(device.index, dtype):
        return False
    try:
        single_kernel(
            MatmulShape(_PROBE_SIZE, _PROBE_SIZE, _PROBE_SIZE, 2), dtype, device, (_PROBE_SIZE, _PROBE_SIZE)
        )()
    except RuntimeError:
        return False
    return True


def _expert_shapes(shape: MatmulShape, group_sizes: Sequence[int]) -> list[MatmulShape]:
    """The product of each."""
    single = replace(shape, batch=1)
    return [
        replace(single, k=size) if shape.operands is MatmulLayout.TN else replace(single, m=size)
        for size in group_sizes
    ]


def _grouped_operands(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Rows of all experts [rows, k] and their matrices [experts, k, n]; of a weights' gradient [m, rows], [rows, n]."""
    if shape.operands is MatmulLayout.TN:
        return normal_tensor(device, dtype, shape.m, sum(group_sizes)), normal_tensor(
            device, dtype, shape.n, sum(group_sizes)
        ).t()
    matrices = normal_tensor(device, dtype, len(group_sizes), shape.n, shape.k).transpose(-2, -1)
    return normal_tensor(device, dtype, sum(group_sizes), shape.k), matrices


def _row_scales(shape: MatmulShape, device: torch.device, group_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """FP32, of rows; in a weights' gradient of each expert's."""
    expert_count = len(group_sizes)
    if shape.operands is MatmulLayout.TN:
        return torch.ones(shape.m * expert_count, device=device), torch.ones(shape.n * expert_count, device=device)
    return torch.ones(sum(group_sizes), device=device), torch.ones(expert_count, shape.n, device=device)


def _tiled_scales(shape: MatmulShape, device: torch.device, group_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """E8M0, of blocks of 32, in tiles."""
    if shape.operands is MatmulLayout.TN:
        blocks = sum(scaled_matmul.padded_scale_columns(DType.MXFP8, group_size) for group_size in group_sizes)
        a_scales, b_scales = (
            scaled_matmul.block_scales(DType.MXFP8, device, scaled_matmul.padded_scale_rows(item), blocks)
            for item in (shape.m, shape.n)
        )
        return a_scales, b_scales
    blocks, row_count = (
        scaled_matmul.padded_scale_columns(DType.MXFP8, shape.k),
        sum(map(scaled_matmul.padded_scale_rows, group_sizes)),
    )
    token_scales = scaled_matmul.block_scales(DType.MXFP8, device, row_count, blocks)
    return token_scales, scaled_matmul.block_scales(
        DType.MXFP8, device, len(group_sizes), blocks * scaled_matmul.padded_scale_rows(shape.n)
    )
