"""Which model is a configuration of the Llama kind: RMSNorm, a gated MLP, rotary positions?

Families differ in biases, norms, windows and defaults, which are those of their configuration classes in transformers
(src/transformers/models/*/configuration_*.py). Gated GELU counts as SwiGLU; the embedding's scale (Gemma) and Llama 4's
norm of queries and keys, which has no weights, are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.hf_fields import FULL, SLIDING, Config
from clustersim.model.hf_moe import MIXTURES, Mixture
from clustersim.model.layer_stack import (
    BlockForm,
    DenseMlp,
    FullAttention,
    LayerRun,
    LayerSpec,
    Mlp,
    QkNorm,
    Stack,
    joined,
    stacked,
)
from clustersim.model.transformer import Model, Norm, Positions

Windows = Callable[[Config, int], list[int | None]]
"""The window of each of so many layers; None: all tokens."""


def everywhere(config: Config, layers: int) -> list[int | None]:
    """Every layer has it, if the file does (phi3)."""
    return [_window(config)] * layers


def mistral(config: Config, layers: int) -> list[int | None]:
    """Every layer has it; `sliding_window` that is left out is 4096, null is none."""
    window = 4096 if "sliding_window" not in config.content else _window(config)
    return [window] * layers


def switched(config: Config, layers: int) -> list[int | None]:
    """Layers from `max_window_layers` on have it, if `use_sliding_window` (qwen2, qwen3)."""
    first = config.content.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise InputError(f"{config.path}: max_window_layers is {first!r}, not a whole number from 0")
    local = [place >= first for place in range(layers)]
    return _where(local, config.positive("sliding_window", 4096)) if _switched_on(config) else [None] * layers


def alternating(config: Config, layers: int) -> list[int | None]:
    """Every second layer has it, the first among them (gemma2)."""
    return _where([place % 2 == 0 for place in range(layers)], config.positive("sliding_window", 4096))


def patterned(config: Config, layers: int) -> list[int | None]:
    """All but every `sliding_window_pattern`-th layer have it (gemma3)."""
    every = config.positive("sliding_window_pattern", 6)
    return _where([(place + 1) % every > 0 for place in range(layers)], config.positive("sliding_window", 4096))


def unturned(config: Config, layers: int) -> list[int | None]:
    """Layers without rotary positions have it, if `use_sliding_window` (smollm3)."""
    window = _window(config) if _switched_on(config) else None
    return _where([share == 0 for share in _nope(config, layers)], window)


def chunked(config: Config, layers: int) -> list[int | None]:
    """Layers with rotary positions have it: chunks of `attention_chunk_size`, within which all tokens before are seen.

    Longer sequences are counted as if a window slid, which has twice as many keys (llama4).
    """
    return _where([share > 0 for share in _nope(config, layers)], config.positive("attention_chunk_size", 8192))


def _where(local: list[bool], window: int | None) -> list[int | None]:
    return [window if here else None for here in local]


def _window(config: Config) -> int | None:
    return None if config.content.get("sliding_window") is None else config.positive("sliding_window")


def _switched_on(config: Config) -> bool:
    return config.truth("use_sliding_window", default=False)


def _nope(config: Config, layers: int) -> list[float]:
    """The share of each head that each layer turns: SmolLM3 leaves every 4th layer unturned."""
    every = config.positive("no_rope_layer_interval", 4)
    said = config.each_layer("no_rope_layers", (0, 1), layers)
    return [float(turned) for turned in said or [(place + 1) % every > 0 for place in range(layers)]]


@dataclass(frozen=True, slots=True)
class LlamaKind:
    """What distinguishes a family.

    head_dim: its default (None: hidden / heads); defaults: of other sizes. qkv_bias: queries, keys and values have
    biases, whatever the file says; biases: attention_bias and mlp_bias, both alike, mean all products;
    bias_of_qkv: attention_bias means queries, keys and values; bias_of_attention: it means these and the output,
    and experts have their own; rotary: share of each head that is turned; norm_said: `use_qk_norm` says whether
    queries and keys are normalised; nope: some layers turn none; windows: None where the family knows none,
    whatever the file says; mixture: layers have experts; sinks: every head has one; softcaps: scores and logits may be
    capped; further: files may have layers that predict further tokens.
    """

    qkv_bias: bool = False
    biases: bool = False
    bias_of_qkv: bool = False
    bias_of_attention: bool = False
    qk_norm: QkNorm | None = None
    norm_said: bool = False
    tied: bool = False
    head_dim: int | None = None
    block: BlockForm = BlockForm.PRE_NORM
    windows: Windows | None = None
    rotary: float = 1.0
    nope: bool = False
    mixture: Mixture | None = None
    sinks: bool = False
    softcaps: Mapping[str, float | None] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    further: bool = False

    def read(self, config: Config) -> Model:
        """Read the model; raise InputError naming file and key."""
        bias = self._linear_bias(config)
        return Model(
            name=config.name,
            stack=self._stack(config, bias),
            hidden=self._size(config, "hidden_size"),
            vocab=self._size(config, "vocab_size"),
            max_positions=self._size(config, "max_position_embeddings"),
            norm=Norm.RMSNORM,
            positions=Positions.ROTARY,
            tied_embeddings=config.truth("tie_word_embeddings", default=self.tied),
            linear_bias=bias,
            logit_softcap=self._capped(config, "final_logit_softcapping"),
            mtp_layers=config.further if self.further else 0,
        )

    def _stack(self, config: Config, bias: bool) -> Stack:
        attentions = self._attentions(config, bias)
        if self.mixture is None:
            mlp = DenseMlp(self._size(config, "intermediate_size"), Mlp.SWIGLU)
            return joined(LayerRun(LayerSpec(attention, mlp, self.block), many) for attention, many in attentions)
        every = [attention for attention, many in attentions for _ in range(many)]
        mlps = self.mixture.read(config, len(every))
        return stacked(LayerSpec(*item, self.block) for item in zip(every, mlps, strict=True))

    def _size(self, config: Config, key: str) -> int:
        return config.positive(key, self.defaults.get(key))

    def _attentions(self, config: Config, bias: bool) -> list[tuple[FullAttention, int]]:
        """The attention of each layer, or of all of them."""
        differ = self.windows is not None or self.nope or self.mixture is not None
        key = "num_hidden_layers"
        alike, layers = (1, config.layers(key)) if differ else (config.positive(key), 1)
        heads = self._size(config, "num_attention_heads")
        kv_heads = config.positive("num_key_value_heads", self.defaults.get("num_key_value_heads", heads))
        config.dividing("num_key_value_heads", kv_heads, "num_attention_heads", heads)
        qkv = config.truth("attention_bias", default=False) if self.bias_of_qkv else bias or self.qkv_bias
        turned = _nope(config, layers) if self.nope else [config.turned(self.rotary)] * layers
        head_dim, softcap = self._head_dim(config, heads), self._capped(config, "attn_logit_softcapping")
        normed = QkNorm.HEADS if config.truth("use_qk_norm", default=False) and self.norm_said else self.qk_norm
        return [
            (FullAttention(heads, kv_heads, head_dim, qkv, normed, window, share, softcap, self.sinks), alike)
            for window, share in zip(self._windows(config, layers), turned, strict=True)
        ]

    def _windows(self, config: Config, layers: int) -> list[int | None]:
        """The window of each layer: by `layer_types`, which files since 2025 have, or as the family has them."""
        if self.windows is None:
            return [None] * layers
        said = config.each_layer("layer_types", (FULL, SLIDING), layers)
        if said is None:
            return self.windows(config, layers)
        local = [kind == SLIDING for kind in said]
        return _where(local, config.positive("sliding_window") if any(local) else None)

    def _head_dim(self, config: Config, heads: int) -> int:
        hidden = self._size(config, "hidden_size")
        if config.content.get("head_dim") is None and self.head_dim is None:
            config.dividing("num_attention_heads", heads, "hidden_size", hidden)
        return config.positive("head_dim", self.head_dim or max(1, hidden // heads))

    def _linear_bias(self, config: Config) -> bool:
        if self.bias_of_attention:
            return config.truth("attention_bias", default=True)
        attention = config.truth("attention_bias", default=False) and not self.bias_of_qkv
        mlp = config.truth("mlp_bias", default=False)
        if attention != mlp or (attention and not self.biases):
            raise InputError(
                f"{config.path}: attention_bias {attention} with mlp_bias {mlp} is not modelled"
                f" for {config.family}; " + ("set both alike" if self.biases else "set both false")
            )
        return attention

    def _capped(self, config: Config, key: str) -> bool:
        if key not in self.softcaps:
            return False
        return (self.softcaps[key] if key not in config.content else config.number(key)) is not None


_NO_CAPS: Final = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_GEMMA3: Final = LlamaKind(
    qk_norm=QkNorm.HEADS,
    tied=True,
    head_dim=256,
    block=BlockForm.SANDWICH,
    windows=patterned,
    softcaps=_NO_CAPS,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
)

LLAMA_KINDS: Final[Mapping[str, LlamaKind]] = MappingProxyType(
    {
        "llama": LlamaKind(biases=True),
        "mistral": LlamaKind(windows=mistral),
        "qwen2": LlamaKind(qkv_bias=True, windows=switched),
        "qwen3": LlamaKind(qk_norm=QkNorm.HEADS, head_dim=128, windows=switched),
        "gemma": LlamaKind(tied=True, head_dim=256),
        "gemma2": LlamaKind(
            tied=True,
            head_dim=256,
            block=BlockForm.SANDWICH,
            windows=alternating,
            softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        "gemma3_text": _GEMMA3,
        "olmo2": LlamaKind(qk_norm=QkNorm.WHOLE, block=BlockForm.POST_NORM),
        "phi3": LlamaKind(windows=everywhere),
        "smollm3": LlamaKind(tied=True, nope=True, windows=unturned),
        "glm": LlamaKind(bias_of_qkv=True, head_dim=128, rotary=0.5),
        "mixtral": LlamaKind(windows=everywhere, mixture=MIXTURES["mixtral"]),
        "olmoe": LlamaKind(qk_norm=QkNorm.WHOLE, mixture=MIXTURES["olmoe"]),
        "qwen2_moe": LlamaKind(qkv_bias=True, windows=switched, mixture=MIXTURES["qwen2_moe"]),
        "qwen3_moe": LlamaKind(qk_norm=QkNorm.HEADS, head_dim=128, windows=switched, mixture=MIXTURES["qwen3_moe"]),
        "gpt_oss": LlamaKind(
            bias_of_attention=True, head_dim=64, windows=alternating, sinks=True, mixture=MIXTURES["gpt_oss"]
        ),
        "llama4_text": LlamaKind(nope=True, windows=chunked, mixture=MIXTURES["llama4_text"]),
        "glm4_moe": LlamaKind(
            bias_of_qkv=True, norm_said=True, head_dim=128, rotary=0.5, mixture=MIXTURES["glm4_moe"], further=True
        ),
        "glm4": LlamaKind(bias_of_qkv=True, head_dim=128, rotary=0.5, block=BlockForm.SANDWICH),
    }
)
