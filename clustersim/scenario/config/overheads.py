"""What may a scenario file say about the framework's per-step overheads?

overheads: none              # no overheads
overheads:                   # the framework's, except
  zero_grad: false
  accumulation: added
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from clustersim.model.overheads import (
    MAX_CROSS_ENTROPY_METRICS,
    NO_OVERHEADS,
    Accumulation,
    BatchTransfer,
    ExpertRowMasks,
    ExpertSort,
    ExpertWeighting,
    Grouping,
    LossReport,
    Overheads,
    RingAttention,
)
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy
from clustersim.scenario.config_reader import ConfigModel, TokenCount, enum_parser


class OverheadsConfig(ConfigModel):
    """`training.overheads`: differences from the framework's per-step overheads."""

    accumulation: Annotated[Accumulation | None, enum_parser(Accumulation)] = None
    """accumulation of weight gradients; left out: the framework's"""
    zero_grad: bool | None = None
    """gradients are zeroed every step; left out: the framework's"""
    prescale_gradients: bool | None = None
    """gradients are divided by the number of replicas before they are reduced; left out: the framework's"""
    check_for_nan_in_grad: bool | None = None
    """gradients are checked for inf and NaN before they are reduced; left out: the framework's"""
    unscale_gradients: bool | None = None
    """gradients are divided by the loss scale; left out: the framework's"""
    upcast_gradients: bool | None = None
    """gradients are copied into a higher-precision format; left out: the framework's"""
    scale_clipped_gradients: bool | None = None
    """clipping multiplies gradients even where their norm is below the limit; left out: the framework's"""
    allreduce_layernorm_grads: bool | None = None
    """weight gradients of norms are all-reduced over tensor-parallel ranks under sequence parallelism;
    left out: the framework's
    """
    keeps_weight_gradients: bool | None = None
    """one gradient of each shape of weight is kept where matmuls add to the sum, as by Transformer Engine since 2.3;
    left out: the framework's
    """
    softmax_copy: bool | None = None
    """loss vocab_parallel is compiled, so that backward has a copy of the softmax; left out: the framework's"""
    tensor_parallel_copies: bool | None = None
    """activations are copied behind all-gathers and before reduce-scatters of sequence parallelism, as by DTensor;
    left out: the framework's
    """
    attention_copies: bool | None = None
    """attention operands are copied into its memory layout; left out: the framework's"""
    bias_adds: bool | None = None
    """biases are added by separate kernels; left out: the framework's"""
    activation_bias_adds: bool | None = None
    """the bias in front of an MLP's activation is added by a separate kernel; left out: the framework's"""
    norm_weight_grad_kernel: bool | None = None
    """weight gradients of a LayerNorm are a second kernel, which reads both operands again;
    left out: the framework's
    """
    norm_fp32_copy: bool | None = None
    """norms in one kernel read an FP32 copy of their input; left out: the framework's"""
    keeps_combined_qkv: bool | None = None
    """the product that makes queries, keys and values is saved with rotated queries and keys, since values are a view
    of it; left out: the framework's
    """
    joins_gate: bool | None = None
    """Muon, Dion and SOAP update gate and up projections as one matrix; left out: the framework's"""
    compiled_muon: bool | None = None
    """a compiler fuses Muon's elementwise operations before and after the iteration; left out: the framework's"""
    shape_padding: bool | None = None
    """matmuls with rows that are no multiples of 16 bytes are padded, as by Inductor where it compiles them;
    left out: the framework's
    """
    scan_copies: bool | None = None
    """layers are iterations of a loop, which copies the results of matmuls that backward reads, as XLA's;
    left out: the framework's
    """
    activation_in_place: bool | None = None
    """an MLP's activation writes its gradients in place of what it saved; left out: the framework's"""
    norm_in_linear: bool | None = None
    """norms are fused into the following matmul; left out: the framework's"""
    permute_unfused: bool | None = None
    """token permutation by several kernels; left out: the framework's"""
    router_unfused: bool | None = None
    """the router is unfused; left out: the framework's"""
    indices_unfused: bool | None = None
    """a mask of received tokens is made of indices by several kernels, for which the host waits (deepep);
    left out: the framework's
    """
    router_fp32: bool | None = None
    """router scores are computed in FP32; left out: the framework's"""
    router_loss: bool | None = None
    """the auxiliary load-balancing loss is computed; left out: the framework's"""
    keeps_gathered_inputs: bool | None = None
    """column-parallel layers save their inputs gathered under sequence parallelism; left out: the framework's"""
    gathers_normed_heads: bool | None = None
    """normalized queries and keys are gathered over tensor-parallel ranks, which rotate all heads;
    left out: the framework's
    """
    gathers_per_linear: bool | None = None
    """every column-parallel layer gathers its input by itself under sequence parallelism; left out: the framework's"""
    gathers_logits: bool | None = None
    """logits are gathered over tensor-parallel ranks, which all compute the whole loss; left out: the framework's"""
    ring_attention: Annotated[RingAttention | None, enum_parser(RingAttention)] = None
    """whether ring attention is one kernel, or one for each block of keys, merged in FP32; left out: the framework's"""
    repeats_kv: bool | None = None
    """keys and values are copied for every query head before context-parallel ranks exchange them;
    left out: the framework's
    """
    complex_rotary: bool | None = None
    """rotary positions are a product of complex numbers in FP32, which a compiler does not fuse (not of models with
    norms of queries and keys or attention sinks); left out: the framework's
    """
    embedding_matmul: bool | None = None
    """tokens are looked up by a matmul of one-hot rows with the embedding table; left out: the framework's"""
    autocast: bool | None = None
    """weights, norms, softmaxes and residual stream are in FP32, and cast for matmuls (torch.autocast of FP32 weights);
    left out: the framework's
    """
    saves_absolute_values: bool | None = None
    """recomputation by operations saves the absolute values that eager casts take; left out: the framework's"""
    unpads_batches: bool | None = None
    """flash attention gathers tokens that are no padding and scatters its results, as Transformers for padded batches;
    left out: the framework's
    """
    grouping: Annotated[Grouping | None, enum_parser(Grouping)] = None
    """launch of expert matmuls (grouped GEMM), and whether the ops in between are fused; left out: the framework's"""
    weighting: Annotated[ExpertWeighting | None, enum_parser(ExpertWeighting)] = None
    """where results of experts are multiplied by probabilities: within experts or behind; left out: the framework's"""
    expert_sort: Annotated[ExpertSort | None, enum_parser(ExpertSort)] = None
    """how received tokens are sorted by expert; left out: the framework's"""
    expert_row_masks: Annotated[ExpertRowMasks | None, enum_parser(ExpertRowMasks)] = None
    """where rows of grouped products that belong to no expert of the rank are masked; left out: the framework's"""
    softmax_keys: TokenCount | None = None
    """maximum number of keys for which standard attention's softmax is one kernel; left out: the framework's"""
    cross_entropy_metrics: Annotated[int, Field(ge=0, le=MAX_CROSS_ENTROPY_METRICS)] | None = None
    """metrics that compute cross-entropy from all logits again (Composer's train metrics); left out: the framework's"""
    loss_averaging: Annotated[LossReport | None, enum_parser(LossReport)] = None
    """when the loss is averaged over ranks; left out: the framework's"""
    batch_transfer: Annotated[BatchTransfer | None, enum_parser(BatchTransfer)] = None
    """how input batches are copied to the device; left out: the framework's"""

    def with_framework_defaults(self, framework: Overheads, data: DataParallelStrategy) -> Overheads:
        """The stated overheads, with the framework's as defaults.

        FSDP2 copies gradients into its reduce-scatter buffer, whatever else is fused.
        """
        defaults = replace(framework, accumulation=Accumulation.COPIED) if data.copies else framework
        return replace(defaults, **self.stated_values())


def resolve_overheads(config: OverheadsConfig | None, framework: Overheads, data: DataParallelStrategy) -> Overheads:
    """The overheads of a section; None (the word `none`) is no overheads."""
    return NO_OVERHEADS if config is None else config.with_framework_defaults(framework, data)
