"""PyTorch formulas that quantize a tensor to a scaled low-precision format.

After pytorch/ao (torchao/float8/float8_utils.py: tensor_to_scale, to_fp8_saturated;
torchao/prototype/mx_formats/ mx_tensor.py: to_mx): values divided by the amax of those that share a scale,
saturated, and the scale in FP32, for MXFP8 as exponent only. Quantized tensors are rowwise, and columnwise
as transposed copies. On a GPU the formulas are compiled, which fuses the amax of a block or row with its
cast, and makes other amax reductions kernels of their own. `target` is an empty tensor that carries the
dtype (E4M3 as the device has it).
"""

from typing import Final

import torch
from torch import Tensor

_EXPONENT_BIAS: Final = 127  # of an 8-bit exponent
_MIN_AMAX: Final = 1e-12  # lower bound of amax, for groups that are all zero

QuantizedTensors = tuple[Tensor, ...]
"""Quantized values and scales, one tensor after the other."""


def delayed_scaling(x: Tensor, scale: Tensor, target: Tensor) -> QuantizedTensors:
    """Quantize with a tensor scale from earlier steps (delayed scaling)."""
    return (_saturating_cast(x.float() * scale, target),)


def delayed_scaling_transposed(x: Tensor, scale: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, plus the transposed copy."""
    quantized = _saturating_cast(x.float() * scale, target)
    return quantized, quantized.t().contiguous()


def current_scaling(x: Tensor, target: Tensor) -> QuantizedTensors:
    """Quantize with a tensor scale from the tensor's own amax (current scaling)."""
    scale = _max_value(target) / x.abs().amax().float().clamp(min=_MIN_AMAX)
    return _saturating_cast(x.float() * scale, target), scale


def current_scaling_transposed(x: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, plus the transposed copy."""
    quantized, scale = current_scaling(x, target)
    return quantized, scale, quantized.t().contiguous()


def transpose_copy(values: Tensor) -> QuantizedTensors:
    """The columnwise copy of rowwise values."""
    return (values.t().contiguous(),)


def rowwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """One scale per row."""
    return _quantize_groups(x.unsqueeze(1), target)


def columnwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """One scale per column."""
    return _quantize_groups(x.t().unsqueeze(1), target)


def rowwise_and_columnwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """Rowwise scales and columnwise scales."""
    return *rowwise(x, target), *columnwise(x, target)


def blockwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """One scale per 128 values of a row."""
    return _quantize_groups(_split_blocks(x, 128), target)


def blockwise_transposed(x: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, plus one scale per 128 values of a column."""
    return *blockwise(x, target), *blockwise(x.t(), target)


def mx_scaling(x: Tensor, target: Tensor) -> QuantizedTensors:
    """Power-of-two scales per 32 values of a row (MX)."""
    groups = _split_blocks(x, 32).float()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX)
    exponents = torch.ceil(torch.log2(amax / _max_value(target)))
    quantized = _saturating_cast(groups * torch.exp2(-exponents), target).flatten(-2).contiguous()
    return quantized, (exponents.squeeze(-1) + _EXPONENT_BIAS).to(torch.uint8)


def mx_scaling_transposed(x: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, plus scales per 32 values of a column."""
    return *mx_scaling(x, target), *mx_scaling(x.t(), target)


def _split_blocks(x: Tensor, block: int) -> Tensor:
    """Split the last dimension: [rows, blocks per row, values per block]."""
    unflattened: Tensor = torch.unflatten(x, -1, (-1, block))
    return unflattened


def _quantize_groups(groups: Tensor, target: Tensor) -> QuantizedTensors:
    """Quantize [rows, groups, values that share a scale] to values [rows, values] and scales [rows, groups]."""
    groups_fp32 = groups.float()
    scales = groups_fp32.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX) / _max_value(target)
    return _saturating_cast(groups_fp32 / scales, target).flatten(-2).contiguous(), scales.squeeze(-1)


def _saturating_cast(x: Tensor, target: Tensor) -> Tensor:
    return x.clamp(-_max_value(target), _max_value(target)).to(target.dtype)


def _max_value(target: Tensor) -> float:
    return torch.finfo(target.dtype).max
