"""Which low-rank adapters are trained with frozen weights?

LoRA (Hu et al. 2021, arXiv:2106.09685) freezes a model and adds s B A x to the output of selected linear
layers, with A [rank, inputs], B [outputs, rank] and s = alpha / rank. QLoRA (Dettmers et al. 2023,
arXiv:2305.14314) stores the frozen matrices of the layers in 4 bits, bitsandbytes' 8-bit loading in 8. Norms,
embedding, logits and biases are frozen too, in their own format.

Adapters follow Hugging Face peft and torchtune, one per projection of a layer, or Megatron-Bridge, one
for queries, keys and values (`linear_qkv`), and one for gate and up (`linear_fc1`). They have the formats
that all weights would have (`training.precision`; peft keeps them in FP32 by default).
"""

from dataclasses import dataclass
from enum import Enum

from clustersim.common.dtypes import DType


class Projection(Enum):
    """The weight matrices of a layer. An MLP without a gate has UP and DOWN."""

    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the usual name
    GATE = "gate"
    UP = "up"
    DOWN = "down"


class LoraTarget(Enum):
    """Target module of an adapter; the value is its name in files."""

    Q = "q"
    K = "k"
    V = "v"
    QKV = "linear_qkv"
    O = "o"  # noqa: E741 - as everyone calls it
    GATE = "gate"
    UP = "up"
    GATE_UP = "linear_fc1"
    DOWN = "down"

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections that share the adapter."""
        match self:
            case LoraTarget.QKV:
                return (Projection.Q, Projection.K, Projection.V)
            case LoraTarget.GATE_UP:
                return (Projection.GATE, Projection.UP)
        return (Projection(self.value),)


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA configuration.

    rank: of the adapters; targets: modules that have one; alpha: the scale is alpha / rank (takes no time of
    its own); dropout: of the adapters' inputs, 0.0: none; base: format of the frozen matrices of the layers,
    None: that of all weights.
    """

    rank: int
    targets: tuple[LoraTarget, ...]
    alpha: float
    dropout: float = 0.0
    base: DType | None = None
