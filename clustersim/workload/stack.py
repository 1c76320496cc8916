"""Which layers follow each other?

A stack is a tuple of runs: equal layers that follow each other are one run, so 126 equal layers are one entry, and the
work on a layer is found once for each spec. A new kind of attention or MLP is a type here, and operators in `layers`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Mlp(Enum):
    """GELU has two matrices (so does squared ReLU); SWIGLU has three (gate, up, down; so has gated GELU)."""

    GELU = "gelu"
    SWIGLU = "swiglu"


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token attends to all tokens before it. head_dim is explicit: it is not hidden / heads in every model.

    qkv_bias: queries, keys and values have biases; qk_norm: each query and key head is normalised.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """An MLP that every token passes. ffn: its width."""

    ffn: int
    form: Mlp


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer is made of; None: the layer has no such part."""

    attention: FullAttention | None
    mlp: DenseMlp | None


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Equal layers that follow each other."""

    spec: LayerSpec
    count: int


Stack = tuple[LayerRun, ...]


def count(stack: Stack) -> int:
    """How many layers a stack has."""
    return sum(run.count for run in stack)


def cut(stack: Stack, first: int, layers: int) -> Stack:
    """Some layers of a stack, from the layer `first` on.

    >>> wide, narrow = LayerSpec(None, DenseMlp(4, Mlp.GELU)), LayerSpec(None, DenseMlp(2, Mlp.GELU))
    >>> [run.count for run in cut((LayerRun(wide, 3), LayerRun(narrow, 5)), 2, 4)]
    [1, 3]
    """
    return tuple(_cut(stack, first, first + layers))


def _cut(stack: Stack, begin: int, end: int) -> Iterator[LayerRun]:
    at = 0
    for run in stack:
        inside = min(end, at + run.count) - max(begin, at)
        if inside > 0:
            yield LayerRun(run.spec, inside)
        at += run.count
