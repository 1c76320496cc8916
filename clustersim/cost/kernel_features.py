"""Which measured kernels are informative about one that was not measured, and how distant is each of them?

Kernels of one family (`cost.calibration_record.family_of`) are points in the space of the logarithms of
their sizes, since doubling a kernel's time doubles a size: m, n, k and batch of a matmul; batch x heads,
queries, keys, queries per key/value head and head dimension of attention; rows and width of memory-bound
kernels, and the rows of a table that they read, or how many they choose or copy. For elementwise routines
only the number of elements counts. A causal mask, whether there is a window, the formats of further
operands, and how often quantized data is read must be equal to be compared. A matmul in another operand
layout (or accumulated in another format) is comparable: it counts as if one of its sizes differed by a
factor of two.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clustersim.cost.calibration_record import KernelSignature, family_of
from clustersim.model.kernels import (
    TOKEN_ROUTING_OPS,
    AttentionShape,
    KernelShape,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
    ScanShape,
    SparseAttentionShape,
)

LAYOUT_DISTANCE: Final = math.log(2.0)

_ELEMENTWISE_ROUTINES: Final = frozenset(
    {
        MemoryBoundOp.GELU,
        MemoryBoundOp.RESIDUAL,
        MemoryBoundOp.RESIDUAL_DROPOUT,
        MemoryBoundOp.DROPOUT,
        MemoryBoundOp.COPY,
        MemoryBoundOp.ACCUMULATE,
        MemoryBoundOp.ZERO,
        MemoryBoundOp.UNSCALE,
        MemoryBoundOp.ADAM,
        MemoryBoundOp.SGD,
        MemoryBoundOp.GRADIENT_NORM,
        MemoryBoundOp.GRADIENT_CLIP,
    }
)
_TABLE_ROUTINES: Final = frozenset({MemoryBoundOp.LOOKUP, MemoryBoundOp.POSITIONS, *TOKEN_ROUTING_OPS})


@dataclass(frozen=True, slots=True)
class KernelFeatures:
    """Features of a kernel for nearest-neighbour comparison.

    comparable_key: equal for kernels that may be compared; layout: equal for kernels between which one can
    interpolate; log_sizes: logarithms of its sizes, equally many for all kernels of one key.
    """

    comparable_key: Hashable
    layout: tuple[Enum | None, ...]
    log_sizes: tuple[float, ...]


def extract_features(signature: KernelSignature) -> KernelFeatures:
    """The features of a kernel."""
    shape = signature.shape
    sizes = tuple(math.log(max(1, size)) for size in _shape_sizes(shape))
    family_name = family_of(signature)
    match shape:
        case MatmulShape(operands=operands, accumulated=accumulated):
            return KernelFeatures(family_name, (operands, accumulated), sizes)
        case AttentionShape(causal=causal, window=window, trailing=trailing, packed=packed):
            return KernelFeatures((family_name, causal, window is None, trailing, packed), (), sizes)
        case MemoryBoundShape(MemoryBoundOp.QUANTIZE, formats=formats, table=reads):
            return KernelFeatures((family_name, formats, reads), (), sizes)
        case MemoryBoundShape(formats=formats):
            return KernelFeatures((family_name, formats), (), sizes)
        case ScanShape(routine=routine, backward=backward):
            return KernelFeatures((family_name, routine, backward), (), sizes)
        case SparseAttentionShape(routine=routine, selected=selected, backward=backward):
            return KernelFeatures((family_name, routine, selected, backward), (), sizes)


def _shape_sizes(shape: KernelShape) -> tuple[float, ...]:
    match shape:
        case MatmulShape(m, n, k, batch):
            return m, n, k, batch
        case AttentionShape(batch, query, key, heads, kv_heads, head_dim, window=window) as shape:
            sizes = (batch * heads, query, key, heads / kv_heads, (head_dim + shape.value_head_dim) / 2)
            return sizes if window is None else (*sizes, window)
        case ScanShape() | SparseAttentionShape():
            return shape.batch * shape.heads, shape.sequence, shape.key_dim, shape.value_dim
        case MemoryBoundShape(routine, rows, width) if routine in _ELEMENTWISE_ROUTINES:
            return (rows * width,)
        case MemoryBoundShape(routine, rows, width, table=table) if routine in _TABLE_ROUTINES:
            return rows, width, table
        case MemoryBoundShape(rows=rows, width=width):
            return rows, width
