"""Readers of Llama-style configurations: RMSNorm, a gated MLP, rotary positions.

Families differ in biases, norms, windows and defaults, which are those of their configuration classes in
transformers (src/transformers/models/*/configuration_*.py). Gated GELU is treated as SwiGLU; the
embedding scale (Gemma) and Llama 4's query-key norm, which has no weights, are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.hf_fields import FULL, SLIDING, HfConfig
from clustersim.model.hf_moe import MOE_CONFIG_KEYS, MoeConfigKeys
from clustersim.model.layer_stack import (
    BlockForm,
    DenseMlp,
    LayerGroup,
    LayerSpec,
    LayerStack,
    MlpType,
    merge_groups,
    stack_layers,
)
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel

WindowRule = Callable[[HfConfig, int], list[int | None]]
"""The attention window of each of `layers` layers; None: full causal attention."""


def uniform_windows(config: HfConfig, layers: int) -> list[int | None]:
    """Every layer has the sliding window, if the file gives one (phi3)."""
    return [_sliding_window(config)] * layers


def mistral_windows(config: HfConfig, layers: int) -> list[int | None]:
    """Every layer has the sliding window; a missing `sliding_window` is 4096, null is none."""
    window = 4096 if "sliding_window" not in config.content else _sliding_window(config)
    return [window] * layers


def upper_layer_windows(config: HfConfig, layers: int) -> list[int | None]:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window` (qwen2, qwen3)."""
    first_layer = config.content.get("max_window_layers", 28)
    if isinstance(first_layer, bool) or not isinstance(first_layer, int) or first_layer < 0:
        raise InputError(f"{config.path}: max_window_layers is {first_layer!r}, not a whole number from 0")
    has_window = [layer >= first_layer for layer in range(layers)]
    return (
        _masked_windows(has_window, config.positive_int("sliding_window", 4096))
        if _uses_sliding_window(config)
        else [None] * layers
    )


def alternating_windows(config: HfConfig, layers: int) -> list[int | None]:
    """Every second layer has the window, starting with the first (gemma2)."""
    return _masked_windows([layer % 2 == 0 for layer in range(layers)], config.positive_int("sliding_window", 4096))


def interleaved_windows(config: HfConfig, layers: int) -> list[int | None]:
    """All but every `sliding_window_pattern`-th layer have the window (gemma3)."""
    period = config.positive_int("sliding_window_pattern", 6)
    return _masked_windows(
        [(layer + 1) % period > 0 for layer in range(layers)], config.positive_int("sliding_window", 4096)
    )


def nope_layer_windows(config: HfConfig, layers: int) -> list[int | None]:
    """Layers without rotary positions have the window, if `use_sliding_window` (smollm3)."""
    window = _sliding_window(config) if _uses_sliding_window(config) else None
    return _masked_windows([fraction == 0 for fraction in _rotary_fractions(config, layers)], window)


def chunked_windows(config: HfConfig, layers: int) -> list[int | None]:
    """Layers with rotary positions attend within chunks of `attention_chunk_size` tokens (llama4).

    Modelled as a sliding window of the chunk size, which for longer sequences attends to twice as many keys.
    """
    return _masked_windows(
        [fraction > 0 for fraction in _rotary_fractions(config, layers)],
        config.positive_int("attention_chunk_size", 8192),
    )


def _masked_windows(has_window: list[bool], window: int | None) -> list[int | None]:
    return [window if windowed else None for windowed in has_window]


def _sliding_window(config: HfConfig) -> int | None:
    return None if config.content.get("sliding_window") is None else config.positive_int("sliding_window")


def _uses_sliding_window(config: HfConfig) -> bool:
    return config.boolean("use_sliding_window", default=False)


def _rotary_fractions(config: HfConfig, layers: int) -> list[float]:
    """The rotary fraction of each layer: SmolLM3 has no rotary positions (NoPE) in every 4th layer."""
    period = config.positive_int("no_rope_layer_interval", 4)
    listed = config.per_layer_values("no_rope_layers", (0, 1), layers)
    return [float(fraction) for fraction in listed or [(layer + 1) % period > 0 for layer in range(layers)]]


