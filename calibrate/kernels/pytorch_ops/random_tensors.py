"""PyTorch dtypes of number formats, and random operands in them.

Values of scaled formats are rounded from normal ones; their scales are those of the matmuls
(`scaled_matmul`). PyTorch has no cast to E2M1: two 4-bit NVFP4 values are packed into a byte, each a sign
bit and the index of its magnitude in 0, 1/2, 1, 3/2, 2, 3, 4, 6 (Open Compute Project, Microscaling Formats
(MX) v1.0, section 5.3.3), and the first 2^20 bytes are repeated.
"""

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from calibrate.devices.matmul_support import fp8_dtype
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType

TORCH_DTYPES: Final = MappingProxyType(
    {
        DType.FP32: torch.float32,
        DType.TF32: torch.float32,
        DType.BF16: torch.bfloat16,
        DType.FP16: torch.float16,
        DType.FP8: torch.float8_e4m3fn,
        DType.FP8_ROWWISE: torch.float8_e4m3fn,
        DType.FP8_BLOCKWISE: torch.float8_e4m3fn,
        DType.MXFP8: torch.float8_e4m3fn,
        DType.NVFP4: torch.float4_e2m1fn_x2,
    }
)
"""Scaled formats as the Open Compute Project defines them; CDNA 3 has others (see `calibrate.devices`)."""

_REPEATED_BLOCK: Final = (
    2**20
)  # random values that are repeated to fill a CPU tensor, since generating them is slow there
_ROUNDING_BOUNDARIES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints between neighbouring E2M1 values
_AMAX_FACTOR: Final = 3.0  # makes the largest of sixteen normal values about six, E2M1's maximum
_SIGN_BIT: Final = 8
_SECOND_NIBBLE: Final = 16  # shifts the second value of a byte


def normal_tensor(device: torch.device, dtype: DType, *sizes: int, gradient: bool = False) -> Tensor:
    """A tensor of standard normal values (whose bits draw realistic power); gradient: requires one.

    For NVFP4 the last size is halved, as bytes hold two values.
    """
    if dtype is DType.NVFP4:
        return _fp4_tensor(device, *sizes[:-1], sizes[-1] // 2)
    if dtype in LOW_PRECISION_DTYPES:
        return normal_tensor(device, DType.BF16, *sizes).to(fp8_dtype(device))
    return fill_normal(torch.empty(sizes, device=device, dtype=TORCH_DTYPES[dtype])).requires_grad_(gradient)


def fill_normal(tensor: Tensor) -> Tensor:
    """Fill the tensor with standard normal values and return it; it must have no gaps in memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if tensor.device.type != "cpu" or flat.numel() <= _REPEATED_BLOCK:
        flat.normal_()
        return tensor
    _fill_repeating(torch.empty(_REPEATED_BLOCK, dtype=tensor.dtype).normal_(), flat)
    return tensor


def _fp4_tensor(device: torch.device, *sizes: int) -> Tensor:
    values = torch.empty(2, _REPEATED_BLOCK, device=device).normal_().mul_(_AMAX_FACTOR)
    codes = torch.bucketize(values.abs(), torch.tensor(_ROUNDING_BOUNDARIES, device=device)) + _SIGN_BIT * (values < 0)
    packed = torch.empty(sizes, dtype=torch.uint8, device=device)
    _fill_repeating((codes[0] + _SECOND_NIBBLE * codes[1]).to(torch.uint8), packed.view(-1))
    return packed.view(torch.float4_e2m1fn_x2)


def _fill_repeating(block: Tensor, target: Tensor) -> None:
    """Fill a vector by repeating a block."""
    repeats, remainder = divmod(target.numel(), len(block))
    target[: repeats * len(block)].view(repeats, len(block)).copy_(block)
    target[repeats * len(block) :].copy_(block[:remainder])
