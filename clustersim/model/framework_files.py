"""Framework files (topologies/frameworks): how is one read, with what it is like, its versions and its recipes?"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import display_name, find_file, read_mapping
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.mapping_reader import MappingReader, merge_mappings
from clustersim.common.units import Bytes, Dimension, Seconds
from clustersim.model.framework import Framework, KernelDefaults, MeasuredHostUse, SupportedLayouts
from clustersim.model.framework_versions import version_changes
from clustersim.model.layout_defaults import read_layout_defaults
from clustersim.model.overheads import (
    MAX_CROSS_ENTROPY_METRICS,
    NO_OVERHEADS,
    Accumulation,
    BatchTransfer,
    ExpertRowMasks,
    ExpertSort,
    ExpertWeighting,
    Grouping,
    LossReport,
    Overheads,
    RingAttention,
)
from clustersim.model.training import AttentionBackend, FusedKernel, LossImplementation

OVERHEAD_FLAGS: Final = tuple(
    dataclass_field.name for dataclass_field in fields(Overheads) if dataclass_field.type is bool
)
"""Names of the boolean overheads."""
_OPTIONAL_LAYOUTS: Final = ("dispatchers", "context_parallel", "axes")
_MAX_SOFTMAX_KEYS: Final = 2**31


def load_framework(name_or_path: str = "pytorch", version: str = "", recipe: str = "") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same format.

    version, recipe: one of the file's `versions` or `releases` and of its `recipes`, whose keys replace those of the
    file; "": the file as it is.
    """
    path = find_file("frameworks", name_or_path)
    section = MappingReader(path, _selected_mapping(path, version, recipe))
    section.reject_renamed_keys("frameworks")
    memory, host, checkpoint = (section.get_section(name) for name in ("memory", "host", "checkpoint"))
    fragmentation, selective_fragmentation, full_fragmentation = _read_fragmentation(memory)
    framework = Framework(
        fragmentation=fragmentation,
        selective_fragmentation=selective_fragmentation,
        full_fragmentation=full_fragmentation,
        communicator_bytes=memory.get_quantity("communicator", Dimension.SIZE, allow_zero=True),
        workspace_bytes=memory.get_quantity("workspace", Dimension.SIZE, allow_zero=True),
        grouped_workspace_bytes=_read_bytes(memory, "grouped_workspace"),
        zero3_bucket_bytes=_read_bytes(memory, "zero3_bucket"),
        zero3_live_bytes=_read_bytes(memory, "zero3_live"),
        deallocate_pipeline_outputs=memory.get_bool("deallocate_pipeline_outputs"),
        torch_fsdp=memory.get_bool("torch_fsdp"),
        launch_seconds=host.get_quantity("launch", Dimension.TIME, allow_zero=True),
        backward_launch_seconds=host.get_quantity("backward_launch", Dimension.TIME, allow_zero=True),
        compiled_launch_seconds=_read_seconds(host, "compiled_launch"),
        p2p_seconds=host.get_quantity("p2p", Dimension.TIME, allow_zero=True),
        collective_seconds=_read_seconds(host, "collective"),
        eager_call_seconds=host.get_quantity("eager_call", Dimension.TIME, allow_zero=True),
        graph_launch_seconds=_read_seconds(host, "graph_launch"),
        moe_launch_seconds=_read_seconds(host, "moe_launch"),
        measured_host_use=host.get_member("measured_host_use", MeasuredHostUse),
        early_stop=checkpoint.get_bool("early_stop"),
        name=path.stem,
        version=version,
        recipe=recipe,
        kernels=_read_kernels(section.get_section("kernels")) if section.has_key("kernels") else KernelDefaults(),
        overheads=_read_overheads(section.get_section("overheads")) if section.has_key("overheads") else NO_OVERHEADS,
        layout_defaults=read_layout_defaults(section.get_section("layout")),
        supported_layouts=_read_supported_layouts(section.get_section("supported_layouts"))
        if section.has_key("supported_layouts")
        else SupportedLayouts(),
    )
    section.get_text("description")
    section.get_section("sources").get_text_mapping()
    section.reject_unknown_keys()
    return framework


def _selected_mapping(path: Path, version: str, recipe: str, derived: tuple[Path, ...] = ()) -> Mapping[str, Any]:
    """The content of a framework's file over the file that it is `like`, with the keys of a version and a recipe.

    derived: files that are like this one, of which none can be what this one is like.
    """
    content = read_mapping(path)
    base = content.pop("like", None)
    versions, releases, recipes = (_pop_changes(path, content, key) for key in ("versions", "releases", "recipes"))
    if base is not None:
        base_path = find_file("frameworks", str(base))
        if base_path in (path, *derived):
            raise InputError(f"{display_name(path)}: like: {base} is like this file; name another one")
        content = merge_mappings(_selected_mapping(base_path, "", "", (path, *derived)), content)
    if version:
        content = merge_mappings(content, version_changes(path, version, versions, releases))
    return merge_mappings(content, recipes[_recipe_of(path, recipe, recipes)]) if recipe else content


