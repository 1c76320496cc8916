"""Which model does a scenario's `model` section describe?

A preset, a config.json or dimensions; dimensions beside the first two change all their layers. Layers that differ are
said in one of three ways: by `global_every` and `nope_every`, which repeat; by a preset or file that has them; or by
`stack`, run by run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from clustersim.common import data_files
from clustersim.common.errors import InputError, nearest
from clustersim.model.hf_config import read_hf_config
from clustersim.model.layer_stack import LayerRun, LayerSpec, Mlp, joined, specs, stacked
from clustersim.model.presets import preset
from clustersim.model.transformer import Model, Norm, Positions, changed, resized, uniform
from clustersim.scenario.config.model import ModelSection
from clustersim.scenario.file_cache import Readings
from clustersim.scenario.mla import with_latent
from clustersim.scenario.moe import check_width, mixed, with_experts

_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {  # Touvron et al. 2023, section 2.2
        "mlp": Mlp.SWIGLU,
        "norm": Norm.RMSNORM,
        "positions": Positions.ROTARY,
        "tied_embeddings": False,
        "linear_bias": False,
        "qkv_bias": False,
    },
    "gpt": {  # Radford et al. 2019, section 2.3
        "mlp": Mlp.GELU,
        "norm": Norm.LAYERNORM,
        "positions": Positions.LEARNED,
        "tied_embeddings": True,
        "linear_bias": True,
        "qkv_bias": True,
    },
}


def read_model(section: ModelSection, base: Path, sequence: int, readings: Readings) -> Model:
    """The model that a section names or describes, with the section's own dimensions on top."""
    if section.preset is not None and section.path is not None:
        raise InputError(f"has both preset {section.preset!r} and path {section.path!r}; keep one")
    if section.preset is not None:
        return _layered(_resized(preset(section.preset), section), section)
    if section.path is not None:
        found = readings.of(read_hf_config, data_files.beside(base, section.path))
        return _layered(_resized(found, section), section)
    return _layered(_inline(section, sequence), section)


def _resized(model: Model, section: ModelSection) -> Model:
    """A model with the section's dimensions. A window is that of the layers that have one, or of all if none has."""
    given = section.dimensions
    window = given.get("window")
    if section.global_every is not None:
        known = {attention.window for attention in model.attentions if attention.window is not None}
        return resized(model, **{**({"window": known.pop()} if len(known) == 1 else {}), **given})
    if window is None:
        return resized(model, **given)
    some = any(item.window is not None for item in model.attentions)
    plain = resized(model, **{key: value for key, value in given.items() if key != "window"})
    windowed = (
        LayerRun(changed(run.spec, window=window) if _windowed(run.spec) or not some else run.spec, run.count)
        for run in plain.stack
    )
    return replace(plain, stack=joined(windowed))


def _windowed(spec: LayerSpec) -> bool:
    return spec.attention is not None and spec.attention.window is not None


def _inline(section: ModelSection, sequence: int) -> Model:
    given = section.dimensions
    if section.stack is not None:
        given.setdefault("layers", sum(run.layers for run in section.stack))
    if (experts := section.experts) is not None and experts.ffn is not None and not experts.placed:
        given.setdefault("ffn", experts.ffn)  # of no layer: all have experts
    missing = [key for key in ("layers", "hidden", "heads", "vocab", "ffn") if key not in given]
    if missing:
        raise InputError(f"lacks {', '.join(missing)}; give them, or a preset or path to start from")
    family = section.family or "llama"
    if family not in _FAMILIES:
        raise InputError(f"family {family!r} is unknown; {nearest(family, _FAMILIES)}")
    own = "head_dim" in given or section.latent is not None
    if not own and section.hidden % section.heads:  # type: ignore[operator]
        raise InputError(f"hidden {section.hidden} is not a multiple of heads {section.heads}; give head_dim")
    usual = {
        "name": "inline model",
        "kv_heads": given["heads"],
        "head_dim": given["hidden"] // given["heads"],
        "max_positions": sequence,
    }
    return uniform(**{**_FAMILIES[family], **usual, **given})


def _layered(model: Model, section: ModelSection) -> Model:
    """The model with the layers that the section lets differ."""
    model = with_experts(with_latent(model, section), section)
    if section.stack is not None:
        model = _stacked(model, section)
    if section.preset is not None or section.path is not None:  # what describes a model may say widths of no layer
        check_width(model, section.ffn)
    for key, item, change in (
        ("window", section.global_every, {"window": None}),
        ("rotary", section.nope_every, {"rotary": 0.0}),
    ):
        if item is not None:
            model = _repeated(model, key, item, change)
    if model.positions is not Positions.ROTARY and any(attention.rotary != 1 for attention in model.attentions):
        raise InputError(f"rotary needs rotary positions; {model.name} has {model.positions.value} ones")
    return model


def _stacked(model: Model, section: ModelSection) -> Model:
    """The model with the runs of `stack`."""
    runs, written = section.stack or [], sum(run.layers for run in section.stack or [])
    if len(model.stack) > 1:
        raise InputError(f"stack: the layers of {model.name} differ already, so nothing says what a run changes")
    if section.layers not in (None, written):
        raise InputError(f"stack: has {written} layers, but layers is {section.layers}; leave layers out")
    if not runs:
        raise InputError("stack: has no run; write such as [{layers: 1, ffn: 8192}, {layers: 31}]")
    spec = model.stack[0].spec
    return replace(
        model,
        stack=joined(LayerRun(mixed(changed(spec, **run.of_layer), run, section.ffn), run.layers) for run in runs),
    )


def _repeated(model: Model, key: str, every: int, change: dict[str, Any]) -> Model:
    """The model with every so-manieth layer changed; raise InputError where that changes nothing."""
    if key == "window" and not any(attention.window for attention in model.attentions):
        raise InputError(f"global_every {every} needs a window, which the other layers have; such as window: 4096")
    if key == "rotary" and model.positions is not Positions.ROTARY:
        raise InputError(f"nope_every {every} needs rotary positions; {model.name} has {model.positions.value} ones")
    layers = enumerate(specs(model.stack), start=1)
    return replace(model, stack=stacked(spec if at % every else changed(spec, **change) for at, spec in layers))
