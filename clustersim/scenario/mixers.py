"""Which mixer has each layer of a scenario's model?

`model.mixer` is that of all layers, or of a group of `model.stack`; with `linear_attention_freq` every n-th layer
has attention and the others the one linear mixer whose sizes the section gives; `hybrid_layer_pattern` gives each
layer a letter, in Megatron-LM's notation (megatron/core/models/hybrid/hybrid_layer_allocation.py), extended by
letters for mixers that it has not: such a layer is a mixer or an MLP, with a norm and a residual connection of its
own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MlpSpec, MoeMlp, layer_specs, stack_layers
from clustersim.model.mixer import Mixer
from clustersim.model.mixers.block_attention import BlockAttention
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet
from clustersim.model.mixers.kimi_delta_attention import KimiDeltaAttention
from clustersim.model.mixers.lightning_attention import LightningAttention
from clustersim.model.mixers.mamba1 import Mamba1
from clustersim.model.mixers.mamba2 import Mamba2
from clustersim.model.mixers.native_sparse_attention import NativeSparseAttention
from clustersim.model.mixers.rwkv7 import Rwkv7
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.transformer import TransformerModel
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

_SECTIONS: Final[
    Mapping[
        MixerKind,
        type[MambaConfig | Mamba1Config | GatedDeltaNetConfig | KdaConfig | LightningConfig | Rwkv7Config],
    ]
] = {
    MixerKind.MAMBA: MambaConfig,
    MixerKind.MAMBA1: Mamba1Config,
    MixerKind.GATED_DELTA_NET: GatedDeltaNetConfig,
    MixerKind.KDA: KdaConfig,
    MixerKind.LIGHTNING: LightningConfig,
    MixerKind.RWKV7: Rwkv7Config,
}
_MIXER_LETTERS: Final[Mapping[str, MixerKind]] = MappingProxyType(
    {
        **{"M": MixerKind.MAMBA, "S": MixerKind.MAMBA1, "G": MixerKind.GATED_DELTA_NET, "K": MixerKind.KDA},
        **{
            "L": MixerKind.LIGHTNING,
            "R": MixerKind.RWKV7,
            "*": MixerKind.ATTENTION,
            "+": MixerKind.ATTENTION,
            "D": MixerKind.ATTENTION,
        },
    }
)
_MLP, _EXPERTS, _MTP_SEPARATOR = "-", "E", "/"
_ATTENTION_OF_LETTER: Final[Mapping[str, tuple[type[Mixer], str]]] = MappingProxyType(
    {
        "+": (LatentAttention, "multi-head latent attention; give mla"),
        "D": (DeepseekSparseAttention, "DeepSeek's sparse attention; give mla and dsa"),
    }
)
"""What attention a letter means, and with which words."""
ATTENTION_LETTERS: Final = ("*", *_ATTENTION_OF_LETTER)
MLP_LETTERS: Final = (_MLP, _EXPERTS)
PATTERN_LETTERS: Final = (*_MIXER_LETTERS, *MLP_LETTERS)


class HybridPattern(NamedTuple):
    """Letters of layers: those of the stack, and of each multi-token prediction layer behind it, if there are any."""

    stack: str
    mtp: tuple[str, ...] = ()


def parse_pattern(pattern: str) -> HybridPattern:
    """A pattern of layers, checked; raise InputError for letters that are none of a layer, and other MTP layers.

    >>> parse_pattern("M*M-/*-/*-")
    HybridPattern(stack='M*M-', mtp=('*-', '*-'))
    """
    stack, *mtp = pattern.split(_MTP_SEPARATOR)
    unknown = [letter for letter in "".join((stack, *mtp)) if letter not in PATTERN_LETTERS]
    if not stack or unknown:
        given = f"letter {unknown[0]!r} is no layer" if unknown else "has no layer"
        hint = "; give layout.layers_per_stage" if unknown and unknown[0] == "|" else ""
        raise InputError(f"hybrid_layer_pattern: {given}{hint}; letters are {' '.join(PATTERN_LETTERS)}")
    for layer in mtp:
        is_pair = len(layer) == 2 and layer[0] in _MIXER_LETTERS and layer[1] in MLP_LETTERS
        if layer != mtp[0] or not (len(layer) == 1 or is_pair):
            raise InputError(
                f"hybrid_layer_pattern: {_MTP_SEPARATOR}{layer} is no multi-token prediction layer that is modelled; "
                "all are equal: a mixer, an MLP, or one and then the other, such as /*-/*-"
            )
    return HybridPattern(stack, tuple(mtp))


def build_mixer(kind: MixerKind, config: ModelConfig) -> Mixer:
    """The linear mixer of a kind, with the sizes that the section gives; raise InputError where it gives none."""
    section = getattr(config, kind.value)
    match section:
        case MambaConfig():
            return Mamba2(
                *(section.num_heads, section.head_dim, section.state_dim, section.num_groups, section.conv_kernel_dim)
            )
        case Mamba1Config():
            return Mamba1(section.channels, section.state_dim, section.step_rank, section.conv_kernel_dim)
        case GatedDeltaNetConfig():
            _require_multiple(kind, "num_value_heads", section.num_value_heads, "num_key_heads", section.num_key_heads)
            return GatedDeltaNet(
                *(section.num_key_heads, section.num_value_heads, section.key_head_dim, section.value_head_dim),
                conv_taps=section.conv_kernel_dim,
            )
        case KdaConfig():
            rank = section.gate_rank or section.value_head_dim
            sizes = (section.num_heads, section.key_head_dim, section.value_head_dim, rank)
            return KimiDeltaAttention(*sizes, conv_taps=section.conv_kernel_dim)
        case LightningConfig():
            return LightningAttention(section.num_heads, section.head_dim)
        case Rwkv7Config():
            ranks = section.decay_low_rank_dim, section.gate_low_rank_dim, section.a_low_rank_dim
            return Rwkv7(section.num_heads, section.head_dim, *ranks, section.v_low_rank_dim)
    raise InputError(f"{kind.value}: is missing; write such as {_SECTIONS[kind].example}")


def _require_multiple(kind: MixerKind, key: str, size: int, divisor_key: str, divisor: int) -> None:
    if size % divisor:
        raise InputError(f"{kind.value}.{key}: {size} is not a multiple of {divisor_key} {divisor}")


def with_mixers(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model with the section's mixers: in all layers, in all but every n-th, or by a pattern."""
    given = [key for key in ("mixer", "linear_attention_freq", "hybrid_layer_pattern") if getattr(config, key)]
    if len(given) > 1:
        raise InputError(f"has both {given[0]} and {given[1]}, which both say what mixer a layer has; keep one")
    if config.hybrid_layer_pattern is not None:
        return _with_pattern(model, config, parse_pattern(config.hybrid_layer_pattern))
    if config.linear_attention_freq is not None:
        return _alternate(model, _linear_mixer(config), config.linear_attention_freq)
    return model if config.mixer is None else _replace_mixers(model, config.mixer, config)


