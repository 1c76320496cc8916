"""What does PyTorch call a number format, and how are random operands in it made?

Numbers of formats with scales are rounded from normal ones; their scales are the products' (`scaled`). PyTorch has no
cast to E2M1: of NVFP4 two numbers of four bits make a byte, a sign and the number of its place in 0, 1/2, 1, 3/2, 2, 3,
4, 6 (Open Compute Project, Microscaling Formats (MX) v1.0, section 5.3.3), and the first 2^20 bytes come again.
"""

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from calibrate.devices.matmul_support import eight_bits
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType

TORCH: Final = MappingProxyType(
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
"""Those of formats with scales as the Open Compute Project has them; CDNA 3 has others (`multiplied.eight_bits`)."""

_BLOCK: Final = 2**20  # random numbers after which those of a CPU's tensor come again: drawing is slow there
_HALFWAY: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of E2M1
_TO_LARGEST: Final = 3.0  # what makes the largest of sixteen normal numbers about six
_SIGN: Final = 8
_NEXT: Final = 16  # what shifts the second number of a byte


def normal(device: torch.device, dtype: DType, *sizes: int, gradient: bool = False) -> Tensor:
    """A tensor of standard normal numbers (their bits cost the power that real ones do); gradient: requires one.

    Of NVFP4 its last size is half as many bytes.
    """
    if dtype is DType.NVFP4:
        return _four_bits(device, *sizes[:-1], sizes[-1] // 2)
    if dtype in LOW_PRECISION_DTYPES:
        return normal(device, DType.BF16, *sizes).to(eight_bits(device))
    return drawn(torch.empty(sizes, device=device, dtype=TORCH[dtype])).requires_grad_(gradient)


def drawn(tensor: Tensor) -> Tensor:
    """The same tensor with standard normal numbers; it has no gaps in memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if tensor.device.type != "cpu" or flat.numel() <= _BLOCK:
        flat.normal_()
        return tensor
    _repeat(torch.empty(_BLOCK, dtype=tensor.dtype).normal_(), flat)
    return tensor


def _four_bits(device: torch.device, *sizes: int) -> Tensor:
    numbers = torch.empty(2, _BLOCK, device=device).normal_().mul_(_TO_LARGEST)
    places = torch.bucketize(numbers.abs(), torch.tensor(_HALFWAY, device=device)) + _SIGN * (numbers < 0)
    made = torch.empty(sizes, dtype=torch.uint8, device=device)
    _repeat((places[0] + _NEXT * places[1]).to(torch.uint8), made.view(-1))
    return made.view(torch.float4_e2m1fn_x2)


def _repeat(block: Tensor, flat: Tensor) -> None:
    """Fill a vector with a block, again and again."""
    whole, rest = divmod(flat.numel(), len(block))
    flat[: whole * len(block)].view(whole, len(block)).copy_(block)
    flat[whole * len(block) :].copy_(block[:rest])