@dataclass(frozen=True, slots=True)
class LlamaFamily:
    """What distinguishes a model family.

    head_dim: its default (None: hidden / heads); defaults: of other dimensions; qkv_bias: queries, keys and
    values always have biases; allows_linear_bias: attention_bias and mlp_bias, which must agree, apply to all
    matrices; attention_bias_is_qkv: attention_bias applies to queries, keys and values;
    attention_bias_is_all: it applies to these and the attention output, and experts have their own biases;
    rotary_fraction: of each head; reads_qk_norm: `use_qk_norm` says whether queries and keys are normalized;
    has_nope_layers: some layers have no rotary positions; windows: None: the family never has windows,
    whatever the file says; moe_keys: configuration keys of MoE layers; sinks: every head has an attention
    sink; softcap_defaults: by key, where scores and logits may be soft-capped; has_mtp: files may have
    multi-token prediction layers.
    """

    qkv_bias: bool = False
    allows_linear_bias: bool = False
    attention_bias_is_qkv: bool = False
    attention_bias_is_all: bool = False
    qk_norm: QkNorm | None = None
    reads_qk_norm: bool = False
    tied_embeddings: bool = False
    head_dim: int | None = None
    block: BlockForm = BlockForm.PRE_NORM
    windows: WindowRule | None = None
    rotary_fraction: float = 1.0
    has_nope_layers: bool = False
    moe_keys: MoeConfigKeys | None = None
    sinks: bool = False
    softcap_defaults: Mapping[str, float | None] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    has_mtp: bool = False

    def read_model(self, config: HfConfig) -> TransformerModel:
        """Read the model; raise InputError naming file and key."""
        bias = self._read_linear_bias(config)
        return TransformerModel(
            name=config.name,
            stack=self._read_stack(config, bias),
            hidden=self._dimension(config, "hidden_size"),
            vocab=self._dimension(config, "vocab_size"),
            max_positions=self._dimension(config, "max_position_embeddings"),
            norm=Norm.RMSNORM,
            positions=PositionEncoding.ROTARY,
            tied_embeddings=config.boolean("tie_word_embeddings", default=self.tied_embeddings),
            linear_bias=bias,
            final_logit_softcapping=self._has_softcap(config, "final_logit_softcapping"),
            mtp_layers=config.mtp_layer_count if self.has_mtp else 0,
        )

    def _read_stack(self, config: HfConfig, bias: bool) -> LayerStack:
        attentions = self._read_attentions(config, bias)
        if self.moe_keys is None:
            mlp = DenseMlp(self._dimension(config, "intermediate_size"), MlpType.SWIGLU)
            return merge_groups(
                LayerGroup(LayerSpec(attention, mlp, self.block), layer_count) for attention, layer_count in attentions
            )
        all_attentions = [attention for attention, layer_count in attentions for _ in range(layer_count)]
        mlps = self.moe_keys.read_mlps(config, len(all_attentions))
        return stack_layers(LayerSpec(*pair, self.block) for pair in zip(all_attentions, mlps, strict=True))

    def _dimension(self, config: HfConfig, key: str) -> int:
        return config.positive_int(key, self.defaults.get(key))

    def _read_attentions(self, config: HfConfig, bias: bool) -> list[tuple[FullAttention, int]]:
        """The attention of each layer with a repeat count; one entry where all layers are equal."""
        differ = self.windows is not None or self.has_nope_layers or self.moe_keys is not None
        key = "num_hidden_layers"
        repeat_count, listed_count = (1, config.layer_count(key)) if differ else (config.positive_int(key), 1)
        heads = self._dimension(config, "num_attention_heads")
        kv_heads = config.positive_int("num_key_value_heads", self.defaults.get("num_key_value_heads", heads))
        config.require_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
        qkv = config.boolean("attention_bias", default=False) if self.attention_bias_is_qkv else bias or self.qkv_bias
        rotary_fractions = (
            _rotary_fractions(config, listed_count)
            if self.has_nope_layers
            else [config.rotary_fraction(self.rotary_fraction)] * listed_count
        )
        head_dim, softcap = self._read_head_dim(config, heads), self._has_softcap(config, "attn_logit_softcapping")
        qk_norm = (
            QkNorm.PER_HEAD if config.boolean("use_qk_norm", default=False) and self.reads_qk_norm else self.qk_norm
        )
        return [
            (FullAttention(heads, kv_heads, head_dim, qkv, qk_norm, window, rotary, softcap, self.sinks), repeat_count)
            for window, rotary in zip(self._layer_windows(config, listed_count), rotary_fractions, strict=True)
        ]

    def _layer_windows(self, config: HfConfig, layers: int) -> list[int | None]:
        """The window of each layer: by `layer_types`, in files since 2025, or by the family's rule."""
        if self.windows is None:
            return [None] * layers
        layer_types = config.per_layer_values("layer_types", (FULL, SLIDING), layers)
        if layer_types is None:
            return self.windows(config, layers)
        has_window = [kind == SLIDING for kind in layer_types]
        return _masked_windows(has_window, config.positive_int("sliding_window") if any(has_window) else None)

    def _read_head_dim(self, config: HfConfig, heads: int) -> int:
        hidden = self._dimension(config, "hidden_size")
        if config.content.get("head_dim") is None and self.head_dim is None:
            config.require_divides("num_attention_heads", heads, "hidden_size", hidden)
        return config.positive_int("head_dim", self.head_dim or max(1, hidden // heads))

    def _read_linear_bias(self, config: HfConfig) -> bool:
        if self.attention_bias_is_all:
            return config.boolean("attention_bias", default=True)
        attention = config.boolean("attention_bias", default=False) and not self.attention_bias_is_qkv
        mlp = config.boolean("mlp_bias", default=False)
        if attention != mlp or (attention and not self.allows_linear_bias):
            raise InputError(
                f"{config.path}: attention_bias {attention} with mlp_bias {mlp} is not modelled"
                f" for {config.family}; "
                + ("set both to the same value" if self.allows_linear_bias else "set both false")
            )
        return attention

    def _has_softcap(self, config: HfConfig, key: str) -> bool:
        if key not in self.softcap_defaults:
            return False
        return (self.softcap_defaults[key] if key not in config.content else config.positive_number(key)) is not None


_NO_SOFTCAPS: Final = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_GEMMA3: Final = LlamaFamily(
    qk_norm=QkNorm.PER_HEAD,
    tied_embeddings=True,
    head_dim=256,
    block=BlockForm.SANDWICH,
    windows=interleaved_windows,
    softcap_defaults=_NO_SOFTCAPS,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
)

LLAMA_FAMILIES: Final[Mapping[str, LlamaFamily]] = MappingProxyType(
    {
        "llama": LlamaFamily(allows_linear_bias=True),
        "mistral": LlamaFamily(windows=mistral_windows),
        "qwen2": LlamaFamily(qkv_bias=True, windows=upper_layer_windows),
        "qwen3": LlamaFamily(qk_norm=QkNorm.PER_HEAD, head_dim=128, windows=upper_layer_windows),
        "gemma": LlamaFamily(tied_embeddings=True, head_dim=256),
        "gemma2": LlamaFamily(
            tied_embeddings=True,
            head_dim=256,
            block=BlockForm.SANDWICH,
            windows=alternating_windows,
            softcap_defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        "gemma3_text": _GEMMA3,
        "olmo2": LlamaFamily(qk_norm=QkNorm.ALL_HEADS, block=BlockForm.POST_NORM),
        "phi3": LlamaFamily(windows=uniform_windows),
        "smollm3": LlamaFamily(tied_embeddings=True, has_nope_layers=True, windows=nope_layer_windows),
        "glm": LlamaFamily(attention_bias_is_qkv=True, head_dim=128, rotary_fraction=0.5),
        "mixtral": LlamaFamily(windows=uniform_windows, moe_keys=MOE_CONFIG_KEYS["mixtral"]),
        "olmoe": LlamaFamily(qk_norm=QkNorm.ALL_HEADS, moe_keys=MOE_CONFIG_KEYS["olmoe"]),
        "qwen2_moe": LlamaFamily(qkv_bias=True, windows=upper_layer_windows, moe_keys=MOE_CONFIG_KEYS["qwen2_moe"]),
        "qwen3_moe": LlamaFamily(
            qk_norm=QkNorm.PER_HEAD, head_dim=128, windows=upper_layer_windows, moe_keys=MOE_CONFIG_KEYS["qwen3_moe"]
        ),
        "gpt_oss": LlamaFamily(
            attention_bias_is_all=True,
            head_dim=64,
            windows=alternating_windows,
            sinks=True,
            moe_keys=MOE_CONFIG_KEYS["gpt_oss"],
        ),
        "llama4_text": LlamaFamily(
            has_nope_layers=True, windows=chunked_windows, moe_keys=MOE_CONFIG_KEYS["llama4_text"]
        ),
        "glm4_moe": LlamaFamily(
            attention_bias_is_qkv=True,
            reads_qk_norm=True,
            head_dim=128,
            rotary_fraction=0.5,
            moe_keys=MOE_CONFIG_KEYS["glm4_moe"],
            has_mtp=True,
        ),
        "glm4": LlamaFamily(attention_bias_is_qkv=True, head_dim=128, rotary_fraction=0.5, block=BlockForm.SANDWICH),
    }
)
