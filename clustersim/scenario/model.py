"""Which model does a scenario's `model` section describe?

A preset, a config.json or dimensions; dimensions next to the first two change all their layers. Heterogeneous
layers are given in one of three ways: `window_attn_skip_freq` and `no_rope_freq`, which are periodic; a preset or file
that has them; or `stack`, one group of layers at a time. Mixers other than attention are given by `scenario.mixers`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from clustersim.common import data_files
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.model.layer_stack import LayerGroup, LayerSpec, MlpType, layer_specs, merge_groups, stack_layers
from clustersim.model.presets import code_presets, load_preset
from clustersim.model.transformer import (
    Norm,
    PositionEncoding,
    TransformerModel,
    change_layer,
    resize_model,
    uniform_model,
)
from clustersim.scenario.config.mixers import MixerKind
from clustersim.scenario.config.model import ModelConfig
from clustersim.scenario.file_cache import ReadCache
from clustersim.scenario.mixers import ATTENTION_LETTERS, MLP_LETTERS, layer_with_mixer, parse_pattern, with_mixers
from clustersim.scenario.mla import with_mla, with_sparse_attention
from clustersim.scenario.moe import check_ffn_used, with_experts, with_group_experts

_VOCABULARY_KEYS: Final = ("vocab", "tied_embeddings", "final_logit_softcapping", "mtp_layers")
_FAMILY_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {  # Touvron et al. 2023, section 2.2
        "mlp": MlpType.SWIGLU,
        "norm": Norm.RMSNORM,
        "positions": PositionEncoding.ROTARY,
        "tied_embeddings": False,
        "linear_bias": False,
        "qkv_bias": False,
    },
    "gpt": {  # Radford et al. 2019, section 2.3
        "mlp": MlpType.GELU,
        "norm": Norm.LAYERNORM,
        "positions": PositionEncoding.LEARNED,
        "tied_embeddings": True,
        "linear_bias": True,
        "qkv_bias": True,
    },
}


def read_model(config: ModelConfig, base_dir: Path, sequence: int, read_cache: ReadCache) -> TransformerModel:
    """The model that a section names or describes, with the section's own dimensions applied."""
    return _with_image_keys(_read_stated_model(config, base_dir, sequence, read_cache), config)


