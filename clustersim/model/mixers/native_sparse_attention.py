"""Native sparse attention (NSA): each query attends to compressed keys, to the best blocks, and to a window.

Yuan et al. 2025, arXiv:2502.11089, section 3. Keys and values are compressed: a learned matrix per key-value head maps
`kernel_size` of them to one, every `kernel_stride` tokens. Attention to these has the scores by which the `topk` best
blocks of `block_size` keys are selected, the same for all query heads of a key-value head, the query's own among them.
Third, attention is to a sliding window. A gate per branch, of the layer's input, weights the three outputs.

Model FLOP: of attention 12 per query width and key of each branch; of the compression 6 per weight and compressed
token; scores for the selection are those of the attention.

Operators are those of a public implementation (XunhaoLai/native-sparse-attention-triton,
native_sparse_attention/module/native_sparse_attention.py), whose kernels have published times: keys and values are
compressed by products; scores are computed again for the selection; a query's own and earlier blocks are attended to by
one program per token and key-value head; the window is flash attention's. Gates are three numbers a token, and their
products and sums PyTorch's. Left out: rotary positions of the compressed keys, a sixteenth of the others'. Context
parallelism is not modelled; in packed documents queries are taken to attend to as many keys as in one document.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from clustersim.common.units import Bytes, Flop
from clustersim.model import memory_bound
from clustersim.model.attention import AttentionCore, attention_operators
from clustersim.model.attention_spec import FullAttention, SelectedKeysAttention, mean_attended_keys
from clustersim.model.kernels import (
    AttentionShape,
    Kernel,
    KernelKind,
    MatmulLayout,
    MatmulShape,
    SparseAttentionShape,
    SparseRoutine,
)
from clustersim.model.linear import LinearLayer, matmul_kernel
from clustersim.model.lora import Projection
from clustersim.model.mixer import AttentionFlopConvention, ContextRule
from clustersim.model.mixers.block_attention import BlockAttention
from clustersim.model.mixers.full_attention import operators_after_core, operators_before_core
from clustersim.model.operators import Operator, ParallelRegion, assign_module
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.sharded_layer import RankContext, linear_operator
from clustersim.model.training import AttentionBackend

BRANCHES: Final = 3
_FP32, _INDEX_BYTES = 4, 4
_MERGE_PASSES: Final = 12  # three products (read, write) and two sums (two reads, write)
_MERGE_BACKWARD_PASSES: Final = 18  # of each branch: the output's gradient (2), and the gate's (3 + 1)
_GRADIENT_SUMS: Final = 2  # gradients of three branches meet at queries, keys and values


@dataclass(frozen=True, slots=True)
class NativeSparseAttention(SelectedKeysAttention):
    """Attention to compressed keys, to `topk` blocks of `block_size` keys, and to `window_size` keys."""

    label: ClassVar[str] = "native sparse attention"
    context_rule: ClassVar[ContextRule] = ContextRule.NONE

    attention: FullAttention
    kernel_size: int
    kernel_stride: int
    block_size: int
    topk: int
    window_size: int

    @property
    def unselected(self) -> FullAttention:
        """The same heads' attention to all keys."""
        return self.attention

    @property
    def compression_elements(self) -> int:
        """Weights of the matrices that compress keys, or values, of all heads."""
        return self.attention.kv_heads * self.kernel_size * self.attention.head_dim**2

    def compressed_tokens(self, sequence: int) -> int:
        """Compressed keys of a sequence."""
        return max(0, (sequence - self.kernel_size) // self.kernel_stride + 1)

    def mean_compressed(self, sequence: int) -> float:
        """Compressed keys before a query, on average over a sequence: each from where its last token is on."""
        count, last = self.compressed_tokens(sequence), self.kernel_size - 1
        return (count * (sequence - last) - self.kernel_stride * count * (count - 1) / 2) / sequence

    def mean_selected(self, sequence: int) -> float:
        """Keys of the selected blocks that a query attends to, on average over a sequence."""
        blocks = BlockAttention(self.attention, self.block_size, self.topk)
        return blocks.own_keys(sequence) + self.block_size * blocks.earlier_blocks(sequence)

    def matrix_elements(self, hidden: int) -> int:
        """Those of the attention, and the gates'."""
        return self.attention.matrix_elements(hidden) + BRANCHES * hidden

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Those of attention and gates, the compression of keys and values, and positions within what is compressed."""
        positions = self.attention.key_width * self.kernel_size
        attention = self.attention.parameter_count(hidden, linear_bias=linear_bias)
        return attention + BRANCHES * hidden + 2 * self.compression_elements + positions

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:
        """Attention of three branches, and the compression."""
        if convention is AttentionFlopConvention.FULL:
            selected, window = (min(sequence, keys) for keys in (self.topk * self.block_size, self.window_size))
            keys = float(self.compressed_tokens(sequence) + selected + window)
        else:
            window_keys = mean_attended_keys(sequence, self.window_size)
            keys = self.mean_compressed(sequence) + self.mean_selected(sequence) + window_keys
        compression = 2 * self.compression_elements * self.compressed_tokens(sequence) / sequence
        return 12.0 * self.attention.query_width * keys + 6.0 * compression

    def projection_sizes(self, hidden: int) -> Mapping[Projection, tuple[int, int]]:
        """Those of the attention."""
        return self.attention.projection_sizes(hidden)

    def with_changes(self, changes: Mapping[str, Any]) -> "NativeSparseAttention":
        """The attention with other values of its fields."""
        return replace(self, attention=self.attention.with_changes(changes))


@dataclass(frozen=True, slots=True)
class _Rank:
    """Sizes on one rank."""

    rank: RankContext
    mixer: NativeSparseAttention

    @property
    def heads(self) -> int:
        return self.mixer.heads // self.rank.shard.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.mixer.kv_heads // self.rank.shard.tp)

    @property
    def elements(self) -> int:
        """Of the queries, or of a branch's output."""
        return self.rank.shard.tokens * self.heads * self.mixer.head_dim

    @property
    def kv_elements(self) -> int:
        """Of the keys, or values."""
        return self.rank.shard.tokens * self.kv_heads * self.mixer.head_dim

    @property
    def compressed_tokens(self) -> int:
        """Compressed keys of a head, of all sequences."""
        return max(1, self.rank.shard.batch * self.mixer.compressed_tokens(self.rank.shard.keys))

    @property
    def statistics_bytes(self) -> Bytes:
        return float(self.rank.shard.tokens * self.heads * _FP32)

    def sparse_kernel(self, routine: SparseRoutine, keys: float, products: int, *, backward: bool = False) -> Kernel:
        """A kernel with `products` multiplications of a query's width and each of `keys` keys, reading each once."""
        shard, dim, width = self.rank.shard, self.mixer.head_dim, self.rank.dtype.bytes
        name = f"attention.{routine.value}{'.input_gradient' if backward else ''}"
        moved = (4 if backward else 2) * (self.elements + self.kv_elements) * width + self.statistics_bytes
        shape = SparseAttentionShape(
            routine, shard.batch, shard.sequence, self.heads, dim, dim, max(1, round(keys)), backward
        )
        flops = 2.0 * products * self.elements * keys
        return Kernel(name, KernelKind.SCAN, self.rank.dtype, flops, float(moved), shape)


def native_sparse_attention_operators(
    rank: RankContext, mixer: NativeSparseAttention, *, after_norm: bool
) -> list[Operator]:
    """The operators between the norm and the residual add."""
    local, sequence = _Rank(rank, mixer), rank.shard.keys
    gate = LinearLayer("attention.gates", rank.shard.tokens, rank.model.hidden, BRANCHES, rank.matmul_formats)
    core = [
        _attention_operator(local, SparseRoutine.NSA_COMPRESSED, mixer.mean_compressed(sequence)),
        _selection_operator(local),
        _attention_operator(local, SparseRoutine.NSA_SELECTED, mixer.mean_selected(sequence)),
        *(replace(one, memberships=()) for one in _window_operators(local)),
        _merge_operator(local),
    ]
    return [
        *operators_before_core(rank, mixer.attention, after_norm=after_norm),
        linear_operator(rank, gate, 0.0, after_norm=after_norm),  # its input is the one that the first one saves
        _compression_operator(local),
        *assign_module(core, RecomputeModule.CORE_ATTENTION),
        *operators_after_core(rank, mixer.attention),
    ]


def _compression_operator(local: _Rank) -> Operator:
    """Keys and values through a matrix per head; backward also sums the gradients of all branches."""
    rank, mixer, name = local.rank, local.mixer, "attention.compression"
    tokens, inputs, dim = local.compressed_tokens, mixer.kernel_size * mixer.head_dim, mixer.head_dim
    forward, input_gradient, weight_gradient = (
        matmul_kernel(
            *(f"{name}{suffix}", rank.dtype, MatmulShape(m, n, k, batch=local.kv_heads, operands=layout)),
            result_bytes=rank.dtype.bytes,
        )
        for suffix, layout, m, n, k in (
            ("", MatmulLayout.NN, tokens, dim, inputs),
            (".input_gradient", MatmulLayout.NT, tokens, inputs, dim),
            (".weight_gradient", MatmulLayout.TN, inputs, dim, tokens),
        )
    )
    spec = memory_bound.GRADIENT_SUM
    summed = (local.elements, local.kv_elements, local.kv_elements)
    sums = (spec.forward_kernel(f"{name}.gradient_sum", rank.dtype, spec.shape_for(size, 1)) for size in summed)
    return Operator(
        name,
        ParallelRegion.SHARDED,
        2 * (forward,),
        (*2 * (input_gradient,), *_GRADIENT_SUMS * tuple(sums)),
        2 * (weight_gradient,),
        parameter_count=local.kv_heads * inputs * (2 * dim + 1),
        saved_bytes=float(2 * tokens * local.kv_heads * dim * rank.dtype.bytes),
    )


def _attention_operator(local: _Rank, routine: SparseRoutine, keys: float) -> Operator:
    """Scores and weighted values; backward has the scores again, and gradients of four operands."""
    forward = local.sparse_kernel(routine, keys, 2)
    backward = local.sparse_kernel(routine, keys, 5, backward=True)
    name = f"attention.{routine.value}"
    output_bytes = float(local.elements * local.rank.dtype.bytes)
    return Operator(
        name,
        ParallelRegion.SHARDED,
        (forward,),
        (backward,),
        saved_bytes=local.statistics_bytes,
        backward_output_bytes=output_bytes,
        saves_outputs=True,
    )


def _selection_operator(local: _Rank) -> Operator:
    """Scores of compressed keys again, summed over heads and blocks, and the best blocks; without a gradient."""
    kernel = local.sparse_kernel(SparseRoutine.NSA_SCORES, local.mixer.mean_compressed(local.rank.shard.keys), 1)
    index_bytes = float(local.rank.shard.tokens * local.kv_heads * local.mixer.topk * _INDEX_BYTES)
    return Operator("attention.nsa_scores", ParallelRegion.SHARDED, (kernel,), saved_bytes=index_bytes)


def _window_operators(local: _Rank) -> tuple[Operator, ...]:
    """Flash attention to the window."""
    shard, mixer = local.rank.shard, local.mixer
    window = mixer.window_size if mixer.window_size < shard.keys else None
    sizes = shard.batch, shard.sequence, shard.keys, local.heads, local.kv_heads, mixer.head_dim
    shape = AttentionShape(*sizes, causal=True, window=window, packed=shard.packed_keys(window))
    core = AttentionCore(shape, local.rank.dtype, local.rank.model.dropout, fused=True)
    return attention_operators(core, AttentionBackend.FLASH)


def _merge_operator(local: _Rank) -> Operator:
    """The branches' outputs times their gates, summed; it saves them."""
    dtype = local.rank.dtype
    copy = memory_bound.copy_kernel("attention.merge", dtype, local.elements)  # a read and a write
    forward = replace(copy, bytes=copy.bytes * _MERGE_PASSES / 2, launches=5)
    backward = replace(
        copy, name="attention.merge.input_gradient", bytes=copy.bytes * _MERGE_BACKWARD_PASSES / 2, launches=12
    )
    saved = float(BRANCHES * local.elements * dtype.bytes)
    return Operator("attention.merge", ParallelRegion.SHARDED, (forward,), (backward,), saved_bytes=saved)
