"""Readers of configurations whose layers differ in their mixer: linear attention, state spaces, attention.

Defaults are those of the configuration classes in transformers (src/transformers/models/*/configuration_*.py) or of
the released repositories. Nemotron-H's layers are a mixer or an MLP each (`hybrid_override_pattern`), Jamba's,
Granite 4's, Qwen3-Next's, MiniMax's and Kimi Linear's have both; Falcon-H1's have attention next to Mamba 2.
Multi-token prediction layers of Nemotron-H (`mtp_hybrid_override_pattern`) and Qwen3-Next have attention and an MLP or
experts; other families have none. Left out: multipliers of
embeddings, residuals and logits (Falcon-H1, Granite 4).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.hf_fields import HfConfig
from clustersim.model.hf_mla import read_latent_attention
from clustersim.model.hf_moe import MoeConfigKeys
from clustersim.model.hf_rmsnorm import rmsnorm_model
from clustersim.model.layer_stack import (
    DenseMlp,
    LayerSpec,
    MlpSpec,
    MlpType,
    MoeMlp,
    Router,
    ScoreFunction,
)
from clustersim.model.mixer import Mixer
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet
from clustersim.model.mixers.kimi_delta_attention import KimiDeltaAttention
from clustersim.model.mixers.lightning_attention import LightningAttention
from clustersim.model.mixers.mamba1 import Mamba1
from clustersim.model.mixers.mamba2 import Mamba2
from clustersim.model.parallel_mixers import ParallelMixers
from clustersim.model.shared_block_spec import SharedBlock
from clustersim.model.transformer import TransformerModel

_FULL, _LINEAR, _MAMBA, _ATTENTION = "full_attention", "linear_attention", "mamba", "attention"
_HYBRID: Final = "hybrid"
_NEMOTRON_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_DENSE_QWEN: Final = "qwen3_5_text"
_QWEN_MOE: Final = MoeConfigKeys(
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    dense_ffn="intermediate_size",
    shared_ffn="shared_expert_intermediate_size",
    shared_gate=True,
    moe_layer_step="decoder_sparse_step",
    dense_layers="mlp_only_layers",
)
_KIMI_MOE: Final = MoeConfigKeys(
    *("num_experts", "num_experts_per_token", "moe_intermediate_size"),
    dense_ffn="intermediate_size",
    shared_count="num_shared_experts",
    first_dense_count="first_k_dense_replace",
    moe_layer_step="moe_layer_freq",
    counts_from_zero=True,
    scores=ScoreFunction.SIGMOID,
    correction_bias=True,
)
_MINIMAX_MOE: Final = MoeConfigKeys("num_local_experts", "num_experts_per_tok", "intermediate_size")
_GRANITE_MOE: Final = MoeConfigKeys(
    "num_local_experts", "num_experts_per_tok", "intermediate_size", shared_ffn="shared_intermediate_size"
)


def _read_attention(config: HfConfig, **options: Any) -> FullAttention:
    """Attention by the usual keys; options: other fields."""
    config.require_value("attention_bias", False, default=False)
    heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    kv_heads = config.positive_int("num_key_value_heads", heads)
    config.require_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    head_dim = config.positive_int("head_dim", config.positive_int("attention_head_dim", max(1, hidden // heads)))
    return FullAttention(heads, kv_heads, head_dim, **options)


def read_nemotron_h(config: HfConfig) -> TransformerModel:
    """Nemotron-H, Nemotron Nano 2 and 3: Mamba 2, attention without positions, MLPs and experts."""
    if config.content.get("moe_latent_size"):
        raise InputError(f"{config.path}: moe_latent_size: experts behind a projection of their own are not modelled")
    mamba = Mamba2(
        config.positive_int("mamba_num_heads", 128),
        config.positive_int("mamba_head_dim", 64),
        config.positive_int("ssm_state_size", 128),
        config.positive_int("n_groups", 8),
        config.positive_int("conv_kernel", 4),
        config.boolean("use_conv_bias", default=True),
    )
    layers = {
        "mamba": lambda: LayerSpec(mamba, None),
        "attention": lambda: LayerSpec(_read_attention(config, rotary_percent=0.0), None),
        "mlp": lambda: LayerSpec(None, DenseMlp(config.positive_int("intermediate_size"), MlpType.GELU)),
        "moe": lambda: LayerSpec(None, _nemotron_experts(config)),
    }
    kinds = _nemotron_layers(config)
    specs = {kind: layers[kind]() for kind in dict.fromkeys(kinds)}
    mtp = [layers[kind]() for kind in _nemotron_mtp_layer(config)]
    mtp_spec = replace(mtp[0], mlp=mtp[-1].mlp) if mtp else None
    model = rmsnorm_model(config, (specs[kind] for kind in kinds))
    return replace(model, mtp_layers=config.mtp_layer_count, mtp_spec=mtp_spec)


def _nemotron_mtp_layer(config: HfConfig) -> list[str]:
    """Kinds of what a multi-token prediction layer consists of: a mixer, an MLP, or one before the other."""
    if not config.mtp_layer_count:
        return []
    pattern = config.content.get("mtp_hybrid_override_pattern", "*E")
    if not isinstance(pattern, str) or not re.fullmatch(r"[M*][-E]?|[-E]", pattern):
        raise InputError(
            f"{config.path}: mtp_hybrid_override_pattern is {pattern!r}, not a mixer (M or *), an MLP (- or E) or one "
            "before the other"
        )
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _nemotron_layers(config: HfConfig) -> list[str]:
    """The kind of each layer, by a pattern or a list."""
    pattern = config.content.get("hybrid_override_pattern")
    count = config.layer_count("num_hidden_layers")
    if pattern is None:
        listed = config.per_layer_values("layers_block_type", tuple(_NEMOTRON_LETTERS.values()), count)
        if listed is None:
            raise InputError(f"{config.path}: has no hybrid_override_pattern, which a {config.family} model needs")
        return listed
    if not isinstance(pattern, str) or len(pattern) != count or not set(pattern) <= set(_NEMOTRON_LETTERS):
        raise InputError(
            f"{config.path}: hybrid_override_pattern is {pattern!r}, not a letter of "
            f"{' '.join(_NEMOTRON_LETTERS)} for each of the {count} layers"
        )
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _nemotron_experts(config: HfConfig) -> MoeMlp:
    """Experts of two matrices each (squared ReLU)."""
    groups = config.positive_int("n_group", 1)
    max_groups = config.positive_int("topk_group", groups)
    shared = config.positive_int("moe_shared_expert_intermediate_size") * config.nonnegative_int("n_shared_experts", 1)
    return MoeMlp(
        config.positive_int("n_routed_experts"),
        config.positive_int("num_experts_per_tok"),
        config.positive_int("moe_intermediate_size"),
        MlpType.GELU,
        shared=shared,
        router=Router(ScoreFunction.SIGMOID, groups, max_groups if max_groups < groups else None, bias=True),
    )


def _mixed(config: HfConfig, mixers: Mapping[str, Mixer], kinds: list[str], mlps: list[MlpSpec]) -> TransformerModel:
    """A model whose layers have one of several mixers and an MLP each."""
    return rmsnorm_model(config, (LayerSpec(mixers[kind], mlp) for kind, mlp in zip(kinds, mlps, strict=True)))


def _periodic_kinds(config: HfConfig, key: str, default: int, count: int) -> list[str]:
    """Attention in every n-th layer, linear attention in the others."""
    period = config.positive_int(key, default)
    return [_LINEAR if layer % period else _FULL for layer in range(1, count + 1)]


def read_qwen3_next(config: HfConfig) -> TransformerModel:
    """Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every fourth layer; experts, or MLPs."""
    config.require_value("attn_output_gate", True, default=True)
    count = config.layer_count("num_hidden_layers")
    delta_net = GatedDeltaNet(
        config.positive_int("linear_num_key_heads", 16),
        config.positive_int("linear_num_value_heads", 32),
        config.positive_int("linear_key_head_dim", 128),
        config.positive_int("linear_value_head_dim", 128),
        config.positive_int("linear_conv_kernel_dim", 4),
    )
    attention = _read_attention(
        config, qk_norm=QkNorm.PER_HEAD, rotary_percent=config.rotary_fraction(0.25), attention_output_gate=True
    )
    kinds = config.per_layer_values("layer_types", (_LINEAR, _FULL), count) or _periodic_kinds(
        config, "full_attention_interval", 4, count
    )
    is_dense = config.family == _DENSE_QWEN
    dense = [DenseMlp(config.positive_int("intermediate_size"), MlpType.SWIGLU)] * count if is_dense else []
    mlps: list[MlpSpec] = [*dense] or _QWEN_MOE.read_mlps(config, count)
    model = _mixed(config, {_LINEAR: delta_net, _FULL: attention}, kinds, mlps)
    mtp_layers = config.nonnegative_int("mtp_num_hidden_layers", 0)
    return replace(model, mtp_layers=mtp_layers, mtp_spec=LayerSpec(attention, mlps[-1]))


def read_kimi_linear(config: HfConfig) -> TransformerModel:
    """Kimi Linear: Kimi Delta Attention, and latent attention without positions in every fourth layer; experts."""
    count = config.layer_count("num_hidden_layers")
    linear = config.content.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise InputError(f"{config.path}: linear_attn_config is {linear!r}, not a mapping")
    section = HfConfig(config.path, linear, config.family)
    head_dim = section.positive_int("head_dim")
    kda = KimiDeltaAttention(
        *(section.positive_int("num_heads"), head_dim, head_dim, head_dim),
        conv_taps=section.positive_int("short_conv_kernel_size", 4),
    )
    full_layers = linear.get("full_attn_layers")
    if not isinstance(full_layers, list) or not all(type(item) is int and 1 <= item <= count for item in full_layers):
        raise InputError(f"{config.path}: full_attn_layers is {full_layers!r}, not a list of layers from 1 to {count}")
    attention = read_latent_attention(config)
    kinds = [_FULL if layer in full_layers else _LINEAR for layer in range(1, count + 1)]
    return _mixed(config, {_LINEAR: kda, _FULL: attention}, kinds, _KIMI_MOE.read_mlps(config, count))


def read_minimax(config: HfConfig) -> TransformerModel:
    """MiniMax-Text-01 and M1: lightning attention, and attention in every eighth layer; experts."""
    count = config.layer_count("num_hidden_layers")
    rotary = config.positive_int("rotary_dim", 64) / config.positive_int("head_dim", 128)
    attention = _read_attention(config, rotary_percent=min(1.0, rotary))
    listed = config.per_layer_values("attn_type_list", (0, 1), count)
    if listed is not None:
        kinds = [_FULL if value else _LINEAR for value in listed]
    else:
        kinds = config.per_layer_values("layer_types", (_LINEAR, _FULL), count) or _periodic_kinds(
            config, "full_attention_interval", 2, count
        )
    lightning = LightningAttention(attention.heads, attention.head_dim)
    return _mixed(config, {_LINEAR: lightning, _FULL: attention}, kinds, _MINIMAX_MOE.read_mlps(config, count))


def read_jamba(config: HfConfig) -> TransformerModel:
    """Jamba: Mamba 1 with inner norms, attention without positions in every eighth layer; experts in every second."""
    count, hidden = config.layer_count("num_hidden_layers"), config.positive_int("hidden_size")
    rank = config.content.get("mamba_dt_rank", "auto")
    mamba = Mamba1(
        config.positive_int("mamba_expand", 2) * hidden,
        config.positive_int("mamba_d_state", 16),
        -(-hidden // 16) if rank in (None, "auto") else config.positive_int("mamba_dt_rank"),
        config.positive_int("mamba_d_conv", 4),
        config.boolean("mamba_conv_bias", default=True),
        inner_norms=True,
    )
    attention = _read_attention(config, rotary_percent=0.0)
    ffn = config.positive_int("intermediate_size")
    experts, top_k = config.positive_int("num_experts", 16), config.positive_int("num_experts_per_tok", 2)
    moe = MoeMlp(experts, top_k, ffn, MlpType.SWIGLU)
    mlps: list[MlpSpec] = [
        moe if is_moe and moe.experts > 1 else DenseMlp(ffn, MlpType.SWIGLU)
        for is_moe in _offset_layers(config, "expert_layer", (2, 1), count)
    ]
    kinds = [_FULL if is_full else _LINEAR for is_full in _offset_layers(config, "attn_layer", (8, 4), count)]
    return _mixed(config, {_LINEAR: mamba, _FULL: attention}, kinds, mlps)


def _offset_layers(config: HfConfig, prefix: str, defaults: tuple[int, int], count: int) -> list[bool]:
    """Whether each layer is the one at an offset of each period."""
    period = config.positive_int(f"{prefix}_period", defaults[0])
    offset = config.nonnegative_int(f"{prefix}_offset", defaults[1])
    return [layer % period == offset for layer in range(count)]


def _read_mamba2(config: HfConfig, *, heads: int, gated_norm: bool = True) -> Mamba2:
    """Mamba 2 by the keys of Granite 4 and Falcon-H1."""
    return Mamba2(
        heads,
        config.positive_int("mamba_d_head"),
        config.positive_int("mamba_d_state", 256),
        config.positive_int("mamba_n_groups", 1),
        config.positive_int("mamba_d_conv", 4),
        config.boolean("mamba_conv_bias", default=True),
        gated_norm,
    )


def read_granite_hybrid(config: HfConfig) -> TransformerModel:
    """Granite 4: Mamba 2, and attention without positions; experts with a shared one, or an MLP of its width."""
    count = config.layer_count("num_hidden_layers")
    kinds = config.per_layer_values("layer_types", (_MAMBA, _ATTENTION), count)
    if kinds is None:
        raise InputError(f"{config.path}: has no layer_types, which a {config.family} model needs")
    rotary = 1.0 if config.content.get("position_embedding_type") == "rope" else 0.0
    mixers = {
        _MAMBA: _read_mamba2(config, heads=config.positive_int("mamba_n_heads", 128)),
        _ATTENTION: _read_attention(config, rotary_percent=rotary),
    }
    if config.nonnegative_int("num_local_experts", 0) > 0:
        mlps = _GRANITE_MOE.read_mlps(config, count)
    else:
        mlps = [DenseMlp(config.positive_int("shared_intermediate_size"), MlpType.SWIGLU)] * count
    return _mixed(config, mixers, kinds, mlps)


def read_falcon_h1(config: HfConfig) -> TransformerModel:
    """Falcon-H1: attention and Mamba 2 side by side in every layer."""
    channels = config.positive_int("mamba_d_ssm")
    heads = config.positive_int("mamba_n_heads")
    config.require_divides("mamba_n_heads", heads, "mamba_d_ssm", channels)
    gated_norm = config.boolean("mamba_rms_norm", default=False)
    mixer = ParallelMixers(_read_attention(config), _read_mamba2(config, heads=heads, gated_norm=gated_norm))
    mlp = DenseMlp(config.positive_int("intermediate_size"), MlpType.SWIGLU)
    return rmsnorm_model(config, [LayerSpec(mixer, mlp)] * config.layer_count("num_hidden_layers"))


def read_zamba2(config: HfConfig) -> TransformerModel:
    """Zamba 2: Mamba 2, and before some layers one of a few blocks of attention and an MLP that they share in turn."""
    for key in ("add_bias_linear", "use_long_context"):
        config.require_value(key, False, default=False)
    count, hidden = config.layer_count("num_hidden_layers"), config.positive_int("hidden_size")
    kinds = config.per_layer_values("layers_block_type", (_MAMBA, _HYBRID), count)
    if kinds is None:
        raise InputError(f"{config.path}: has no layers_block_type, which a {config.family} model needs")
    inner, heads = config.positive_int("mamba_expand", 2) * hidden, config.positive_int("n_mamba_heads", 8)
    config.require_divides("n_mamba_heads", heads, "mamba_expand x hidden_size", inner)
    mamba = Mamba2(
        *(heads, inner // heads, config.positive_int("mamba_d_state", 64), config.positive_int("mamba_ngroups", 1)),
        conv_taps=config.positive_int("mamba_d_conv", 4),
    )
    blocks = _zamba2_blocks(config, kinds.count(_HYBRID), hidden)
    specs = (LayerSpec(mamba, None, shared=next(blocks) if kind == _HYBRID else None) for kind in kinds)
    return rmsnorm_model(config, specs, tied=True)


def _zamba2_blocks(config: HfConfig, uses: int, hidden: int) -> Iterator[SharedBlock]:
    """Each use of a shared block, in order of the layers; its attention is as wide as stream and embedding."""
    blocks, attention_heads = config.positive_int("num_mem_blocks", 1), config.positive_int("num_attention_heads", 32)
    config.require_divides("num_attention_heads", attention_heads, "2 x hidden_size", 2 * hidden)
    head_dim = 2 * hidden // attention_heads
    rotary = 1.0 if config.boolean("use_mem_rope", default=False) else 0.0
    attention = _read_attention(config.with_values(head_dim=head_dim), rotary_percent=rotary)
    first = SharedBlock(
        *(0, attention, config.positive_int("intermediate_size", 4 * hidden), config.positive_int("adapter_rank", 128)),
        adapts_attention=config.boolean("use_shared_attention_adapter", default=False),
    )
    return (replace(first, index=use % blocks, holds_weights=use < blocks) for use in range(uses))


HYBRID_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {
        "nemotron_h": read_nemotron_h,
        "qwen3_next": read_qwen3_next,
        "qwen3_5_moe_text": read_qwen3_next,
        _DENSE_QWEN: read_qwen3_next,
        "kimi_linear": read_kimi_linear,
        "minimax": read_minimax,
        "minimax_text_01": read_minimax,
        "minimax_m1": read_minimax,
        "jamba": read_jamba,
        "granitemoehybrid": read_granite_hybrid,
        "falcon_h1": read_falcon_h1,
        "zamba2": read_zamba2,
    }
)
