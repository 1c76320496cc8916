"""Which layers do Megatron-LM's arguments of hybrid models define, and with which arguments are layers written?

`--hybrid-layer-pattern` (before 2026 `--hybrid-override-pattern`, or two ratios) has a letter for each layer and bars
between pipeline stages (megatron/core/models/hybrid/hybrid_layer_allocation.py); `--experimental-attention-variant gdn`
with `--linear-attention-freq` has gated delta nets in a model of other layers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final

from clustersim.interop.megatron_arguments import Arguments, MegatronArguments
from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.layer_stack import BlockForm, LayerSpec, layer_specs, stack_layers
from clustersim.model.mixer import Mixer
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet
from clustersim.model.mixers.mamba2 import Mamba2
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import FullRecompute
from clustersim.model.transformer import TransformerModel
from clustersim.parallel.layer_partition import partition_layers
from clustersim.scenario import Scenario

_PATTERN_FLAGS: Final = ("hybrid-layer-pattern", "hybrid-override-pattern")
_MTP_SEPARATOR, _STAGE_SEPARATOR = "/", "|"
_MOE_LETTER: Final = "E"
_DELTA_NETS: Final = ("gdn", "gated_delta_net")
_SPARSE_ATTENTION: Final = "dsa"  # read with the other attention
_LETTERS: Final[Mapping[type[Mixer], str]] = MappingProxyType(
    {Mamba2: "M", GatedDeltaNet: "G", FullAttention: "*", LatentAttention: "+", DeepseekSparseAttention: "D"}
)
_DEFAULT_HEAD_DIM: Final = 64  # mamba_head_dim
_EXPANSION: Final = 2  # of MambaMixer


def with_pattern_layers(arguments: Arguments) -> dict[str, tuple[str, ...]]:
    """Arguments with the number of layers that a pattern has, which Megatron-LM takes whatever `--num-layers` says."""
    pattern = next((values[0] for name in _PATTERN_FLAGS if (values := arguments.get(name))), "")
    letters = pattern.partition(_MTP_SEPARATOR)[0].replace(_STAGE_SEPARATOR, "")
    return {**arguments, **({"num-layers": (str(len(letters)),)} if letters and "\0" not in letters else {})}


def contradicted_layers(arguments: Arguments) -> tuple[str, ...]:
    """A note where `--num-layers` is another number than a pattern's."""
    given, taken = arguments.get("num-layers"), with_pattern_layers(arguments).get("num-layers")
    if not given or not taken or given == taken or "\0" in given[0]:
        return ()
    return (
        f"--num-layers {given[0]} is passed over: the pattern has {taken[0]} layers, which Megatron-LM takes since "
        "2026 and refused before",
    )


def hybrid_pattern(parsed: MegatronArguments) -> str | None:
    """The layers' letters with bars between stages; None where the model is no hybrid."""
    parsed.has("is-hybrid-model")
    parsed.values("spec")
    for name in _PATTERN_FLAGS:
        pattern = parsed.text(name)
        if pattern is not None:
            mtp = parsed.text("mtp-hybrid-override-pattern")  # before 2026 apart from the others
            count = parsed.integer("mtp-num-layers", 0) or 0
            return pattern + count * f"{_MTP_SEPARATOR}{mtp}" if mtp is not None else pattern
    ratios = [parsed.real_number(f"hybrid-{kind}-ratio", 0.0) for kind in ("attention", "mlp")]
    return pattern_from_ratios(parsed.required_integer("num-layers"), *ratios) if any(ratios) else None


