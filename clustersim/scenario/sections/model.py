"""What may a scenario file say of its model?"""

import math
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from clustersim.errors import shown
from clustersim.scenario.section import (
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
    share,
)
from clustersim.workload.stack import MOST_AHEAD, MOST_LAYERS, BlockForm, Mlp, QkNorm, Scores
from clustersim.workload.transformer import Norm, Positions

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
    """`experts` of a layer: a mixture of experts in place of the MLP; what is left out is the model's own, or none.

    count: of experts (0: the layer has a dense MLP); ffn: width of each; shared: width of the experts that every token
    passes, together; groups, limit: experts are in so many groups, of which a token's are in at most `limit`;
    capacity: each takes exactly so many times its even share of a rank's tokens, dropped or padded.
    """

    short: ClassVar[str | None] = "count"
    example: ClassVar[str] = "{count: 8, top_k: 2}"
    count: Annotated[int, Field(ge=0, le=MOST_WIDTH)] | None = None
    top_k: Experts | None = None
    ffn: Width | None = None
    shared: Annotated[int, Field(ge=0, le=MOST_WIDTH)] | None = None
    shared_gate: bool | None = None
    bias: bool | None = None
    router: Annotated[Scores | None, member(Scores)] = None
    router_bias: bool | None = None
    groups: Experts | None = None
    limit: Experts | None = None
    capacity: Annotated[float | None, BeforeValidator(_capacity)] = None


class PlacedExpertsSection(ExpertsSection):
    """`model.experts`, and where they are.

    dense_layers: so many first layers have a dense MLP; every: every so-manieth layer has experts.
    """

    dense_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | None = None
    every: Layers | None = None

    @property
    def placed(self) -> bool:
        """Whether it says which layers have experts."""
        return self.dense_layers is not None or self.every is not None


class LatentSection(Section):
    """`model.latent`: keys and values of all heads are made from one latent vector of a token, queries from another.

    query_rank, kv_rank: sizes of the vectors (0: queries are made from the input itself); nope, rope: dimensions of
    each head's queries and keys without and with rotary positions; value_dim: of its values.
    """

    example: ClassVar[str] = "{query_rank: 1536, kv_rank: 512, nope: 128, rope: 64, value_dim: 128}"
    query_rank: Annotated[int, Field(ge=0, le=MOST_WIDTH)] | None = None
    kv_rank: Width | None = None
    nope: Width | None = None
    rope: Width | None = None
    value_dim: Width | None = None


class LayerSection(Section):
    """Dimensions of a layer."""

    ffn: Width | None = None
    heads: Width | None = None
    kv_heads: Width | None = None
    head_dim: Width | None = None
    mlp: Annotated[Mlp | None, member(Mlp)] = None
    block: Annotated[BlockForm | None, member(BlockForm)] = None
    qkv_bias: bool | None = None
    qk_norm: Annotated[QkNorm | bool | None, BeforeValidator(_qk_norm)] = None
    window: Annotated[int | bool | None, BeforeValidator(_window)] = None
    rotary: Annotated[float | None, share(0.0, 1.0)] = None
    softcap: bool | None = None
    sinks: bool | None = None

    @property
    def of_layer(self) -> dict[str, Any]:
        """What the file gives of a layer's own dimensions; false is none."""
        given = self.model_dump(include=set(LayerSection.model_fields), exclude_none=True)
        return {key: None if key in _NONE and value is False else value for key, value in given.items()}


_NONE = ("window", "qk_norm")


class RunSection(LayerSection):
    """An entry of `model.stack`: so many layers that follow each other, and what they have of their own."""

    layers: Layers = Field(examples=[1])
    experts: ExpertsSection | None = None


class ModelSection(LayerSection, Shipped):
    """`model`: a preset, a Hugging Face config.json, or dimensions; dimensions beside a preset or path change it.

    global_every: every so-manieth layer has no window; nope_every: no rotary positions; mtp_layers: how many further
    layers predict a further token each (Megatron-LM's --mtp-num-layers); stack: layers in runs that differ from what
    the model's other keys say.
    """

    short: ClassVar[str | None] = "preset"
    preset: Name | None = None
    family: Name | None = None
    name: Name | None = None
    layers: Layers | None = None
    hidden: Width | None = None
    vocab: Width | None = None
    max_positions: Tokens | None = None
    norm: Annotated[Norm | None, member(Norm)] = None
    positions: Annotated[Positions | None, member(Positions)] = None
    tied_embeddings: bool | None = None
    linear_bias: bool | None = None
    dropout: bool | None = None
    embedding_norm: bool | None = None
    logit_softcap: bool | None = None
    mtp_layers: Annotated[int, Field(ge=0, le=MOST_AHEAD)] | None = None
    global_every: Annotated[int | None, Field(ge=2, le=MOST_LAYERS)] = None
    nope_every: Annotated[int | None, Field(ge=2, le=MOST_LAYERS)] = None
    stack: Annotated[list[RunSection], Field(max_length=MOST_LAYERS)] | None = None
    experts: PlacedExpertsSection | None = None
    latent: LatentSection | None = None

    @property
    def dimensions(self) -> dict[str, Any]:
        """What the file gives of `Model`'s own fields, and of all its layers."""
        own = {"preset", "path", "family", "global_every", "nope_every", "stack", "experts", "latent"}
        return {**self.model_dump(exclude=own, exclude_none=True), **self.of_layer}
