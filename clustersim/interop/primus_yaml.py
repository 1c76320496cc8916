"""Which arguments does an experiment of AMD's Primus define?

An experiment names a module's file and a model's, of Primus' checkout, and overrides their keys. Keys are Megatron-LM's
arguments by their names in Python, torchtitan's sections, or Primus' own, which change either. Files of the checkout
above the experiment are read; without it, the values that its common files set are known here.

Reference: AMD-AGI/Primus, primus/core/launcher/parser.py, primus/backends/megatron/{argument_builder,patches}.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import read_mapping, read_text
from clustersim.common.errors import InputError
from clustersim.common.files import first_file
from clustersim.interop.import_result import ImportContext
from clustersim.interop.shell.unknowns import Unknowns
from clustersim.interop.yaml_arguments import YamlArguments, YamlFile, yaml_mapping

_MAX_EXTENDS: Final = 8
_MAX_PARENTS: Final = 6
_MAX_DIGITS: Final = 12
SWITCHED_OFF: Final[Mapping[str, str]] = {
    "add_bias_linear": "disable_bias_linear",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
}
"""Arguments that are on unless a flag turns them off, and that flag."""
VIRTUAL_STAGES: Final = "virtual_pipeline_model_parallel_size"
"""What Megatron-LM computes, and nobody sets."""
_WITHOUT_EFFECT: Final = frozenset({
    "img_h", "img_w", "patch_dim", "num_channels", "num_classes", "vision_backbone_type", "vision_pretraining_type",
    "enable_zb_runtime", "enable_zero_bubble", "bert_embedder_type", "retro_encoder_layers", "overlap_p2p_comm",
    "optimizer_offload_fraction", "cuda_graph_scope",
})  # fmt: skip
"""What Primus' common files set for other models than decoders, or for what `patch_zero_bubble` turns on."""
_FOREIGN_LAYERS: Final = (
    "lfm_layer_types", "hybrid_attention_enabled", "use_turbo_mega_moe", "experimental_attention_variant",
)  # fmt: skip
_DECODERS: Final = (None, "gpt", "mamba")
_SCHEDULES: Final = ("1f1b", "1f1b-interleaved")
_DEEPEP_STAGE: Final = 2
"""The stage of sync-free experts from which they are dispatched by DeepEP."""


