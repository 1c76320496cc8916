"""What does one GPU kernel do?

A kernel is described by what it computes and moves, never by how long that takes: FLOP executed, bytes read and
written in device memory, and the shape that a cost model needs to see tile and wave effects.
"""

from dataclasses import dataclass, replace
from enum import Enum

from clustersim.dtypes import DType
from clustersim.units import Bytes, Flop


class KernelKind(Enum):
    """Families of kernels that one cost model treats alike."""

    MATMUL = "matmul"
    ATTENTION_FORWARD = "attention_forward"  # flash attention: one fused kernel
    ATTENTION_BACKWARD = "attention_backward"
    NORM = "norm"
    ACTIVATION = "activation"
    ROTARY = "rotary"
    RESIDUAL = "residual"
    DROPOUT = "dropout"
    SOFTMAX = "softmax"  # of standard (not flash) attention, with scale and mask
    EMBEDDING = "embedding"
    LOSS = "loss"  # softmax cross-entropy
    OPTIMIZER = "optimizer"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """C[m, n] += A[m, k] B[k, n], `batch` times."""

    m: int
    n: int
    k: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """softmax(Q K^T) V of `batch` sequences: queries [query, heads, head_dim], keys [key, kv_heads, head_dim]."""

    batch: int
    query: int
    key: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one rank.

    flops: FLOP executed (a causal attention kernel skips the masked half, and counts what it does);
    bytes: read and written in device memory if every operand passes once; shape: None for streaming kernels;
    launches: how many device kernels this is in an unfused implementation (1 when fused).
    """

    name: str
    kind: KernelKind
    dtype: DType
    flops: Flop
    bytes: Bytes
    shape: MatmulShape | AttentionShape | None = None
    launches: int = 1

    def piece(self, pieces: int) -> "Kernel":
        """One of several kernels that together do the same: a matmul by its rows, attention by its keys.

        The operand that is not cut (B of a matmul, the queries and the result of attention) passes with every piece.
        """
        match self.shape:
            case MatmulShape(m, n, k, batch):
                rows = -(-m // pieces)
                cut = (rows * k + rows * n + k * n) / (m * k + m * n + k * n)
                shape: MatmulShape | AttentionShape | None = MatmulShape(rows, n, k, batch)
                return replace(self, flops=self.flops / pieces, bytes=self.bytes * cut, shape=shape)
            case AttentionShape() as whole:
                queries, keys = whole.query * whole.heads, whole.key * whole.kv_heads
                cut = (queries + keys / pieces) / (queries + keys)
                shape = replace(whole, key=-(-whole.key // pieces))
                return replace(self, flops=self.flops / pieces, bytes=self.bytes * cut, shape=shape)
        return replace(self, flops=self.flops / pieces, bytes=self.bytes / pieces)
