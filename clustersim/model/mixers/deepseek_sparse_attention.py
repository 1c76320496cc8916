"""Operators of DeepSeek's sparse attention (`model.sparse_attention_spec`) on one rank, in its sparse training stage.

Kernels are those that Megatron-Core takes with `dsa_kernel_backend` cudnn or tilelang (megatron/core/transformer/
experimental_attention_variant/{absorbed_mla,dsa}.py, ops/). Attention runs in the latent space (`absorbed`), where all
heads share one key and value per token: queries are multiplied by the keys' up projection before it, outputs by the
values' behind it. Tensor parallelism splits these heads; every rank has all of the indexer and runs it for all tokens,
which it gathers under sequence parallelism. Scores of `_QUERY_BLOCK` queries are in memory at once, in FP32: counted as
if in backward, which begins with as many saved activations as forward ends with. Selected rows are taken to be read
from device memory once: they stay in the L2 cache, as in the kernels' published times. Context parallelism is not
modelled.

The indexer learns the distribution of attention over the selected keys, summed over all ranks' heads (a KL divergence),
from detached inputs (DeepSeek-V3.2-Exp, section 2.1.1): it has weight gradients, and none of its inputs. Its queries
and keys are rotated by rotary positions and a Hadamard transform.

Saved besides the latent vectors: queries and keys as attention reads them, its output in the latent space, the selected
keys' indices and the gradient of their scores, the indexer's queries, keys and weights.
"""

from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.units import Bytes, Flop
from clustersim.model import memory_bound
from clustersim.model.attention_spec import mean_attended_keys
from clustersim.model.kernels import (
    Kernel,
    KernelKind,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
    SparseAttentionShape,
    SparseRoutine,
)
from clustersim.model.linear import LinearLayer, matmul_kernel
from clustersim.model.mixers.latent_attention import (
    full_bytes,
    latent_vector_operators,
    output_operator,
    query_operator,
)
from clustersim.model.operators import (
    Operator,
    ParallelRegion,
    RegionInput,
    TpCollective,
    TpCollectives,
    TpCombine,
    assign_module,
)
from clustersim.model.overheads import Accumulation
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.sharded_layer import RankContext, linear_operator, memory_bound_operator
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import FusedKernel
from clustersim.model.transformer import Norm
from clustersim.model.weight_matrices import WeightMatrix

_FP32_BYTES: Final = 4
_INDEX_BYTES: Final = 4
_FORWARD_HEAD_BLOCK: Final = 64  # heads that a block has at least: FlashMLA, csrc/sm90/prefill/sparse
_BACKWARD_HEAD_BLOCK: Final = 16  # tilelang_sparse_mla_bwd.py, padded_H
_TOP_K_READS: Final = 5  # torch.topk of long rows: four passes of 8 bits, one that gathers (ATen, TensorTopK.cu)
_LOSS_PASSES: Final = 6  # two softmaxes, their difference: read and written once each, FP32
_QUERY_BLOCK: Final = 8192  # DSAttention, fused_indexer_block_size


@dataclass(frozen=True, slots=True)
class _SparseRank:
    """Sizes on one rank."""

    rank: RankContext
    attention: DeepseekSparseAttention

    @property
    def heads(self) -> int:
        return self.attention.heads // self.rank.shard.tp

    @property
    def tokens(self) -> int:
        return self.rank.shard.tokens

    @property
    def width(self) -> int:
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
        packed = self.rank.shard.packed_keys(None)
        return mean_attended_keys(self.rank.shard.keys, None) if packed is None else packed.mean

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
        every: bool = False,
        backward: bool = False,
    ) -> Kernel:
        """A kernel of (FLOP, bytes); every: it works on all keys."""
        shard, attention = self.rank.shard, self.attention
        sizes = (self.heads, attention.absorbed_width, attention.latent.kv_lora_rank)
        if routine is not SparseRoutine.SPARSE_MLA and routine is not SparseRoutine.INDEXER_LOSS:
            sizes = (attention.index_heads, attention.index_head_dim, 0)
        selected = 0 if every else min(attention.index_topk, shard.keys)
        shape = SparseAttentionShape(routine, shard.batch, shard.sequence, *sizes, selected, backward=backward)
        return Kernel(name, KernelKind.SPARSE_ATTENTION, self.rank.dtype, *map(float, work), shape)


