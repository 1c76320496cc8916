"""Operators of the lightning indexer of DeepSeek's sparse attention, and of the loss that it learns from.

Every tensor-parallel rank has all of the indexer and runs it for all tokens, which it gathers under sequence
parallelism; context-parallel ranks gather its keys. Its queries and keys are rotated by rotary positions and a Hadamard
transform. Scores of `_QUERY_BLOCK` queries are in memory at once, in FP32: counted as if in backward, which begins with
as many saved activations as forward ends with.

It learns the distribution of attention over the selected keys, summed over all ranks' heads (a KL divergence), from
detached inputs (DeepSeek-V3.2-Exp, section 2.1.1): it has weight gradients, and none of its inputs. Saved are its
queries, keys and weights, the selected keys' indices and the gradient of their scores. Reference: Megatron-LM,
megatron/core/transformer/experimental_attention_variant/dsa.py, ops/tilelang_dsa.py, ops/indexer.py.
"""

from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.units import Bytes, Flop
from clustersim.model import memory_bound
from clustersim.model.attention_spec import mean_attended_keys
from clustersim.model.kernels import (
    Kernel,
    KernelKind,
    MemoryBoundOp,
    MemoryBoundShape,
    SparseAttentionShape,
    SparseRoutine,
)
from clustersim.model.linear import LinearLayer
from clustersim.model.mixers.latent_attention import full_bytes
from clustersim.model.operators import (
    Operator,
    ParallelRegion,
    ShardAxis,
    TpCollective,
    TpCollectives,
    TpCombine,
)
from clustersim.model.sharded_layer import RankContext, linear_operator, memory_bound_operator
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import FusedKernel
from clustersim.model.transformer import Norm

FP32_BYTES: Final = 4
INDEX_BYTES: Final = 4
TILE_HEADS: Final = 16  # heads that a TileLang kernel has at least: tilelang_sparse_mla_bwd.py, padded_H
_TOP_K_READS: Final = 5  # torch.topk of long rows: four passes of 8 bits, one that gathers (ATen, TensorTopK.cu)
_LOSS_PASSES: Final = 6  # two softmaxes, their difference: read and written once each, FP32
_QUERY_BLOCK: Final = 8192  # DSAttention, fused_indexer_block_size


@dataclass(frozen=True, slots=True)
class SparseRank:
    """Sizes on one rank."""

    rank: RankContext
    attention: DeepseekSparseAttention

    @property
    def heads(self) -> int:
        """Heads of attention."""
        return self.attention.heads // self.rank.shard.tp

    @property
    def tokens(self) -> int:
        """Tokens that attention and the indexer work on."""
        return self.rank.shard.tokens

    @property
    def width(self) -> Bytes:
        """Bytes of an element."""
        return self.rank.dtype.bytes

    @property
    def selected(self) -> float:
        """Keys that attention works on, of each query: all of them where there are fewer."""
        packed = self.rank.shard.packed_keys(self.attention.index_topk)
        return min(self.attention.index_topk, self.rank.shard.keys) if packed is None else packed.full

    @property
    def scored(self) -> float:
        """Keys that the indexer scores, on average: those before a token, within its document."""
        shard = self.rank.shard
        packed = shard.packed_keys(None)
        if packed is not None:
            return packed.mean
        before = shard.keys - shard.sequence if shard.consecutive else 0  # of the rank that has the last tokens
        return before + mean_attended_keys(shard.keys - before, None)

    @property
    def key_tokens(self) -> int:
        """Tokens of the keys: of all context-parallel ranks, which each gathers."""
        return self.rank.shard.batch * self.rank.shard.keys

    def key_gather(self, width: int, name: str) -> TpCollectives:
        """The gather of `width` elements of every key from context-parallel ranks, and what returns their gradients."""
        if self.rank.shard.keys == self.rank.shard.sequence:
            return TpCollectives()
        full_bytes = float(self.key_tokens * width * self.width)
        gather, scatter = (
            TpCollective(combine, full_bytes, name, ShardAxis.CONTEXT)
            for combine in (TpCombine.GATHER, TpCombine.SUM_SCATTER)
        )
        return TpCollectives(after_forward=(gather,), before_backward=(scatter,))

    def head_sums(self, scores: float) -> tuple[TpCollective, ...]:
        """The sum over all ranks' heads of what these attend to, in FP32, if several ranks have them."""
        if self.rank.shard.tp == 1:
            return ()
        return (TpCollective(TpCombine.SUM, float(scores * FP32_BYTES), "attention of all heads"),)

    @property
    def gathers(self) -> bool:
        """Whether tensor-parallel ranks hold parts of the sequence, which the indexer gathers."""
        return self.rank.shard.sequence_parallel and self.rank.shard.tp > 1

    def kernel(
        self,
        name: str,
        routine: SparseRoutine,
        work: tuple[Flop, Bytes],
        *,
        all_keys: bool = False,
        backward: bool = False,
    ) -> Kernel:
        """A kernel of (FLOP, bytes); all_keys: it works on all of them."""
        shard, attention = self.rank.shard, self.attention
        sizes = (self.heads, attention.absorbed_width, attention.latent.kv_lora_rank)
        if routine is not SparseRoutine.SPARSE_MLA and routine is not SparseRoutine.INDEXER_LOSS:
            sizes = (attention.index_heads, attention.index_head_dim, 0)
        selected = 0 if all_keys else min(attention.index_topk, shard.keys)
        shape = SparseAttentionShape(routine, shard.batch, shard.sequence, *sizes, selected, backward=backward)
        flops, moved_bytes = work
        return Kernel(
            name,
            KernelKind.SPARSE_ATTENTION,
            self.rank.dtype,
            flops=float(flops),
            bytes=float(moved_bytes),
            shape=shape,
        )


