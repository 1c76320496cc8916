"""Readers of configurations with LayerNorm and rotary positions: GPT-NeoX, StableLM, StarCoder 2, Cohere, OLMo 1.

Defaults of missing keys, biases and norms are those of the families' classes in transformers
(src/transformers/models/*/configuration_*.py and modeling_*.py). Scales of embeddings and logits are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.hf_fields import FULL, SLIDING, HfConfig
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerSpec, MlpType, stack_layers
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, uniform_model

_COHERE2_PERIOD: Final = 4
_COHERE2_WINDOW: Final = 4096


@dataclass(frozen=True, slots=True)
class _Heads:
    """The heads of a configuration whose head dimension is hidden / heads."""

    count: int
    kv_count: int
    dim: int


def read_gpt_neox(config: HfConfig) -> TransformerModel:
    """Read a GPT-NeoX configuration (GPT-NeoX-20B, Pythia): biases everywhere, a parallel block with two norms."""
    config.require_value("attention_bias", True, default=True)
    is_parallel = config.boolean("use_parallel_residual", default=True)
    # rope_parameters has partial_rotary_factor since 2025; rotary_pct before that
    key = "rotary_pct" if "rotary_pct" in config.content else "partial_rotary_factor"
    return _uniform(
        config,
        mlp=MlpType.GELU,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=True,
        qkv_bias=True,
        block=BlockForm.PARALLEL_NORMS if is_parallel else BlockForm.PRE_NORM,
        rotary_percent=config.rotary_fraction(0.25, key),
        dropout=_has_dropout(config, "hidden_dropout", "attention_dropout"),
    )


def read_stablelm(config: HfConfig) -> TransformerModel:
    """Read a StableLM configuration; biases of queries, keys and values only, and norms of their heads."""
    is_parallel = config.boolean("use_parallel_residual", default=False)
    return _uniform(
        config,
        mlp=MlpType.SWIGLU,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=False,
        qkv_bias=config.boolean("use_qkv_bias", default=False),
        # each head's norm has a weight of its own
        qk_norm=QkNorm.ALL_HEADS if config.boolean("qk_layernorm", default=False) else None,
        block=BlockForm.PARALLEL if is_parallel else BlockForm.PRE_NORM,
        rotary_percent=config.rotary_fraction(0.25),
        dropout=_has_dropout(config, "hidden_dropout", "attention_dropout"),
    )


def read_starcoder2(config: HfConfig) -> TransformerModel:
    """Read a StarCoder 2 configuration: a plain MLP, biases everywhere, a sliding window if the file gives one."""
    has_bias = config.boolean("use_bias", default=True)
    window = None if config.content.get("sliding_window") is None else config.positive_int("sliding_window")
    return _uniform(
        config,
        mlp=MlpType.GELU,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=has_bias,
        qkv_bias=has_bias,
        window=window,
        dropout=_has_dropout(config, "residual_dropout", "embedding_dropout", "attention_dropout"),
    )


def read_olmo(config: HfConfig) -> TransformerModel:
    """Read an OLMo 1 configuration, whose LayerNorm learns nothing."""
    config.require_value("attention_bias", False, default=False)
    return _uniform(
        config,
        mlp=MlpType.SWIGLU,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=False,
        layernorm_vectors=0,
        dropout=_has_dropout(config, "attention_dropout"),
    )


def read_cohere(config: HfConfig) -> TransformerModel:
    """Read a Cohere configuration (Command R, R+, Aya): a parallel block with one norm that has no bias."""
    config.require_value("attention_bias", False, default=False)
    return _uniform(
        config,
        mlp=MlpType.SWIGLU,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=False,
        qk_norm=QkNorm.ALL_HEADS if config.boolean("use_qk_norm", default=False) else None,
        block=BlockForm.PARALLEL,
        layernorm_vectors=1,
        dropout=_has_dropout(config, "attention_dropout"),
    )


def read_cohere2(config: HfConfig) -> TransformerModel:
    """Read a Cohere 2 configuration (Command R7B, Command A): as Cohere; layers without a window have no positions."""
    config.require_value("attention_bias", False, default=False)
    layers, heads = config.layer_count("num_hidden_layers"), _read_heads(config)
    mlp = DenseMlp(config.positive_int("intermediate_size"), MlpType.SWIGLU)
    window = config.positive_int("sliding_window", _COHERE2_WINDOW)
    sliding = FullAttention(heads.count, heads.kv_count, heads.dim, window=window)
    full = FullAttention(heads.count, heads.kv_count, heads.dim, rotary_percent=0.0)
    return TransformerModel(
        stack=stack_layers(
            LayerSpec(sliding if is_sliding else full, mlp, BlockForm.PARALLEL)
            for is_sliding in _cohere2_sliding(config, layers)
        ),
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=False,
        layernorm_vectors=1,
        dropout=_has_dropout(config, "attention_dropout"),
        **layernorm_properties(config),
    )


def _cohere2_sliding(config: HfConfig, layers: int) -> list[bool]:
    """Whether each layer has a window: all but every `sliding_window_pattern`-th, or as the file lists them."""
    listed = config.per_layer_values("layer_types", (FULL, SLIDING), layers)
    if listed is not None:
        return [kind == SLIDING for kind in listed]
    period = config.positive_int("sliding_window_pattern", _COHERE2_PERIOD)
    return [(layer + 1) % period > 0 for layer in range(layers)]


def _read_heads(config: HfConfig) -> _Heads:
    """Heads; raise InputError where they do not divide."""
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    config.require_divides("num_attention_heads", heads, "hidden_size", hidden)
    config.require_value("head_dim", hidden // heads, default=hidden // heads)
    kv_heads = config.positive_int("num_key_value_heads", heads)
    config.require_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    return _Heads(heads, kv_heads, hidden // heads)


def layernorm_properties(config: HfConfig) -> Mapping[str, Any]:
    """What models with LayerNorm and rotary positions have in common."""
    return {
        "name": config.name,
        "hidden": config.positive_int("hidden_size"),
        "vocab": config.positive_int("vocab_size"),
        "max_positions": config.positive_int("max_position_embeddings"),
        "norm": Norm.LAYERNORM,
        "positions": PositionEncoding.ROTARY,
    }


def _uniform(config: HfConfig, **properties: Any) -> TransformerModel:
    heads = _read_heads(config)
    return uniform_model(
        layers=config.positive_int("num_hidden_layers"),
        ffn=config.positive_int("intermediate_size"),
        heads=heads.count,
        kv_heads=heads.kv_count,
        head_dim=heads.dim,
        **layernorm_properties(config),
        **properties,
    )


def _has_dropout(config: HfConfig, *keys: str) -> bool:
    return any(config.fraction_below_one(key, 0.0) > 0 for key in keys)
