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

from clustersim.common.dtypes import NARROW, DType


@dataclass(frozen=True, slots=True)
class Products:
    """Formats of the operands of a linear layer's products. weight_gradient: in it the layer's input is saved, too."""

    forward: DType
    input_gradient: DType
    weight_gradient: DType

    @classmethod
    def all_in(cls, dtype: DType) -> Self:
        """All three in one format."""
        return cls(dtype, dtype, dtype)

    @property
    def narrow(self) -> DType | None:
        """The format with scales of the first that has one."""
        formats = (self.forward, self.input_gradient, self.weight_gradient)
        return next((d_type for d_type in formats if d_type in NARROW), None)


@dataclass(frozen=True, slots=True)
class Cast:
    """How an operand comes into the format of products.

    reads: how often kernels read it in the format it is in, each time a kernel; copies: how many they write, by rows
    and by columns: a product reads both operands along what it sums over, and each operand is in two products.
    """

    reads: int
    copies: int

    @property
    def launches(self) -> int:
        """Kernels."""
        return max(self.reads, min(self.copies, 1))

    @property
    def searched(self) -> bool:
        """Whether the largest element is looked for first."""
        return self.reads > 1

    @property
    def by_rows(self) -> "Cast":
        """The same where accelerators read operands either way, so that one copy does for both products."""
        return replace(self, copies=max(0, self.copies - 1))


class WeightCasts(Enum):
    """When weights are cast: once a STEP, and kept until its end; or in each PASS."""

    STEP = "step"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Casts:
    """How operands come into the format of products.

    input, output_gradient, weight: of a linear layer; behind_norm: of an input that a norm in the same linear layer
    makes, which may do a part of it; input_again, weight_again: what is cast once more in backward, of operands that
    were saved in the format of activations (None: they were saved as products read them); weights: when these are
    cast; transposed: the second copy is the first one's transpose, made where accelerators multiply rows by rows alone;
    gathered: tensor-parallel ranks gather operands that are cast.
    """

    input: Cast
    behind_norm: Cast
    output_gradient: Cast
    weight: Cast
    input_again: Cast | None = None
    weight_again: Cast | None = None
    weights: WeightCasts = WeightCasts.STEP
    transposed: bool = False
    gathered: bool = True

    @property
    def in_passes(self) -> "Casts":
        """The same where nothing is kept from one pass to the next."""
        return replace(self, weights=WeightCasts.PASS)

    @property
    def by_rows(self) -> "Casts":
        """The same on accelerators that read operands either way."""
        if not self.transposed:
            return self
        of = {name: getattr(self, name).by_rows for name in ("input", "behind_norm", "output_gradient", "weight")}
        return replace(self, transposed=False, **of)


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
    def held(self) -> DType:
        """The format of the weights that the optimizer updates."""
        return self.stored if self.master is None else self.master

    @property
    def copy(self) -> DType | None:
        """The format of master weights beside the stored ones; None: those are their own master."""
        return None if self.master is self.stored else self.master


@dataclass(frozen=True, slots=True)
class Recipe:
    """Number formats of a training run.

    casts: how operands come into them, None: as they are made; attention: the format of the attention core's products,
    None: that of activations; stored, gathered: in what else matrices with narrow
    products are kept and gathered, None: as all weights are; dispatched: in what tokens, and gradients of what experts
    make of them, travel to experts, None: as activations; first, last: how many layers at each end of the stack
    have all products in the format of activations; called, description: its name and what
    it is, where it has them.
    """

    products: Products
    activations: DType
    weights: WeightFormats
    casts: Casts | None = None
    stored: DType | None = None
    gathered: DType | None = None
    dispatched: DType | None = None
    attention: DType | None = None
    first: int = 0
    last: int = 0
    called: str = field(default="", compare=False)
    description: str = field(default="", compare=False)

    @property
    def compute(self) -> DType:
        """The format that a run is called by, to whose peak its use is compared: that of forward's products."""
        return self.products.forward

    @property
    def name(self) -> str:
        """What users call it."""
        return self.called or self.compute.value

    @property
    def apart(self) -> bool:
        """Whether matrices with narrow products are kept or gathered in other formats than all else."""
        return self.matrices != self.weights

    @property
    def matrices(self) -> WeightFormats:
        """Formats of matrices with narrow products."""
        own = self.weights
        return replace(own, stored=self.stored or own.stored, gathered=self.gathered or own.gathered)

    @property
    def saved(self) -> DType:
        """The format in which a linear layer saves its input."""
        again = self.casts is not None and self.casts.input_again is not None
        return self.activations if again else self.products.weight_gradient

    @property
    def casts_inputs(self) -> bool:
        """Whether each linear layer saves a copy of its input that it has made itself."""
        return self.casts is not None and self.casts.input_again is None

    def as_run(self, *, by_rows: bool, sharded: bool) -> Self:
        """The same on accelerators that read operands by rows alone, or either way; sharded: weights come and go."""
        if self.casts is None:
            return self
        casts = self.casts if by_rows else self.casts.by_rows
        return replace(self, casts=casts.in_passes if sharded else casts)

    @property
    def wide(self) -> Self:
        """The same with all products in the format of activations."""
        return replace(
            self,
            products=Products.all_in(self.activations),
            casts=None,
            stored=None,
            gathered=None,
            dispatched=None,
            attention=None,
        )


def mixed(
    compute: DType = DType.BF16,
    *,
    gradients: DType = DType.FP32,
    master: DType | None = DType.FP32,
    moments: DType = DType.FP32,
) -> Recipe:
    """Products, activations and weights in one format, optimizer states in others."""
    weights = WeightFormats(compute, compute, gradients, master, moments)
    return Recipe(Products.all_in(compute), compute, weights)
