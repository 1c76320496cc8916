"""What may a scenario file say about linear attention and state space layers?"""

from enum import Enum
from typing import ClassVar

from clustersim.scenario.config_reader import ConfigModel, TokenCount, Width


class MixerKind(Enum):
    """A layer's mixer of tokens; the values but the first and the last are keys of `model` with its sizes."""

    ATTENTION = "attention"
    MAMBA = "mamba"
    MAMBA1 = "mamba1"
    GATED_DELTA_NET = "gated_delta_net"
    KDA = "kda"
    LIGHTNING = "lightning"
    RWKV7 = "rwkv7"
    MOBA = "moba"
    NSA = "nsa"
    NONE = "none"


class MambaConfig(ConfigModel):
    """`model.mamba`: Mamba 2 layers (letter M of a pattern)."""

    example: ClassVar[str] = "{num_heads: 128, head_dim: 64, state_dim: 128, num_groups: 8}"
    num_heads: Width = 128
    """heads of the state space"""
    head_dim: Width = 64
    """channels of a head"""
    state_dim: Width = 128
    """state dimensions of each channel"""
    num_groups: Width = 8
    """groups of heads that share input and output maps (B, C)"""
    conv_kernel_dim: Width = 4
    """taps of the short convolution"""


class Mamba1Config(ConfigModel):
    """`model.mamba1`: Mamba 1 layers (letter S of a pattern)."""

    example: ClassVar[str] = "{channels: 8192, state_dim: 16, step_rank: 256}"
    channels: Width
    """channels, usually 2 x hidden"""
    state_dim: Width = 16
    """state dimensions of each channel"""
    step_rank: Width
    """rank of the step sizes, usually hidden / 16"""
    conv_kernel_dim: Width = 4
    """taps of the short convolution"""


class GatedDeltaNetConfig(ConfigModel):
    """`model.gated_delta_net`: gated delta net layers (letter G of a pattern)."""

    example: ClassVar[str] = "{num_key_heads: 16, num_value_heads: 32, key_head_dim: 128, value_head_dim: 128}"
    num_key_heads: Width = 16
    """heads of queries and keys"""
    num_value_heads: Width = 32
    """heads of values, a multiple of num_key_heads"""
    key_head_dim: Width = 128
    """dimensions of each query and key head"""
    value_head_dim: Width = 128
    """dimensions of each value head"""
    conv_kernel_dim: Width = 4
    """taps of the short convolution"""


class KdaConfig(ConfigModel):
    """`model.kda`: Kimi Delta Attention layers (letter K of a pattern)."""

    example: ClassVar[str] = "{num_heads: 32, key_head_dim: 128, value_head_dim: 128}"
    num_heads: Width = 32
    """heads"""
    key_head_dim: Width = 128
    """dimensions of each query and key head"""
    value_head_dim: Width = 128
    """dimensions of each value head"""
    gate_rank: Width | None = None
    """rank of the projections of decay and output gate; left out: value_head_dim"""
    conv_kernel_dim: Width = 4
    """taps of the short convolution"""


class LightningConfig(ConfigModel):
    """`model.lightning`: lightning attention layers (letter L of a pattern)."""

    example: ClassVar[str] = "{num_heads: 64, head_dim: 128}"
    num_heads: Width
    """heads"""
    head_dim: Width
    """dimensions of each head"""


class Rwkv7Config(ConfigModel):
    """`model.rwkv7`: time mixing of RWKV-7 layers (letter R of a pattern)."""

    example: ClassVar[str] = "{num_heads: 32, head_dim: 64}"
    num_heads: Width
    """heads"""
    head_dim: Width = 64
    """dimensions of each head"""
    decay_low_rank_dim: Width = 64
    """rank of the decay"""
    gate_low_rank_dim: Width = 128
    """rank of the output gate"""
    a_low_rank_dim: Width = 64
    """rank of the in-context learning rate"""
    v_low_rank_dim: Width = 32
    """rank of the share of the first layer's values"""


class MobaConfig(ConfigModel):
    """`model.moba`: mixture of block attention (MoBA), attention to the best blocks of keys and a query's own."""

    example: ClassVar[str] = "{chunk_size: 512, topk: 3}"
    chunk_size: TokenCount
    """keys of a block"""
    topk: TokenCount
    """blocks that a query attends to, its own among them"""


class NsaConfig(ConfigModel):
    """`model.nsa`: native sparse attention (NSA), to compressed keys, the best blocks of keys and a sliding window."""

    example: ClassVar[str] = "{kernel_size: 32, kernel_stride: 16, block_size: 64, topk: 16, window_size: 512}"
    kernel_size: TokenCount = 32
    """tokens whose keys, and values, are compressed to one"""
    kernel_stride: TokenCount = 16
    """tokens from one compressed key to the next"""
    block_size: TokenCount = 64
    """keys of a selected block"""
    topk: TokenCount = 16
    """blocks that a query attends to, its own among them"""
    window_size: TokenCount = 512
    """keys of the sliding window, the token's own among them"""
