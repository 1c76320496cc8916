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

from clustersim.cost.calibration_record import Signature, family
from clustersim.model.kernels import ROUTING, AttentionShape, MatmulShape, Routine, Shape, StreamShape

LAYOUT_DISTANCE: Final = math.log(2.0)

_ELEMENTWISE: Final = frozenset(
    {
        Routine.GELU,
        Routine.RESIDUAL,
        Routine.RESIDUAL_DROPOUT,
        Routine.DROPOUT,
        Routine.COPY,
        Routine.ACCUMULATE,
        Routine.ZERO,
        Routine.UNSCALE,
        Routine.ADAM,
        Routine.SGD,
        Routine.GRADIENT_NORM,
        Routine.GRADIENT_CLIP,
    }
)
_TABLES: Final = frozenset({Routine.LOOKUP, Routine.POSITIONS, *ROUTING})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kernel lies.

    kin: what kernels that are compared have in common; layout: what those have in common between which one lies;
    point: logarithms of its sizes, as many for all of a kin.
    """

    kin: Hashable
    layout: tuple[Enum | None, ...]
    point: tuple[float, ...]


def place(signature: Signature) -> Place:
    """Where a kernel lies among its like."""
    shape = signature.shape
    sizes = tuple(math.log(max(1, size)) for size in _sizes(shape))
    named = family(signature)
    match shape:
        case MatmulShape(operands=operands, accumulated=accumulated):
            return Place(named, (operands, accumulated), sizes)
        case AttentionShape(causal=causal, window=window):
            return Place((named, causal, window is None), (), sizes)
        case StreamShape(Routine.QUANTIZE, formats=formats, table=reads):
            return Place((named, formats, reads), (), sizes)
        case StreamShape(formats=formats):
            return Place((named, formats), (), sizes)


def _sizes(shape: Shape) -> tuple[float, ...]:
    match shape:
        case MatmulShape(m, n, k, batch):
            return m, n, k, batch
        case AttentionShape(batch, query, key, heads, kv_heads, head_dim, window=window) as shape:
            sizes = (batch * heads, query, key, heads / kv_heads, (head_dim + shape.values) / 2)
            return sizes if window is None else (*sizes, window)
        case StreamShape(routine, rows, width) if routine in _ELEMENTWISE:
            return (rows * width,)
        case StreamShape(routine, rows, width, table=table) if routine in _TABLES:
            return rows, width, table
        case StreamShape(rows=rows, width=width):
            return rows, width
