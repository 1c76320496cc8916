"""In which number formats is a model trained (precision recipe)?

A recipe gives the operand format of each matmul of a linear layer (forward, input gradient, weight
gradient), the format of all activations between matmuls, and of everything that is stored of the weights.
Matmul results, norms and logits are in the activation format (Micikevicius et al. 2022, arXiv:2209.05433,
for FP8), and so is attention, unless a run says otherwise. Operands are quantized into a format with
scales by kernels that read them and write copies (`quantization`): the recipe says how often they are
read and how many copies there are. Packaged recipes are in `topologies/recipes` (`recipe_files`).
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType


@dataclass(frozen=True, slots=True)
class MatmulFormats:
    """Operand formats of a linear layer's matmuls. The layer's input is saved in that of weight_gradient."""

    forward: DType
    input_gradient: DType
    weight_gradient: DType

    @classmethod
    def uniform(cls, dtype: DType) -> Self:
        """All three in one format."""
        return cls(dtype, dtype, dtype)

    @property
    def low_precision(self) -> DType | None:
        """The first low-precision format (with scales), if any."""
        formats = (self.forward, self.input_gradient, self.weight_gradient)
        return next((dtype for dtype in formats if dtype in LOW_PRECISION_DTYPES), None)


@dataclass(frozen=True, slots=True)
class OperandCast:
    """How an operand is quantized.

    reads: read passes in its original format, one kernel each; copies: quantized copies written, row-wise and
    column-wise: a matmul reads both operands along the reduction dimension, and each operand is in two
    matmuls; uncoalesced_reads: how many of the reads go down the columns of a row-major tensor; scratch_bytes:
    bytes per element of intermediate tensors, written and read; extra_launches: kernels in addition to one for
    each read; slowdown: time over that of the bytes, where arithmetic limits the kernels (Hadamard transforms,
    random numbers).
    """

    reads: int
    copies: int
    uncoalesced_reads: int = 0
    scratch_bytes: float = 0.0
    extra_launches: int = 0
    slowdown: float = 1.0

    @property
    def launch_count(self) -> int:
        """Number of kernels."""
        return max(self.reads, min(self.copies, 1)) + self.extra_launches

    @property
    def has_amax_pass(self) -> bool:
        """Whether the maximum absolute value (amax) is computed first."""
        return self.reads > 1

    @property
    def rowwise_only(self) -> "OperandCast":
        """The cast where accelerators support all operand layouts, so that one copy serves both matmuls."""
        return replace(self, copies=max(0, self.copies - 1))


class WeightCastTiming(Enum):
    """When weights are quantized: once per STEP, cached until its end; or in each PASS."""

    STEP = "step"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class OperandCasts:
    """How the operands of linear layers are quantized.

    input, output_gradient, weight: of a linear layer; after_norm: of an input produced by a norm fused into
    the same linear layer, which may do a part of it; input_backward, weight_backward: casts repeated in
    backward, of operands that were saved in the activation format (None: they were saved quantized);
    weight_timing: when weights are quantized; uses_transpose: the second copy is the transpose of the first,
    needed where tensor cores support only the TN layout; gathers_quantized: tensor-parallel ranks all-gather
    quantized operands; scales_gradients: both gradients of a linear layer are multiplied by their scales in kernels
    of their own, behind matmuls without scales; saves_quantized_inputs: inputs are saved quantized although they are
    cast again in backward, as a compiler decides which of the two it keeps; eager: casts run operation by
    operation, so that projections which the model counts as one matrix cast the same input each, and a checkpoint
    casts again what its saved matmuls read.
    """

    input: OperandCast
    after_norm: OperandCast
    output_gradient: OperandCast
    weight: OperandCast
    input_backward: OperandCast | None = None
    weight_backward: OperandCast | None = None
    weight_timing: WeightCastTiming = WeightCastTiming.STEP
    uses_transpose: bool = False
    gathers_quantized: bool = True
    scales_gradients: bool = False
    saves_quantized_inputs: bool = False
    eager: bool = False

    @property
    def cast_per_pass(self) -> "OperandCasts":
        """The casts where no quantized weights are cached from one pass to the next."""
        return replace(self, weight_timing=WeightCastTiming.PASS)

    @property
    def rowwise_only(self) -> "OperandCasts":
        """The casts on accelerators that support all operand layouts, without transposes."""
        if not self.uses_transpose:
            return self
        rowwise = {
            name: getattr(self, name).rowwise_only for name in ("input", "after_norm", "output_gradient", "weight")
        }
        return replace(self, uses_transpose=False, **rowwise)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats of what is stored of a group of weights.

    stored: the compute weights; gathered: the format in which sharded weights are all-gathered; gradients: as
    they are accumulated and reduced; master: the optimizer's own copy of the weights, None: there is none;
    moments: its other states.
    """

    stored: DType
    gathered: DType
    gradients: DType
    master: DType | None
    moments: DType

    @property
    def updated(self) -> DType:
        """The format of the weights that the optimizer updates."""
        return self.stored if self.master is None else self.master

    @property
    def master_copy(self) -> DType | None:
        """The format of separate master weights; None: the stored weights are their own master."""
        return None if self.master is self.stored else self.master


