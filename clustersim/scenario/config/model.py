"""What may a scenario file say about its model?"""

import math
from enum import Enum
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from clustersim.common.errors import format_value
from clustersim.model.attention_spec import QkNorm
from clustersim.model.layer_stack import MAX_LAYERS, MAX_MTP_LAYERS, BlockForm, MlpType, ScoreFunction
from clustersim.model.transformer import Norm, PositionEncoding
from clustersim.scenario.config.images import ImagesConfig, InputSize
from clustersim.scenario.config.mixers import (
    GatedDeltaNetConfig,
    KdaConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MixerKind,
    MobaConfig,
    NsaConfig,
    Rwkv7Config,
)
from clustersim.scenario.config_reader import (
    MAX_TOKENS,
    MAX_WIDTH,
    ConfigModel,
    LayerCount,
    LayerCountOrZero,
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

_MAX_MATRICES: Final = 4  # of a projector
ExpertCount = Annotated[int, Field(ge=1, le=MAX_WIDTH)]


def _parse_qk_norm(value: object) -> object:
    """The kind of QK normalization; true is per head."""
    norms_by_name = {kind.value: kind for kind in QkNorm}
    if isinstance(value, bool):
        return QkNorm.PER_HEAD if value else value
    if isinstance(value, str) and value in norms_by_name:
        return norms_by_name[value]
    raise config_error(f"{format_value(value)} is unknown; write true, false, {' or '.join(norms_by_name)}")


def _parse_window(value: object) -> object:
    """The window in tokens; False for `full` and for `off`, which YAML parses as false."""
    if value == "full" or value is False:
        return False
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise config_error(
            f"{format_value(value)} is no window; write a number of tokens from 1 to {MAX_TOKENS:,}, or full"
        )
    return value


def _parse_capacity(value: object) -> float | None:
    if value == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise config_error(
            f"{format_value(value)} is no capacity factor; write a number above 0, such as 1.25, or none"
        )
    return float(value)


class ExpertsConfig(ConfigModel):
    """`experts` of a layer: an MoE layer instead of the MLP; keys left out are the model's own, or none."""

    shorthand_key: ClassVar[str | None] = "count"
    example: ClassVar[str] = "{count: 8, top_k: 2}"
    count: Annotated[int, Field(ge=0, le=MAX_WIDTH)] | None = None
    """routed experts per layer, of which top_k process each token; 0: a dense MLP; left out: the model's"""
    top_k: ExpertCount | None = None
    """experts per token; left out: the model's"""
    ffn: Width | None = None
    """width of each expert; left out: the model's, or the MLP's"""
    shared: Annotated[int, Field(ge=0, le=MAX_WIDTH)] | None = None
    """total width of the shared experts, which process every token; left out: the model's, or 0"""
    shared_gate: bool | None = None
    """the shared experts' output is gated per token; left out: the model's, or false"""
    bias: bool | None = None
    """router and experts have biases; left out: the model's, or false"""
    router: Annotated[ScoreFunction | None, enum_parser(ScoreFunction)] = None
    """score function of the router; left out: the model's, or softmax"""
    router_bias: bool | None = None
    """a bias corrects the scores for expert selection (loss-free balancing); left out: the model's, or false"""
    num_groups: ExpertCount | None = None
    """expert groups for group-limited routing; left out: the model's, or 1"""
    group_topk: ExpertCount | None = None
    """maximum number of groups per token; left out: any"""
    capacity_factor: Annotated[float | None, value_parser(_parse_capacity, "a number above 0, or none", "1.25")] = None
    """expert capacity over the even share, to which tokens are padded or dropped; none: dropless, whatever the recipe.

    Left out: as the recipe, else dropless
    """


class ModelExpertsConfig(ExpertsConfig):
    """`model.experts`: expert settings, and which layers are MoE layers."""

    dense_layers: Annotated[int, Field(ge=0, le=MAX_LAYERS)] | None = None
    """leading layers with a dense MLP; left out: the model's, or 0"""
    interleave_moe_layer_step: LayerCount | None = None
    """every n-th layer is an MoE layer; left out: all"""

    @property
    def selects_layers(self) -> bool:
        """Whether it selects which layers are MoE layers."""
        return self.dense_layers is not None or self.interleave_moe_layer_step is not None


class MlaConfig(ConfigModel):
    """`model.mla`: multi-head latent attention (MLA), low-rank compression of keys and values, and of queries."""

    example: ClassVar[str] = (
        "{q_lora_rank: 1536, kv_lora_rank: 512, qk_nope_head_dim: 128, qk_rope_head_dim: 64, v_head_dim: 128}"
    )
    q_lora_rank: Annotated[int, Field(ge=0, le=MAX_WIDTH)] | None = None
    """rank of the query compression; 0: none; left out: the model's"""
    kv_lora_rank: Width | None = None
    """rank of the key-value compression; left out: the model's"""
    qk_nope_head_dim: Width | None = None
    """query and key dimensions per head without RoPE; left out: the model's"""
    qk_rope_head_dim: Width | None = None
    """those with RoPE, the key shared by all heads; left out: the model's"""
    v_head_dim: Width | None = None
    """value dimensions per head; left out: the model's"""


class DsaStage(Enum):
    """Stages of training sparse attention."""

    SPARSE = "sparse"
    DENSE_WARM_UP = "dense_warm_up"


class DsaConfig(ConfigModel):
    """`model.dsa`: DeepSeek's sparse attention (DSA), latent attention to the keys that an indexer selects."""

    example: ClassVar[str] = "{index_n_heads: 64, index_head_dim: 128, index_topk: 2048}"
    index_n_heads: Width = 64
    """heads of the indexer"""
    index_head_dim: Width = 128
    """dimensions of each of its heads"""
    index_topk: TokenCount = 2048
    """keys that each query attends to"""
    stage: Annotated[DsaStage, enum_parser(DsaStage)] = DsaStage.SPARSE
    """sparse, or dense_warm_up: attention to all keys with everything but the indexer frozen"""


class LayerConfig(ConfigModel):
    """Dimensions of a layer."""

    ffn: Width | None = None
    """width of the MLP; left out: the model's"""
    heads: Width | None = None
    """query heads of attention; left out: the model's"""
    kv_heads: Width | None = None
    """key-value heads (GQA groups); left out: the model's, or heads"""
    head_dim: Width | None = None
    """dimensions of a head; left out: the model's, or hidden / heads"""
    mlp: Annotated[MlpType | None, enum_parser(MlpType)] = None
    """kind of MLP; left out: the model's, or swiglu (family gpt: gelu)"""
    block: Annotated[BlockForm | None, enum_parser(BlockForm)] = None
    """arrangement of attention, MLP and norms in the layer; left out: the model's, or pre_norm"""
    qkv_bias: bool | None = None
    """queries, keys and values have biases; left out: the model's, or false (gpt: true)"""
    qk_norm: Annotated[QkNorm | bool | None, value_parser(_parse_qk_norm, _QK_NORMS)] = None
    """queries and keys are normalized; true is heads; left out: the model's, or false"""
    window: Annotated[int | bool | None, value_parser(_parse_window, f"1 to {MAX_TOKENS:,}, or full")] = None
    """sliding window in tokens, including the token itself, or full; left out: the model's, or full"""
    rotary_percent: Annotated[float | None, fraction_parser(0.0, 1.0)] = None
    """fraction of each head with rotary embedding; left out: the model's, or 1"""
    attn_logit_softcapping: bool | None = None
    """attention scores are soft-capped by a tanh; left out: the model's, or false"""
    attention_sinks: bool | None = None
    """every head has a learned attention sink logit; left out: the model's, or false"""
    attention_output_gate: bool | None = None
    """attention's output is gated, by a projection as wide as the queries; left out: the model's, or false"""
    causal: bool | None = None
    """tokens attend only to those before them; false: to all (encoders, ViT, DiT); left out: the model's, or true"""
    mixer: Annotated[MixerKind | None, enum_parser(MixerKind)] = None
    """what mixes a layer's tokens; all but attention have a key with sizes; left out: the model's, or attention"""

    @property
    def layer_dimensions(self) -> dict[str, Any]:
        """The stated dimensions of a layer; false is converted to None where it means none."""
        dimensions = self.model_dump(include=set(LayerConfig.model_fields) - {"mixer"}, exclude_none=True)
        return {key: None if key in _FALSE_IS_NONE and value is False else value for key, value in dimensions.items()}


_FALSE_IS_NONE = ("window", "qk_norm")


class LayerGroupConfig(LayerConfig):
    """An entry of `model.stack`: a group of consecutive layers and their differences from the model."""

    layers: LayerCount = Field(examples=[1])
    """number of consecutive layers"""
    experts: ExpertsConfig | None = None
    """an MoE layer instead of the MLP, 0: none; left out: the model's"""


class ModelConfig(LayerConfig, PresetOrPathConfig):
    """A transformer: a preset, a Hugging Face config.json, or dimensions, which override a preset or config.json."""

    shorthand_key: ClassVar[str | None] = "preset"
    preset: NonEmptyText | None = None
    """a packaged model (`clustersim presets`); left out: none, path or dimensions are needed"""
    family: NonEmptyText | None = None
    """llama or gpt: the defaults of other keys; left out: llama"""
    name: NonEmptyText | None = None
    """of the model in results; left out: inline model"""
    layers: LayerCount | None = None
    """transformer layers; of a preset with heterogeneous layers the first ones are kept; left out: the preset's"""
    hidden: Width | None = None
    """width of the residual stream; left out: the preset's"""
    vocab: Width | None = None
    """vocabulary size, including padding; left out: the preset's"""
    max_positions: TokenCount | None = None
    """number of learned positions; left out: the preset's, or training.sequence"""
    norm: Annotated[Norm | None, enum_parser(Norm)] = None
    """kind of normalization; left out: the preset's, or rmsnorm (gpt: layernorm)"""
    positions: Annotated[PositionEncoding | None, enum_parser(PositionEncoding)] = None
    """kind of position encoding; left out: the preset's, or rotary (gpt: learned)"""
    tied_embeddings: bool | None = None
    """embedding and output layer share weights; left out: the preset's, or false (gpt: true)"""
    linear_bias: bool | None = None
    """linear layers have biases; left out: the preset's, or false (gpt: true)"""
    dropout: bool | None = None
    """layers have dropout; left out: the preset's, or false"""
    embedding_norm: bool | None = None
    """the embedding is normalized; left out: the preset's, or false"""
    final_logit_softcapping: bool | None = None
    """logits are soft-capped by a tanh; left out: the preset's, or false"""
    mtp_layers: Annotated[int, Field(ge=0, le=MAX_MTP_LAYERS)] | None = None
    """multi-token prediction (MTP) layers, each of which predicts one additional token; left out: the preset's, or 0"""
    input_size: InputSize | None = None
    """pixels of a square image, or [height, width] or [frames, height, width]; left out: the preset's"""
    window_attn_skip_freq: Annotated[int | None, Field(ge=2, le=MAX_LAYERS)] = None
    """every n-th layer has full attention instead of a window; left out: the preset's, or none"""
    no_rope_freq: Annotated[int | None, Field(ge=2, le=MAX_LAYERS)] = None
    """every n-th layer has no rotary embedding (NoPE); left out: the preset's, or none"""
    stack: Annotated[list[LayerGroupConfig], Field(max_length=MAX_LAYERS)] | None = None
    """groups of layers that differ, each with its own dimensions; left out: all layers equal"""
    experts: ModelExpertsConfig | None = None
    """MoE layers instead of MLPs, or their expert count; left out: the preset's, or none"""
    mla: MlaConfig | None = None
    """multi-head latent attention (MLA) instead of full keys and values; left out: the preset's, or none"""
    dsa: DsaConfig | None = None
    """DeepSeek's sparse attention (DSA) in layers with MLA; left out: the preset's, or none"""
    hybrid_layer_pattern: NonEmptyText | None = None
    """layers by letter, as in Megatron: M, G, K, L, S, R linear mixers, *, +, D attention, - MLP, E experts; / MTP"""
    linear_attention_freq: Annotated[int | None, Field(ge=2, le=MAX_LAYERS)] = None
    """every n-th layer has attention, the others the linear mixer whose sizes are given; left out: the preset's"""
    mamba: MambaConfig | None = None
    """sizes of Mamba 2 layers; left out: none"""
    mamba1: Mamba1Config | None = None
    """sizes of Mamba 1 layers; left out: none"""
    gated_delta_net: GatedDeltaNetConfig | None = None
    """sizes of gated delta net layers; left out: none"""
    kda: KdaConfig | None = None
    """sizes of Kimi Delta Attention layers; left out: none"""
    lightning: LightningConfig | None = None
    """sizes of lightning attention layers; left out: none"""
    rwkv7: Rwkv7Config | None = None
    """sizes of RWKV-7 layers; left out: none"""
    moba: MobaConfig | None = None
    """blocks of mixture of block attention (mixer: moba); left out: none"""
    nsa: NsaConfig | None = None
    """branches of native sparse attention (mixer: nsa); left out: none"""

    @property
    def dimensions(self) -> dict[str, Any]:
        """The stated fields of `Model`, and of all its layers."""
        return {**self.model_dump(exclude=_NO_DIMENSIONS, exclude_none=True), **self.layer_dimensions}


class LanguageConfig(ModelConfig):
    """`model.language`: the language model behind an encoder, which may stand in `model` itself as well."""

    frozen: bool | None = None
    """its weights are not trained; gradients pass through it to what is before it; left out: the preset's, or false"""


class EncoderConfig(ModelConfig):
    """`model.encoder`: an encoder of images in front of a language model, see layout.encoder_placement."""

    example: ClassVar[str] = "{preset: clip-vit-l-14-336, frozen: true}"
    layers: LayerCountOrZero | None = None
    """its layers, of which the first ones are kept; 0: there is no encoder; left out: the preset's"""
    images: ImagesConfig | None = None
    """images of a sequence: their mean, or a distribution; left out: the preset's, or 1"""
    frozen: bool | None = None
    """its weights are not trained, and nothing is saved for a backward; left out: the preset's, or false"""
    recompute: bool | None = None
    """it is under training.recompute, too (Megatron-LM's --recompute-vision); left out: the preset's, or true"""


class ProjectorConfig(ConfigModel):
    """`model.projector`: matrices between an encoder and a language model, with GELU between them."""

    example: ClassVar[str] = "{widths: [4096, 4096]}"
    widths: Annotated[list[Width], Field(min_length=1, max_length=_MAX_MATRICES)] | None = None
    """outputs of its matrices, the last as wide as the language model; left out: the preset's, or twice its width"""
    merge: Annotated[int, Field(ge=1, le=MAX_WIDTH)] | None = None
    """neighbouring tokens that become one, as wide as all of them; left out: the preset's, or 1"""
    frozen: bool | None = None
    """its weights are not trained; left out: the preset's, or false"""


class TowersConfig(LanguageConfig):
    """`model`: a preset, a Hugging Face config.json, or dimensions; an encoder in front of it makes it multimodal."""

    encoder: EncoderConfig | None = None
    """an encoder of images in front of the model; left out: the preset's, or none"""
    projector: ProjectorConfig | None = None
    """what maps the encoder's tokens to those of the model; left out: the preset's, or two matrices"""
    language: LanguageConfig | None = None
    """the language model, where its keys do not stand in `model` itself; left out: they do"""


_NO_DIMENSIONS: Final = {
    *("input_size", "encoder", "projector", "language", "frozen", "images", "recompute"),
    *("preset", "path", "family", "window_attn_skip_freq", "no_rope_freq", "stack", "experts", "mla", "dsa"),
    *("mixer", "hybrid_layer_pattern", "linear_attention_freq"),
    *("mamba", "mamba1", "gated_delta_net", "kda", "lightning", "rwkv7", "moba", "nsa"),
}