def _pop_changes(path: Path, content: dict[str, Any], key: str) -> Mapping[str, Mapping[str, Any]]:
    """Take a mapping of names to the keys that they change out of a file's content."""
    changes = content.pop(key, {})
    if not isinstance(changes, dict) or not all(isinstance(changed_keys, dict) for changed_keys in changes.values()):
        raise InputError(f"{display_name(path)}: {key}: write a mapping of {key} to the keys that they change")
    return {str(name): changed_keys for name, changed_keys in changes.items()}  # YAML reads 2025-03-01 as a date


def _recipe_of(path: Path, recipe: str, recipes: Mapping[str, Any]) -> str:
    """The entry of a recipe."""
    if recipe in recipes:
        return recipe
    available = suggest_nearest(recipe, recipes) if recipes else "its file has no recipes, leave it out"
    raise InputError(f"recipe: {format_value(recipe)} of {path.stem} is unknown; {available}")


def _read_kernels(section: MappingReader) -> KernelDefaults:
    """Read the kernels of a framework file; what the file does not name is fused, and the fastest library's."""
    stated: dict[str, Any] = {}
    if section.has_key("fused"):
        names = section.get_choices("fused", *(kind.value for kind in FusedKernel))
        stated["fused"] = frozenset(map(FusedKernel, names))
    if section.has_key("compiled_padding"):
        stated["compiled_padding"] = section.get_bool("compiled_padding")
    kinds = {"loss": LossImplementation, "compiled_loss": LossImplementation, "attention": AttentionBackend}
    for name, kind in {**kinds, "gradients": DType}.items():
        if section.has_key(name):
            stated[name] = section.get_member(name, kind)
    return KernelDefaults(**stated)


def _read_supported_layouts(section: MappingReader) -> SupportedLayouts:
    return SupportedLayouts(
        **{
            layout_field.name: section.get_text_list(layout_field.name)
            for layout_field in fields(SupportedLayouts)
            if layout_field.name not in _OPTIONAL_LAYOUTS or section.has_key(layout_field.name)
        }
    )


def _read_overheads(section: MappingReader) -> Overheads:
    """Read the overheads of a framework file; what the file does not name is off."""
    flags = {name: section.get_bool(name) for name in OVERHEAD_FLAGS}
    return Overheads(
        **flags,
        accumulation=section.get_member("accumulation", Accumulation) if section.has_key("accumulation") else None,
        grouping=section.get_member("grouping", Grouping) if section.has_key("grouping") else None,
        ring_attention=section.get_member("ring_attention", RingAttention),
        weighting=section.get_member("weighting", ExpertWeighting),
        expert_sort=section.get_member("expert_sort", ExpertSort),
        expert_row_masks=section.get_member("expert_row_masks", ExpertRowMasks),
        softmax_keys=section.get_int("softmax_keys", max_value=_MAX_SOFTMAX_KEYS)
        if section.has_key("softmax_keys")
        else None,
        cross_entropy_metrics=section.get_int("cross_entropy_metrics", max_value=MAX_CROSS_ENTROPY_METRICS)
        if section.has_key("cross_entropy_metrics")
        else 0,
        loss_averaging=section.get_member("loss_averaging", LossReport),
        batch_transfer=section.get_member("batch_transfer", BatchTransfer),
    )


def _read_fragmentation(memory: MappingReader) -> tuple[float, float, float]:
    """Fragmentation without, with selective and with full recomputation: one number, or one for each."""
    if not isinstance(memory.get_value("fragmentation"), Mapping):
        factor = memory.get_float("fragmentation", min_value=1.0)
        return factor, factor, factor
    by_recompute = memory.get_section("fragmentation")
    none, selective, full = (by_recompute.get_float(key, min_value=1.0) for key in ("none", "selective", "full"))
    return none, selective, full


def _read_bytes(section: MappingReader, key: str) -> Bytes:
    """Bytes; 0 where the file does not name them."""
    return section.get_quantity(key, Dimension.SIZE, allow_zero=True) if section.has_key(key) else 0.0


def _read_seconds(host: MappingReader, key: str) -> Seconds | None:
    """Host seconds of one operation; None if the file does not name them."""
    return host.get_quantity(key, Dimension.TIME, allow_zero=True) if host.has_key(key) else None