def is_primus(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is an experiment."""
    modules = content.get("modules")
    return isinstance(modules, Mapping) and any(str(name).endswith("_trainer") for name in modules)


def read_primus(file: YamlFile) -> YamlArguments:
    """The arguments of an experiment on Megatron-LM."""
    trainer = _trainer(file)
    framework = trainer.get("framework", "megatron")
    if framework != "megatron":
        raise file.error("modules.pre_trainer.framework", f"{framework!r} is not read; megatron and torchtitan are")
    if trainer.get("trainer_class"):
        raise file.error("modules.pre_trainer.trainer_class", f"{trainer['trainer_class']}: its step is not known")
    module, overrides = _preset(file, "modules", framework), _overrides(file)
    common = {**module, **_preset_named(file, "models", framework, "language_model.yaml")}
    values = {**module, **_preset(file, "models", framework), **overrides}
    stated = {name for name, value in values.items() if name in overrides or common.get(name) != value}
    values = {name: file.expanded(value) for name, value in values.items()}
    _require_a_decoder_s_step(file, values)
    arguments = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT or name in overrides}
    remarks = _apply_turbo(arguments)
    if arguments.pop(VIRTUAL_STAGES, None) is not None and VIRTUAL_STAGES in stated:
        remarks.append(f"{VIRTUAL_STAGES} has no effect; Megatron-LM takes num_virtual_stages_per_pipeline_rank")
    for name, flag in SWITCHED_OFF.items():
        if arguments.pop(name, True) in (False, "false", "False"):
            arguments[flag] = True
    defaulted = frozenset(name.replace("_", "-") for name in arguments if name not in stated)
    return YamlArguments(tuple(file.flags(arguments)), None, file.unknowns, defaulted=defaulted, remarks=tuple(remarks))


def primus_job(text: str, source: str, context: ImportContext) -> Mapping[str, Any] | None:
    """The sections of torchtitan's job that an experiment has; None: it is of another framework."""
    content = yaml_mapping(text, source)
    file = YamlFile(content, source, context, Unknowns())
    trainer = _trainer(file) if is_primus(content) else {}
    if trainer.get("framework") != "torchtitan":
        return None
    base = _merged(_preset(file, "modules", "torchtitan"), _preset(file, "models", "torchtitan"))
    sections = _merged(base, _overrides(file))
    return {
        name: _expanded_section(file, section) for name, section in sections.items() if isinstance(section, Mapping)
    }


def _trainer(file: YamlFile) -> Mapping[str, Any]:
    trainer = file.content["modules"].get("pre_trainer")
    if not isinstance(trainer, Mapping):
        raise file.error("modules", f"{', '.join(map(str, file.content['modules']))}: nothing but pre_trainer is read")
    return trainer


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings of mappings, the second over the first."""
    merged = dict(first)
    for name, value in second.items():
        old = merged.get(name)
        is_nested = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[name] = _merged(old, value) if is_nested else value  # type: ignore[arg-type]
    return merged


def _expanded_section(file: YamlFile, section: Mapping[str, Any]) -> dict[str, Any]:
    """A section with its variables expanded and without keys that are null."""
    return {
        key: _expanded_section(file, value) if isinstance(value, Mapping) else _expanded_number(file, value)
        for key, value in section.items()
        if value is not None
    }


def _expanded_number(file: YamlFile, value: Any) -> Any:
    """A value of a file; digits that a variable stands for are a number."""
    expanded = file.expanded(value)
    return _number(expanded) if expanded != value else value


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < _MAX_DIGITS else value


def _overrides(file: YamlFile) -> Mapping[str, Any]:
    overrides = _trainer(file).get("overrides") or {}
    if not isinstance(overrides, Mapping):
        raise file.error("modules.pre_trainer.overrides", "is no mapping of arguments to values")
    return overrides


def _is_on(value: object) -> bool:
    return str(value) not in ("False", "false", "None", "null", "0", "")


def _require_a_decoder_s_step(file: YamlFile, values: Mapping[str, Any]) -> None:
    """Raise InputError where Primus' own keys define another model or schedule."""
    foreign_layers = next((name for name in _FOREIGN_LAYERS if _is_on(values.get(name))), None)
    if foreign_layers is not None:
        raise file.error(foreign_layers, f"{str(values[foreign_layers])[:40]}: layers of Primus' own are not known")
    lora = values.get("lora")
    if isinstance(lora, Mapping) and _is_on(lora.get("enabled", True)):
        raise file.error("lora", "leave it out, and write training.lora in the scenario")
    if values.get("model_type") not in _DECODERS:
        raise file.error("model_type", f"{values['model_type']!r} is no decoder of text")
    is_pipelined = str(values.get("pipeline_model_parallel_size", 1)) != "1"
    if is_pipelined and _is_on(values.get("patch_zero_bubble")):
        raise file.error("patch_zero_bubble", "leave it out, and write schedule: zb-1p or zb-v in the scenario")
    algorithm = values.get("pp_algorithm")
    if is_pipelined and _is_on(values.get("patch_primus_pipeline")) and algorithm not in _SCHEDULES:
        raise file.error("pp_algorithm", f"{algorithm!r} is not read; leave it out, and write schedule in the scenario")
    for name, key in (("recompute_layer_ids", "training.recompute"), ("decoder_pipeline_manual_split_list", "layout")):
        if _is_on(values.get(name)):
            raise file.error(name, f"its layers are not read; leave it out, and write {key} in the scenario")
    if str(values.get("data_parallel_replicate_degree", 1)) != "1":
        raise file.error("data_parallel_replicate_degree", "is not read; write layout.data: hsdp in the scenario")


def _apply_turbo(arguments: dict[str, Any]) -> list[str]:
    """Replace Primus' own keys by the arguments that have the same effect; sentences about the others."""
    turbo = {name: arguments.pop(name) for name in [*arguments] if "turbo" in name}
    arguments.pop("pp_algorithm", None)
    fused_router = arguments.pop("moe_use_fused_router_with_aux_score", False)
    if not _is_on(turbo.get("enable_primus_turbo")):
        return []
    stage = _number(turbo.get("turbo_sync_free_moe_stage", 0))
    stage = stage if isinstance(stage, int) else 0
    if stage:
        arguments["moe_permute_fusion"] = True
    if stage or _is_on(fused_router):
        arguments["moe_router_fusion"] = True
    if stage >= _DEEPEP_STAGE or _is_on(turbo.get("use_turbo_deepep")):
        arguments["moe_token_dispatcher_type"], arguments["moe_flex_dispatcher_backend"] = "flex", "deepep"
        arguments["moe_deepep_num_sms"] = turbo.get("turbo_deepep_num_cu", 32)
    return ["kernels are Megatron-LM's, where the experiment has those of Primus-Turbo"]


# files of the checkout


def _preset(file: YamlFile, kind: str, framework: str) -> dict[str, Any]:
    """The values of the module's file, or of the model's, with those that it extends."""
    trainer = _trainer(file)
    key = {"modules": "config", "models": "model"}[kind]
    given = trainer.get(key)
    if given is None:
        raise file.error(f"modules.pre_trainer.{key}", "is missing, as Primus would say, too")
    name = str(file.expanded(given))
    try:
        return _preset_named(file, kind, framework, name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    except KeyError:
        raise file.error(
            f"modules.pre_trainer.{key}",
            f"{name} is not here; give the file inside Primus' checkout, or write its arguments as overrides",
        ) from None


def _preset_named(file: YamlFile, kind: str, framework: str, name: str) -> dict[str, Any]:
    """The values of a file of the checkout, or of one whose values are known here; else raise KeyError."""
    path = _checkout_path(file.context.directory, f"{kind}/{framework}", name)
    if path is not None:
        return _extended(path, _MAX_EXTENDS)
    return dict(_packaged_defaults()[f"{kind}/{framework}/{name}"])


@cache
def _packaged_defaults() -> Mapping[str, Any]:
    return read_mapping(Path(__file__).with_name("primus_defaults.yaml"))


def common_defaults() -> dict[str, Any]:
    """What an experiment on language_model.yaml has where it overrides nothing and Megatron-LM has something else."""
    defaults = _packaged_defaults()
    return {**defaults["models/megatron/language_model.yaml"], **defaults["modules/megatron/pre_trainer.yaml"]}


def _checkout_path(directory: Path | None, folder: str, name: str) -> Path | None:
    """A file in Primus' checkout above a directory."""
    parents = [] if directory is None else [directory.resolve(), *directory.resolve().parents][:_MAX_PARENTS]
    folders = (f"primus/configs/{folder}", folder, "")
    candidates = (parent / inner / name for parent in parents for inner in folders)
    return first_file(candidates)


def _extended(path: Path, depth: int) -> dict[str, Any]:
    """A file's values over those of the files that it extends."""
    if not depth:
        raise InputError(f"{path}: extends files more than {_MAX_EXTENDS} deep")
    content = dict(yaml_mapping(read_text(path), str(path)))
    values: dict[str, Any] = {}
    for base in content.pop("extends", content.pop("bases", None)) or ():
        values = _merged(values, _extended(path.parent / str(base), depth - 1))
    return _merged(values, content)
