"""Which formulas bring a tensor into a format with scales?

Those of pytorch/ao (torchao/float8/float8_utils.py: tensor_to_scale, to_fp8_saturated; torchao/prototype/mx_formats/
mx_tensor.py: to_mx): numbers over the largest of those that share a scale, saturated, and the scale, FP32 or of MXFP8
the exponent alone. Copies are along rows, and along columns with these as their rows. On a GPU they are compiled, which
fuses the search in a block or a row with its cast and makes a kernel of its own of each other search; `like` has no
numbers, and E4M3 as the device has it.
"""

from typing import Final

import torch
from torch import Tensor

_EXPONENT_BIAS: Final = 127  # of an exponent of eight bits
_MIN_AMAX: Final = 1e-12  # of what is divided by, where all that share a scale is zero

QuantizedTensors = tuple[Tensor, ...]
"""Numbers and scales, one copy behind the other."""


def delayed_scaling(x: Tensor, scale: Tensor, target: Tensor) -> QuantizedTensors:
    """With the scale of the tensor that earlier steps gave."""
    return (_saturating_cast(x.float() * scale, target),)


def delayed_scaling_transposed(x: Tensor, scale: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, along columns, too."""
    quantized = _saturating_cast(x.float() * scale, target)
    return quantized, quantized.t().contiguous()


def current_scaling(x: Tensor, target: Tensor) -> QuantizedTensors:
    """With a scale of the tensor, which is found first."""
    scale = _max_value(target) / x.abs().amax().float().clamp(min=_MIN_AMAX)
    return _saturating_cast(x.float() * scale, target), scale


def current_scaling_transposed(x: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, along columns, too."""
    quantized, scale = current_scaling(x, target)
    return quantized, scale, quantized.t().contiguous()


def transpose_copy(values: Tensor) -> QuantizedTensors:
    """The copy along columns of one along rows."""
    return (values.t().contiguous(),)


def rowwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """With a scale of each row."""
    return _quantize_groups(x.unsqueeze(1), target)


def columnwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """With a scale of each column."""
    return _quantize_groups(x.t().unsqueeze(1), target)


def rowwise_and_columnwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """With scales of rows, and with scales of columns."""
    return *rowwise(x, target), *columnwise(x, target)


def blockwise(x: Tensor, target: Tensor) -> QuantizedTensors:
    """With scales of 128 of a row."""
    return _quantize_groups(_split_blocks(x, 128), target)


def blockwise_transposed(x: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, and of 128 of a column."""
    return *blockwise(x, target), *blockwise(x.t(), target)


def mx_scaling(x: Tensor, target: Tensor) -> QuantizedTensors:
    """With powers of two as scales of 32 of a row."""
    groups = _split_blocks(x, 32).float()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX)
    exponents = torch.ceil(torch.log2(amax / _max_value(target)))
    quantized = _saturating_cast(groups * torch.exp2(-exponents), target).flatten(-2).contiguous()
    return quantized, (exponents.squeeze(-1) + _EXPONENT_BIAS).to(torch.uint8)


def mx_scaling_transposed(x: Tensor, target: Tensor) -> QuantizedTensors:
    """The same, and of 32 of a column."""
    return *mx_scaling(x, target), *mx_scaling(x.t(), target)


def _split_blocks(x: Tensor, block: int) -> Tensor:
    """[rows, blocks of a row, numbers of a block]."""
    unflattened: Tensor = torch.unflatten(x, -1, (-1, block))
    return unflattened


def _quantize_groups(groups: Tensor, target: Tensor) -> QuantizedTensors:
    """Of [rows, parts of a row, numbers that share a scale]: [rows, numbers] and scales [rows, parts]."""
    groups_fp32 = groups.float()
    scales = groups_fp32.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX) / _max_value(target)
    return _saturating_cast(groups_fp32 / scales, target).flatten(-2).contiguous(), scales.squeeze(-1)


def _saturating_cast(x: Tensor, target: Tensor) -> Tensor:
    return x.clamp(-_max_value(target), _max_value(target)).to(target.dtype)


def _max_value(target: Tensor) -> float:
    return torch.finfo(target.dtype).max
