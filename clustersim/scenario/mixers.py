"""Which mixer has each layer of a scenario's model?

`model.mixer` is that of all layers, or of a group of `model.stack`; with `linear_attention_freq` every n-th layer
has attention and the others the one linear mixer whose sizes the section gives; `hybrid_layer_pattern` gives each
layer a letter, in Megatron-LM's notation (megatron/core/models/hybrid/hybrid_layer_allocation.py), extended by
letters for mixers that it has not: such a layer is a mixer or an MLP, with a norm and a residual connection of its
own.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MlpSpec, MoeMlp, layer_specs, stack_layers
from clustersim.model.mixer import Mixer
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.transformer import TransformerModel
from clustersim.scenario.config.mixers import (
    GatedDeltaNetConfig,
    KdaConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MixerKind,
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


def _linear_mixer_of(kind: MixerKind, config: ModelConfig) -> Mixer:
    """The linear mixer of a kind, with the sizes that the section gives; raise InputError where it gives none."""
    if (section := getattr(config, kind.value)) is None:
        raise InputError(f"{kind.value}: is missing; write such as {_SECTIONS[kind].example}")
    from clustersim.scenario.mixer_sections import build_mixer

    return build_mixer(section)


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
        from clustersim.scenario.mixer_sections import with_selected_keys

        return replace(spec, mixer=with_selected_keys(kind, _plain_attention(spec.mixer, kind), config))
    return replace(spec, mixer=None if kind is MixerKind.NONE else _linear_mixer_of(kind, config))


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
    return _linear_mixer_of(kinds[0], config)


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
    mixer = template.mixer if kind is MixerKind.ATTENTION else _linear_mixer_of(kind, config)
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