def pattern_from_ratios(layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Letters with attention evenly spaced between Mamba layers, and MLPs in place of evenly spaced others of these.

    >>> pattern_from_ratios(10, 0.2, 0.0), pattern_from_ratios(8, 0.125, 0.5)
    ('MMM*MM*MMM', 'M-M-*-M-')
    """
    attention_count = round(layers * attention_ratio)
    letters = _spaced("M" * layers, "*", (layers - attention_count) / (attention_count + 1))
    mlp_count = round(layers * mlp_ratio)
    if not mlp_count:
        return letters
    return _spaced(letters, "-", (layers - attention_count - mlp_count) / mlp_count)


def _spaced(letters: str, letter: str, section: float) -> str:
    """Letters of which every M that ends a section of so many is replaced."""
    result, remaining = "", section
    for current in letters:
        if current != "M":
            result += current
        elif remaining < 1 / 2:
            result, remaining = result + letter, remaining + section
        else:
            result, remaining = result + current, remaining - 1
    return result


def hybrid_config(parsed: MegatronArguments, hidden: int) -> dict[str, Any]:
    """Keys of the `model` section of a hybrid, in addition to those of its attention and MLPs."""
    pattern = hybrid_pattern(parsed)
    if pattern is None:
        return _delta_net_layers(parsed)
    letters = pattern.replace(_STAGE_SEPARATOR, "")
    if parsed.integer("mtp-num-layers", 0) and _MTP_SEPARATOR not in pattern:
        raise parsed.error("mtp-num-layers", "the pattern does not say which layers these are; write /*- behind it")
    if parsed.text("num-experts") is not None and _MOE_LETTER not in letters:
        raise parsed.error(
            "num-experts",
            f"the pattern of layers has none with experts ({_MOE_LETTER}), so its letters are not Megatron's",
        )
    sections = {"M": ("mamba", _mamba_config), "G": ("gated_delta_net", _delta_net_config)}
    sizes = {key: read(parsed, hidden) for letter, (key, read) in sections.items() if letter in letters}
    return {"layers": None, "stack": None, "mtp_layers": None, "hybrid_layer_pattern": letters, **sizes}


def hybrid_stages(parsed: MegatronArguments) -> list[int] | None:
    """Layers of each pipeline stage by the bars of a pattern; None without bars."""
    pattern = hybrid_pattern(parsed)
    stages = "" if pattern is None else pattern.partition(_MTP_SEPARATOR)[0]
    return [len(stage) for stage in stages.split(_STAGE_SEPARATOR)] if _STAGE_SEPARATOR in stages else None


def _mamba_config(parsed: MegatronArguments, hidden: int) -> dict[str, Any]:
    head_dim = parsed.integer("mamba-head-dim", _DEFAULT_HEAD_DIM) or _DEFAULT_HEAD_DIM
    return {
        "num_heads": parsed.integer("mamba-num-heads", _EXPANSION * hidden // head_dim),
        "head_dim": head_dim,
        "state_dim": parsed.integer("mamba-state-dim", 128),
        "num_groups": parsed.integer("mamba-num-groups", 8),
    }


def _delta_net_config(parsed: MegatronArguments, hidden: int = 0) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {
        "num_key_heads": parsed.integer("linear-num-key-heads", 16),
        "num_value_heads": parsed.integer("linear-num-value-heads", 32),
        "key_head_dim": parsed.integer("linear-key-head-dim", 128),
        "value_head_dim": parsed.integer("linear-value-head-dim", 128),
        "conv_kernel_dim": parsed.integer("linear-conv-kernel-dim", 4),
    }


def _delta_net_layers(parsed: MegatronArguments) -> dict[str, Any]:
    """Gated delta nets in all layers but every n-th."""
    variant = parsed.text("experimental-attention-variant") or parsed.text("linear-attention-type")
    if variant in (None, _SPARSE_ATTENTION):
        return {}
    if variant not in _DELTA_NETS:
        modelled = f"{_DELTA_NETS[0]} and {_SPARSE_ATTENTION}"
        raise parsed.error("experimental-attention-variant", f"{variant!r} is not modelled; {modelled} are")
    frequency = parsed.text("linear-attention-freq") or ""
    if not re.fullmatch(r"[1-9]\d*", frequency) or frequency == "1":
        raise parsed.error("linear-attention-freq", f"{frequency!r} is no number of layers from 2; write model.stack")
    return {"linear_attention_freq": int(frequency), "gated_delta_net": _delta_net_config(parsed)}


def hybrid_flags(model: TransformerModel) -> Iterator[tuple[str, ...]]:
    """The arguments of a model with other mixers, of which Megatron-LM has Mamba 2 and the gated delta net."""
    specs = layer_specs(model.stack)
    if has_pattern(model):
        mtp = "" if model.mtp_spec is None else _MTP_SEPARATOR + "".join(map(_letter, _halves(model.mtp_spec)))
        yield "hybrid-layer-pattern", "".join(map(_letter, specs)) + mtp * model.mtp_layers
        yield "spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"
        yield ("is-hybrid-model",)
    elif any(isinstance(mixer, GatedDeltaNet) for mixer in model.distinct_mixers):
        period = 1 + next(index for index, spec in enumerate(specs) if spec.attention is not None)
        yield "experimental-attention-variant", "gdn"
        yield "linear-attention-freq", str(period)
    for mixer in model.distinct_mixers:
        match mixer:
            case Mamba2():
                yield "mamba-num-heads", str(mixer.heads)
                yield "mamba-head-dim", str(mixer.head_dim)
                yield "mamba-state-dim", str(mixer.state_dim)
                yield "mamba-num-groups", str(mixer.groups)
            case GatedDeltaNet():
                yield "linear-num-key-heads", str(mixer.key_heads)
                yield "linear-num-value-heads", str(mixer.value_heads)
                yield "linear-key-head-dim", str(mixer.key_dim)
                yield "linear-value-head-dim", str(mixer.value_dim)
                yield "linear-conv-kernel-dim", str(mixer.conv_taps)


def in_pattern_layers(scenario: Scenario) -> Scenario:
    """The scenario of a hybrid whose layers are each a mixer or an MLP, as a pattern's are (Granite 4, Jamba).

    A mixer and an MLP with a norm and a residual connection each are the same operators as one layer or as two; stages
    and layers that are recomputed have twice as many. Gated delta nets have another argument than a pattern.
    """
    model, layout, training = scenario.model, scenario.layout, scenario.training
    specs = layer_specs(model.stack)
    is_split = any(isinstance(spec.mixer, Mamba2) and spec.mlp is not None for spec in specs)
    if not is_split or not all(spec.block is BlockForm.PRE_NORM and _letter(spec) != "?" for spec in specs):
        return scenario
    halves = [tuple(_halves(spec)) for spec in specs]
    model = replace(model, stack=stack_layers([half for pair in halves for half in pair]))
    if layout.pp > 1:
        counts = partition_layers(layout.layers_per_stage, len(specs), scenario.placement)
        ends = accumulate(counts)
        split = tuple(sum(map(len, halves[end - count : end])) for count, end in zip(counts, ends, strict=True))
        layout = replace(layout, layers_per_stage=split)
    match training.recompute:
        case FullRecompute(int() as layers):
            training = replace(training, recompute=FullRecompute(2 * layers))
    return replace(scenario, model=model, layout=layout, training=training)


def _halves(spec: LayerSpec) -> Iterator[LayerSpec]:
    """A layer of a mixer and an MLP as two layers."""
    yield from [replace(spec, mlp=None)] if spec.mixer is not None else []
    yield from [replace(spec, mixer=None)] if spec.mlp is not None else []


def _letter(spec: LayerSpec) -> str:
    """The letter of a layer that is a mixer or an MLP; a question mark for mixers that Megatron-LM has not."""
    if spec.mixer is None:
        return "-" if spec.moe is None else "E"
    return _LETTERS.get(type(spec.mixer), "?")


def has_pattern(model: TransformerModel) -> bool:
    """Whether each layer is a mixer or an MLP, and some have another mixer than attention."""
    specs = layer_specs(model.stack)
    return model.has_other_mixers and all((spec.mixer is None) is not (spec.mlp is None) for spec in specs)
