"""Which model does a Hugging Face `config.json` describe? Read as JSON; transformers is not needed.

Only families that the operators of `layers` express exactly are read: GPT-2, and the Llama kind (RMSNorm, gated MLP,
rotary positions: llama, mistral, qwen2, qwen3, gemma). Defaults of missing keys are those of the family's
configuration class in transformers; dimensions have no defaults here. Mixtures of experts, sliding windows that
would bite and biases on the attention output without biases in the MLP are refused.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clustersim.errors import InputError, nearest
from clustersim.shipped import read_mapping
from clustersim.workload.stack import Mlp
from clustersim.workload.transformer import Model, Norm, Positions, uniform

_EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class _Config:
    """A configuration and the file that it comes from."""

    path: Path
    content: Mapping[str, Any]

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above zero; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise InputError(f"{self.path}: has no {key}, which a {self.content['model_type']} model needs")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(f"{self.path}: {key} is {value!r}, not a whole number above 0")
        return value

    def truth(self, key: str, *, default: bool) -> bool:
        """True or false; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.path}: {key} is {value!r}, not true or false")
        return value

    def rate(self, key: str, default: float) -> float:
        """A number from 0 to below 1; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InputError(f"{self.path}: {key} is {value!r}, not a number from 0 to below 1")
        return float(value)

    def dividing(self, key: str, part: int, whole_key: str, whole: int) -> None:
        """Raise InputError unless `part` divides `whole`."""
        if whole % part:
            raise InputError(f"{self.path}: {key} {part} does not divide {whole_key} {whole}")

    @property
    def name(self) -> str:
        """The folder's name for a file that is called config.json, else the file's."""
        return self.path.resolve().parent.name if self.path.stem == "config" else self.path.stem


@dataclass(frozen=True, slots=True)
class _LlamaKind:
    """What distinguishes the families of the Llama kind. head_dim: the family's default (None: hidden / heads)."""

    qkv_bias: bool = False
    biases: bool = False  # attention_bias and mlp_bias mean something
    qk_norm: bool = False
    tied: bool = False
    head_dim: int | None = None
    window: bool | None = None  # default of use_sliding_window; None: sliding_window itself decides

    def read(self, config: _Config) -> Model:
        """Read the model; raise InputError naming file and key."""
        self._refuse_window(config)
        hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
        kv_heads = config.positive("num_key_value_heads", heads)
        config.dividing("num_key_value_heads", kv_heads, "num_attention_heads", heads)
        bias = self._linear_bias(config)
        return uniform(
            name=config.name,
            layers=config.positive("num_hidden_layers"),
            hidden=hidden,
            ffn=config.positive("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self._head_dim(config, hidden, heads),
            vocab=config.positive("vocab_size"),
            max_positions=config.positive("max_position_embeddings"),
            mlp=Mlp.SWIGLU,
            norm=Norm.RMSNORM,
            positions=Positions.ROTARY,
            tied_embeddings=config.truth("tie_word_embeddings", default=self.tied),
            linear_bias=bias,
            qkv_bias=bias or self.qkv_bias,
            qk_norm=self.qk_norm,
        )

    def _head_dim(self, config: _Config, hidden: int, heads: int) -> int:
        if config.content.get("head_dim") is None and self.head_dim is None:
            config.dividing("num_attention_heads", heads, "hidden_size", hidden)
        return config.positive("head_dim", self.head_dim or max(1, hidden // heads))

    def _linear_bias(self, config: _Config) -> bool:
        attention = config.truth("attention_bias", default=False)
        mlp = config.truth("mlp_bias", default=False)
        if attention != mlp or (attention and not self.biases):
            raise InputError(
                f"{config.path}: attention_bias {attention} with mlp_bias {mlp} is not modelled"
                f" for {config.content['model_type']}; " + ("set both alike" if self.biases else "set both false")
            )
        return attention

    def _refuse_window(self, config: _Config) -> None:
        used = self.window is None or config.truth("use_sliding_window", default=self.window)
        if not used or config.content.get("sliding_window") is None:
            return
        window, positions = config.positive("sliding_window"), config.positive("max_position_embeddings")
        if window < positions:
            raise InputError(
                f"{config.path}: sliding_window {window} is not modelled (attention is over the whole sequence);"
                f" set it to null, or to max_position_embeddings {positions}"
            )


def _gpt2(config: _Config) -> Model:
    hidden, heads = config.positive("n_embd"), config.positive("n_head")
    config.dividing("n_head", heads, "n_embd", hidden)
    dropouts = [config.rate(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    return uniform(
        name=config.name,
        layers=config.positive("n_layer"),
        hidden=hidden,
        ffn=config.positive("n_inner", 4 * hidden),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("n_positions"),
        mlp=Mlp.GELU,
        norm=Norm.LAYERNORM,
        positions=Positions.LEARNED,
        tied_embeddings=config.truth("tie_word_embeddings", default=True),
        linear_bias=True,
        qkv_bias=True,
        dropout=max(dropouts) > 0,
    )


FAMILIES: Final[Mapping[str, Callable[[_Config], Model]]] = MappingProxyType(
    {
        "llama": _LlamaKind(biases=True).read,
        "mistral": _LlamaKind().read,
        "qwen2": _LlamaKind(qkv_bias=True, window=False).read,
        "qwen3": _LlamaKind(qk_norm=True, head_dim=128, window=False).read,
        "gemma": _LlamaKind(tied=True, head_dim=256).read,
        "gpt2": _gpt2,
    }
)


def config_file(path: Path) -> Path:
    """The path itself, or the `config.json` in a folder."""
    return path / "config.json" if os.path.isdir(path) else path  # noqa: PTH112 - false also for what can be no path


def read_hf_config(path: Path) -> Model:
    """Read a `config.json`, or the one in a folder; raise InputError naming the file and the key at fault."""
    found = config_file(path)
    config = _Config(found, read_mapping(found))
    family = config.content.get("model_type")
    if not isinstance(family, str):
        raise InputError(f"{found}: has no model_type; families that are read: {', '.join(FAMILIES)}")
    experts = [key for key in _EXPERT_KEYS if config.content.get(key)]
    if experts or "moe" in family:
        why = f"{experts[0]} is {config.content[experts[0]]}" if experts else f"model_type is {family}"
        raise InputError(f"{found}: is a mixture of experts ({why}), which is not simulated; use a dense model")
    if family not in FAMILIES:
        raise InputError(f"{found}: model_type {family!r} is not known; {nearest(family, FAMILIES)}")
    return FAMILIES[family](config)
