"""In which number formats is a model trained?

A recipe says it for each product of a linear layer (forward, the input's gradient, the weights' gradient), for all
activations between products, and for what is kept of the weights. Products read operands in their own formats; results,
attention, norms and the logits are in the format of activations (Micikevicius et al. 2022, arXiv:2209.05433, for FP8).
What casts between formats cost is not counted.
"""

from dataclasses import dataclass
from typing import Self

from clustersim.dtypes import DType


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
    """Number formats of a training run."""

    products: Products
    activations: DType
    weights: WeightFormats

    @property
    def compute(self) -> DType:
        """The format that a run is called by, to whose peak its use is compared: that of forward's products."""
        return self.products.forward


def mixed(
    compute: DType = DType.BF16,
    *,
    gradients: DType = DType.FP32,
    master: DType | None = DType.FP32,
    moments: DType = DType.FP32,
) -> Recipe:
    """Products, activations and weights in one format (with FP8, activations in BF16), optimizer states in others."""
    activations = DType.BF16 if compute is DType.FP8 else compute
    return Recipe(Products.all_in(compute), activations, WeightFormats(compute, compute, gradients, master, moments))
