"""Which parts of a model have gradients?

A frozen weight has no gradient and no optimizer state. Where something before it is trained (a projector in front of a
frozen language model), gradients of activations pass through it: backward runs its input gradients, and what these read
is saved. Where nothing before it is trained (a frozen encoder of images), autograd records nothing: there is no
backward, nothing is saved, and nothing is recomputed.
"""

from dataclasses import dataclass
from typing import Final

from clustersim.common.enums import IdentityEnum


class GradientFlow(IdentityEnum):
    """TRAINED: weights have gradients; PASSES: those of activations pass through frozen weights; NONE: no backward."""

    TRAINED = "trained"
    PASSES = "passes"
    NONE = "none"

    @property
    def flops_per_weight(self) -> float:
        """Model FLOP of a token and a weight: two forward, two for the gradient of its input, two for its own."""
        return {GradientFlow.TRAINED: 6.0, GradientFlow.PASSES: 4.0, GradientFlow.NONE: 2.0}[self]

    @property
    def mixing_share(self) -> float:
        """Share of the FLOP of mixing without weights, a third of which is forward."""
        return 1 / 3 if self is GradientFlow.NONE else 1.0


@dataclass(frozen=True, slots=True)
class ModelGradients:
    """Gradients of a model's parts: of its embedding, of its layers, and of its head."""

    embedding: GradientFlow = GradientFlow.TRAINED
    layers: GradientFlow = GradientFlow.TRAINED
    head: GradientFlow = GradientFlow.TRAINED

    @property
    def has_frozen(self) -> bool:
        """Whether some weights are frozen."""
        return any(flow is not GradientFlow.TRAINED for flow in (self.embedding, self.layers, self.head))


ALL_TRAINED: Final = ModelGradients()
