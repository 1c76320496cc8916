"""Published models whose layers have linear attention or state spaces, with the sources of their dimensions."""

from typing import Any, Final

from clustersim.model.preset_builder import ModelPreset, config_dimensions, preset_from_config

_NEMOTRON_H: Final = "Nemotron-H, arXiv:2504.03624, Table 1"
_NANO2: Final = "Nemotron Nano 2, arXiv:2508.14444, section 2.1"
_PATTERN_8B: Final = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_PATTERN_47B: Final = (
    "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
)
_PATTERN_56B: Final = "M-M-M-M" + 10 * "*-M-M-M-M-M" + "-"
_PATTERN_9B: Final = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_PATTERN_12B: Final = "M-M-M-M" + 6 * "*-M-M-M-M" + "-"


def _nemotron(name: str, source: str, pattern: str, sizes: tuple[int, ...], **mamba: int) -> ModelPreset:
    """A Nemotron-H; sizes: hidden, ffn, heads, positions; mamba: keys that differ from the family's defaults."""
    hidden, ffn, heads, positions = sizes
    content = config_dimensions(len(pattern), hidden, ffn, heads, 8, 131072, positions)
    return preset_from_config(
        name, "nemotron_h", source, {**content, "head_dim": 128, "hybrid_override_pattern": pattern, **mamba}
    )


def _zamba2(name: str, hybrid_layers: tuple[int, ...], sizes: tuple[int, ...], **keys: Any) -> ModelPreset:
    """A Zamba 2; hybrid_layers: those with a shared block; sizes: layers, hidden, Mamba 2's heads and state, blocks."""
    layers, hidden, mamba_heads, state, blocks = sizes
    content = {
        **config_dimensions(layers, hidden, 4 * hidden, 32, 32, 32000, 4096),
        "layers_block_type": ["hybrid" if layer in hybrid_layers else "mamba" for layer in range(layers)],
        **{"n_mamba_heads": mamba_heads, "mamba_d_state": state, "num_mem_blocks": blocks},
    }
    source = f"Zamba 2, arXiv:2411.15242, section 2; Zyphra/{name.replace('zamba2', 'Zamba2').replace('b', 'B')}"
    return preset_from_config(name, "zamba2", source, {**content, **keys})


def _rwkv7(name: str, sizes: tuple[int, int], ranks: tuple[int, int, int, int]) -> ModelPreset:
    """An RWKV-7; sizes: layers, hidden; ranks: of decay, gate, in-context learning rate and value."""
    keys = ("num_hidden_layers", "hidden_size", "decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim")
    content = dict(zip((*keys, "v_low_rank_dim"), (*sizes, *ranks), strict=True))
    return preset_from_config(name, "rwkv7", f"RWKV-7, arXiv:2503.14456, section 5; fla-hub/{name}-world", content)