def deepseek_sparse_attention_operators(
    rank: RankContext,
    attention: DeepseekSparseAttention,
    *,
    after_norm: bool,  # noqa: ARG001 - of the protocol
) -> list[Operator]:
    """The operators between the norm, which is never fused into them, and the residual add."""
    local = _SparseRank(rank, attention)
    *latents, last = latent_vector_operators(rank, attention.latent)
    core = (_scores_operator(local), _loss_operator(local), _core_operator(local))
    return [
        *(*latents, replace(last, tp_collectives=_gathered_inputs(local))),
        *_indexer_operators(local),
        query_operator(rank, attention.latent),
        _absorption(local, "attention.query_absorption", attention.latent.qk_nope_head_dim, saves_queries=True),
        _packing_operator(local),
        *assign_module(core, RecomputeModule.CORE_ATTENTION),
        _absorption(local, "attention.value_up", attention.latent.v_head_dim, saves_queries=False),
        output_operator(rank, attention.latent),
    ]


def _gathered_inputs(local: _SparseRank) -> TpCollectives:
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


def _indexer_operators(local: _SparseRank) -> list[Operator]:
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


def _index_projection(local: _SparseRank, name: str, sizes: tuple[int, int], *, saves_input: bool) -> Operator:
    """A projection (inputs, outputs) without input gradient. saves_input: no other operator saves what it reads."""
    rank = local.rank
    linear = LinearLayer(name, local.tokens, *sizes, rank.matmul_formats)
    saves = saves_input or rank.training.recipe.casts_inputs
    operator = linear_operator(rank, linear, rank.saved_input_bytes(local.tokens * sizes[0]) if saves else 0.0)
    casts = tuple(kernel for kernel in operator.input_gradient if kernel.kind is KernelKind.CAST)
    return replace(operator, region=ParallelRegion.REPLICATED, linear=None, input_gradient=casts)


def _rotation_operator(local: _SparseRank) -> Operator:
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
    saved_bytes = local.tokens * (elements * local.width + attention.index_heads * _FP32_BYTES)
    return Operator(
        *("indexer.rotation", ParallelRegion.REPLICATED, (forward,), (backward,)), saved_bytes=float(saved_bytes)
    )


def _absorption(local: _SparseRank, name: str, head_width: int, *, saves_queries: bool) -> Operator:
    """Queries into the latent space, or outputs out of it: one product per head with its part of the up projection.

    Its weight gradient is added to the accumulated one: no matmul of a linear layer produces it.
    saves_queries: it saves the queries; else the latent outputs.
    """
    rank, latent = local.rank, local.attention.latent
    inner, outer = (head_width, latent.kv_lora_rank) if saves_queries else (latent.kv_lora_rank, head_width)
    forward, input_gradient, weight_gradient = (
        matmul_kernel(
            *(f"{name}{suffix}", rank.dtype, MatmulShape(m, n, k, batch=local.heads, operands=operands)),
            result_bytes=local.width,
        )
        for suffix, operands, m, n, k in (
            ("", MatmulLayout.NN, local.tokens, outer, inner),
            (".input_gradient", MatmulLayout.NT, local.tokens, inner, outer),
            (".weight_gradient", MatmulLayout.TN, head_width, latent.kv_lora_rank, local.tokens),
        )
    )
    rows = local.heads * head_width
    accumulation = rank.training.accumulation
    accumulate = memory_bound.accumulate_kernels(
        *(f"{name}.accumulate", (rows, latent.kv_lora_rank)),
        gradient_dtype=rank.dtype,
        accumulator_dtype=rank.training.recipe.weight_formats.gradients,
        accumulation=Accumulation.ADDED if accumulation is Accumulation.FUSED else accumulation,
    )
    saved = local.heads * (latent.head_dim if saves_queries else latent.kv_lora_rank)
    return Operator(
        name,
        ParallelRegion.SHARDED,
        (forward,),
        (input_gradient,),
        (weight_gradient, *accumulate),
        parameter_count=rows * latent.kv_lora_rank,
        saved_bytes=float(local.tokens * saved * local.width),
        deferred_wgrad_bytes=float(local.tokens * local.heads * (inner + outer) * local.width),
        matrices=(WeightMatrix(rows, latent.kv_lora_rank),),
    )


def _packing_operator(local: _SparseRank) -> Operator:
    """Rotate parts of the queries and the shared key, and write both next to the latent ones, as attention reads them.

    The latent vectors of all tokens enter the sharded region here.
    """
    rank, attention = local.rank, local.attention
    packed_elements = (local.heads + 1) * attention.absorbed_width
    is_fused = rank.training.fuses(FusedKernel.ROTARY)
    passes, launches = (2, 2) if is_fused else (4, 8)  # unfused: one more copy of each, as in latent attention
    rotary_width = attention.latent.qk_rope_head_dim
    shape = MemoryBoundShape(
        *(MemoryBoundOp.ROTARY, local.tokens * (local.heads + 1), rotary_width),
        fused=is_fused,
        table=rank.shard.sequence,
    )
    moved_bytes = float(local.tokens * packed_elements * passes * local.width)
    forward = Kernel("attention.packing", KernelKind.ROTARY, rank.dtype, 0.0, moved_bytes, shape, launches)
    backward = replace(forward, name="attention.packing.input_gradient", shape=replace(shape, backward=True))
    return Operator(
        "attention.packing",
        ParallelRegion.SHARDED,
        (forward,),
        (backward,),
        saved_bytes=float(local.tokens * packed_elements * local.width),
        region_input=RegionInput.OTHER,
        region_input_bytes=full_bytes(rank, attention.absorbed_width),
    )


