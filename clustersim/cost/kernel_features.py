"""Which measured kernels tell about one that was not measured, and how near is each of them?

Kernels of one family (`cost.record.family`) lie in the space of the logarithms of their sizes, since what doubles a
kernel's time doubles a size: m, n, k and batch of a product; batch x heads, queries, keys, queries per key/value head
and head dimension of attention; rows and width of what streams, and the rows of a table that it passes, or how many it
chooses or copies. Where a routine works on each element by itself only their number counts. A causal mask, whether
there is a window, the formats of further operands, and how often what is cast is read are never compared across. A
product in another layout (or added to another format) tells something: it counts as if one of its sizes were twice as
large.
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
    """Where a kernel lies.

    kin: what kernels that are compared have in common; layout: what those have in common between which one lies;
    point: logarithms of its sizes, as many for all of a kin.
    """

    comparable_key: Hashable
    layout: tuple[Enum | None, ...]
    log_sizes: tuple[float, ...]


def extract_features(signature: KernelSignature) -> KernelFeatures:
    """Where a kernel lies among its like."""
    shape = signature.shape
    sizes = tuple(math.log(max(1, size)) for size in _shape_sizes(shape))
    family_name = family_of(signature)
    match shape:
        case MatmulShape(operands=operands, accumulated=accumulated):
            return KernelFeatures(family_name, (operands, accumulated), sizes)
        case AttentionShape(causal=causal, window=window):
            return KernelFeatures((family_name, causal, window is None), (), sizes)
        case MemoryBoundShape(MemoryBoundOp.QUANTIZE, formats=formats, table=reads):
            return KernelFeatures((family_name, formats, reads), (), sizes)
        case MemoryBoundShape(formats=formats):
            return KernelFeatures((family_name, formats), (), sizes)


def _shape_sizes(shape: KernelShape) -> tuple[float, ...]:
    match shape:
        case MatmulShape(m, n, k, batch):
            return m, n, k, batch
        case AttentionShape(batch, query, key, heads, kv_heads, head_dim, window=window) as shape:
            sizes = (batch * heads, query, key, heads / kv_heads, (head_dim + shape.value_head_dim) / 2)
            return sizes if window is None else (*sizes, window)
        case MemoryBoundShape(routine, rows, width) if routine in _ELEMENTWISE_ROUTINES:
            return (rows * width,)
        case MemoryBoundShape(routine, rows, width, table=table) if routine in _TABLE_ROUTINES:
            return rows, width, table
        case MemoryBoundShape(rows=rows, width=width):
            return rows, width