_GRANITE_SMALL: Final[dict[str, Any]] = {
    "layer_types": 4 * [*5 * ["mamba"], "attention", *4 * ["mamba"]],
    **{"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
    **{"num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536},
    "tie_word_embeddings": True,
}
_KIMI_LINEAR: Final[dict[str, Any]] = {
    "linear_attn_config": {
        **{"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32},
        "short_conv_kernel_size": 4,
    },
    **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024},
    "first_k_dense_replace": 1,
}
_QWEN3_NEXT: Final[dict[str, Any]] = {
    "head_dim": 256,
    **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
    "shared_expert_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,  # of the released weights; the file does not say
}

HYBRID_PRESETS: Final = (
    _nemotron("nemotron-h-8b", f"{_NEMOTRON_H}; nvidia/Nemotron-H-8B-Base-8K", _PATTERN_8B, (4096, 21504, 32, 8192)),
    _nemotron(
        *("nemotron-h-47b", f"{_NEMOTRON_H}; nvidia/Nemotron-H-47B-Base-8K", _PATTERN_47B, (8192, 30720, 64, 8192)),
        mamba_num_heads=256,
        ssm_state_size=256,
    ),
    _nemotron(
        *("nemotron-h-56b", f"{_NEMOTRON_H}; nvidia/Nemotron-H-56B-Base-8K", _PATTERN_56B, (8192, 32768, 64, 8192)),
        mamba_num_heads=256,
        ssm_state_size=256,
    ),
    _nemotron(
        *("nemotron-nano-9b-v2", f"{_NANO2}; nvidia/NVIDIA-Nemotron-Nano-9B-v2", _PATTERN_9B),
        (4480, 15680, 40, 131072),
        mamba_head_dim=80,
    ),
    _nemotron(
        *("nemotron-nano-12b-v2", f"{_NANO2}; nvidia/NVIDIA-Nemotron-Nano-12B-v2", _PATTERN_12B),
        (5120, 20480, 40, 131072),
        mamba_head_dim=80,
    ),
    preset_from_config(
        "qwen3-next-80b-a3b",
        "qwen3_next",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        config_dimensions(48, 2048, 5120, 16, 2, 151936, 262144) | _QWEN3_NEXT,
    ),
    preset_from_config(
        "kimi-linear-48b-a3b",
        "kimi_linear",
        "Kimi Linear, arXiv:2510.26692, section 5; moonshotai/Kimi-Linear-48B-A3B-Base",
        config_dimensions(27, 2304, 9216, 32, 32, 163840, 1048576) | _KIMI_LINEAR,
    ),
    preset_from_config(
        "minimax-text-01",
        "minimax",
        "MiniMax-01, arXiv:2501.08313, section 2; MiniMaxAI/MiniMax-Text-01",
        {
            **config_dimensions(80, 6144, 9216, 64, 8, 200064, 10240000),
            **{"head_dim": 128, "rotary_dim": 64, "attn_type_list": 10 * [*7 * [0], 1]},
            **{"num_local_experts": 32, "num_experts_per_tok": 2},
        },
    ),
    preset_from_config(
        "jamba-1.5-mini",
        "jamba",
        "Jamba-1.5, arXiv:2408.12570, section 2; ai21labs/AI21-Jamba-1.5-Mini",
        config_dimensions(32, 4096, 14336, 32, 8, 65536, 262144),
    ),
    preset_from_config(
        "jamba-1.5-large",
        "jamba",
        "Jamba-1.5, arXiv:2408.12570, section 2; ai21labs/AI21-Jamba-1.5-Large",
        config_dimensions(72, 8192, 24576, 64, 8, 65536, 262144),
    ),
    preset_from_config(
        "falcon-h1-34b",
        "falcon_h1",
        "Falcon-H1, arXiv:2507.22448, Table 1; tiiuae/Falcon-H1-34B-Base",
        {
            **config_dimensions(72, 5120, 21504, 20, 4, 261120, 262144),
            **{"head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_d_state": 256},
            **{"mamba_n_groups": 2, "mamba_rms_norm": True},
        },
    ),
    preset_from_config(
        "granite-4.0-h-small",
        "granitemoehybrid",
        "ibm-granite/granite-4.0-h-small",
        config_dimensions(40, 4096, 768, 32, 8, 100352, 131072) | _GRANITE_SMALL,
    ),
    _rwkv7("rwkv7-0.1b", (12, 768), (64, 128, 64, 32)),
    _rwkv7("rwkv7-0.4b", (24, 1024), (64, 128, 64, 32)),
    _rwkv7("rwkv7-1.5b", (24, 2048), (96, 256, 96, 64)),
    _rwkv7("rwkv7-2.9b", (32, 2560), (96, 320, 96, 64)),
    _zamba2(
        *("zamba2-1.2b", (5, 11, 17, 23, 29, 35), (38, 2048, 64, 128, 1)),
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    ),
    _zamba2("zamba2-2.7b", (6, 12, 18, 24, 30, 36, 42, 47, 51), (54, 2560, 80, 64, 2)),
    _zamba2("zamba2-7b", (6, *range(11, 78, 6)), (81, 3584, 112, 64, 2), mamba_ngroups=2, use_mem_rope=True),
)
