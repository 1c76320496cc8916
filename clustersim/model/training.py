"""How is the model trained? Batch, sequence, number formats, recomputation, optimizer."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, Final, Self

from clustersim.common.enums import IdentityEnum
from clustersim.model.documents import Documents
from clustersim.model.lora import Lora
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.model.offload import NO_OFFLOAD, Offload
from clustersim.model.optimizers import AnyOptimizer, MatrixOptimizer, Optimizer
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, Grouping, Overheads
from clustersim.model.precision_recipe import PrecisionRecipe, mixed_precision
from clustersim.model.recompute_modules import RecomputeModule


class AttentionBackend(Enum):
    """Attention implementation: flash or standard.

    FLASH: one fused kernel that saves no score matrix, by the fastest library for the GPU; STANDARD writes
    scores to memory (PyTorch's math backend).
    SDPA is what PyTorch's scaled_dot_product_attention takes first since its release 2.11: cuDNN on some GPUs
    (`KernelEfficiency.sdpa_library`), else FlashAttention-2. CUDNN is NVIDIA's library (Transformer Engine's
    default from Hopper on); FLASH4 and FLASH3 are FlashAttention's fourth version, for Blackwell, and third, for Hopper
    alone. FLASH2 and FLASH1 are its second (since July 2023, PyTorch's since 2.2) and its first (Triton's of that time
    is similar), which do not reach the full rate of newer GPUs.
    """

    FLASH = "flash"
    SDPA = "sdpa"
    CUDNN = "cudnn"
    FLASH4 = "flash4"
    FLASH3 = "flash3"
    FLASH2 = "flash2"
    FLASH1 = "flash1"
    STANDARD = "standard"


@dataclass(frozen=True, slots=True)
class NoRecompute:
    """Save every activation that backward needs."""

    is_selective: ClassVar[bool] = False
    modules: ClassVar[frozenset[RecomputeModule]] = frozenset()
    layers: ClassVar[int | None] = None


@dataclass(frozen=True, slots=True)
class SelectiveRecompute:
    """Recompute some modules of each layer, save everything else.

    Usually the attention core alone: scores, softmax, context (Korthikanti et al. 2022).
    """

    is_selective: ClassVar[bool] = True
    layers: ClassVar[int | None] = None

    modules: frozenset[RecomputeModule] = frozenset({RecomputeModule.CORE_ATTENTION})


@dataclass(frozen=True, slots=True)
class SelectiveOpRecompute:
    """Save the outputs of flash attention and of every second matmul of a layer, recompute everything else.

    Queries, keys and values, and the MLP's first two matrices, count as separate matmuls (torchtitan's
    `selective_policies` activation checkpointing with option `op`, torch.utils.checkpoint's selective contexts).
    """

    is_selective: ClassVar[bool] = True
    modules: ClassVar[frozenset[RecomputeModule]] = frozenset()
    layers: ClassVar[int | None] = None


@dataclass(frozen=True, slots=True)
class DotsSaveableRecompute:
    """Save the results of all products with weights, recompute everything else that backward reads.

    JAX's policy `dots_with_no_batch_dims_saveable` (jax/_src/ad_checkpoint.py; Praxis' SAVE_DOT_WITH_NO_BATCH_DIM):
    standard attention's products are batched, and flash attention is no product, so that both run again.
    """

    is_selective: ClassVar[bool] = True
    modules: ClassVar[frozenset[RecomputeModule]] = frozenset()
    layers: ClassVar[int | None] = None


@dataclass(frozen=True, slots=True)
class FullRecompute:
    """Save only each layer's input and run the layer's forward again before its backward.

    layers: how many layers of each virtual stage are recomputed (None: all of them).
    """

    is_selective: ClassVar[bool] = False
    modules: ClassVar[frozenset[RecomputeModule]] = frozenset()

    layers: int | None = None


Recompute = NoRecompute | SelectiveRecompute | SelectiveOpRecompute | DotsSaveableRecompute | FullRecompute
"""Every policy says which `modules` it recomputes, and of how many `layers` only (None: of all)."""


class LossImplementation(Enum):
    """How softmax cross-entropy is computed over the logits.

    VOCAB_PARALLEL is Megatron-LM's, unfused operations in FP32; TORCH is PyTorch's log-softmax and negative
    log-likelihood; TORCH_FP32 is that of logits that the model returns in FP32 and the training loop keeps until
    backward is done (Hugging Face's models until 2024; torchtitan until its pull request 391); FUSED is one kernel
    each way (Apex, Transformer Engine, Liger); COMPILED is PyTorch's behind torch.compile, one kernel each way that
    converts to FP32 in registers, so that the logits are saved unchanged; CHUNKED is that over a chunk of the tokens
    at a time (torchtune's `CEWithChunkedOutputLoss`). FUSED_LINEAR runs the output matrix, the loss and both their
    backwards for a chunk of the tokens at a time, so that only a chunk's logits exist (torchtitan's `ChunkedCELoss`):
    what is saved is the gradient of the hidden states, as large as these. LIGER is Liger's
    `fused_linear_cross_entropy`, which does so in more and smaller chunks; LIGER_FP32_SUM that of its releases up to
    0.8.0, which add a chunk's gradient of the output matrix by way of an FP32 copy. CHUNKED_NLL is PyTorch's loss of
    a few tokens at a time under an activation checkpoint (TRL's `chunked_nll`), CUT_CROSS_ENTROPY a kernel that keeps
    logits on the chip (Wijmans et al. 2024, arXiv:2411.09009; Megatron-LM's `--cross-entropy-fusion-impl linear`):
    the backward of both computes the logits again (`model.linear_loss`).
    """

    VOCAB_PARALLEL = "vocab_parallel"
    TORCH = "torch"
    TORCH_FP32 = "torch_fp32"
    FUSED = "fused"
    COMPILED = "compiled"
    CHUNKED = "chunked"
    FUSED_LINEAR = "fused_linear"
    LIGER = "liger"
    LIGER_FP32_SUM = "liger_fp32_sum"
    CHUNKED_NLL = "chunked_nll"
    CUT_CROSS_ENTROPY = "cut_cross_entropy"


class FusedKernel(IdentityEnum):
    """Kinds of memory-bound operations that a software stack runs as one kernel each, not one per formula term.

    NORM: norms; ROTARY: rotary position embeddings; ACTIVATION: the MLP's activation, its product with the
    gate, caps of scores and logits; RESIDUAL: residual adds with dropout, scaled sums of adapters; SOFTMAX:
    scale, mask and softmax of unfused attention; OPTIMIZER: the update of all states of the weights.
    """

    NORM = "norm"
    ROTARY = "rotary"
    ACTIVATION = "activation"
    RESIDUAL = "residual"
    SOFTMAX = "softmax"
    OPTIMIZER = "optimizer"


ALL_FUSED: Final = frozenset(FusedKernel)
COMPILER_FUSED: Final = ALL_FUSED - {FusedKernel.OPTIMIZER}
"""What `torch.compile` of a model fuses: its pointwise operations."""
NONE_FUSED: Final = frozenset[FusedKernel]()


@dataclass(frozen=True, slots=True)
class TiledMlp:
    """Dense MLPs that run on tiles of the sequence (`model.tiled_mlp`).

    tokens: of a sequence in a tile, None: as many as the model is wide (DeepSpeed, Liger); recomputes: a tile runs
    again before its backward, for which nothing but the MLP's input is saved.
    """

    tokens: int | None = None
    recomputes: bool = True

    def tile_count(self, sequence: int, hidden: int) -> int:
        """Tiles of a sequence.

        >>> TiledMlp().tile_count(131072, 4096), TiledMlp(16384).tile_count(131072, 4096)
        (32, 8)
        """
        return -(-sequence // (self.tokens or hidden))


@dataclass(frozen=True, slots=True)
class Training:
    """One step: `global_batch` sequences of `sequence` tokens, `microbatch` sequences at a time per replica.

    optimizer_in_backward: weights are updated as soon as their gradients are there, which are freed then (LOMO, Lv et
    al. 2023, arXiv:2306.09782; torchtune's `optimizer_in_bwd`); the kernels are timed after backward, with which they
    share a stream. early_stop: recomputation stops once everything that backward needs is available again, as in
    torch.utils.checkpoint without `use_reentrant` (`operators.early_stop_count`); else all of forward runs
    again, as in the checkpoints of Megatron-LM, Transformer Engine and DeepSpeed. lora: adapters trained with
    frozen weights, None: all weights are trained; overheads: extra work of the framework; expert_load:
    imbalance of routed tokens over experts, None: balanced; fused: what runs as one kernel each; documents: packed into
    sequences, None: each is one; reference_model: a frozen copy of the model runs forward on every microbatch, too, as
    in preference optimization (Rafailov et al. 2023, arXiv:2305.18290) and self-distillation; with adapters it is the
    model without them. Its loss is timed as the model's, and model FLOP do not count it; z_loss: the squared logarithm
    of each token's sum of exponentials is added to the loss (`memory_bound.z_loss_spec`); tiled_mlp: dense MLPs run on
    tiles of the sequence, None: on all of it.
    """

    sequence: int
    global_batch: int
    microbatch: int = 1
    recipe: PrecisionRecipe = field(default_factory=mixed_precision)
    recompute: Recompute = field(default_factory=NoRecompute)
    early_stop: bool = False
    attention: AttentionBackend = AttentionBackend.FLASH
    loss: LossImplementation = LossImplementation.VOCAB_PARALLEL
    z_loss: bool = False
    optimizer: AnyOptimizer = Optimizer.ADAM
    optimizer_in_backward: bool = False
    gradient_clipping: bool = True
    fused: frozenset[FusedKernel] = ALL_FUSED
    offload: Offload = NO_OFFLOAD
    lora: Lora | None = None
    overheads: Overheads = NO_OVERHEADS
    expert_load: ExpertLoad | None = None
    documents: Documents | None = None
    reference_model: bool = False
    tiled_mlp: TiledMlp | None = None

    @property
    def orthogonalizes_dense(self) -> bool:
        """Whether the optimizer orthogonalizes the matrices of layers, other than experts."""
        return isinstance(self.optimizer, MatrixOptimizer) and self.optimizer.dense

    @property
    def scalar_optimizer(self) -> Optimizer:
        """The optimizer of weights that are updated element by element."""
        return self.optimizer.scalar if isinstance(self.optimizer, MatrixOptimizer) else self.optimizer

    @property
    def dense_optimizer(self) -> AnyOptimizer:
        """The optimizer of the matrices of layers, other than experts."""
        return self.optimizer if self.orthogonalizes_dense else self.scalar_optimizer

    @property
    def expert_optimizer(self) -> AnyOptimizer:
        """The optimizer of experts."""
        is_scalar = isinstance(self.optimizer, MatrixOptimizer) and not self.optimizer.experts
        return self.scalar_optimizer if is_scalar else self.optimizer

    @property
    def high_precision(self) -> Self:
        """The training with all matmuls in the activation format."""
        return replace(self, recipe=self.recipe.high_precision)

    def fuses(self, kernel: FusedKernel) -> bool:
        """Whether operations of this kind run as one kernel each."""
        return kernel in self.fused

    @property
    def fuses_casts(self) -> bool:
        """Whether casts are part of the kernels that they follow: every pointwise kind is fused, as by a compiler."""
        return self.fused >= COMPILER_FUSED

    @property
    def is_fully_fused(self) -> bool:
        """Whether operations of all kinds run as one kernel each."""
        return self.fused == ALL_FUSED

    def microbatch_count(self, dp: int) -> int:
        """Number of microbatches that each of `dp` replicas runs in one step."""
        return self.global_batch // (dp * self.microbatch)

    @property
    def accumulation(self) -> Accumulation:
        """How gradients of microbatches are accumulated."""
        return self.overheads.accumulation or (Accumulation.FUSED if self.is_fully_fused else Accumulation.ADDED)

    @property
    def grouping(self) -> Grouping:
        """How the matmuls of several experts are run."""
        return self.overheads.grouping or (Grouping.STREAMS if self.is_fully_fused else Grouping.LOOP)
