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

_BIAS: Final = 127  # of an exponent of eight bits
_SMALLEST: Final = 1e-12  # of what is divided by, where all that share a scale is zero

Copies = tuple[Tensor, ...]
"""Numbers and scales, one copy behind the other."""


def known(x: Tensor, scale: Tensor, like: Tensor) -> Copies:
    """With the scale of the tensor that earlier steps gave."""
    return (_saturated(x.float() * scale, like),)


def known_both(x: Tensor, scale: Tensor, like: Tensor) -> Copies:
    """The same, along columns, too."""
    made = _saturated(x.float() * scale, like)
    return made, made.t().contiguous()


def searched(x: Tensor, like: Tensor) -> Copies:
    """With a scale of the tensor, which is found first."""
    scale = _largest(like) / x.abs().amax().float().clamp(min=_SMALLEST)
    return _saturated(x.float() * scale, like), scale


def searched_both(x: Tensor, like: Tensor) -> Copies:
    """The same, along columns, too."""
    made, scale = searched(x, like)
    return made, scale, made.t().contiguous()


def transposed(numbers: Tensor) -> Copies:
    """The copy along columns of one along rows."""
    return (numbers.t().contiguous(),)


def rows(x: Tensor, like: Tensor) -> Copies:
    """With a scale of each row."""
    return _shared(x.unsqueeze(1), like)


def columns(x: Tensor, like: Tensor) -> Copies:
    """With a scale of each column."""
    return _shared(x.t().unsqueeze(1), like)


def rows_both(x: Tensor, like: Tensor) -> Copies:
    """With scales of rows, and with scales of columns."""
    return *rows(x, like), *columns(x, like)


def blocks(x: Tensor, like: Tensor) -> Copies:
    """With scales of 128 of a row."""
    return _shared(_parts(x, 128), like)


def blocks_both(x: Tensor, like: Tensor) -> Copies:
    """The same, and of 128 of a column."""
    return *blocks(x, like), *blocks(x.t(), like)


def microscaled(x: Tensor, like: Tensor) -> Copies:
    """With powers of two as scales of 32 of a row."""
    parts = _parts(x, 32).float()
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST)
    exponents = torch.ceil(torch.log2(largest / _largest(like)))
    made = _saturated(parts * torch.exp2(-exponents), like).flatten(-2).contiguous()
    return made, (exponents.squeeze(-1) + _BIAS).to(torch.uint8)


def microscaled_both(x: Tensor, like: Tensor) -> Copies:
    """The same, and of 32 of a column."""
    return *microscaled(x, like), *microscaled(x.t(), like)


def _parts(x: Tensor, block: int) -> Tensor:
    """[rows, blocks of a row, numbers of a block]."""
    made: Tensor = torch.unflatten(x, -1, (-1, block))
    return made


def _shared(parts: Tensor, like: Tensor) -> Copies:
    """Of [rows, parts of a row, numbers that share a scale]: [rows, numbers] and scales [rows, parts]."""
    wide = parts.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST) / _largest(like)
    return _saturated(wide / scales, like).flatten(-2).contiguous(), scales.squeeze(-1)


def _saturated(x: Tensor, like: Tensor) -> Tensor:
    return x.clamp(-_largest(like), _largest(like)).to(like.dtype)


def _largest(like: Tensor) -> float:
    return torch.finfo(like.dtype).max
