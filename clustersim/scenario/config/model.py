"""What may a scenario file say of its model?"""

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from clustersim.common.errors import shown
from clustersim.model.layer_stack import MOST_AHEAD, MOST_LAYERS, BlockForm, Mlp, QkNorm, Scores
from clustersim.model.transformer import Norm, Positions
from clustersim.scenario.config_reader import (
    MOST_TOKENS,
    MOST_WIDTH,
    Layers,
    Name,
    Section,
    Shipped,
    Tokens,
    Width,
    member,
    mistake,
    reads,
    share,
)

_QK_NORMS = f"true, false, {', '.join(kind.value for kind in QkNorm)}"

Experts = Annotated[int, Field(ge=1, le=MOST_WIDTH)]


def _qk_norm(value: object) -> object:
    """True is the usual kind, of each head by itself."""
    named = {kind.value: kind for kind in QkNorm}
    if isinstance(value, bool):
        return QkNorm.HEADS if value else value
    if isinstance(value, str) and value in named:
        return named[value]
    raise mistake(f"{shown(value)} is unknown; write true, false, {' or '.join(named)}")


def _window(value: object) -> object:
    """Full is false: YAML reads `off` so, too."""
    if value == "full" or value is False:
        return False
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
        raise mistake(f"{shown(value)} is no window; write a number of tokens from 1 to {MOST_TOKENS:,}, or full")
    return value


