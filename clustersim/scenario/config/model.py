"""What may a scenario file say of its model?"""

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from clustersim.common.errors import format_value
from clustersim.model.layer_stack import MAX_LAYERS, MAX_MTP_LAYERS, BlockForm, MlpType, QkNorm, ScoreFunction
from clustersim.model.transformer import Norm, PositionEncoding
from clustersim.scenario.config_reader import (
    MAX_TOKENS,
    MAX_WIDTH,
    ConfigModel,
    LayerCount,
    NonEmptyText,
    PresetOrPathConfig,
    TokenCount,
    Width,
    config_error,
    enum_parser,
    fraction_parser,
    value_parser,
)

_QK_NORMS = f"true, false, {', '.join(kind.value for kind in QkNorm)}"

ExpertCount = Annotated[int, Field(ge=1, le=MAX_WIDTH)]


def _parse_qk_norm(value: object) -> object:
    """True is the usual kind, of each head by itself."""
    norms_by_name = {kind.value: kind for kind in QkNorm}
    if isinstance(value, bool):
        return QkNorm.PER_HEAD if value else value
    if isinstance(value, str) and value in norms_by_name:
        return norms_by_name[value]
    raise config_error(f"{format_value(value)} is unknown; write true, false, {' or '.join(norms_by_name)}")


def _parse_window(value: object) -> object:
    """Full is false: YAML reads `off_label` so, too."""
    if value == "full" or value is False:
        return False
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise config_error(
            f"{format_value(value)} is no window; write a number of tokens from 1 to {MAX_TOKENS:,}, or full"
        )
    return value


