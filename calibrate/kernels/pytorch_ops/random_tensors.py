"""What does PyTorch call a number format, and how are random operands in it made?

Numbers of formats with scales are rounded from normal ones; their scales are the products' (`scaled`). PyTorch has no
cast to E2M1: of NVFP4 two numbers of four bits make a byte, a sign and the number of its place in 0, 1/2, 1, 3/2, 2, 3,
4, 6 (Open Compute Project, Microscaling Formats (MX) v1.0, section 5.3.3), and the first 2^20 bytes come again.
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
"""Those of formats with scales as the Open Compute Project has them; CDNA 3 has others (`multiplied.fp8_dtype`)."""

_REPEATED_BLOCK: Final = 2**20  # random numbers after which those of a CPU's tensor come again: drawing is slow there
_ROUNDING_BOUNDARIES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of E2M1
_AMAX_FACTOR: Final = 3.0  # what makes the largest of sixteen normal numbers about six
_SIGN_BIT: Final = 8
_SECOND_NIBBLE: Final = 16  # what shifts the second number of a byte


def normal_tensor(device: torch.device, dtype: DType, *sizes: int, gradient: bool = False) -> Tensor:
    """A tensor of standard normal numbers (their bits cost the power that real ones do); gradient: requires one.

    Of NVFP4 its last size is half as many bytes.
    """
    if dtype is DType.NVFP4:
        return _fp4_tensor(device, *sizes[:-1], sizes[-1] // 2)
    if dtype in LOW_PRECISION_DTYPES:
        return normal_tensor(device, DType.BF16, *sizes).to(fp8_dtype(device))
    return fill_normal(torch.empty(sizes, device=device, dtype=TORCH_DTYPES[dtype])).requires_grad_(gradient)


def fill_normal(tensor: Tensor) -> Tensor:
    """The same tensor with standard normal numbers; it has no gaps in memory."""
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
    """Fill a vector with a block, again and again."""
    repeats, remainder = divmod(target.numel(), len(block))
    target[: repeats * len(block)].view(repeats, len(block)).copy_(block)
    target[repeats * len(block) :].copy_(block[:remainder])