def gathered_inputs(local: SparseRank) -> TpCollectives:
    """The gathers of the layer's input and of the queries' latent vectors for the indexer, if ranks hold parts."""
    if not local.gathers:
        return TpCollectives()
    widths = {"indexer inputs": local.rank.model.hidden, "latent queries": local.attention.latent.q_lora_rank or 0}
    return TpCollectives(
        after_forward=tuple(
            TpCollective(TpCombine.GATHER, full_bytes(local.rank, width), name)
            for name, width in widths.items()
            if width
        )
    )


def indexer_operators(local: SparseRank) -> list[Operator]:
    """Projections of the indexer on every tensor-parallel rank for all tokens, the norm of its keys, rotations."""
    rank, attention, hidden = local.rank, local.attention, local.rank.model.hidden
    inputs = attention.latent.q_lora_rank or hidden
    norm = memory_bound.norm_spec(Norm.LAYERNORM, fused=rank.training.fuses(FusedKernel.NORM))
    key_norm = memory_bound_operator(
        *(ParallelRegion.REPLICATED, "indexer.key_norm", rank.dtype, norm),
        (norm.shape_for(local.tokens, attention.index_head_dim),),
    )
    return [
        _index_projection(local, "indexer.query", (inputs, attention.index_width), saves_input=local.gathers),
        _index_projection(local, "indexer.key", (hidden, attention.index_head_dim), saves_input=local.gathers),
        replace(key_norm, parameter_count=2 * attention.index_head_dim),
        _index_projection(local, "indexer.head_weights", (hidden, attention.index_heads), saves_input=False),
        _rotation_operator(local),
    ]


def _index_projection(local: SparseRank, name: str, sizes: tuple[int, int], *, saves_input: bool) -> Operator:
    """A projection (inputs, outputs) without input gradient. saves_input: no other operator saves what it reads."""
    rank = local.rank
    linear = LinearLayer(name, local.tokens, *sizes, rank.matmul_formats)
    saves = saves_input or rank.training.recipe.casts_inputs
    operator = linear_operator(rank, linear, rank.saved_input_bytes(local.tokens * sizes[0]) if saves else 0.0)
    casts = tuple(kernel for kernel in operator.input_gradient if kernel.kind is KernelKind.CAST)
    return replace(operator, region=ParallelRegion.REPLICATED, linear=None, input_gradient=casts)


def _rotation_operator(local: SparseRank) -> Operator:
    """Rotary positions and a Hadamard transform of the indexer's queries and keys, one pass each (two launches)."""
    attention = local.attention
    elements = attention.index_width + attention.index_head_dim
    shape = MemoryBoundShape(MemoryBoundOp.ROTARY, local.tokens * (attention.index_heads + 1), attention.index_head_dim)
    is_fused = local.rank.training.fuses(FusedKernel.ROTARY)
    passes, launches = (4, 4) if is_fused else (4 + 2 * 2, 12)  # unfused: both parts copied apart and together again
    moved_bytes = float(local.tokens * elements * passes * local.width)
    forward = Kernel(
        *("indexer.rotation", KernelKind.ROTARY, local.rank.dtype, 0.0, moved_bytes),
        *(replace(shape, fused=is_fused), launches),
    )
    backward = replace(forward, name="indexer.rotation.input_gradient", shape=replace(shape, backward=True))
    saved_bytes = local.tokens * (attention.index_width * local.width + attention.index_heads * FP32_BYTES)
    saved_bytes += local.key_tokens * attention.index_head_dim * local.width
    return Operator(
        *("indexer.rotation", ParallelRegion.REPLICATED, (forward,), (backward,)),
        saved_bytes=float(saved_bytes),
        tp_collectives=local.key_gather(attention.index_head_dim, "index keys"),
    )


