"""How is the model trained? Batch, sequence, number formats, recomputation, optimizer."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from clustersim.model.lora import Lora
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.model.offload import NO_OFFLOAD, Offload
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, Grouping, Overheads
from clustersim.model.precision_recipe import PrecisionRecipe, mixed_precision
from clustersim.model.recompute_modules import RecomputeModule


class AttentionBackend(Enum):
    """FLASH, one fused kernel that keeps no score matrix, by the fastest library for the GPU; STANDARD writes scores.

    FLASH2 and FLASH1 are FlashAttention's second version (since July 2023, PyTorch's since 2.2) and its first (Triton's
    of that time is like it), which newer GPUs do not run at their full rate.
    """

    FLASH = "flash"
    FLASH2 = "flash2"
    FLASH1 = "flash1"
    STANDARD = "standard"


@dataclass(frozen=True, slots=True)
class NoRecompute:
    """Keep every activation that backward needs."""


@dataclass(frozen=True, slots=True)
class SelectiveRecompute:
    """Recompute some modules of each layer, keep the rest.

    Mostly the attention core alone: scores, softmax, context (Korthikanti et al. 2022).
    """

    modules: frozenset[RecomputeModule] = frozenset({RecomputeModule.CORE_ATTENTION})


@dataclass(frozen=True, slots=True)
class SelectiveOpRecompute:
    """Keep the results of flash attention and of every second matrix product of a layer, run all else again.

    Queries, keys and values, and the MLP's first two matrices, are products of their own (torchtitan's `selective_policies`
    activation checkpointing with option `op`, torch.utils.checkpoint's selective contexts).
    """


@dataclass(frozen=True, slots=True)
class FullRecompute:
    """Keep each layer's input only and run the layer's forward again before its backward.

    layers: how many layers of each virtual stage do so (None: all of them).
    """

    layers: int | None = None


Recompute = NoRecompute | SelectiveRecompute | SelectiveOpRecompute | FullRecompute


class LossImplementation(Enum):
    """How softmax cross-entropy is computed over the logits.

    VOCAB_PARALLEL is Megatron-LM's, one operation after the other in FP32; TORCH is PyTorch's log-softmax and negative
    log-likelihood; FUSED is one kernel each way (Apex, Transformer Engine, Liger); CHUNKED is one kernel each way
    over a part of the tokens at a time, which keeps the logits as they are (torchtune's `CEWithChunkedOutputLoss`,
    compiled).
    """

    VOCAB_PARALLEL = "vocab_parallel"
    TORCH = "torch"
    FUSED = "fused"
    CHUNKED = "chunked"


class Optimizer(Enum):
    """Adam keeps two moments per parameter, SGD one (momentum)."""

    ADAM = "adam"
    SGD = "sgd"


@dataclass(frozen=True, slots=True)
class Training:
    """One step: `global_batch` sequences of `sequence` tokens, `microbatch` sequences at a time per replica.

    early_stop: what is recomputed is run only until all that backward needs is there again, as torch.utils.checkpoint
    does without `use_reentrant` (`workload.operators.until_saved`); else all of it, as the checkpoints of Megatron-LM,
    Transformer Engine and DeepSpeed do. lora: the adapters that are trained beside frozen weights, None: all weights
    are trained; overheads: what the framework does beside the model's own arithmetic; expert_load: how unevenly tokens
    choose experts, None: evenly.
    """

    sequence: int
    global_batch: int
    microbatch: int = 1
    recipe: PrecisionRecipe = field(default_factory=mixed_precision)
    recompute: Recompute = field(default_factory=NoRecompute)
    early_stop: bool = False
    attention: AttentionBackend = AttentionBackend.FLASH
    loss: LossImplementation = LossImplementation.VOCAB_PARALLEL
    optimizer: Optimizer = Optimizer.ADAM
    gradient_clipping: bool = True
    fused: bool = True  # norms, activation, rotary, residual and optimizer are fused kernels
    offload: Offload = NO_OFFLOAD
    lora: Lora | None = None
    overheads: Overheads = NO_OVERHEADS
    expert_load: ExpertLoad | None = None

    @property
    def high_precision(self) -> Self:
        """The same with all products in the format of activations."""
        return replace(self, recipe=self.recipe.high_precision)

    @property
    def accumulation(self) -> Accumulation:
        """How gradients of microbatches are added up."""
        return self.overheads.accumulation or (Accumulation.FUSED if self.fused else Accumulation.ADDED)

    @property
    def grouping(self) -> Grouping:
        """How the products of several experts are run."""
        return self.overheads.grouping or (Grouping.STREAMS if self.fused else Grouping.LOOP)
