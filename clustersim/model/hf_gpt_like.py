"""Readers of GPT-style configurations after GPT-2: GPT-J, CodeGen, GPT-BigCode, MPT, Nemotron, Phi-3.5-MoE.

Defaults of missing keys are those of the families' configuration classes in transformers
(src/transformers/models/*/configuration_*.py). Squared ReLU is treated as GELU. GPT-J's and CodeGen's attention has no
biases where their MLP has: the one of its output is counted all the same (2e-5 of the parameters).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention
from clustersim.model.hf_fields import HfConfig
from clustersim.model.hf_layernorm import layernorm_properties
from clustersim.model.hf_moe import MOE_CONFIG_KEYS
from clustersim.model.layer_stack import BlockForm, LayerSpec, MlpType, stack_layers
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, uniform_model


def read_gptj(config: HfConfig) -> TransformerModel:
    """Read a GPT-J or CodeGen configuration: a parallel block with one norm, biases of MLP and logits."""
    hidden, heads = config.positive_int("n_embd"), config.positive_int("n_head")
    config.require_divides("n_head", heads, "n_embd", hidden)
    rotary = config.positive_int("rotary_dim", 64)
    return uniform_model(
        **_gpt2_sizes(config, hidden, heads, heads),
        block=BlockForm.PARALLEL,
        rotary_percent=min(1.0, rotary / (hidden // heads)),
        positions=PositionEncoding.ROTARY,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        qkv_bias=False,
        head_bias=True,
        dropout=_has_dropout(config, 0.0),
    )


def read_gpt_bigcode(config: HfConfig) -> TransformerModel:
    """Read a GPT-BigCode configuration (StarCoder, SantaCoder): GPT-2 with one key and value head."""
    hidden, heads = config.positive_int("n_embd"), config.positive_int("n_head")
    config.require_divides("n_head", heads, "n_embd", hidden)
    kv_heads = 1 if config.boolean("multi_query", default=True) else heads
    return uniform_model(
        **_gpt2_sizes(config, hidden, heads, kv_heads),
        positions=PositionEncoding.LEARNED,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        qkv_bias=True,
        dropout=_has_dropout(config, 0.1),
    )


def _gpt2_sizes(config: HfConfig, hidden: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "name": config.name,
        "layers": config.positive_int("n_layer"),
        "hidden": hidden,
        "ffn": config.positive_int("n_inner", 4 * hidden),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab": config.positive_int("vocab_size"),
        "max_positions": config.positive_int("n_positions"),
        "mlp": MlpType.GELU,
        "norm": Norm.LAYERNORM,
        "linear_bias": True,
    }


def _has_dropout(config: HfConfig, default: float) -> bool:
    return any(config.fraction_below_one(key, default) > 0 for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"))


def read_mpt(config: HfConfig) -> TransformerModel:
    """Read an MPT configuration; without ALiBi its positions are learned."""
    hidden, heads = config.positive_int("d_model"), config.positive_int("n_heads")
    config.require_divides("n_heads", heads, "d_model", hidden)
    attention = config.content.get("attn_config", {})
    if not isinstance(attention, Mapping):
        raise InputError(f"{config.path}: attn_config is {attention!r}, not a mapping")
    section = HfConfig(config.path, attention, "mpt attn_config")
    section.require_value("qk_ln", False, default=False)
    has_bias = not config.boolean("no_bias", default=True)
    is_alibi = section.boolean("alibi", default=False)
    kv_heads = 1 if attention.get("attn_type") == "multiquery_attention" else section.positive_int("kv_n_heads", heads)
    return uniform_model(
        name=config.name,
        layers=config.positive_int("n_layers"),
        hidden=hidden,
        ffn=hidden * config.positive_int("expansion_ratio", 4),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("max_seq_len", 2048),
        mlp=MlpType.GELU,
        norm=Norm.LAYERNORM,
        layernorm_vectors=2 if has_bias else 1,
        positions=PositionEncoding.ALIBI if is_alibi else PositionEncoding.LEARNED,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=has_bias,
        qkv_bias=has_bias,
    )


def read_nemotron(config: HfConfig) -> TransformerModel:
    """Read a Nemotron 3 or 4 configuration (Minitron): LayerNorm, an MLP of two matrices, no biases."""
    config.require_value("attention_bias", False, default=False)
    config.require_value("mlp_bias", False, default=False)
    attention = _grouped_attention(config, rotary=config.rotary_fraction(0.5))
    return uniform_model(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        rotary_percent=attention.rotary_percent,
        layers=config.positive_int("num_hidden_layers"),
        ffn=config.positive_int("intermediate_size"),
        mlp=MlpType.GELU,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=False,
        **layernorm_properties(config),
    )


def read_phimoe(config: HfConfig) -> TransformerModel:
    """Read a Phi-3.5-MoE configuration: Mixtral with LayerNorm and biases of attention and logits."""
    layers, has_bias = config.layer_count("num_hidden_layers"), config.boolean("attention_bias", default=False)
    attention = _grouped_attention(config, qkv_bias=has_bias)
    mlps = MOE_CONFIG_KEYS["mixtral"].read_mlps(config, layers)
    return TransformerModel(
        stack=stack_layers(LayerSpec(attention, mlp) for mlp in mlps),
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=False,
        head_bias=config.boolean("lm_head_bias", default=False),
        **layernorm_properties(config),
    )


def _grouped_attention(config: HfConfig, *, qkv_bias: bool = False, rotary: float = 1.0) -> FullAttention:
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    kv_heads = config.positive_int("num_key_value_heads", heads)
    config.require_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if config.content.get("head_dim") is None:
        config.require_divides("num_attention_heads", heads, "hidden_size", hidden)
    head_dim = config.positive_int("head_dim", max(1, hidden // heads))
    return FullAttention(heads, kv_heads, head_dim, qkv_bias, rotary_percent=rotary)


GPT_LIKE_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {
        "gptj": read_gptj,
        "codegen": read_gptj,
        "gpt_bigcode": read_gpt_bigcode,
        "mpt": read_mpt,
        "nemotron": read_nemotron,
        "phimoe": read_phimoe,
    }
)
"""Readers by family; those of phimoe have experts."""