def layer_with_mixer(spec: LayerSpec, kind: MixerKind | None, config: ModelConfig) -> LayerSpec:
    """A layer of a `stack` group with the group's mixer."""
    if kind in (None, MixerKind.ATTENTION):
        return spec
    if kind in (MixerKind.MOBA, MixerKind.NSA):
        return replace(spec, mixer=_SELECTED_KEYS[kind](_plain_attention(spec.mixer, kind), config))
    return replace(spec, mixer=None if kind is MixerKind.NONE else build_mixer(kind, config))


def _plain_attention(mixer: Mixer | None, kind: MixerKind) -> FullAttention:
    """The layer's attention, from whose keys some are selected."""
    name = kind.value
    if not isinstance(mixer, FullAttention) or mixer.window or not mixer.causal:
        raise InputError(
            f"mixer: {name} is causal attention without a window to blocks of keys, which this layer has not"
        )
    if mixer.attention_sinks or mixer.attn_logit_softcapping:
        raise InputError(f"mixer: {name} has no attention_sinks and no attn_logit_softcapping; leave them out")
    return mixer


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


_SELECTED_KEYS: Final[Mapping[MixerKind, Callable[[FullAttention, ModelConfig], Mixer]]] = {
    MixerKind.MOBA: _with_blocks,
    MixerKind.NSA: _with_branches,
}


