"""Which model is trained? Dimensions of a decoder-only transformer and its exact parameter count."""

from dataclasses import dataclass
from enum import Enum


class Mlp(Enum):
    """GELU has two matrices; SWIGLU has three (gate, up, down)."""

    GELU = "gelu"
    SWIGLU = "swiglu"


class Norm(Enum):
    """LayerNorm has weight and bias, RMSNorm a weight."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"


class Positions(Enum):
    """Learned positions are a table added to the embedding; rotary ones are applied to queries and keys."""

    LEARNED = "learned"
    ROTARY = "rotary"


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer. head_dim is explicit: it is not hidden / heads in every model."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    mlp: Mlp
    norm: Norm
    positions: Positions
    tied_embeddings: bool
    linear_bias: bool
    qkv_bias: bool
    dropout: bool = False