def scores_operator(local: SparseRank) -> Operator:
    """Scores of all keys and the selection of the best; backward: the scores' gradients at the selected keys."""
    attention, tokens, keys = local.attention, local.tokens, local.rank.shard.keys
    operands = (tokens * attention.index_width + local.key_tokens * attention.index_head_dim) * local.width
    operands += tokens * attention.index_heads * FP32_BYTES
    selected_bytes = tokens * local.selected * (INDEX_BYTES + FP32_BYTES)
    products = 2.0 * tokens * attention.index_width
    written = tokens * keys * FP32_BYTES  # masked ones, too (clean_logits)
    scores = local.kernel(
        "indexer.scores", SparseRoutine.LIGHTNING_INDEXER, (products * local.scored, operands + written), all_keys=True
    )
    top_k = local.kernel(
        "indexer.top_k", SparseRoutine.INDEX_TOP_K, (0.0, _TOP_K_READS * written + selected_bytes), all_keys=True
    )
    gradient = local.kernel(
        "indexer.scores.input_gradient",
        SparseRoutine.LIGHTNING_INDEXER,
        (3 * products * local.selected, 2 * operands + selected_bytes),
        backward=True,
    )
    block = min(_QUERY_BLOCK, local.rank.shard.sequence)
    return Operator(
        "indexer.scores",
        ParallelRegion.SHARDED,
        (scores, top_k),
        (gradient,),
        saved_bytes=float(selected_bytes),
        saves_outputs=True,
        temporary_bytes=float(block * keys * FP32_BYTES),
    )


def loss_operator(local: SparseRank) -> Operator:
    """What the heads attend to among the selected keys, summed over all ranks' heads, and the indexer's loss.

    Its gradient is computed with it, and only scaled in backward.
    """
    tokens, padded = local.tokens, padded_heads(local.heads, TILE_HEADS)
    scores = tokens * local.selected
    operands = (tokens * local.heads + local.key_tokens) * local.attention.absorbed_width * local.width
    flops = 2.0 * padded * local.attention.absorbed_width * scores
    target = local.kernel(
        "indexer.target", SparseRoutine.INDEXER_LOSS, (flops, operands + scores * (INDEX_BYTES + FP32_BYTES))
    )
    loss = local.kernel("indexer.loss", SparseRoutine.INDEXER_LOSS, (0.0, _LOSS_PASSES * scores * FP32_BYTES))
    gradient = local.kernel(
        "indexer.loss.input_gradient", SparseRoutine.INDEXER_LOSS, (0.0, 2 * scores * FP32_BYTES), backward=True
    )
    return Operator(
        "indexer.loss",
        ParallelRegion.SHARDED,
        (target, loss),
        (gradient,),
        saves_outputs=True,
        tp_collectives=TpCollectives(after_forward=local.head_sums(scores)),
    )


def dense_scores_operator(local: SparseRank) -> Operator:
    """Scores of all keys, and their gradients: of the warm-up, in which none are selected."""
    attention, keys = local.attention, local.rank.shard.keys
    operands = local.tokens * (attention.index_width + attention.index_head_dim) * local.width
    products, written = 2.0 * local.tokens * attention.index_width * local.scored, local.tokens * keys * FP32_BYTES
    forward, backward = (
        local.kernel(name, SparseRoutine.LIGHTNING_INDEXER, work, all_keys=True, backward=is_backward)
        for name, work, is_backward in (
            ("indexer.scores", (products, operands + written), False),
            ("indexer.scores.input_gradient", (3 * products, 2 * operands + written), True),
        )
    )
    block = min(_QUERY_BLOCK, local.rank.shard.sequence)
    temporary_bytes = float(2 * block * keys * FP32_BYTES)  # scores, and what attention weights
    return Operator("indexer.scores", ParallelRegion.SHARDED, (forward,), (backward,), temporary_bytes=temporary_bytes)


def dense_loss_operator(local: SparseRank) -> Operator:
    """What the heads attend to among all keys, summed over all ranks' heads, and the loss; backward does it again."""
    latent, scores = local.attention.latent, local.tokens * local.scored
    operands = 2 * local.tokens * local.heads * latent.head_dim * local.width
    target_work = 2.0 * local.heads * latent.head_dim * scores, operands + scores * FP32_BYTES
    kernels = {
        is_backward: (
            local.kernel(
                "indexer.target", SparseRoutine.INDEXER_LOSS, target_work, all_keys=True, backward=is_backward
            ),
            local.kernel(
                *("indexer.loss", SparseRoutine.INDEXER_LOSS, (0.0, _LOSS_PASSES * scores * FP32_BYTES)),
                all_keys=True,
                backward=is_backward,
            ),
        )
        for is_backward in (False, True)
    }
    summed = local.head_sums(scores)
    return Operator(
        *("indexer.loss", ParallelRegion.SHARDED, kernels[False], kernels[True]),
        tp_collectives=TpCollectives(after_forward=summed, before_backward=summed),
    )


def padded_heads(heads: int, block: int) -> int:
    """Heads that a kernel with blocks of heads computes."""
    return -(-heads // block) * block
