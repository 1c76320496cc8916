"""Which small matrices are trained beside frozen ones?

LoRA (Hu et al. 2021, arXiv:2106.09685) freezes a model and adds to the output of chosen linear layers s B A x, with
A [rank, inputs], B [outputs, rank] and s = alpha / rank. QLoRA (Dettmers et al. 2023, arXiv:2305.14314) keeps the
frozen matrices of the layers in 4 bits. Norms, embedding, logits and biases are frozen too, in their own format.

Adapters are those of Hugging Face peft and torchtune, one for each of a layer's projections, or of Megatron-Bridge, one
for queries, keys and values together (`linear_qkv`), and for gate and up together (`linear_fc1`). They have the formats
that all weights would have (`training.precision`; peft keeps them in FP32 unless it is told not to).
"""

from dataclasses import dataclass
from enum import Enum

from clustersim.common.dtypes import DType


class Projection(Enum):
    """The matrices of a layer. An MLP without a gate has UP and DOWN."""

    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - as everyone calls it
    GATE = "gate"
    UP = "up"
    DOWN = "down"


class LoraTarget(Enum):
    """What an adapter stands beside; the value is its name in files."""

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
    """rank: columns of the adapters between their matrices; targets: beside what they stand.

    alpha: the scale is alpha / rank (it takes no time of its own); dropout: of the adapters' inputs, 0.0: none; base:
    the format of the frozen matrices of the layers, None: that of all weights.
    """

    rank: int
    targets: tuple[LoraTarget, ...]
    alpha: float
    dropout: float = 0.0
    base: DType | None = None