@dataclass(frozen=True, slots=True)
class PrecisionRecipe:
    """Number formats of a training run.

    matmul_formats: operands of linear layers; activations: between them; weight_formats: of stored weights;
    casts: how operands are quantized, None: not at all; eager_casts: the same where layers are not compiled, None:
    no different; recomputes_all_matmuls: recomputation by operations (`SelectiveOpRecompute`) saves no result of a
    low-precision matmul, since its list does not have the operation; attention: format of the attention core's matmuls,
    None: the activation format; stored, gathered: formats in which matrices with low-precision matmuls are
    stored and all-gathered, None: as all weights; dispatch_format: of tokens, and gradients of expert outputs,
    in the dispatch to experts, None: the activation format; num_layers_at_start_in_bf16,
    num_layers_at_end_in_bf16: number of layers at each end of the stack whose matmuls stay in the activation
    format; label, description: its name and explanation, if it has them.
    """

    matmul_formats: MatmulFormats
    activations: DType
    weight_formats: WeightFormats
    casts: OperandCasts | None = None
    eager_casts: OperandCasts | None = None
    recomputes_all_matmuls: bool = False
    stored: DType | None = None
    gathered: DType | None = None
    dispatch_format: DType | None = None
    attention: DType | None = None
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    label: str = field(default="", compare=False)
    description: str = field(default="", compare=False)

    @property
    def compute(self) -> DType:
        """The format of forward matmuls: a run is named after it, and its MFU refers to its peak rate."""
        return self.matmul_formats.forward

    @property
    def name(self) -> str:
        """The name shown to users."""
        return self.label or self.compute.value

    @property
    def has_matrix_formats(self) -> bool:
        """Whether matrices with low-precision matmuls are stored or gathered in other formats than other weights."""
        return self.matrix_formats != self.weight_formats

    @property
    def matrix_formats(self) -> WeightFormats:
        """Formats of matrices with low-precision matmuls."""
        weights = self.weight_formats
        return replace(weights, stored=self.stored or weights.stored, gathered=self.gathered or weights.gathered)

    @property
    def saved_input_format(self) -> DType:
        """The format in which a linear layer saves its input."""
        casts = self.casts
        keeps_input = casts is not None and casts.input_backward is not None and not casts.saves_quantized_inputs
        return self.activations if keeps_input else self.matmul_formats.weight_gradient

    @property
    def casts_inputs(self) -> bool:
        """Whether each linear layer saves its own quantized copy of its input."""
        return self.casts is not None and self.casts.input_backward is None

    def for_hardware(self, *, tn_only: bool, weights_sharded: bool) -> Self:
        """The recipe on given hardware.

        tn_only: tensor cores support only the TN layout; weights_sharded: no quantized weights are cached.
        """
        if self.casts is None:
            return self
        casts = self.casts if tn_only else self.casts.rowwise_only
        return replace(self, casts=casts.cast_per_pass if weights_sharded else casts)

    def uncompiled(self) -> Self:
        """The recipe where layers are not compiled."""
        return self if self.eager_casts is None else replace(self, casts=self.eager_casts)

    @property
    def high_precision(self) -> Self:
        """The recipe with all matmuls in the activation format."""
        return replace(
            self,
            matmul_formats=MatmulFormats.uniform(self.activations),
            casts=None,
            eager_casts=None,
            recomputes_all_matmuls=False,
            stored=None,
            gathered=None,
            dispatch_format=None,
            attention=None,
        )


def mixed_precision(
    compute: DType = DType.BF16,
    *,
    gradients: DType = DType.FP32,
    master: DType | None = DType.FP32,
    moments: DType = DType.FP32,
) -> PrecisionRecipe:
    """Mixed precision: matmuls, activations and weights in one format, gradients and states in others."""
    weights = WeightFormats(compute, compute, gradients, master, moments)
    return PrecisionRecipe(MatmulFormats.uniform(compute), compute, weights)
