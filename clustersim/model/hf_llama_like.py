"""Readers of configurations that differ from the Llama family's in a few keys.

Each reader says its family in the words of `hf_llama`. Sources: transformers,
src/transformers/models/*/configuration_*.py and modeling_*.py; for Baichuan, InternLM and Ling the modeling_*.py next
to their released config.json. Scales of embeddings, residuals and logits (Granite) are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.hf_fields import HfConfig
from clustersim.model.hf_llama import LlamaFamily, uniform_windows, upper_layer_windows
from clustersim.model.hf_moe import MOE_CONFIG_KEYS, MoeConfigKeys
from clustersim.model.layer_stack import (
    BlockForm,
    LayerGroup,
    ScoreFunction,
    merge_groups,
)
from clustersim.model.transformer import PositionEncoding, TransformerModel

_OLMO3_PERIOD: Final = 4
_EXAONE4_PERIOD: Final = 4
_QWEN_KEYS: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def read_baichuan(config: HfConfig) -> TransformerModel:
    """Read a Baichuan configuration; 13B, whose files have no max_position_embeddings, has ALiBi."""
    if "max_position_embeddings" in config.content:
        return LlamaFamily().read_model(config)
    positions = config.positive_int("model_max_length")
    model = LlamaFamily().read_model(config.with_values(max_position_embeddings=positions))
    return replace(model, positions=PositionEncoding.ALIBI)


def read_internlm(config: HfConfig) -> TransformerModel:
    """Read an InternLM or InternLM 2 configuration: `bias` is that of queries, keys, values and the output."""
    if config.boolean("bias", default=config.family == "internlm"):
        raise InputError(f"{config.path}: bias True is not modelled for {config.family}, whose MLP has none; false is")
    return LlamaFamily().read_model(config)


def read_internlm3(config: HfConfig) -> TransformerModel:
    """Read an InternLM 3 configuration: `qkv_bias`, and `bias` of all matrices."""
    bias = config.boolean("bias", default=False)
    family = LlamaFamily(allows_linear_bias=True, qkv_bias=config.boolean("qkv_bias", default=False))
    return family.read_model(config.with_values(attention_bias=bias, mlp_bias=bias))


def read_granite(config: HfConfig) -> TransformerModel:
    """Read a Granite configuration, which is Llama's but for its scales."""
    return LlamaFamily(allows_linear_bias=True).read_model(config)


def read_ernie(config: HfConfig) -> TransformerModel:
    """Read an ERNIE 4.5 configuration: `use_bias` is that of all matrices."""
    bias = config.boolean("use_bias", default=False)
    family = LlamaFamily(allows_linear_bias=True, tied_embeddings=True, head_dim=128)
    return family.read_model(config.with_values(attention_bias=bias, mlp_bias=bias))


def read_hunyuan(config: HfConfig) -> TransformerModel:
    """Read a dense Hunyuan configuration, which always normalizes queries and keys."""
    return LlamaFamily(qk_norm=QkNorm.PER_HEAD).read_model(config)


def read_seed_oss(config: HfConfig) -> TransformerModel:
    """Read a Seed-OSS configuration: `attention_bias` is that of queries, keys and values."""
    config.require_value("attention_out_bias", False, default=False)
    bias = config.boolean("attention_bias", default=True)
    model = LlamaFamily(attention_bias_is_qkv=True, head_dim=128).read_model(config.with_values(attention_bias=bias))
    dropouts = [config.fraction_below_one(key, 0.1) for key in ("attention_dropout", "residual_dropout")]
    return replace(model, dropout=max(dropouts) > 0)


def read_olmo3(config: HfConfig) -> TransformerModel:
    """Read an OLMo 3 configuration: OLMo 2 with a window in all but every fourth layer."""
    family = LlamaFamily(qk_norm=QkNorm.ALL_HEADS, block=BlockForm.POST_NORM, windows=_olmo3_windows)
    return family.read_model(config)


def _olmo3_windows(config: HfConfig, layers: int) -> list[int | None]:
    window = config.positive_int("sliding_window", 4096)
    return [window if (layer + 1) % _OLMO3_PERIOD else None for layer in range(layers)]


