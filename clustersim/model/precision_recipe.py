"""In which number formats is a model trained?

A recipe says it for each product of a linear layer (forward, the input's gradient, the weights' gradient), for all
activations between products, and for what is kept of the weights. Products read operands in their own formats; results,
norms and the logits are in the format of activations (Micikevicius et al. 2022, arXiv:2209.05433, for FP8), and so is
attention, unless a run says otherwise.
Operands come into a format with scales by kernels that read them and write copies (`quantization`): how often they are read
and how many copies there are is the recipe's. Shipped recipes are in `topologies/recipes` (`recipes`).
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType


@dataclass(frozen=True, slots=True)
class MatmulFormats:
    """Formats of the operands of a linear layer's products. weight_gradient: in it the layer's input is saved, too."""

    forward: DType
    input_gradient: DType
    weight_gradient: DType

    @classmethod
    def uniform(cls, dtype: DType) -> Self:
        """All three in one format."""
        return cls(dtype, dtype, dtype)

    @property
    def low_precision(self) -> DType | None:
        """The format with scales of the first that has one."""
        formats = (self.forward, self.input_gradient, self.weight_gradient)
        return next((dtype for dtype in formats if dtype in LOW_PRECISION_DTYPES), None)


@dataclass(frozen=True, slots=True)
class OperandCast:
    """How an operand comes into the format of products.

    reads: how often kernels read it in the format it is in, each time a kernel; copies: how many they write, by rows
    and by columns: a product reads both operands along what it sums over, and each operand is in two products.
    """

    reads: int
    copies: int

    @property
    def launch_count(self) -> int:
        """Kernels."""
        return max(self.reads, min(self.copies, 1))

    @property
    def has_amax_pass(self) -> bool:
        """Whether the largest element is looked for first."""
        return self.reads > 1

    @property
    def rowwise_only(self) -> "OperandCast":
        """The same where accelerators read operands either way, so that one copy does for both products."""
        return replace(self, copies=max(0, self.copies - 1))


class WeightCastTiming(Enum):
    """When weights are cast: once a STEP, and kept until its end; or in each PASS."""

    STEP = "step"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class OperandCasts:
    """How operands come into the format of products.

    input, output_gradient, weight: of a linear layer; behind_norm: of an input that a norm in the same linear layer
    makes, which may do a part of it; input_again, weight_again: what is cast once more in backward, of operands that
    were saved in the format of activations (None: they were saved as products read them); weights: when these are
    cast; transposed: the second copy is the first one's transpose, made where accelerators multiply rows by rows alone;
    gathered: tensor-parallel ranks gather operands that are cast.
    """

    input: OperandCast
    behind_norm: OperandCast
    output_gradient: OperandCast
    weight: OperandCast
    input_backward: OperandCast | None = None
    weight_backward: OperandCast | None = None
    weight_timing: WeightCastTiming = WeightCastTiming.STEP
    uses_transpose: bool = False
    gathers_quantized: bool = True

    @property
    def cast_per_pass(self) -> "OperandCasts":
        """The same where nothing is kept from one pass to the next."""
        return replace(self, weight_timing=WeightCastTiming.PASS)

    @property
    def rowwise_only(self) -> "OperandCasts":
        """The same on accelerators that read operands either way."""
        if not self.uses_transpose:
            return self
        rowwise = {
            name: getattr(self, name).rowwise_only for name in ("input", "behind_norm", "output_gradient", "weight")
        }
        return replace(self, uses_transpose=False, **rowwise)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats of what is kept of a group of weights.

    stored: the weights that are computed with; gathered: as what they are gathered where they are sharded; gradients:
    as they are accumulated and reduced; master: the optimizer's own copy of the weights, None: there is none; moments:
    its other states.
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
        """The format of master weights beside the stored ones; None: those are their own master."""
        return None if self.master is self.stored else self.master


@dataclass(frozen=True, slots=True)
class PrecisionRecipe:
    """Number formats of a training run.

    casts: how operands come into them, None: as they are made; attention: the format of the attention core's products,
    None: that of activations; stored, gathered: in what else matrices with narrow
    products are kept and gathered, None: as all weights are; dispatched: in what tokens, and gradients of what experts
    make of them, travel to experts, None: as activations; first, last: how many layers at each end of the stack
    have all products in the format of activations; called, description: its name and what
    it is, where it has them.
    """

    matmul_formats: MatmulFormats
    activations: DType
    weight_formats: WeightFormats
    casts: OperandCasts | None = None
    stored: DType | None = None
    gathered: DType | None = None
    dispatch_format: DType | None = None
    attention: DType | None = None
    first_layers: int = 0
    last_layers: int = 0
    label: str = field(default="", compare=False)
    description: str = field(default="", compare=False)

    @property
    def compute(self) -> DType:
        """The format that a run is called by, to whose peak its use is compared: that of forward's products."""
        return self.matmul_formats.forward

    @property
    def name(self) -> str:
        """What users call it."""
        return self.label or self.compute.value

    @property
    def has_matrix_formats(self) -> bool:
        """Whether matrices with narrow products are kept or gathered in other formats than all else."""
        return self.matrix_formats != self.weight_formats

    @property
    def matrix_formats(self) -> WeightFormats:
        """Formats of matrices with narrow products."""
        weights = self.weight_formats
        return replace(weights, stored=self.stored or weights.stored, gathered=self.gathered or weights.gathered)

    @property
    def saved_input_format(self) -> DType:
        """The format in which a linear layer saves its input."""
        cast_in_backward = self.casts is not None and self.casts.input_backward is not None
        return self.activations if cast_in_backward else self.matmul_formats.weight_gradient

    @property
    def casts_inputs(self) -> bool:
        """Whether each linear layer saves a copy of its input that it has made itself."""
        return self.casts is not None and self.casts.input_backward is None

    def for_hardware(self, *, tn_only: bool, weights_sharded: bool) -> Self:
        """The same on accelerators that read operands by rows alone, or either way; sharded: weights come and go."""
        if self.casts is None:
            return self
        casts = self.casts if tn_only else self.casts.rowwise_only
        return replace(self, casts=casts.cast_per_pass if weights_sharded else casts)

    @property
    def high_precision(self) -> Self:
        """The same with all products in the format of activations."""
        return replace(
            self,
            matmul_formats=MatmulFormats.uniform(self.activations),
            casts=None,
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
    """Products, activations and weights in one format, optimizer states in others."""
    weights = WeightFormats(compute, compute, gradients, master, moments)
    return PrecisionRecipe(MatmulFormats.uniform(compute), compute, weights)