def change_model(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """A model with the dimensions that a section states."""
    return _with_image_keys(_apply_layer_differences(_apply_dimensions(model, config), config), config)


def _with_image_keys(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model with the size of its images; raise InputError for keys that are of another kind of model."""
    checked = _check_vocabulary_keys(model, config)
    return checked if config.input_size is None else with_input_size(checked, config.input_size)


def _read_stated_model(config: ModelConfig, base_dir: Path, sequence: int, read_cache: ReadCache) -> TransformerModel:
    if config.preset is not None and config.path is not None:
        raise InputError(f"has both preset {config.preset!r} and path {config.path!r}; keep one")
    if config.preset is not None:
        return _apply_layer_differences(_apply_dimensions(load_preset(config.preset), config), config)
    if config.path is not None:
        from clustersim.common.synonyms import describe_model_name
        from clustersim.model.hf_config import read_hf_config

        path = data_files.resolve_relative(base_dir, config.path)
        hint = describe_model_name(config.path, code_presets())
        if hint is not None and not path.suffix == ".json" and not path.exists():
            raise InputError(f"there is no file or folder {config.path}; {hint}")
        hf_model = read_cache.get_or_read(read_hf_config, path)
        return _apply_layer_differences(_apply_dimensions(hf_model, config), config)
    return _apply_layer_differences(_inline_model(config, sequence), config)


def _apply_dimensions(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """A model with the section's dimensions; a window applies to layers that have one, or to all if none has."""
    dimensions = config.dimensions
    window = dimensions.get("window")
    if config.window_attn_skip_freq is not None:
        windows = {
            distinct_attention.window
            for distinct_attention in model.distinct_attentions
            if distinct_attention.window is not None
        }
        return resize_model(model, **{**({"window": windows.pop()} if len(windows) == 1 else {}), **dimensions})
    if window is None:
        return resize_model(model, **dimensions)
    has_windows = any(attention.window is not None for attention in model.distinct_attentions)
    resized_model = resize_model(model, **{key: value for key, value in dimensions.items() if key != "window"})
    layer_groups = (
        LayerGroup(
            change_layer(run.spec, window=window) if _has_window(run.spec) or not has_windows else run.spec, run.count
        )
        for run in resized_model.stack
    )
    return replace(resized_model, stack=merge_groups(layer_groups))


def with_input_size(model: TransformerModel, size: tuple[int, ...]) -> TransformerModel:
    """A model of images of another size; learned positions are interpolated to as many as it has tokens."""
    if model.patches is None:
        raise InputError(f"input_size: {model.name} reads tokens, not images; leave it out")
    patch_size = model.patches.patch_size
    patches = model.patches.resized(size) if len(size) <= len(patch_size) else model.patches
    if len(size) > len(patch_size) or not patches.patches:
        least = " x ".join(map(str, patch_size))
        raise InputError(
            f"input_size: {list(size)} holds no patch of {model.name}, which are {least}; at least that large fits"
        )
    return replace(model, patches=patches, max_positions=patches.tokens)


def _check_vocabulary_keys(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model; raise InputError for keys of a vocabulary that it has not."""
    stated = [key for key in _VOCABULARY_KEYS if getattr(config, key) not in (None, 0, False)]
    if stated and not model.has_vocabulary_loss:
        raise InputError(f"{stated[0]}: {model.name} has no vocabulary; leave it out")
    return model


def _has_window(spec: LayerSpec) -> bool:
    return spec.attention is not None and spec.attention.window is not None


def _inline_model(config: ModelConfig, sequence: int) -> TransformerModel:
    dimensions = config.dimensions
    if config.stack is not None:
        dimensions.setdefault("layers", sum(run.layers for run in config.stack))
    if (experts := config.experts) is not None and experts.ffn is not None and not experts.selects_layers:
        dimensions.setdefault("ffn", experts.ffn)  # used by no layer: all are MoE layers
    _add_pattern_defaults(dimensions, config)
    missing = [key for key in ("layers", "hidden", "heads", "vocab", "ffn") if key not in dimensions]
    if missing:
        raise InputError(f"missing keys: {', '.join(missing)}; give them, or a preset or path to start from")
    family = config.family or "llama"
    if family not in _FAMILY_DEFAULTS:
        raise InputError(f"family {family!r} is unknown; {suggest_nearest(family, _FAMILY_DEFAULTS)}")
    has_head_dim = "head_dim" in dimensions or config.mla is not None
    hidden, heads = dimensions["hidden"], dimensions["heads"]
    if not has_head_dim and hidden % heads:
        raise InputError(f"hidden {hidden} is not a multiple of heads {heads}; give head_dim")
    defaults = {
        "name": "inline model",
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": sequence,
    }
    return uniform_model(**{**_FAMILY_DEFAULTS[family], **defaults, **dimensions})


def _add_pattern_defaults(dimensions: dict[str, Any], config: ModelConfig) -> None:
    """Add what a pattern of layers says, and sizes of layers that it has not, which nothing uses then."""
    pattern = config.hybrid_layer_pattern
    has_attention = config.mixer in (None, MixerKind.ATTENTION, MixerKind.MOBA, MixerKind.NSA) and (
        pattern is None or any(letter in pattern for letter in ATTENTION_LETTERS)
    )
    if pattern is not None:
        dimensions.setdefault("layers", len(parse_pattern(pattern).stack))
        if not any(letter in pattern for letter in MLP_LETTERS):
            dimensions.setdefault("ffn", 1)
    if not has_attention:
        dimensions.setdefault("heads", 1)


def _apply_layer_differences(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model with the section's per-layer differences: MLA, experts, stack, window and rotary periods."""
    model = with_mixers(with_experts(with_sparse_attention(with_mla(model, config), config), config), config)
    if config.stack is not None:
        model = _apply_stack(model, config)
    if (
        config.preset is not None or config.path is not None
    ):  # a full model description may state an MLP width that no layer uses
        check_ffn_used(model, config.ffn)
    for key, period, overrides in (
        ("window", config.window_attn_skip_freq, {"window": None}),
        ("rotary_percent", config.no_rope_freq, {"rotary_percent": 0.0}),
    ):
        if period is not None:
            model = _change_periodic_layers(model, key, period, overrides)
    if model.positions is not PositionEncoding.ROTARY and any(
        distinct_attention.rotary_percent != 1 for distinct_attention in model.distinct_attentions
    ):
        raise InputError(f"rotary_percent needs rotary positions; {model.name} has {model.positions.value} ones")
    for attention in model.distinct_attentions:
        if attention.window is not None and not attention.causal:
            raise InputError(
                f"causal: false has no window, and a layer of {model.name} has one of {attention.window}; "
                "give window: full, or leave causal out"
            )
    return model


def _apply_stack(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model with the layer groups of `stack`."""
    runs, layer_count = config.stack or [], sum(run.layers for run in config.stack or [])
    if len(model.stack) > 1:
        raise InputError(f"stack: the layers of {model.name} differ already, so nothing says what a run changes")
    if config.layers not in (None, layer_count):
        raise InputError(f"stack: has {layer_count} layers, but layers is {config.layers}; leave layers out")
    if not runs:
        raise InputError("stack: has no run; write such as [{layers: 1, ffn: 8192}, {layers: 31}]")
    spec = model.stack[0].spec
    return replace(
        model,
        stack=merge_groups(
            LayerGroup(
                layer_with_mixer(
                    with_group_experts(change_layer(spec, **run.layer_dimensions), run, config.ffn), run.mixer, config
                ),
                run.layers,
            )
            for run in runs
        ),
    )


def _change_periodic_layers(
    model: TransformerModel, key: str, period: int, overrides: dict[str, Any]
) -> TransformerModel:
    """The model with every period-th layer changed; raises InputError where that has no effect."""
    if key == "window" and not any(distinct_attention.window for distinct_attention in model.distinct_attentions):
        raise InputError(
            f"window_attn_skip_freq {period} needs a window, which the other layers have; such as window: 4096"
        )
    if key == "rotary_percent" and model.positions is not PositionEncoding.ROTARY:
        raise InputError(f"no_rope_freq {period} needs rotary positions; {model.name} has {model.positions.value} ones")
    layers = enumerate(layer_specs(model.stack), start=1)
    return replace(
        model,
        stack=stack_layers(
            spec if layer_index % period else change_layer(spec, **overrides) for layer_index, spec in layers
        ),
    )
