"""What does PyTorch call a number format, and how are random operands in it made?"""

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from clustersim.dtypes import DType

TORCH: Final = MappingProxyType(
    {
        DType.FP32: torch.float32,
        DType.TF32: torch.float32,
        DType.BF16: torch.bfloat16,
        DType.FP16: torch.float16,
        DType.FP8: torch.float8_e4m3fn,
    }
)


_BLOCK: Final = 2**20  # random numbers after which those of a CPU's tensor come again: drawing is slow there


def normal(device: torch.device, dtype: DType, *sizes: int, gradient: bool = False) -> Tensor:
    """A tensor of standard normal numbers (their bits cost the power that real ones do); gradient: requires one."""
    if dtype is DType.FP8:
        return normal(device, DType.BF16, *sizes).to(TORCH[dtype])
    return drawn(torch.empty(sizes, device=device, dtype=TORCH[dtype])).requires_grad_(gradient)


def drawn(tensor: Tensor) -> Tensor:
    """The same tensor with standard normal numbers; it has no gaps in memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if tensor.device.type != "cpu" or flat.numel() <= _BLOCK:
        flat.normal_()
        return tensor
    block = torch.empty(_BLOCK, dtype=tensor.dtype).normal_()
    whole, rest = divmod(flat.numel(), _BLOCK)
    flat[: whole * _BLOCK].view(whole, _BLOCK).copy_(block)
    flat[whole * _BLOCK :].copy_(block[:rest])
    return tensor
