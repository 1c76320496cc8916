"""What does a compiler do about matmuls whose sizes leave rows that are no multiples of 16 bytes?

Inductor pads them (`pad_mm`): it copies operands with zeros up to the next multiple of 8 elements of 16 bits, and
slices the result, a view that the next kernel reads as it is. It times both ways when it compiles, and takes the
padded one where that is faster by a margin, as it is wherever a library's kernels for unaligned rows are much
slower; here it always does. Copied are the weight, in forward and again for the input gradient, and the transposed
output gradient for the weight gradient; the zeros of the output gradient itself are written by the kernel that
makes it (`should_exclude_padding_time` counts on that, too).

Reference: torch/_inductor/fx_passes/pad_mm.py; `shape_padding` of torch/_inductor/config.py is off in release 2.0,
on since 2.1 (pytorch/pytorch pull requests 88709 and 90425 brought it).
"""

from dataclasses import replace
from typing import NamedTuple

from clustersim.common.dtypes import DType
from clustersim.model.attention import VECTOR_BYTES
from clustersim.model.kernels import Kernel
from clustersim.model.linear import LinearLayer
from clustersim.model.memory_bound import copy_kernel


class PaddingCopies(NamedTuple):
    """Copies of a linear layer's operands with zeros, by the matmul that reads them; empty where nothing is padded."""

    forward: tuple[Kernel, ...] = ()
    input_gradient: tuple[Kernel, ...] = ()
    weight_gradient: tuple[Kernel, ...] = ()


def padded_linear(linear: LinearLayer, dtype: DType) -> LinearLayer:
    """The layer whose matmuls run: inputs and outputs are rounded up to rows of multiples of 16 bytes."""
    return replace(linear, inputs=_padded(linear.inputs, dtype), outputs=_padded(linear.outputs, dtype))


def padding_copies(linear: LinearLayer, dtype: DType) -> PaddingCopies:
    """The copies that padding a layer takes."""
    padded = padded_linear(linear, dtype)
    if padded == linear:
        return PaddingCopies()
    weight = copy_kernel(f"{linear.name}.pad_weight", dtype, padded.inputs * padded.outputs)
    gradient = copy_kernel(f"{linear.name}.pad_gradient", dtype, linear.tokens * padded.outputs)
    return PaddingCopies((weight,), (replace(weight, name=f"{weight.name}.input_gradient"),), (gradient,))


def _padded(elements: int, dtype: DType) -> int:
    multiple = int(VECTOR_BYTES // dtype.bytes)
    return -(-elements // multiple) * multiple
