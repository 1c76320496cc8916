"""Which mixer does a section of sizes describe? Imported where a scenario has one."""

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention
from clustersim.model.mixer import Mixer
from clustersim.model.mixers.block_attention import BlockAttention
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet
from clustersim.model.mixers.kimi_delta_attention import KimiDeltaAttention
from clustersim.model.mixers.lightning_attention import LightningAttention
from clustersim.model.mixers.mamba1 import Mamba1
from clustersim.model.mixers.mamba2 import Mamba2
from clustersim.model.mixers.native_sparse_attention import NativeSparseAttention
from clustersim.model.mixers.rwkv7 import Rwkv7
from clustersim.scenario.config.mixers import (
    GatedDeltaNetConfig,
    KdaConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MixerKind,
    MobaConfig,
    NsaConfig,
    Rwkv7Config,
)
from clustersim.scenario.config.model import ModelConfig

_LinearSection = MambaConfig | Mamba1Config | GatedDeltaNetConfig | KdaConfig | LightningConfig | Rwkv7Config


def build_mixer(section: _LinearSection) -> Mixer:
    """The linear mixer with the sizes that a section gives."""
    match section:
        case MambaConfig():
            return Mamba2(
                *(section.num_heads, section.head_dim, section.state_dim, section.num_groups, section.conv_kernel_dim)
            )
        case Mamba1Config():
            return Mamba1(section.channels, section.state_dim, section.step_rank, section.conv_kernel_dim)
        case GatedDeltaNetConfig():
            return _gated_delta_net(section)
        case KdaConfig():
            rank = section.gate_rank or section.value_head_dim
            sizes = (section.num_heads, section.key_head_dim, section.value_head_dim, rank)
            return KimiDeltaAttention(*sizes, conv_taps=section.conv_kernel_dim)
        case LightningConfig():
            return LightningAttention(section.num_heads, section.head_dim)
        case Rwkv7Config():
            ranks = section.decay_low_rank_dim, section.gate_low_rank_dim, section.a_low_rank_dim
            return Rwkv7(section.num_heads, section.head_dim, *ranks, section.v_low_rank_dim)


def _gated_delta_net(section: GatedDeltaNetConfig) -> GatedDeltaNet:
    if section.num_value_heads % section.num_key_heads:
        raise InputError(
            f"{MixerKind.GATED_DELTA_NET.value}.num_value_heads: {section.num_value_heads} is not a multiple of "
            f"num_key_heads {section.num_key_heads}"
        )
    return GatedDeltaNet(
        *(section.num_key_heads, section.num_value_heads, section.key_head_dim, section.value_head_dim),
        conv_taps=section.conv_kernel_dim,
    )


def with_selected_keys(kind: MixerKind, attention: FullAttention, config: ModelConfig) -> Mixer:
    """Attention to selected keys only, MOBA or NSA."""
    return _with_blocks(attention, config) if kind is MixerKind.MOBA else _with_branches(attention, config)


def _with_blocks(attention: FullAttention, config: ModelConfig) -> Mixer:
    """Attention to blocks of keys."""
    if config.moba is None:
        raise InputError(f"moba: is missing; write such as {MobaConfig.example}")
    return BlockAttention(attention, config.moba.chunk_size, config.moba.topk)


def _with_branches(attention: FullAttention, config: ModelConfig) -> Mixer:
    """Attention to compressed keys, blocks of keys and a window."""
    if (nsa := config.nsa) is None:
        raise InputError(f"nsa: is missing; write such as {NsaConfig.example}")
    if nsa.kernel_size % nsa.kernel_stride or nsa.block_size % nsa.kernel_stride:
        raise InputError(
            f"nsa.kernel_stride: {nsa.kernel_stride} does not divide kernel_size {nsa.kernel_size} and block_size "
            f"{nsa.block_size}, so that blocks have no whole compressed keys"
        )
    return NativeSparseAttention(
        attention, nsa.kernel_size, nsa.kernel_stride, nsa.block_size, nsa.topk, nsa.window_size
    )