def _parse_capacity(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise config_error(f"{format_value(value)} is no capacity; write a number above 0, such as 1.25")
    return float(value)


class ExpertsConfig(ConfigModel):
    """`experts` of a layer: a mixture of experts in place of the MLP; what is left out is the model's own, or none."""

    shorthand_key: ClassVar[str | None] = "count"
    example: ClassVar[str] = "{count: 8, top_k: 2}"
    count: Annotated[int, Field(ge=0, le=MAX_WIDTH)] | None = None
    """experts, of which a token passes top_k; 0: a dense MLP; left out: the model's"""
    top_k: ExpertCount | None = None
    """experts that a token passes; left out: the model's"""
    ffn: Width | None = None
    """width of each; left out: the model's, or the MLP's"""
    shared: Annotated[int, Field(ge=0, le=MAX_WIDTH)] | None = None
    """width of the experts that every token passes, together; left out: the model's, or 0"""
    shared_gate: bool | None = None
    """what these make is weighted for each token; left out: the model's, or false"""
    bias: bool | None = None
    """router and experts have biases; left out: the model's, or false"""
    router: Annotated[ScoreFunction | None, enum_parser(ScoreFunction)] = None
    """how scores are made; left out: the model's, or softmax"""
    router_bias: bool | None = None
    """a correction chooses experts beside their scores; left out: the model's, or false"""
    groups: ExpertCount | None = None
    """experts are in so many groups; left out: the model's, or 1"""
    limit: ExpertCount | None = None
    """groups that a token's experts are in at most; left out: any"""
    capacity: Annotated[float | None, value_parser(_parse_capacity, "a number above 0", "1.25")] = None
    """times its even share that an expert takes, padded or dropped; left out: what comes"""


class ModelExpertsConfig(ExpertsConfig):
    """`model.experts`, and where they are."""

    dense_layers: Annotated[int, Field(ge=0, le=MAX_LAYERS)] | None = None
    """first layers with a dense MLP; left out: the model's, or 0"""
    every: LayerCount | None = None
    """every so-manieth layer has experts; left out: all"""

    @property
    def selects_layers(self) -> bool:
        """Whether it says which layers have experts."""
        return self.dense_layers is not None or self.every is not None


class MlaConfig(ConfigModel):
    """`model.latent`: keys and values of all heads are made from one latent vector of a token, queries from another."""

    example: ClassVar[str] = "{query_rank: 1536, kv_rank: 512, nope: 128, rope: 64, value_dim: 128}"
    query_rank: Annotated[int, Field(ge=0, le=MAX_WIDTH)] | None = None
    """size of the queries' latent vector; 0: they are made from the input itself; left out: the model's"""
    kv_rank: Width | None = None
    """size of that of keys and values; left out: the model's"""
    nope: Width | None = None
    """dimensions of a head's queries and keys without rotary positions; left out: the model's"""
    rope: Width | None = None
    """those with them, one key for all heads; left out: the model's"""
    value_dim: Width | None = None
    """dimensions of a head's values; left out: the model's"""


class LayerConfig(ConfigModel):
    """Dimensions of a layer."""

    ffn: Width | None = None
    """width of the MLP; left out: the model's"""
    heads: Width | None = None
    """of attention; left out: the model's"""
    kv_heads: Width | None = None
    """heads of keys and values; left out: the model's, or heads"""
    head_dim: Width | None = None
    """dimensions of a head; left out: the model's, or hidden / heads"""
    mlp: Annotated[MlpType | None, enum_parser(MlpType)] = None
    """its form; left out: the model's, or swiglu (family gpt: gelu)"""
    block: Annotated[BlockForm | None, enum_parser(BlockForm)] = None
    """how attention, MLP and norms are joined; left out: the model's, or pre_norm"""
    qkv_bias: bool | None = None
    """queries, keys and values have biases; left out: the model's, or false (gpt: true)"""
    qk_norm: Annotated[QkNorm | bool | None, value_parser(_parse_qk_norm, _QK_NORMS)] = None
    """queries and keys are normalised; true is heads; left out: the model's, or false"""
    window: Annotated[int | bool | None, value_parser(_parse_window, f"1 to {MAX_TOKENS:,}, or full")] = None
    """tokens that a token attends to, itself among them, or full; left out: the model's, or full"""
    rotary: Annotated[float | None, fraction_parser(0.0, 1.0)] = None
    """part of each head that is turned by position; left out: the model's, or 1"""
    softcap: bool | None = None
    """scores are capped by a tanh; left out: the model's, or false"""
    sinks: bool | None = None
    """every head has a learned score beside those of keys; left out: the model's, or false"""

    @property
    def layer_dimensions(self) -> dict[str, Any]:
        """What the file gives of a layer's own dimensions; false is none."""
        dimensions = self.model_dump(include=set(LayerConfig.model_fields), exclude_none=True)
        return {key: None if key in _FALSE_IS_NONE and value is False else value for key, value in dimensions.items()}


_FALSE_IS_NONE = ("window", "qk_norm")


class LayerGroupConfig(LayerConfig):
    """An entry of `model.stack`: so many layers that follow each other, and what they have of their own."""

    layers: LayerCount = Field(examples=[1])
    """that follow each other"""
    experts: ExpertsConfig | None = None
    """a mixture in place of the MLP, 0: none; left out: the model's"""


class ModelConfig(LayerConfig, PresetOrPathConfig):
    """`model`: a preset, a Hugging Face config.json, or dimensions; dimensions beside a preset or path change it."""

    shorthand_key: ClassVar[str | None] = "preset"
    preset: NonEmptyText | None = None
    """a shipped model (`clustersim presets`); left out: none, path or dimensions are needed"""
    family: NonEmptyText | None = None
    """llama or gpt: the defaults of dimensions; left out: llama"""
    name: NonEmptyText | None = None
    """of the answer; left out: inline model"""
    layers: LayerCount | None = None
    """of the whole model; beside a preset whose layers differ, the first ones are kept; left out: the preset's"""
    hidden: Width | None = None
    """width of the residual stream; left out: the preset's"""
    vocab: Width | None = None
    """entries, as they are padded; left out: the preset's"""
    max_positions: TokenCount | None = None
    """learned positions; left out: the preset's, or training.sequence"""
    norm: Annotated[Norm | None, enum_parser(Norm)] = None
    """its form; left out: the preset's, or rmsnorm (gpt: layernorm)"""
    positions: Annotated[PositionEncoding | None, enum_parser(PositionEncoding)] = None
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
    mtp_layers: Annotated[int, Field(ge=0, le=MAX_MTP_LAYERS)] | None = None
    """layers that predict a further token each (multi-token prediction); left out: the preset's, or 0"""
    global_every: Annotated[int | None, Field(ge=2, le=MAX_LAYERS)] = None
    """every so-manieth layer has no window; left out: the preset's, or none"""
    nope_every: Annotated[int | None, Field(ge=2, le=MAX_LAYERS)] = None
    """every so-manieth layer has no rotary positions; left out: the preset's, or none"""
    stack: Annotated[list[LayerGroupConfig], Field(max_length=MAX_LAYERS)] | None = None
    """runs of layers that differ, each with what it has of its own; left out: all alike"""
    experts: ModelExpertsConfig | None = None
    """a mixture of experts in place of the MLP, or its count; left out: the preset's, or none"""
    latent: MlaConfig | None = None
    """latent attention (MLA) in place of heads' own keys and values; left out: the preset's, or none"""

    @property
    def dimensions(self) -> dict[str, Any]:
        """What the file gives of `Model`'s own fields, and of all its layers."""
        excluded = {"preset", "path", "family", "global_every", "nope_every", "stack", "experts", "latent"}
        return {**self.model_dump(exclude=excluded, exclude_none=True), **self.layer_dimensions}