def _replace_mixers(model: TransformerModel, kind: MixerKind, config: ModelConfig) -> TransformerModel:
    return replace(model, stack=stack_layers(layer_with_mixer(spec, kind, config) for spec in layer_specs(model.stack)))


def _linear_mixer(config: ModelConfig) -> Mixer:
    """The mixer of the one section of sizes that is given."""
    kinds = [kind for kind in _SECTIONS if getattr(config, kind.value) is not None]
    if len(kinds) != 1:
        sections = ", ".join(kind.value for kind in kinds or _SECTIONS)
        raise InputError(
            f"linear_attention_freq: {config.linear_attention_freq} needs the sizes of one linear mixer; "
            f"{'it has several' if kinds else 'give one'} of {sections}"
        )
    return build_mixer(kinds[0], config)


def _alternate(model: TransformerModel, mixer: Mixer, period: int) -> TransformerModel:
    """Attention in every `period`-th layer, the mixer in the others (transformers, Qwen3-Next's interval)."""
    layers = enumerate(layer_specs(model.stack), start=1)
    return replace(
        model,
        stack=stack_layers(spec if index % period == 0 else replace(spec, mixer=mixer) for index, spec in layers),
    )


def _with_pattern(model: TransformerModel, config: ModelConfig, pattern: HybridPattern) -> TransformerModel:
    layers, mtp_layers = len(pattern.stack), len(pattern.mtp)
    if len(model.stack) > 1:
        raise InputError(f"hybrid_layer_pattern: the layers of {model.name} differ already; leave it out")
    if config.layers not in (None, layers):
        raise InputError(f"hybrid_layer_pattern: has {layers} layers, but layers is {config.layers}; leave layers out")
    if (config.mtp_layers or 0) not in (0, mtp_layers) or (config.mtp_layers == 0 and mtp_layers):
        raise InputError(
            f"hybrid_layer_pattern: has {mtp_layers} multi-token prediction layers, but mtp_layers is "
            f"{config.mtp_layers}; write them behind the others, such as M*M-/*-, and leave mtp_layers out"
        )
    template = model.stack[0].spec
    specs = {letter: _pattern_layer(template, config, letter) for letter in dict.fromkeys(pattern.stack)}
    stack = stack_layers(specs[letter] for letter in pattern.stack)
    if not mtp_layers:
        return replace(model, stack=stack)
    mtp_specs = [_pattern_layer(template, config, letter) for letter in pattern.mtp[0]]
    mtp_spec = replace(mtp_specs[0], mlp=mtp_specs[-1].mlp)
    return replace(model, stack=stack, mtp_layers=mtp_layers, mtp_spec=mtp_spec)


def _pattern_layer(template: LayerSpec, config: ModelConfig, letter: str) -> LayerSpec:
    """The layer of a letter; template: has the attention and the MLP of the section."""
    if letter in MLP_LETTERS:
        return replace(template, mixer=None, mlp=_pattern_mlp(template, config, letter))
    kind = _MIXER_LETTERS[letter]
    mixer = template.mixer if kind is MixerKind.ATTENTION else build_mixer(kind, config)
    needed = _ATTENTION_OF_LETTER.get(letter)
    if needed is not None and not isinstance(mixer, needed[0]):
        raise InputError(f"hybrid_layer_pattern: {letter} is {needed[1]}, or write * for the model's attention")
    return replace(template, mixer=mixer, mlp=None)


def _pattern_mlp(template: LayerSpec, config: ModelConfig, letter: str) -> MlpSpec:
    mlp = template.mlp
    if letter == _EXPERTS:
        if not isinstance(mlp, MoeMlp):
            raise InputError("hybrid_layer_pattern: E is a layer of experts; give experts, or write - for an MLP")
        return mlp
    if isinstance(mlp, MoeMlp):
        if config.ffn is None:
            raise InputError("hybrid_layer_pattern: - is a dense MLP, and nothing says how wide it is; give ffn")
        return DenseMlp(config.ffn, mlp.form)
    if mlp is None:
        raise InputError("hybrid_layer_pattern: - is an MLP, which the model has none of; give ffn")
    return mlp
