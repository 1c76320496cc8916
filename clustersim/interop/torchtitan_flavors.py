"""Which models does torchtitan name, and what are they?

Flavors of torchtitan/models/{llama3,llama4,deepseek_v3,qwen3,gpt_oss}/__init__.py with the defaults of their
model/args.py (v0.2.2). Every mixture has a correction that chooses experts (`load_balance_coeff`, 1e-3 by default), so
presets whose papers have none get it here. Llama 4's experts are narrowed by what a token passes
(`auto_scale_hidden_dim`), which comes to the published widths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.model_equivalence import alike
from clustersim.model.training import AttentionBackend
from clustersim.model.transformer import TransformerModel
from clustersim.scenario.config.model import ModelConfig
from clustersim.scenario.file_cache import ReadCache
from clustersim.scenario.model import read_model

_BIAS: Final = {"experts": {"router_bias": True}}


@dataclass(frozen=True, slots=True)
class Flavor:
    """A model by torchtitan's names. section: what `model` says of it; masked: tokens attend within their document.

    Attention is scaled_dot_product_attention's, by cuDNN first, or where there are masks FlexAttention or the varlen
    one, which are Triton's and FlashAttention 2; gpt-oss has FlexAttention for its windows and sinks.
    """

    name: str
    flavor: str
    section: Mapping[str, Any] = field(compare=False)
    masked: bool = False

    @property
    def attention(self) -> AttentionBackend:
        """The attention core."""
        return AttentionBackend.FLASH2 if self.masked or self.name == "gpt_oss" else AttentionBackend.FLASH


def _dims(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **other: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return {**sizes, "vocab": 2048, **other}


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, **other: Any) -> dict[str, Any]:
    return _dims(layers, hidden, heads, 8, ffn, vocab=151936, head_dim=128, qk_norm=True) | other


def _llama4(count: int, every: int) -> dict[str, Any]:
    experts = {"count": count, "top_k": 1, "ffn": 8192, "shared": 8192, "router": "sigmoid", "every": every}
    return _dims(48, 5120, 40, 8, 16384, vocab=202048, experts={**experts, **_BIAS["experts"]})


_LATENT: Final = {"query_rank": 0, "kv_rank": 512, "nope": 128, "rope": 64, "value_dim": 128}
_TINY_LLAMA: Final = _dims(6, 256, 16, 16, 768)
_TINY_LLAMA4: Final = _TINY_LLAMA | {
    "experts": {"count": 8, "top_k": 1, "ffn": 512, "shared": 512, "router": "sigmoid", "router_bias": True, "every": 2}
}
_TINY_DEEPSEEK: Final = {
    "layers": 6, "hidden": 256, "heads": 16, "ffn": 1024, "vocab": 2048, "latent": _LATENT,
    "experts": {"count": 8, "top_k": 3, "ffn": 256, "shared": 512, "router_bias": True, "dense_layers": 1},
}  # fmt: skip
_TINY_MIXTURE: Final = {"count": 64, "top_k": 8, "ffn": 768, "router_bias": True}
_TINY_GPT_OSS: Final = {
    "preset": "gpt-oss-20b",
    "layers": 4,
    "hidden": 256,
    "experts": {"count": 8, "router_bias": True},
}

FLAVORS: Final = (
    Flavor("llama3", "debugmodel", _TINY_LLAMA),
    Flavor("llama3", "debugmodel_flex_attn", _TINY_LLAMA, masked=True),
    Flavor("llama3", "debugmodel_varlen_attn", _TINY_LLAMA, masked=True),
    Flavor("llama3", "8B", {"preset": "llama3-8b"}),
    Flavor("llama3", "8B_flex", {"preset": "llama3-8b"}, masked=True),
    Flavor("llama3", "8B_varlen", {"preset": "llama3-8b"}, masked=True),
    Flavor("llama3", "70B", {"preset": "llama3-70b"}),
    Flavor("llama3", "405B", {"preset": "llama3-405b"}),
    Flavor("llama4", "debugmodel", _TINY_LLAMA4),
    Flavor("llama4", "17bx16e", _llama4(16, 1)),
    Flavor("llama4", "17bx128e", _llama4(128, 2)),
    Flavor("llama4", "17bx16e_irope", {"preset": "llama4-scout", **_BIAS}, masked=True),
    Flavor("llama4", "17bx128e_irope", {"preset": "llama4-maverick", **_BIAS}, masked=True),
    Flavor("deepseek_v3", "debugmodel", _TINY_DEEPSEEK),
    Flavor("deepseek_v3", "debugmodel_flex_attn", _TINY_DEEPSEEK, masked=True),
    Flavor("deepseek_v3", "16B", {"preset": "deepseek-v2-lite", **_BIAS}, masked=True),
    Flavor("deepseek_v3", "236B", {"preset": "deepseek-v2", **_BIAS}, masked=True),
    Flavor("deepseek_v3", "671B", {"preset": "deepseek-v3"}, masked=True),
    Flavor("qwen3", "debugmodel", _qwen3(8, 256, 16, 3072, vocab=2048, tied_embeddings=True)),
    Flavor("qwen3", "0.6B", _qwen3(28, 1024, 16, 3072, tied_embeddings=True)),
    Flavor("qwen3", "1.7B", _qwen3(28, 2048, 16, 6144, tied_embeddings=True)),
    Flavor("qwen3", "4B", _qwen3(36, 2560, 32, 9728, tied_embeddings=True)),
    Flavor("qwen3", "8B", {"preset": "qwen3-8b"}),
    Flavor("qwen3", "14B", _qwen3(40, 5120, 40, 17408)),
    Flavor("qwen3", "32B", _qwen3(64, 5120, 64, 25600)),
    Flavor("qwen3", "debugmodel_moe", _qwen3(8, 256, 16, 3072, vocab=2048, experts=_TINY_MIXTURE)),
    Flavor("qwen3", "30B-A3B", {"preset": "qwen3-30b-a3b", **_BIAS}),
    Flavor("qwen3", "235B-A22B", {"preset": "qwen3-235b-a22b", **_BIAS}),
    Flavor("gpt_oss", "debugmodel", _TINY_GPT_OSS),
    Flavor("gpt_oss", "20b", {"preset": "gpt-oss-20b", **_BIAS}),
    Flavor("gpt_oss", "120b", {"preset": "gpt-oss-120b", **_BIAS}),
)
"""Of flavors that are the same model the one without masks comes first."""


def flavor(name: str, asked: str, source: str) -> Flavor:
    """The flavor of a model; raise InputError with the nearest names if there is none."""
    names = [item.name for item in FLAVORS]
    if name not in names:
        raise InputError(f"{source}: [model] name: {name!r} is not known; {suggest_nearest(name, names)}")
    known = {element.flavor: element for element in FLAVORS if element.name == name}
    if asked not in known:
        raise InputError(f"{source}: [model] flavor: {name} has no {asked!r} here; {suggest_nearest(asked, known)}")
    return known[asked]


def flavor_of(model: TransformerModel, attention: AttentionBackend) -> Flavor | None:
    """The first flavor that is alike, one with the attention core if there is one; None: there is none."""
    found = [item for item in FLAVORS if alike(model_of(item), model)]
    return next((element for element in found if element.attention is attention), found[0] if found else None)


@cache
def model_of(asked: Flavor) -> TransformerModel:
    """The model that a flavor stands for."""
    return read_model(ModelConfig.model_validate(asked.section), Path(), 1, ReadCache())