def read_exaone4(config: HfConfig) -> TransformerModel:
    """Read an EXAONE 4 configuration: norms after both; where some layers have windows, the others no positions."""
    is_hybrid = config.content.get("sliding_window") is not None
    content = config if is_hybrid else config.with_values(layer_types=None)
    family = LlamaFamily(
        qk_norm=QkNorm.PER_HEAD, block=BlockForm.POST_NORM, windows=_exaone4_windows if is_hybrid else uniform_windows
    )
    model = family.read_model(content)
    return _without_positions_in_full_layers(model) if is_hybrid else model


def _exaone4_windows(config: HfConfig, layers: int) -> list[int | None]:
    """By a period, or by a text such as LLLG: local, and global for layers that have no window."""
    pattern, window = (
        config.content.get("sliding_window_pattern", _EXAONE4_PERIOD),
        config.positive_int("sliding_window"),
    )
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        # the last layer is global
        kinds = [pattern[layer % len(pattern)] for layer in range(layers - 1)] + ["G"]
        return [window if kind == "L" else None for kind in kinds]
    period = config.positive_int("sliding_window_pattern", _EXAONE4_PERIOD)
    return [window if (layer + 1) % period else None for layer in range(layers)]


def _without_positions_in_full_layers(model: TransformerModel) -> TransformerModel:
    groups = []
    for group in model.stack:
        match group.spec.attention:
            case FullAttention(window=None) as full:
                spec = replace(group.spec, mixer=replace(full, rotary_percent=0.0))
                groups.append(LayerGroup(spec, group.count))
            case _:
                groups.append(group)
    return replace(model, stack=merge_groups(groups))


def read_granitemoe(config: HfConfig) -> TransformerModel:
    """Read a Granite MoE configuration."""
    keys = MoeConfigKeys("num_local_experts", "num_experts_per_tok", "intermediate_size")
    return LlamaFamily(moe_keys=keys).read_model(config)


def read_minimax_m2(config: HfConfig) -> TransformerModel:
    """Read a MiniMax-M2 configuration: `rotary_dim` of each head has positions; MTP layers are `num_mtp_modules`."""
    config.require_value("shared_intermediate_size", 0, default=0)
    config.require_value("use_qk_norm", True, default=True)
    head_dim = config.positive_int("head_dim", 128)
    rotary = config.positive_int("rotary_dim", head_dim)
    is_mtp = config.boolean("use_mtp", default=False)
    values: dict[str, Any] = {
        "partial_rotary_factor": min(1.0, rotary / head_dim),
        "num_nextn_predict_layers": config.nonnegative_int("num_mtp_modules", 0) if is_mtp else 0,
    }
    keys = MoeConfigKeys(
        "num_local_experts",
        "num_experts_per_tok",
        "intermediate_size",
        scores=ScoreFunction.SIGMOID,
        correction_bias=True,
    )
    return LlamaFamily(qk_norm=QkNorm.ALL_HEADS, head_dim=128, moe_keys=keys, has_mtp=True).read_model(
        config.with_values(**values)
    )


def read_ernie_moe(config: HfConfig) -> TransformerModel:
    """Read an ERNIE 4.5 MoE configuration; its MoE layers begin and end at given layers."""
    config.require_value("use_bias", False, default=False)
    layers = config.layer_count("num_hidden_layers")
    last = config.content.get("moe_layer_end_index", -1)
    if last not in (-1, None, layers - 1):
        raise InputError(
            f"{config.path}: moe_layer_end_index is {last!r}; dense layers after those with experts are not read, "
            f"{layers - 1} is"
        )
    keys = MoeConfigKeys(
        "moe_num_experts",
        "moe_k",
        "moe_intermediate_size",
        dense_ffn="intermediate_size",
        shared_count="moe_num_shared_experts",
        moe_layer_step="moe_layer_interval",
        first_dense_count="moe_layer_start_index",
        correction_bias=config.boolean("moe_use_aux_free", default=True),
    )
    return LlamaFamily(tied_embeddings=True, moe_keys=keys).read_model(config)


def read_hunyuan_moe(config: HfConfig) -> TransformerModel:
    """Read a Hunyuan MoE configuration; its lists of equal numbers for each layer are one number."""
    config.require_value("use_cla", False, default=False)
    layers = config.layer_count("num_hidden_layers")
    values = {
        key: _equal_number(config, key, layers)
        for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
        if config.content.get(key) is not None
    }
    keys = MoeConfigKeys(
        "num_experts",
        "moe_topk",
        "moe_intermediate_size" if "moe_intermediate_size" in values else "intermediate_size",
        always_shared=values.get("num_shared_expert", 1) == 1,
        shared_count="num_shared_expert" if values.get("num_shared_expert", 1) != 1 else None,
    )
    family = LlamaFamily(qk_norm=QkNorm.PER_HEAD, moe_keys=keys)
    return family.read_model(config.with_values(**values))


