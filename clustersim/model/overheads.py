"""What does a framework do in every step beside the model's own arithmetic: with gradients, losses and batches?

Each is what the code of a framework of its time does, and is off where that code does not do it. Which framework does
what is in `topologies/frameworks`, with its place in that code; a scenario may say otherwise (`training.overheads`).
Counted are kernels, the bytes that they move, collectives, and, by their launches, the host. Left out, for want of a
source of seconds: what data loaders do that does not hide behind a step, logging, and the host's wait for a number
(`.item()`), which costs one launch where the GPU has been waited for already.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Accumulation(Enum):
    """How a weight's gradient of one microbatch joins that of the others.

    FUSED: in the epilogue of the product that makes it (Megatron-LM's gradient accumulation fusion, since February
    2022); ADDED: by a kernel that adds it to the sum (PyTorch's autograd, the hooks of Megatron-LM of 2021); CONVERTED:
    by a kernel that makes a copy in the format of the sum, and one that adds the copy (DeepSpeed's `BF16_Optimizer`,
    `update_hp_grads`); COPIED: it is the only one, and is copied into the buffer that is reduced (FSDP2's
    `foreach_reduce_scatter_copy_in`).
    """

    FUSED = "fused"
    ADDED = "added"
    CONVERTED = "converted"
    COPIED = "copied"


class Grouping(Enum):
    """How the products of several experts are run.

    STREAMS: a library's product for each, in turns on a few streams (Transformer Engine's `GroupedLinear`); KERNEL: one
    kernel for all of them (`torch._grouped_mm`); LOOP: one after the other (Megatron-Core's `SequentialMLP`); FUSED: as
    streams, but activation and casts between the two products are in the kernels of these (Transformer Engine's fused
    grouped MLP, NVTE_CUTEDSL_FUSED_GROUPED_MLP), assumed to be as fast.
    """

    STREAMS = "streams"
    KERNEL = "kernel"
    LOOP = "loop"
    FUSED = "fused"


class LossReport(Enum):
    """When ranks with the same weights average the loss that is logged: NEVER, once a STEP, after each MICROBATCH."""

    NEVER = "never"
    STEP = "step"
    MICROBATCH = "microbatch"


class BatchTransfer(Enum):
    """How a microbatch comes to tensor-parallel ranks. LOADED: each reads its own.

    PACKED: at every stage, the sizes are sent, waited for, and then all tokens at once, of which masks are made on the
    GPU (Megatron-LM of 2021, `broadcast_data` and `get_ltor_masks_and_position_ids`); SEPARATE: at the first and the
    last stage, tokens, labels, loss masks and positions are sent one after the other (Megatron-LM since November 2023,
    `get_batch_on_this_tp_rank`).
    """

    LOADED = "loaded"
    PACKED = "packed"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True)
class Overheads:
    """What is done, by what it is done to. `accumulation` None: fused if the other kernels are, else added.

    Gradients: zeroing, their buffer is set to zero before a step; averaging, it is multiplied by 1 / ranks before it is
    reduced (else the collective averages); checking, it is read before it is reduced, to find what is not finite;
    unscaling, FP16's gradients are divided by the scale of the loss, and are looked through for what is not finite, of
    which all ranks of a model hear; widening, the optimizer reads a copy of narrower gradients in its master weights'
    format; norm_sums, gradients of norms (and of biases behind them) are summed over tensor-parallel ranks under
    sequence parallelism.

    Kernels: attention_copies, standard attention scales gradients, joins those of queries, keys and values, and
    reorders its result, each by a copy; bias_adds, biases of queries, keys and values are added by a kernel of their
    own; norm_twice, the gradients of a LayerNorm's weights are a second kernel, which reads both operands again;
    norm_in_linear, a norm before plain attention or a dense MLP is within the linear layer behind it, and no module
    that can be recomputed by itself (Transformer Engine's `LayerNormLinear`);
    softmax_keys, standard attention's fused softmax takes at most so many keys, and batch x heads in multiples of 4
    (None: any), else one operation follows the other in FP32.

    Experts: grouping, how the products of several experts are run (None: on streams if other kernels are fused, else in
    a loop); permute_unfused, tokens are sorted by experts and summed again by PyTorch's operations, not by a kernel
    each; router_unfused, so are scores, choice and probabilities; router_fp32, the router multiplies FP32 copies of its
    operands; router_loss, routers have a loss that balances their experts' load.

    loss: when the loss that is logged is averaged; batches: how tokens come to the ranks.
    """

    accumulation: Accumulation | None = None
    zeroing: bool = False
    averaging: bool = False
    checking: bool = False
    unscaling: bool = False
    widening: bool = False
    norm_sums: bool = False
    attention_copies: bool = False
    bias_adds: bool = False
    norm_twice: bool = False
    norm_in_linear: bool = False
    permute_unfused: bool = False
    router_unfused: bool = False
    router_fp32: bool = False
    router_loss: bool = False
    grouping: Grouping | None = None
    softmax_keys: int | None = None
    loss: LossReport = LossReport.NEVER
    batches: BatchTransfer = BatchTransfer.LOADED

    @property
    def layer_implementation(self) -> "Overheads":
        """How norms and experts are run, which is no work beside the model, and nothing else."""
        return Overheads(
            norm_in_linear=self.norm_in_linear,
            permute_unfused=self.permute_unfused,
            router_unfused=self.router_unfused,
            router_fp32=self.router_fp32,
            router_loss=self.router_loss,
            grouping=self.grouping,
        )


NO_OVERHEADS: Final = Overheads()
"""Nothing beside the model."""
