"""Operators of DeepSeek's sparse attention (`model.sparse_attention_spec`) on one rank.

Kernels are those that Megatron-Core takes with `dsa_kernel_backend` cudnn or tilelang (megatron/core/transformer/
experimental_attention_variant/{absorbed_mla,dsa}.py, ops/). Attention runs in the latent space (`absorbed`), where all
heads share one key and value per token: queries are multiplied by the keys' up projection before it, outputs by the
values' behind it. Tensor parallelism splits these heads, and repeats the indexer (`lightning_indexer`). Selected rows
are taken to be read from device memory once: they stay in the L2 cache, as in the kernels' published times.
Context-parallel ranks gather the latent vectors of all tokens, and scatter the sum of their gradients.

In the dense warm-up of the indexer latent attention runs as it is, next to the indexer: its scores of all keys, and its
loss over them. No gradient passes anything else (`model.frozen_layers`).

Saved besides the latent vectors and what the indexer saves: queries and keys as attention reads them, and its output in
the latent space.
"""

from dataclasses import replace
from typing import Final

from clustersim.model import memory_bound
from clustersim.model.kernels import (
    Kernel,
    KernelKind,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
    SparseRoutine,
)
from clustersim.model.linear import matmul_kernel
from clustersim.model.mixers.latent_attention import (
    full_bytes,
    head_operators,
    latent_core_operators,
    latent_vector_operators,
    output_operator,
    query_operator,
)
from clustersim.model.mixers.lightning_indexer import (
    FP32_BYTES,
    INDEX_BYTES,
    TILE_HEADS,
    SparseRank,
    dense_loss_operator,
    dense_scores_operator,
    gathered_inputs,
    indexer_operators,
    loss_operator,
    padded_heads,
    scores_operator,
)
from clustersim.model.operators import (
    INDEXER,
    Operator,
    ParallelRegion,
    RegionInput,
    assign_module,
)
from clustersim.model.overheads import Accumulation
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.sharded_layer import RankContext
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import FusedKernel
from clustersim.model.weight_matrices import WeightMatrix

_FLASH_HEADS: Final = 64  # heads that a kernel of FlashMLA has at least: csrc/sm90/prefill/sparse


def deepseek_sparse_attention_operators(
    rank: RankContext,
    attention: DeepseekSparseAttention,
    *,
    after_norm: bool,  # noqa: ARG001 - of the protocol
) -> list[Operator]:
    """The operators between the norm, which is never fused into them, and the residual add."""
    local = SparseRank(rank, attention)
    *latents, last = latent_vector_operators(rank, attention.latent)
    if attention.warms_up:
        indexer = (*indexer_operators(local), dense_scores_operator(local), dense_loss_operator(local))
        return [
            *(*latents, replace(last, tp_collectives=gathered_inputs(local))),
            *head_operators(rank, attention.latent),
            *latent_core_operators(rank, attention.latent),
            *(replace(operator, parameter_group=INDEXER, region=ParallelRegion.SHARDED) for operator in indexer),
            output_operator(rank, attention.latent),
        ]
    core = (scores_operator(local), loss_operator(local), _core_operator(local))
    return [
        *(*latents, replace(last, tp_collectives=gathered_inputs(local))),
        *indexer_operators(local),
        query_operator(rank, attention.latent),
        _absorption(local, "attention.query_absorption", attention.latent.qk_nope_head_dim, saves_queries=True),
        _packing_operator(local),
        *assign_module(core, RecomputeModule.CORE_ATTENTION),
        _absorption(local, "attention.value_up", attention.latent.v_head_dim, saves_queries=False),
        output_operator(rank, attention.latent),
    ]


def _absorption(local: SparseRank, name: str, head_width: int, *, saves_queries: bool) -> Operator:
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


def _packing_operator(local: SparseRank) -> Operator:
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
        saved_bytes=float((local.tokens * local.heads + local.key_tokens) * attention.absorbed_width * local.width),
        tp_collectives=local.key_gather(attention.absorbed_width, "latent keys"),
        region_input=RegionInput.OTHER,
        region_input_bytes=full_bytes(rank, attention.absorbed_width),
    )


def _core_operator(local: SparseRank) -> Operator:
    """Attention of this rank's heads to the selected tokens' latent vectors; heads are padded to a kernel's block."""
    tokens, queries = local.tokens, local.attention.absorbed_width
    values = local.attention.latent.kv_lora_rank
    statistics = tokens * local.heads * FP32_BYTES
    packed_bytes = (tokens * local.heads + local.key_tokens) * queries * local.width
    operands = packed_bytes + tokens * local.selected * INDEX_BYTES
    outputs = tokens * local.heads * values * local.width
    scores = 2.0 * tokens * local.selected
    forward = local.kernel(
        "attention.core",
        SparseRoutine.SPARSE_MLA,
        (
            scores * padded_heads(local.heads, _FLASH_HEADS) * (queries + values),
            operands + outputs + statistics,
        ),
    )
    backward = local.kernel(
        "attention.core.input_gradient",
        SparseRoutine.SPARSE_MLA,
        (
            scores * padded_heads(local.heads, TILE_HEADS) * (3 * queries + 2 * values),
            2 * operands + 3 * outputs + 2 * statistics + 2 * local.key_tokens * queries * FP32_BYTES,
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