def _capacity(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise mistake(f"{shown(value)} is no capacity; write a number above 0, such as 1.25")
    return float(value)


class ExpertsSection(Section):
    """`experts` of a layer: a mixture of experts in place of the MLP; what is left out is the model's own, or none."""

    short: ClassVar[str | None] = "count"
    example: ClassVar[str] = "{count: 8, top_k: 2}"
    count: Annotated[int, Field(ge=0, le=MOST_WIDTH)] | None = None
    """experts, of which a token passes top_k; 0: a dense MLP; left out: the model's"""
    top_k: Experts | None = None
    """experts that a token passes; left out: the model's"""
    ffn: Width | None = None
    """width of each; left out: the model's, or the MLP's"""
    shared: Annotated[int, Field(ge=0, le=MOST_WIDTH)] | None = None
    """width of the experts that every token passes, together; left out: the model's, or 0"""
    shared_gate: bool | None = None
    """what these make is weighted for each token; left out: the model's, or false"""
    bias: bool | None = None
    """router and experts have biases; left out: the model's, or false"""
    router: Annotated[Scores | None, member(Scores)] = None
    """how scores are made; left out: the model's, or softmax"""
    router_bias: bool | None = None
    """a correction chooses experts beside their scores; left out: the model's, or false"""
    groups: Experts | None = None
    """experts are in so many groups; left out: the model's, or 1"""
    limit: Experts | None = None
    """groups that a token's experts are in at most; left out: any"""
    capacity: Annotated[float | None, reads(_capacity, "a number above 0", "1.25")] = None
    """times its even share that an expert takes, padded or dropped; left out: what comes"""


class PlacedExpertsSection(ExpertsSection):
    """`model.experts`, and where they are."""

    dense_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | None = None
    """first layers with a dense MLP; left out: the model's, or 0"""
    every: Layers | None = None
    """every so-manieth layer has experts; left out: all"""

    @property
    def placed(self) -> bool:
        """Whether it says which layers have experts."""
        return self.dense_layers is not None or self.every is not None


class LatentSection(Section):
    """`model.latent`: keys and values of all heads are made from one latent vector of a token, queries from another."""

    example: ClassVar[str] = "{query_rank: 1536, kv_rank: 512, nope: 128, rope: 64, value_dim: 128}"
    query_rank: Annotated[int, Field(ge=0, le=MOST_WIDTH)] | None = None
    """size of the queries' latent vector; 0: they are made from the input itself; left out: the model's"""
    kv_rank: Width | None = None
    """size of that of keys and values; left out: the model's"""
    nope: Width | None = None
    """dimensions of a head's queries and keys without rotary positions; left out: the model's"""
    rope: Width | None = None
    """those with them, one key for all heads; left out: the model's"""
    value_dim: Width | None = None
    """dimensions of a head's values; left out: the model's"""


class LayerSection(Section):
    """Dimensions of a layer."""

    ffn: Width | None = None
    """width of the MLP; left out: the model's"""
    heads: Width | None = None
    """of attention; left out: the model's"""
    kv_heads: Width | None = None
    """heads of keys and values; left out: the model's, or heads"""
    head_dim: Width | None = None
    """dimensions of a head; left out: the model's, or hidden / heads"""
    mlp: Annotated[Mlp | None, member(Mlp)] = None
    """its form; left out: the model's, or swiglu (family gpt: gelu)"""
    block: Annotated[BlockForm | None, member(BlockForm)] = None
    """how attention, MLP and norms are joined; left out: the model's, or pre_norm"""
    qkv_bias: bool | None = None
    """queries, keys and values have biases; left out: the model's, or false (gpt: true)"""
    qk_norm: Annotated[QkNorm | bool | None, reads(_qk_norm, _QK_NORMS)] = None
    """queries and keys are normalised; true is heads; left out: the model's, or false"""
    window: Annotated[int | bool | None, reads(_window, f"1 to {MOST_TOKENS:,}, or full")] = None
    """tokens that a token attends to, itself among them, or full; left out: the model's, or full"""
    rotary: Annotated[float | None, share(0.0, 1.0)] = None
    """part of each head that is turned by position; left out: the model's, or 1"""
    softcap: bool | None = None
    """scores are capped by a tanh; left out: the model's, or false"""
    sinks: bool | None = None
    """every head has a learned score beside those of keys; left out: the model's, or false"""

    @property
    def of_layer(self) -> dict[str, Any]:
        """What the file gives of a layer's own dimensions; false is none."""
        given = self.model_dump(include=set(LayerSection.model_fields), exclude_none=True)
        return {key: None if key in _NONE and value is False else value for key, value in given.items()}


_NONE = ("window", "qk_norm")


class RunSection(LayerSection):
    """An entry of `model.stack`: so many layers that follow each other, and what they have of their own."""

    layers: Layers = Field(examples=[1])
    """that follow each other"""
    experts: ExpertsSection | None = None
    """a mixture in place of the MLP, 0: none; left out: the model's"""


class ModelSection(LayerSection, Shipped):
    """`model`: a preset, a Hugging Face config.json, or dimensions; dimensions beside a preset or path change it."""

    short: ClassVar[str | None] = "preset"
    preset: Name | None = None
    """a shipped model (`clustersim presets`); left out: none, path or dimensions are needed"""
    family: Name | None = None
    """llama or gpt: the defaults of dimensions; left out: llama"""
    name: Name | None = None
    """of the answer; left out: inline model"""
    layers: Layers | None = None
    """of the whole model; beside a preset whose layers differ, the first ones are kept; left out: the preset's"""
    hidden: Width | None = None
    """width of the residual stream; left out: the preset's"""
    vocab: Width | None = None
    """entries, as they are padded; left out: the preset's"""
    max_positions: Tokens | None = None
    """learned positions; left out: the preset's, or training.sequence"""
    norm: Annotated[Norm | None, member(Norm)] = None
    """its form; left out: the preset's, or rmsnorm (gpt: layernorm)"""
    positions: Annotated[Positions | None, member(Positions)] = None
    """how they enter; left out: the preset's, or rotary (gpt: learned)"""
    tied_embeddings: bool | None = None
    """embedding and head share a matrix; left out: the preset's, or false (gpt: true)"""
    linear_bias: bool | None = None
    """matrices have biases; left out: the preset's, or false (gpt: true)"""
    dropout: bool | None = None
    """layers have dropout; left out: the preset's, or false"""
    embedding_norm: bool | None = None
    """the embedding is normalised; left out: the preset's, or false"""
    logit_softcap: bool | None = None
    """logits are capped by a tanh; left out: the preset's, or false"""
    mtp_layers: Annotated[int, Field(ge=0, le=MOST_AHEAD)] | None = None
    """layers that predict a further token each (multi-token prediction); left out: the preset's, or 0"""
    global_every: Annotated[int | None, Field(ge=2, le=MOST_LAYERS)] = None
    """every so-manieth layer has no window; left out: the preset's, or none"""
    nope_every: Annotated[int | None, Field(ge=2, le=MOST_LAYERS)] = None
    """every so-manieth layer has no rotary positions; left out: the preset's, or none"""
    stack: Annotated[list[RunSection], Field(max_length=MOST_LAYERS)] | None = None
    """runs of layers that differ, each with what it has of its own; left out: all alike"""
    experts: PlacedExpertsSection | None = None
    """a mixture of experts in place of the MLP, or its count; left out: the preset's, or none"""
    latent: LatentSection | None = None
    """latent attention (MLA) in place of heads' own keys and values; left out: the preset's, or none"""

    @property
    def dimensions(self) -> dict[str, Any]:
        """What the file gives of `Model`'s own fields, and of all its layers."""
        own = {"preset", "path", "family", "global_every", "nope_every", "stack", "experts", "latent"}
        return {**self.model_dump(exclude=own, exclude_none=True), **self.of_layer}
