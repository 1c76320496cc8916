"""What does a framework do per step in addition to the model: for gradients, losses and batches?

Each flag is what the code of a framework of its time does, and is off where that code does not do it.
Which framework does what is in `topologies/frameworks`, with a reference to that code; a scenario may
override it (`training.overheads`). Counted are kernels, the bytes that they move, collectives, and, by
their launches, host time. Left out, for want of measured times: data loading that is not hidden behind a
step, logging, and the host's wait for a scalar (`.item()`), which costs one launch where the GPU has been
waited for already.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Accumulation(Enum):
    """How a weight gradient of one microbatch is accumulated.

    FUSED: in the epilogue of the matmul that produces it (Megatron-LM's gradient accumulation fusion, since
    February 2022); ADDED: by a kernel that adds it to the sum (PyTorch's autograd, the hooks of Megatron-LM
    of 2021); CONVERTED: by one kernel that makes a copy in the format of the sum, and one that adds the copy
    (DeepSpeed's `BF16_Optimizer`, `update_hp_grads`); COPIED: there is only one, copied into the buffer that
    is reduced (FSDP2's `foreach_reduce_scatter_copy_in`); ASSIGNED: there is only one, which becomes the sum, converted
    first where its format is another (autograd's `accumulateGrad` where the gradient is None, torch/csrc/autograd/
    functions/accumulate_grad.h; what ADDED is with one microbatch, unless a buffer of zeros is added to:
    `Plan.accumulation`).
    """

    FUSED = "fused"
    ADDED = "added"
    CONVERTED = "converted"
    COPIED = "copied"
    ASSIGNED = "assigned"


class Grouping(Enum):
    """How the matmuls of several experts (grouped GEMM) are run.

    STREAMS: one library matmul per expert, round-robin on a few streams (Transformer Engine's
    `GroupedLinear`); KERNEL: one kernel for all of them (`torch._grouped_mm`); LOOP: one after the other
    (Megatron-Core's `SequentialMLP`); FUSED: as STREAMS, but activation and quantization between the two
    matmuls are fused into their kernels (Transformer Engine's fused grouped MLP,
    NVTE_CUTEDSL_FUSED_GROUPED_MLP), assumed to be as fast.
    """

    STREAMS = "streams"
    KERNEL = "kernel"
    LOOP = "loop"
    FUSED = "fused"


class ExpertWeighting(Enum):
    """Where the results of a token's experts are multiplied by its probabilities.

    ACTIVATION: within the experts, behind the activation (Megatron-LM). The others multiply what experts return, for
    each token and expert, in FP32: OUTPUT, where layers are compiled in one kernel; EAGER_OUTPUT, by operations that
    are never compiled; BATCHED_OUTPUT, by a batched matmul of a converted copy, which sums as well (torchtitan's
    MoE). UNCONVERTED_OUTPUT multiplies in the activations' format, where layers are compiled in one kernel
    (Transformers). Tokens that are permuted behind the dispatch are multiplied in the activations' format.
    """

    ACTIVATION = "activation"
    OUTPUT = "output"
    EAGER_OUTPUT = "eager_output"
    BATCHED_OUTPUT = "batched_output"
    UNCONVERTED_OUTPUT = "unconverted_output"


class ExpertRowMasks(Enum):
    """Where masks set to zero the rows of grouped products that belong to no expert of the rank.

    The grouped kernel leaves those rows uninitialized. In eager mode each mask fills a copy of all rows:
    NEVER; EXPERT_PARALLEL, where experts are on several ranks; ALWAYS.
    """

    NEVER = "never"
    EXPERT_PARALLEL = "expert_parallel"
    ALWAYS = "always"


class ExpertSort(Enum):
    """How received tokens are sorted by expert, and back.

    CHUNKS: those of one sender and expert at a time (Megatron-Core's `sort_chunks_by_idxs`); INDICES: rows by index,
    whose backward adds them to zeros; PADDED_INDICES: so, of a copy with one more row of zeros, with or without
    expert parallelism.
    """

    CHUNKS = "chunks"
    INDICES = "indices"
    PADDED_INDICES = "padded_indices"


class RingAttention(Enum):
    """How ring attention runs the blocks of keys that come round.

    ONE_KERNEL: as one kernel does that waits for them; BLOCKS: a kernel for each, whose results others merge in FP32
    (PyTorch's `context_parallel`: `model.ring_attention`).
    """

    ONE_KERNEL = "one_kernel"
    BLOCKS = "blocks"


MAX_CROSS_ENTROPY_METRICS: Final = 100
"""More metrics than a training script logs: a larger number is a mistake."""


class LossReport(Enum):
    """When data-parallel ranks average the logged loss: NEVER, once per STEP, or after each MICROBATCH."""

    NEVER = "never"
    STEP = "step"
    MICROBATCH = "microbatch"


class BatchTransfer(Enum):
    """How a microbatch reaches tensor-parallel ranks. LOADED: each rank reads its own.

    PACKED: at every stage, the sizes are broadcast and waited for, then all tokens at once, from which masks
    are built on the GPU (Megatron-LM of 2021, `broadcast_data` and `get_ltor_masks_and_position_ids`);
    SEPARATE: at the first and the last stage, tokens, labels, loss masks and positions are broadcast one
    after the other (Megatron-LM since November 2023, `get_batch_on_this_tp_rank`).
    """

    LOADED = "loaded"
    PACKED = "packed"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True)
class Overheads:
    """Extra work per step. `accumulation` None: fused if the other kernels are, else added.

    Gradients: zero_grad, their buffer is zeroed before a step; prescale_gradients, it is multiplied by 1 /
    ranks before it is reduced (else the collective averages); check_for_nan_in_grad, it is read before it is
    reduced, to find non-finite values; unscale_gradients, FP16 gradients are divided by the loss scale and
    checked for non-finite values, and the result is all-reduced over the model-parallel ranks;
    upcast_gradients, the optimizer reads a copy of lower-precision gradients in its master weights' format;
    scale_clipped_gradients, clipping multiplies gradients whether their norm exceeds the limit or not
    (torch.nn.utils.clip_grad_norm_; other software multiplies them only where it does, which is rare in a steady run);
    allreduce_layernorm_grads, gradients of norms (and of biases after them) are all-reduced over
    tensor-parallel ranks under sequence parallelism.

    Weight gradients: keeps_weight_gradients, a matmul that adds to the sum returns autograd a gradient that nothing
    reads, and one of each shape is kept for good (Transformer Engine since 2.3, `get_dummy_wgrad`).

    Loss: softmax_copy, graphs of torch.compile write the exponentials of `vocab_parallel`'s logits, and their gradient,
    to a new tensor before they copy it to the old one (Megatron-LM's native cross-entropy fusion).

    Tensor parallelism: tensor_parallel_copies, sequence parallelism splits the second dimension of activations, so
    that they are copied behind each all-gather and before each reduce-scatter (torch's DTensor:
    `parallel.layer_sharding`).

    Kernels: attention_copies, standard attention scales gradients, concatenates those of queries, keys and values, and
    reorders its output, one copy each; bias_adds, biases of queries, keys and values are added by a separate kernel;
    activation_bias_adds, so are those of an MLP's first matrix, since its activation is a library's kernel without one;
    norm_weight_grad_kernel, the gradients of a LayerNorm's weights are a second kernel, which reads both operands
    again; norm_fp32_copy, a norm in one kernel reads an FP32 copy of its input; activation_in_place, an MLP's
    activation writes its gradients in place of what it saved (Liger's SwiGLU); keeps_combined_qkv, values are a view of
    the product that makes queries, keys and values, so that it stays with the rotated queries and keys; joins_gate,
    optimizers of matrices update gate and up projections as one (`model.weight_matrices`); compiled_muon, a compiler
    fuses what is elementwise in Muon (`model.newton_schulz`);
    norm_in_linear, a norm before plain attention or a dense MLP is fused into the following linear layer and cannot be
    recomputed separately (Transformer Engine's `LayerNormLinear`); softmax_keys, standard attention's fused softmax
    supports at most this number of keys, and batch x heads in multiples of 4 (None: any), else it runs unfused in FP32;
    autocast, weights are in FP32 and cast in every forward, norms and softmaxes run in FP32, and so does what is added
    to an embedding of FP32, the residual stream (torch.autocast: PyTorch's documentation of torch.amp, "CUDA Ops that
    can autocast to float32", and type promotion).

    Layers: scan_copies, they are iterations of a loop, which copies saved results of matmuls (`lowering.scan_copies`).

    Matmuls: shape_padding, a compiler pads sizes whose rows are no multiples of 16 bytes (`model.shape_padding`).

    Experts: grouping, how the matmuls of several experts are run (None: on streams if other kernels are
    fused, else in a loop); permute_unfused, tokens are permuted and unpermuted by PyTorch operations, not by
    one kernel each; router_unfused, so are scores, top-k and probabilities; indices_unfused, so is the mask that tells
    which received token goes to which expert, where dispatch kernels send indices (DeepEP); router_fp32, the router
    multiplies FP32 copies of its operands; router_loss, routers have a load-balancing loss; weighting, where the
    results of experts are multiplied by probabilities; expert_sort, how received tokens are sorted by expert;
    expert_row_masks, where rows of grouped products are masked.

    Tensor parallelism: keeps_gathered_inputs, under sequence parallelism a column-parallel layer saves its gathered
    input, so that backward does not gather it again, and its input gradients are full tensors, one for each linear
    layer and their sum (DTensor: `PrepareModuleInput` to `Replicate()`); gathers_normed_heads, normalized queries and
    keys are gathered over their heads, so that every rank rotates all of them (torchtitan's Qwen3 of 2025);
    gathers_per_linear, every column-parallel layer gathers its input and reduces the gradient of that input by itself,
    though others of its region read the same (DTensor: `ColwiseParallel` with `input_layouts=Shard(1)` without a
    `PrepareModuleInput` before it); torch.compile merges gathers of one tensor, but no reductions (aot_autograd's
    `fx_graph_cse`: the graphs of three such layers, compiled with PyTorch 2.13, have one all-gather in forward and
    three reduce-scatters in backward); gathers_logits, logits are gathered, and every rank computes the whole loss
    (DTensor: `output_layouts=Replicate()` of the output layer; torchtitan's `disable_loss_parallel`).

    Context parallelism: ring_attention, how ring attention runs the blocks of keys that come round; repeats_kv, keys
    and values are copied for every query head before attention, so that a ring carries as many (torchtitan's
    `repeat_kv`); the copies themselves are not counted.

    Attention: complex_rotary, rotary positions are a product of complex numbers in FP32, which torch.compile does not
    fuse (torchtitan's Llama).

    Embedding: embedding_matmul, tokens are looked up by a matmul of one-hot rows with the table (Praxis).

    Recomputation: saves_absolute_values, that by operations saves the absolute values that eager casts take.

    Padding: unpads_batches, flash attention gathers what is no padding, and scatters its results
    (`attention.AttentionCore.unpadding_operators`).

    Logging: cross_entropy_metrics, metrics for which PyTorch's cross-entropy of a microbatch's logits is computed once
    more when its backward is done (Composer's train metrics: `_eval_train_metrics` in composer/trainer/trainer.py);
    loss_averaging: when the logged loss is averaged; batch_transfer: how microbatches reach the ranks.
    """

    accumulation: Accumulation | None = None
    zero_grad: bool = False
    prescale_gradients: bool = False
    check_for_nan_in_grad: bool = False
    unscale_gradients: bool = False
    upcast_gradients: bool = False
    scale_clipped_gradients: bool = False
    allreduce_layernorm_grads: bool = False
    keeps_weight_gradients: bool = False
    softmax_copy: bool = False
    tensor_parallel_copies: bool = False
    attention_copies: bool = False
    bias_adds: bool = False
    activation_bias_adds: bool = False
    norm_weight_grad_kernel: bool = False
    norm_fp32_copy: bool = False
    activation_in_place: bool = False
    keeps_combined_qkv: bool = False
    joins_gate: bool = False
    compiled_muon: bool = False
    shape_padding: bool = False
    scan_copies: bool = False
    norm_in_linear: bool = False
    permute_unfused: bool = False
    router_unfused: bool = False
    indices_unfused: bool = False
    router_fp32: bool = False
    router_loss: bool = False
    keeps_gathered_inputs: bool = False
    gathers_normed_heads: bool = False
    gathers_per_linear: bool = False
    gathers_logits: bool = False
    repeats_kv: bool = False
    complex_rotary: bool = False
    embedding_matmul: bool = False
    saves_absolute_values: bool = False
    unpads_batches: bool = False
    autocast: bool = False
    ring_attention: RingAttention = RingAttention.ONE_KERNEL
    grouping: Grouping | None = None
    weighting: ExpertWeighting = ExpertWeighting.ACTIVATION
    expert_sort: ExpertSort = ExpertSort.CHUNKS
    expert_row_masks: ExpertRowMasks = ExpertRowMasks.NEVER
    softmax_keys: int | None = None
    cross_entropy_metrics: int = 0
    loss_averaging: LossReport = LossReport.NEVER
    batch_transfer: BatchTransfer = BatchTransfer.LOADED

    @property
    def layer_implementation(self) -> "Overheads":
        """Only how layers, casts, tensor and context parallelism are implemented, no extra work."""
        return Overheads(
            activation_in_place=self.activation_in_place,
            keeps_combined_qkv=self.keeps_combined_qkv,
            joins_gate=self.joins_gate,
            keeps_weight_gradients=self.keeps_weight_gradients,
            softmax_copy=self.softmax_copy,
            shape_padding=self.shape_padding,
            scan_copies=self.scan_copies,
            norm_in_linear=self.norm_in_linear,
            permute_unfused=self.permute_unfused,
            router_unfused=self.router_unfused,
            indices_unfused=self.indices_unfused,
            router_fp32=self.router_fp32,
            router_loss=self.router_loss,
            keeps_gathered_inputs=self.keeps_gathered_inputs,
            gathers_normed_heads=self.gathers_normed_heads,
            gathers_per_linear=self.gathers_per_linear,
            gathers_logits=self.gathers_logits,
            ring_attention=self.ring_attention,
            repeats_kv=self.repeats_kv,
            complex_rotary=self.complex_rotary,
            embedding_matmul=self.embedding_matmul,
            saves_absolute_values=self.saves_absolute_values,
            autocast=self.autocast,
            grouping=self.grouping,
            weighting=self.weighting,
            expert_sort=self.expert_sort,
            expert_row_masks=self.expert_row_masks,
        )


NO_OVERHEADS: Final = Overheads()
"""No overheads."""