def _scores_operator(local: _SparseRank) -> Operator:
    """Scores of all keys and the selection of the best; backward: the scores' gradients at the selected keys."""
    attention, tokens, keys = local.attention, local.tokens, local.rank.shard.keys
    operands = tokens * (attention.index_width + attention.index_head_dim) * local.width
    operands += tokens * attention.index_heads * _FP32_BYTES
    selected_bytes = tokens * local.selected * (_INDEX_BYTES + _FP32_BYTES)
    products = 2.0 * tokens * attention.index_width
    written = tokens * keys * _FP32_BYTES  # masked ones, too (clean_logits)
    scores = local.kernel(
        "indexer.scores", SparseRoutine.LIGHTNING_INDEXER, (products * local.scored, operands + written), every=True
    )
    top_k = local.kernel(
        "indexer.top_k", SparseRoutine.INDEX_TOP_K, (0.0, _TOP_K_READS * written + selected_bytes), every=True
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
        temporary_bytes=float(block * keys * _FP32_BYTES),
    )


def _loss_operator(local: _SparseRank) -> Operator:
    """What the heads attend to among the selected keys, summed over all ranks' heads, and the indexer's loss.

    Its gradient is computed with it, and only scaled in backward.
    """
    tokens, padded = local.tokens, _padded(local.heads, _BACKWARD_HEAD_BLOCK)
    scores = tokens * local.selected
    operands = tokens * (local.heads + 1) * local.attention.absorbed_width * local.width
    flops = 2.0 * padded * local.attention.absorbed_width * scores
    target = local.kernel(
        "indexer.target", SparseRoutine.INDEXER_LOSS, (flops, operands + scores * (_INDEX_BYTES + _FP32_BYTES))
    )
    loss = local.kernel("indexer.loss", SparseRoutine.INDEXER_LOSS, (0.0, _LOSS_PASSES * scores * _FP32_BYTES))
    gradient = local.kernel(
        "indexer.loss.input_gradient", SparseRoutine.INDEXER_LOSS, (0.0, 2 * scores * _FP32_BYTES), backward=True
    )
    sums = (TpCollective(TpCombine.SUM, float(scores * _FP32_BYTES), "attention of all heads"),)
    collectives = TpCollectives(after_forward=sums if local.rank.shard.tp > 1 else ())
    return Operator(
        "indexer.loss",
        ParallelRegion.SHARDED,
        (target, loss),
        (gradient,),
        saves_outputs=True,
        tp_collectives=collectives,
    )


def _core_operator(local: _SparseRank) -> Operator:
    """Attention of this rank's heads to the selected tokens' latent vectors; heads are padded to a kernel's block."""
    tokens, queries = local.tokens, local.attention.absorbed_width
    values = local.attention.latent.kv_lora_rank
    statistics = tokens * local.heads * _FP32_BYTES
    operands = tokens * (local.heads + 1) * queries * local.width + tokens * local.selected * _INDEX_BYTES
    outputs = tokens * local.heads * values * local.width
    scores = 2.0 * tokens * local.selected
    forward = local.kernel(
        "attention.core",
        SparseRoutine.SPARSE_MLA,
        (
            scores * _padded(local.heads, _FORWARD_HEAD_BLOCK) * (queries + values),
            operands + outputs + statistics,
        ),
    )
    backward = local.kernel(
        "attention.core.input_gradient",
        SparseRoutine.SPARSE_MLA,
        (
            scores * _padded(local.heads, _BACKWARD_HEAD_BLOCK) * (3 * queries + 2 * values),
            2 * operands + 3 * outputs + 2 * statistics + 2 * tokens * queries * _FP32_BYTES,
        ),
        backward=True,
    )
    return Operator(
        "attention.core",
        ParallelRegion.SHARDED,
        (forward,),
        (backward,),
        saved_bytes=float(statistics),
        recompute_override=(),
        saved_output_bytes=float(outputs + statistics),
        backward_output_bytes=float(outputs),
        saves_outputs=True,
    )


def _padded(heads: int, block: int) -> int:
    """Heads that a kernel with blocks of heads computes."""
    return -(-heads // block) * block
