"""What do the job files of torchtitan's earlier releases say?

Releases of 2024 to July 2025 have the keys of v0.2.2 under other names, with the same meanings, and the same defaults
where these concern the step. Reference: pytorch/torchtitan v0.1.0 and of October 2024, config_manager.py.
"""

from collections.abc import Mapping
from typing import Any, Final

from clustersim.common.errors import InputError, format_value

_MOVED: Final[Mapping[str, str]] = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    **{
        f"experimental.{name}": f"parallelism.{name}"
        for name in (
            "context_parallel_degree", "context_parallel_rotate_method", "pipeline_parallel_degree",
            "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
            "pipeline_parallel_layers_per_stage", "enable_async_tensor_parallel",
        )
    },
}  # fmt: skip
"""Keys by their names now."""
_FORMATS: Final = ("float8", "mx")
"""Sections that are `quantize.linear`'s now."""
_WITHOUT_EFFECT: Final = (
    "training.warmup_steps", "training.seed", "training.deterministic", "training.shuffle_seed",
    "training.enable_compiled_autograd", "parallelism.enable_compiled_autograd",
    "experimental.enable_compiled_autograd", "training.enable_loss_parallel",
)  # fmt: skip
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "model.norm_type": ("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"),
    "experimental.pipeline_parallel_split_points": ([], None),
    "experimental.pipeline_parallel_microbatches": (None,),
    "parallelism.pipeline_parallel_split_points": ([], None),
    "parallelism.pipeline_parallel_microbatches": (None,),
    "float8.scaling_type_input": ("dynamic",),
    "float8.scaling_type_weight": ("dynamic",),
    "float8.scaling_type_grad_output": ("dynamic",),
    "float8.force_recompute_fp8_weight_in_bwd": (False,),
}
"""Keys of which no value but these has a counterpart now."""
_SWITCH: Final = "enable_float8_linear"
_FUSED: Final = "optimizer.fused"


def is_older_job(sections: Mapping[str, Any]) -> bool:
    """Whether a job has a key or a section that v0.2.2 does not have."""
    names = {f"{section}.{key}" for section, keys in sections.items() if isinstance(keys, Mapping) for key in keys}
    old_names = {*_MOVED, *_WITHOUT_EFFECT, *_NEUTRAL, _FUSED}
    return bool(old_names & names) or not {*_FORMATS}.isdisjoint(sections)


def modernized_job(sections: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The sections of v0.2.2 that say the same; raises InputError for what has no counterpart."""
    new: dict[str, Any] = {}
    for section, keys in sections.items():
        if not isinstance(keys, Mapping):
            new[section] = keys
            continue
        for key, value in keys.items():
            name = f"{section}.{key}"
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise InputError(
                    f"{source}: [{section}] {key}: {format_value(value)} has no counterpart in torchtitan now"
                )
            if name in _WITHOUT_EFFECT or name in _NEUTRAL or section in _FORMATS:
                continue
            if name == _FUSED:
                section_now, key_now, value = "optimizer", "implementation", "fused" if value else "foreach"
            else:
                section_now, _, key_now = _MOVED.get(name, name).partition(".")
            if new.setdefault(section_now, {}).setdefault(key_now, value) != value:
                raise InputError(f"{source}: [{section}] {key}: is [{section_now}] {key_now} now, which is also given")
        new.setdefault(section, {})
    for section in _FORMATS:
        new.pop(section, None)
    _put_formats(new, sections)
    return {section: keys for section, keys in new.items() if keys or not isinstance(keys, Mapping)}


def _put_formats(new: dict[str, Any], sections: Mapping[str, Any]) -> None:
    """Sections of formats, and the converter that a switch of 2024 turned on; the output stayed wide."""
    converters = list(new.get("model", {}).get("converters", []))
    linear: dict[str, Any] = {}
    for section in _FORMATS:
        keys = sections.get(section)
        if not isinstance(keys, Mapping):
            continue
        kept = {key: value for key, value in keys.items() if key != _SWITCH and f"{section}.{key}" not in _NEUTRAL}
        if keys.get(_SWITCH) is True:
            converters.append(section)
            kept.setdefault("filter_fqns", ["output"])
        if section in converters:
            linear[section] = kept
    if converters:
        new.setdefault("model", {})["converters"] = list(dict.fromkeys(converters))
    if linear:
        new["quantize"] = {"linear": linear}
