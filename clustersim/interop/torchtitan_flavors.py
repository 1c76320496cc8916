"""Which models does torchtitan name, and what are they?

Flavors of torchtitan/models/{llama3,llama4,deepseek_v3,qwen3,gpt_oss}/__init__.py with the defaults of
their model/args.py (v0.2.2). Every MoE model has a router bias for load balancing (`load_balance_coeff`,
1e-3 by default), which is added here to presets whose papers have none. Llama 4 scales the width of its
experts by the number that a token activates (`auto_scale_hidden_dim`), which gives the published widths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.model_equivalence import models_equivalent
from clustersim.model.training import AttentionBackend
from clustersim.model.transformer import TransformerModel
from clustersim.scenario.config.model import ModelConfig
from clustersim.scenario.file_cache import ReadCache
from clustersim.scenario.model import read_model

_ROUTER_BIAS: Final = {"experts": {"router_bias": True}}


@dataclass(frozen=True, slots=True)
class ModelFlavor:
    """A model by torchtitan's names. has_document_mask: tokens attend within their document only.

    Attention is scaled_dot_product_attention, cuDNN's first; with masks FlexAttention or varlen attention,
    which are Triton's and FlashAttention 2; gpt-oss uses FlexAttention for its windows and sinks.
    """

    name: str
    flavor: str
    model_section: Mapping[str, Any] = field(compare=False)
    has_document_mask: bool = False

    @property
    def attention(self) -> AttentionBackend:
        """The attention backend."""
        return AttentionBackend.FLASH2 if self.has_document_mask or self.name == "gpt_oss" else AttentionBackend.FLASH


def _llama_dimensions(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **overrides: Any
) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return {**sizes, "vocab": 2048, **overrides}


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, **overrides: Any) -> dict[str, Any]:
    return _llama_dimensions(layers, hidden, heads, 8, ffn, vocab=151936, head_dim=128, qk_norm=True) | overrides


def _llama4(count: int, moe_period: int) -> dict[str, Any]:
    experts = {
        "count": count,
        "top_k": 1,
        "ffn": 8192,
        "shared": 8192,
        "router": "sigmoid",
        "interleave_moe_layer_step": moe_period,
    }
    return _llama_dimensions(48, 5120, 40, 8, 16384, vocab=202048, experts={**experts, **_ROUTER_BIAS["experts"]})


_MLA: Final = {
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_TINY_LLAMA: Final = _llama_dimensions(6, 256, 16, 16, 768)
_TINY_LLAMA4: Final = _TINY_LLAMA | {
    "experts": {
        "count": 8,
        "top_k": 1,
        "ffn": 512,
        "shared": 512,
        "router": "sigmoid",
        "router_bias": True,
        "interleave_moe_layer_step": 2,
    }
}
_TINY_DEEPSEEK: Final = {
    "layers": 6, "hidden": 256, "heads": 16, "ffn": 1024, "vocab": 2048, "mla": _MLA,
    "experts": {"count": 8, "top_k": 3, "ffn": 256, "shared": 512, "router_bias": True, "dense_layers": 1},
}  # fmt: skip
_TINY_MOE: Final = {"count": 64, "top_k": 8, "ffn": 768, "router_bias": True}
_TINY_GPT_OSS: Final = {
    "preset": "gpt-oss-20b",
    "layers": 4,
    "hidden": 256,
    "experts": {"count": 8, "router_bias": True},
}

FLAVORS: Final = (
    ModelFlavor("llama3", "debugmodel", _TINY_LLAMA),
    ModelFlavor("llama3", "debugmodel_flex_attn", _TINY_LLAMA, has_document_mask=True),
    ModelFlavor("llama3", "debugmodel_varlen_attn", _TINY_LLAMA, has_document_mask=True),
    ModelFlavor("llama3", "8B", {"preset": "llama3-8b"}),
    ModelFlavor("llama3", "8B_flex", {"preset": "llama3-8b"}, has_document_mask=True),
    ModelFlavor("llama3", "8B_varlen", {"preset": "llama3-8b"}, has_document_mask=True),
    ModelFlavor("llama3", "70B", {"preset": "llama3-70b"}),
    ModelFlavor("llama3", "405B", {"preset": "llama3-405b"}),
    ModelFlavor("llama4", "debugmodel", _TINY_LLAMA4),
    ModelFlavor("llama4", "17bx16e", _llama4(16, 1)),
    ModelFlavor("llama4", "17bx128e", _llama4(128, 2)),
    ModelFlavor("llama4", "17bx16e_irope", {"preset": "llama4-scout", **_ROUTER_BIAS}, has_document_mask=True),
    ModelFlavor("llama4", "17bx128e_irope", {"preset": "llama4-maverick", **_ROUTER_BIAS}, has_document_mask=True),
    ModelFlavor("deepseek_v3", "debugmodel", _TINY_DEEPSEEK),
    ModelFlavor("deepseek_v3", "debugmodel_flex_attn", _TINY_DEEPSEEK, has_document_mask=True),
    ModelFlavor("deepseek_v3", "16B", {"preset": "deepseek-v2-lite", **_ROUTER_BIAS}, has_document_mask=True),
    ModelFlavor("deepseek_v3", "236B", {"preset": "deepseek-v2", **_ROUTER_BIAS}, has_document_mask=True),
    ModelFlavor("deepseek_v3", "671B", {"preset": "deepseek-v3"}, has_document_mask=True),
    ModelFlavor("qwen3", "debugmodel", _qwen3(8, 256, 16, 3072, vocab=2048, tied_embeddings=True)),
    ModelFlavor("qwen3", "0.6B", _qwen3(28, 1024, 16, 3072, tied_embeddings=True)),
    ModelFlavor("qwen3", "1.7B", _qwen3(28, 2048, 16, 6144, tied_embeddings=True)),
    ModelFlavor("qwen3", "4B", _qwen3(36, 2560, 32, 9728, tied_embeddings=True)),
    ModelFlavor("qwen3", "8B", {"preset": "qwen3-8b"}),
    ModelFlavor("qwen3", "14B", _qwen3(40, 5120, 40, 17408)),
    ModelFlavor("qwen3", "32B", _qwen3(64, 5120, 64, 25600)),
    ModelFlavor("qwen3", "debugmodel_moe", _qwen3(8, 256, 16, 3072, vocab=2048, experts=_TINY_MOE)),
    ModelFlavor("qwen3", "30B-A3B", {"preset": "qwen3-30b-a3b", **_ROUTER_BIAS}),
    ModelFlavor("qwen3", "235B-A22B", {"preset": "qwen3-235b-a22b", **_ROUTER_BIAS}),
    ModelFlavor("gpt_oss", "debugmodel", _TINY_GPT_OSS),
    ModelFlavor("gpt_oss", "20b", {"preset": "gpt-oss-20b", **_ROUTER_BIAS}),
    ModelFlavor("gpt_oss", "120b", {"preset": "gpt-oss-120b", **_ROUTER_BIAS}),
)
"""All flavors; of those that are the same model, the one without masks comes first."""


def find_flavor(name: str, flavor_name: str, source: str) -> ModelFlavor:
    """The flavor of a model; raises InputError with the nearest names if there is none."""
    names = [model_flavor.name for model_flavor in FLAVORS]
    if name not in names:
        raise InputError(f"{source}: [model] name: {name!r} is not known; {suggest_nearest(name, names)}")
    by_name = {flavor.flavor: flavor for flavor in FLAVORS if flavor.name == name}
    if flavor_name not in by_name:
        raise InputError(
            f"{source}: [model] flavor: {name} has no {flavor_name!r} here; {suggest_nearest(flavor_name, by_name)}"
        )
    return by_name[flavor_name]


def matching_flavor(model: TransformerModel, attention: AttentionBackend) -> ModelFlavor | None:
    """The first flavor with an equivalent model, preferably with the same attention backend; None: no such."""
    matches = [model_flavor for model_flavor in FLAVORS if models_equivalent(flavor_model(model_flavor), model)]
    return next((match for match in matches if match.attention is attention), matches[0] if matches else None)


@cache
def flavor_model(flavor: ModelFlavor) -> TransformerModel:
    """The model of a flavor."""
    return read_model(ModelConfig.model_validate(flavor.model_section), Path(), 1, ReadCache())