def read_hunyuan_original(config: HfConfig) -> TransformerModel:
    """Read a Hunyuan configuration of the authors' own code, whose classes state what the families above have."""
    config.require_value("use_mla", False, default=False)
    config.require_value("use_qk_norm", True, default=False)
    return read_hunyuan_moe(config)


def _equal_number(config: HfConfig, key: str, layers: int) -> Any:
    """The value of a key that may be one number, or the same number for each layer."""
    value = config.content[key]
    if not isinstance(value, list):
        return value
    if len(value) < layers or len(set(map(repr, value))) != 1:
        raise InputError(f"{config.path}: {key} differs between layers, or is not there for each of the {layers}")
    return value[0]


def read_bailing_moe(config: HfConfig) -> TransformerModel:
    """Read a Ling or Ring configuration (bailing_moe): softmax scores, no norm of queries and keys."""
    config.require_value("use_bias", False, default=False)
    keys = MoeConfigKeys(
        *_QWEN_KEYS,
        dense_ffn="intermediate_size",
        shared_count="num_shared_experts",
        first_dense_count="first_k_dense_replace",
    )
    family = LlamaFamily(qkv_bias=config.boolean("use_qkv_bias", default=False), moe_keys=keys)
    return family.read_model(config)


def read_bailing_moe_v2(config: HfConfig) -> TransformerModel:
    """Read a Ling 2 or Ring 2 configuration: sigmoid scores with a correction bias, norms of queries and keys."""
    config.require_value("use_bias", False, default=False)
    config.require_value("score_function", "sigmoid", default="sigmoid")
    keys = MoeConfigKeys(
        *_QWEN_KEYS,
        dense_ffn="intermediate_size",
        shared_count="num_shared_experts",
        first_dense_count="first_k_dense_replace",
        scores=ScoreFunction.SIGMOID,
        correction_bias=config.boolean("moe_router_enable_expert_bias", default=True),
    )
    family = LlamaFamily(
        qk_norm=QkNorm.PER_HEAD if config.boolean("use_qk_norm", default=True) else None,
        qkv_bias=config.boolean("use_qkv_bias", default=False),
        moe_keys=keys,
        has_mtp=True,
    )
    return family.read_model(config)


def read_dots1(config: HfConfig) -> TransformerModel:
    """Read a dots.llm1 configuration: Qwen 3's attention, DeepSeek-V3's experts, whose routing it calls noaux_tc."""
    family = LlamaFamily(qk_norm=QkNorm.PER_HEAD, moe_keys=MOE_CONFIG_KEYS["deepseek_v3"])
    scores = config.content.get("scoring_func", "sigmoid")
    return family.read_model(config.with_values(scoring_func="sigmoid" if scores == "noaux_tc" else scores))


LLAMA_LIKE_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {
        "baichuan": read_baichuan,
        "internlm": read_internlm,
        "internlm2": read_internlm,
        "internlm3": read_internlm3,
        "granite": read_granite,
        "ernie4_5": read_ernie,
        "hunyuan_v1_dense": read_hunyuan,
        "seed_oss": read_seed_oss,
        "olmo3": read_olmo3,
        "exaone4": read_exaone4,
        "mimo": LlamaFamily(attention_bias_is_qkv=True, windows=upper_layer_windows, has_mtp=True).read_model,
        "ministral3": LlamaFamily(windows=uniform_windows).read_model,
    }
)
"""Readers of dense families."""
MOE_LLAMA_LIKE_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {
        "granitemoe": read_granitemoe,
        "minimax_m2": read_minimax_m2,
        "ernie4_5_moe": read_ernie_moe,
        "hunyuan_v1_moe": read_hunyuan_moe,
        "hunyuan": read_hunyuan_original,
        "bailing_moe": read_bailing_moe,
        "bailing_moe_v2": read_bailing_moe_v2,
        "dots1": read_dots1,
    }
)
"""Readers of families with experts."""
