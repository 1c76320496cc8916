"""Which model is trained? Dimensions of a decoder-only transformer and its exact parameter count.

A layer is norm, attention, residual, norm, MLP, residual (pre-norm, GPT-2 and after); a final norm and the logits
matrix follow. Vaswani et al. 2017 (arXiv:1706.03762), Radford et al. 2019 (GPT-2), Touvron et al. 2023
(arXiv:2302.13971).
"""

from dataclasses import dataclass
from enum import Enum


class Mlp(Enum):
    """GELU has two matrices (so does squared ReLU); SWIGLU has three (gate, up, down; so has gated GELU)."""

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
    """A decoder-only transformer. head_dim is explicit: it is not hidden / heads in every model.

    linear_bias: the attention output and the MLP have biases; qkv_bias: queries, keys and values have; qk_norm: each
    query and key head is normalised; tied_embeddings: the logits matrix is the embedding; vocab is used as it is
    (frameworks pad it: give the padded size).
    """

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
    qk_norm: bool = False


def norm_parameters(model: Model) -> int:
    """Parameters of one norm over the hidden dimension."""
    return model.hidden * (2 if model.norm is Norm.LAYERNORM else 1)


def layer_parameters(model: Model) -> int:
    """Parameters of one layer: attention, MLP and two norms."""
    return _attention_parameters(model) + _mlp_parameters(model) + 2 * norm_parameters(model)


def embedding_parameters(model: Model) -> int:
    """Parameters of the token table and of learned positions."""
    positions = model.max_positions if model.positions is Positions.LEARNED else 0
    return (model.vocab + positions) * model.hidden


def head_parameters(model: Model) -> int:
    """Parameters of the final norm and of a logits matrix that is not tied to the embedding."""
    return norm_parameters(model) + (0 if model.tied_embeddings else model.vocab * model.hidden)


def parameters(model: Model) -> int:
    """Parameters of the whole model, tied ones once."""
    return model.layers * layer_parameters(model) + embedding_parameters(model) + head_parameters(model)


def layer_matrix_parameters(model: Model) -> int:
    """Parameters of one layer that multiply activations: matrices, without biases and norms."""
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = 3 if model.mlp is Mlp.SWIGLU else 2
    return model.hidden * (2 * query + 2 * key_value + matrices * model.ffn)


def matrix_parameters(model: Model) -> int:
    """Parameters that multiply activations: the layers' matrices and the logits matrix, tied or not."""
    return model.layers * layer_matrix_parameters(model) + model.vocab * model.hidden


def _attention_parameters(model: Model) -> int:
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    weights = model.hidden * (2 * query + 2 * key_value)
    biases = (query + 2 * key_value if model.qkv_bias else 0) + (model.hidden if model.linear_bias else 0)
    return weights + biases + (2 * model.head_dim if model.qk_norm else 0)


def _mlp_parameters(model: Model) -> int:
    up = 2 * model.ffn if model.mlp is Mlp.SWIGLU else model.ffn
    biases = up + model.hidden if model.linear_bias else 0
    return model.hidden * (up + model.ffn) + biases
