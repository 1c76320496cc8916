"""Grouped matmul of experts in block-scaled formats in PyTorch.

In one kernel with row scales on Hopper and in MXFP8 on the first Blackwell (pytorch/pytorch,
aten/src/ATen/native/cuda/GroupedBlas.cpp, torch/testing/_internal/common_cuda.py; MXFP8's needs a build with
MSLK); otherwise one matmul per expert, as Transformer Engine's `GroupedLinear` runs them. MXFP8 scales start
a new tile for each expert.
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

_PROBE_SIZE: Final = 128  # dimensions of the matmuls that probe for the kernel


def matmul_per_expert(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> list[Callable[[], Tensor]]:
    """One matmul per expert; group_sizes: tokens of each.

    Raise UnsupportedKernel if PyTorch has none of these sizes.
    """
    return [
        scaled_matmul.random_scaled_matmul(expert_shape, dtype, device)
        for expert_shape in _expert_shapes(shape, group_sizes)
    ]


def single_kernel(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> Callable[[], Tensor]:
    """All matmuls in one kernel; raise UnsupportedKernel if PyTorch has none of these sizes."""
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
    """Whether PyTorch has a grouped kernel on this device and in this format."""
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
    """The matmul shape of each expert."""
    single = replace(shape, batch=1)
    return [
        replace(single, k=size) if shape.operands is MatmulLayout.TN else replace(single, m=size)
        for size in group_sizes
    ]


def _grouped_operands(
    shape: MatmulShape, dtype: DType, device: torch.device, group_sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Tokens [tokens, k] and weights [experts, k, n]; for a weight gradient [m, tokens], [tokens, n]."""
    if shape.operands is MatmulLayout.TN:
        return normal_tensor(device, dtype, shape.m, sum(group_sizes)), normal_tensor(
            device, dtype, shape.n, sum(group_sizes)
        ).t()
    matrices = normal_tensor(device, dtype, len(group_sizes), shape.n, shape.k).transpose(-2, -1)
    return normal_tensor(device, dtype, sum(group_sizes), shape.k), matrices


def _row_scales(shape: MatmulShape, device: torch.device, group_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """FP32 row scales; in a weight gradient, separate ones for each expert."""
    expert_count = len(group_sizes)
    if shape.operands is MatmulLayout.TN:
        return torch.ones(shape.m * expert_count, device=device), torch.ones(shape.n * expert_count, device=device)
    return torch.ones(sum(group_sizes), device=device), torch.ones(expert_count, shape.n, device=device)


def _tiled_scales(shape: MatmulShape, device: torch.device, group_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """E8M0 scales of blocks of 32, tiled."""
    if shape.operands is MatmulLayout.TN:
        padded_columns = sum(scaled_matmul.padded_scale_columns(DType.MXFP8, group_size) for group_size in group_sizes)
        a_scales, b_scales = (
            scaled_matmul.block_scales(DType.MXFP8, device, scaled_matmul.padded_scale_rows(size), padded_columns)
            for size in (shape.m, shape.n)
        )
        return a_scales, b_scales
    padded_columns, row_count = (
        scaled_matmul.padded_scale_columns(DType.MXFP8, shape.k),
        sum(map(scaled_matmul.padded_scale_rows, group_sizes)),
    )
    token_scales = scaled_matmul.block_scales(DType.MXFP8, device, row_count, padded_columns)
    return token_scales, scaled_matmul.block_scales(
        DType.MXFP8, device, len(group_sizes), padded_columns * scaled_matmul.padded_scale_rows(shape.n)
    )
