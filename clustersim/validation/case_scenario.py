"""Which scenario is a published run? Conversion of a row of `steps.csv` into the mapping of a scenario file.

What the row does not state is filled in with the defaults of its software (`framework_defaults`), the same
for all runs of that software.
"""

import re
from typing import Any, Final

from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError
from clustersim.parallel.mesh import DENSE_AXIS_NAMES
from clustersim.schedules import registry
from clustersim.uncertainty.model_file import uncertainty_model_name
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.cluster_lookup import cluster_config
from clustersim.validation.framework_defaults import (
    FrameworkDefaults,
    framework_defaults,
    has_experts,
)
from clustersim.validation.moe_settings import (
    dense_ffn_size,
    experts_config,
    matching_preset,
    moe_expert_load,
    moe_layout,
    moe_overheads,
    moe_precision,
    require_expressible_moe,
)
from clustersim.validation.training_precision import is_high_precision

_OFFLOAD_BY_NOTE: Final[dict[str, dict[str, Any]]] = {  # text in the notes
    "activation offloading on": {"activations": "all"},
    "optimizer offloading on": {"optimizer": True, "update": "sequential"},  # by DeepSpeed
    "parameter offloading on": {"parameters": True},  # FSDP2's CPUOffloadPolicy
}
_MUON_NOTE: Final = "optimizer muon"
_TILED_MLP_NOTE: Final = re.compile(r"MLP in tiles of (\d+) tokens")
RECOMPUTE_MODES: Final = {
    "": "none",
    "none": "none",
    "selective": "selective",
    "selective-op": "selective_op",
    "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims_saveable",
    "full": "full",
}
_RECOMPUTE_MODULES: Final = re.compile(r"selective:\[([a-z_ ]+)\]")  # Megatron-LM's --recompute-modules
_UNKNOWN_LAYOUT: Final = re.compile(r"unknown:[^;]*layout \(tp", re.IGNORECASE)
_PIPELINE_LAYOUT: Final = re.compile(r"\b(?:layout |pp_layout=)(E[tmL|()*\d]+)")  # pipeline_model_parallel_layout
_MTP_LAYERS: Final = re.compile(r"\bMTP (\d+)|\bmtp-num-layers (\d+)")  # MTP layers
_MODULES_PREFIX: Final = "modules:"  # followed by module names joined by +
_RECOMPUTED_LAYERS: Final = re.compile(r"layers:(\d+)")
_QK_NORM_MODEL: Final = re.compile(r"qwen-?3", re.IGNORECASE)  # RMSNorms of queries and keys, one per head
SIMULATED_PREFIX: Final = "simulated"
"""Prefix of `step_time_origin` where another simulator, not a measurement, gave the time."""
SCHEDULE_NAMES: Final = ("", *registry.SCHEDULE_NAMES)


def scenario_mapping(case: ValidationCase, *, states_software: bool = True) -> dict[str, Any]:
    """The mapping of a run's scenario file; raises CannotPredictError if scenarios cannot express the run.

    states_software: False: as a user writes it who says nothing of the software.
    """
    _require_expressible(case)
    defaults = framework_defaults(case)
    if not states_software:
        defaults = defaults.without_software()
    return {
        "name": case.text("case_id"),
        "model": _model_config(case, defaults),
        "cluster": cluster_config(case),
        "layout": _layout_config(case, defaults),
        "schedule": _schedule_config(case),
        "training": _training_config(case, defaults),
        **_framework_section(case, defaults),
        "steps": _step_count(case),
    }


def _framework_section(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    """The section `framework`, unless the row says nothing of software that is known."""
    section = defaults.framework_config(case)
    return {"framework": section} if section else {}


def _step_count(case: ValidationCase) -> int:
    """Steps to simulate: with zero-bubble schedules steps overlap, and the third is in steady state."""
    return 3 if case.text("schedule").startswith("zb") else 1


def is_high_precision_dense(case: ValidationCase) -> bool:
    """Whether a dense model of attention was trained in bf16 or fp16, in a fully specified run (quality A or B)."""
    return is_fully_specified(case) and is_high_precision(case) and not has_experts(case) and not case.text("mixers")


def is_high_precision_moe(case: ValidationCase) -> bool:
    """Whether an MoE model was trained in bf16 or fp16 and the run is fully specified."""
    return is_fully_specified(case) and is_high_precision(case) and has_experts(case)


def case_uncertainty_model(case: ValidationCase) -> str | None:
    """Name of the uncertainty model to which a case contributes; None if not fully specified or not measured.

    Models with linear mixers contribute to none: their few sources judge predictions, and fit nothing.
    """
    if not (is_fully_specified(case) and is_measured(case)) or case.text("mixers"):
        return None
    return uncertainty_model_name(moe=has_experts(case), low_precision=not is_high_precision(case))


def is_measured(case: ValidationCase) -> bool:
    """Whether the step time was measured on GPUs rather than given by a simulator."""
    return not case.text("step_time_origin").startswith(SIMULATED_PREFIX)


def is_fully_specified(case: ValidationCase) -> bool:
    """Whether everything that the step time depends on is known (quality A or B)."""
    return case.text("quality") in ("A", "B")


def _require_expressible(case: ValidationCase) -> None:
    """Raise CannotPredictError for a run that is not modelled or whose row is inconsistent."""
    if case.positive_int("ep", 1) > 1 and not has_experts(case):
        raise CannotPredictError("expert parallelism of a model without experts", is_expressible=False)
    if _UNKNOWN_LAYOUT.search(case.text("notes")):
        raise CannotPredictError("degrees of parallelism are not stated", is_expressible=False)
    if case.text("schedule") not in SCHEDULE_NAMES:
        raise CannotPredictError(f"schedule {case.text('schedule')} is not modelled")


def _model_config(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    preset = matching_preset(case) if has_experts(case) else None
    if has_experts(case):
        require_expressible_moe(case, preset)
    moe_config = {"experts": experts_config(case, preset)} if has_experts(case) else {}
    base_config = {"name": case.text("model") or case.text("case_id"), **moe_config, **_mtp_config(case)}
    if preset is not None:
        size_overrides = {column: case.positive_int(column) for column in ("layers", "vocab")}
        return base_config | size_overrides | {"preset": preset, "max_positions": case.positive_int("seq")}
    dimensions = _model_dimensions(case, defaults) | mixers_config(case)
    if "mla" in dimensions:
        del dimensions["qkv_bias"]  # of heads that it has not
    if moe_config and not moe_config["experts"].get("dense_layers"):
        del dimensions["ffn"]  # width of the dense MLP, which no layer has
    return base_config | dimensions


def _mtp_config(case: ValidationCase) -> dict[str, int]:
    """The number of multi-token prediction layers that the notes state, else of those in the pipeline's layout."""
    stated, layout = _MTP_LAYERS.search(case.text("notes")), _PIPELINE_LAYOUT.search(case.text("notes"))
    count = int(stated[1] or stated[2]) if stated else layout[1].count("m") if layout else 0
    return {"mtp_layers": count} if count else {}


def _model_dimensions(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    return {
        **{column: case.positive_int(column) for column in ("layers", "hidden", "vocab")},
        **_head_dimensions(case),
        "ffn": dense_ffn_size(case) if has_experts(case) else case.positive_int("ffn_hidden"),
        "max_positions": case.positive_int("seq"),
        "mlp": case.text("mlp") or "swiglu",
        "tied_embeddings": case.boolean("tied_embeddings"),
        **({"qk_norm": True} if _QK_NORM_MODEL.match(case.text("model")) else {}),
        **defaults.model_options(case),
    }


def _head_dimensions(case: ValidationCase) -> dict[str, int]:
    """Heads of attention; of a model with other mixers only those that the row states."""
    if case.text("mixers"):
        return {column: case.positive_int(column) for column in ("heads",) if case.text(column)}
    heads = case.positive_int("heads")
    head_dim = case.positive_int("head_dim", max(1, case.positive_int("hidden") // heads))
    return {"heads": heads, "kv_heads": case.positive_int("kv_heads", heads), "head_dim": head_dim}


def mixers_config(case: ValidationCase) -> dict[str, Any]:
    """Keys of `model` that say which mixers the layers have, and their sizes, in YAML."""
    if not case.text("mixers"):
        return {}
    try:
        content = parse_yaml(case.text("mixers"))
    except InputError as error:
        raise CannotPredictError(f"mixers {case.text('mixers')}: {error}", is_expressible=False) from None
    if not isinstance(content, dict):
        raise CannotPredictError(f"mixers {case.text('mixers')}: is no mapping", is_expressible=False)
    return content


def _uses_sequence_parallel(case: ValidationCase) -> bool:
    """Whether sequence parallelism is on; frameworks require it for MoE models with tensor parallelism."""
    return case.boolean("sequence_parallel") or (has_experts(case) and not case.text("sequence_parallel"))


def _layout_config(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    degrees = {axis: case.positive_int(axis, 1) for axis in DENSE_AXIS_NAMES}
    config: dict[str, Any] = {
        **degrees,
        "sequence_parallel": _uses_sequence_parallel(case) and degrees["tp"] > 1,
        "tp_comm_overlap": defaults.overlaps_tp_comm(case),
        **defaults.overlap_options(case),
        "data": defaults.data_parallel_config(case),
        **(moe_layout(case, defaults) if has_experts(case) else {}),
    }
    return config | _layer_split(case, defaults)


def _layer_split(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    """The split of layers over stages, where it is not even."""
    stages, layers = case.positive_int("pp", 1) * case.positive_int("vpp", 1), case.positive_int("layers")
    stated = case.text("layers_per_stage").split()
    if stated:
        return {
            "layers_per_stage": [int(count_text) if count_text.isdecimal() else count_text for count_text in stated]
        }
    layout_match = _PIPELINE_LAYOUT.search(case.text("notes"))
    if layout_match:
        return {"layers_per_stage": layout_match[1]}
    counts_embedding_and_head = "take a layer slot" in case.text("notes") or (
        defaults.counts_embedding_and_head and layers % stages != 0
    )
    if (
        stages > 1 and counts_embedding_and_head and (layers + 2) % stages == 0
    ):  # embedding and output head count as one layer each
        slots = (layers + 2) // stages
        return {"layers_per_stage": [slots - 1, *[slots] * (stages - 2), slots - 1]}
    return {}


def _schedule_config(case: ValidationCase) -> Any:
    name = case.text("schedule")
    if case.positive_int("pp", 1) == 1 or not name:
        return "1f1b"
    # if the number of chunks is not stated: maximal interleaving, one layer per chunk
    max_chunks = -(-case.positive_int("layers") // case.positive_int("pp"))
    return {name: {"chunks": case.positive_int("vpp", max_chunks)}} if name in registry.CHUNKED_SCHEDULES else name


def _training_config(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    return {
        "sequence": case.positive_int("seq"),
        "global_batch": case.positive_int("global_batch"),
        "microbatch": case.positive_int("micro_batch", 1),
        "precision": _precision_config(case, defaults),
        **_recompute_section(case, defaults),
        **defaults.attention_options(case),
        **defaults.kernel_options(case),
        **_lora_config(case),
        **_offload_config(case),
        **_optimizer_config(case),
        **_overheads_config(case, defaults),
        **(moe_expert_load(case) if has_experts(case) else {}),
        **_tiled_mlp_config(case),
    }


def _tiled_mlp_config(case: ValidationCase) -> dict[str, Any]:
    """MLPs that run on tiles of the sequence in forward, which is checkpointed."""
    stated = _TILED_MLP_NOTE.search(case.text("notes"))
    return {"tiled_mlp": {"tokens": int(stated[1]), "recompute": False}} if stated else {}


def _overheads_config(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    """The section `overheads`, where it differs from the framework's."""
    overheads = moe_overheads(case, defaults) if has_experts(case) else {}
    overheads |= defaults.kernel_overheads(case)
    if defaults.ring_attention is not None:
        overheads |= {"ring_attention": defaults.ring_attention.value}
    return {"overheads": overheads} if overheads else {}


def _precision_config(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, str | int]:
    """Compute format and the formats of stored tensors that differ from the defaults."""
    return (moe_precision(case, defaults) if has_experts(case) else {}) | defaults.precision_config(case)


def _offload_config(case: ValidationCase) -> dict[str, Any]:
    """Offloading to the host that the notes state."""
    configs = [config for note, config in _OFFLOAD_BY_NOTE.items() if note in case.text("notes")]
    return {"offload": {key: value for entry in configs for key, value in entry.items()}} if configs else {}


def _optimizer_config(case: ValidationCase) -> dict[str, str]:
    """The optimizer, where the notes state another than the usual one."""
    return {"optimizer": "muon"} if _MUON_NOTE in case.text("notes") else {}


def _lora_config(case: ValidationCase) -> dict[str, Any]:
    """LoRA adapters, where the row states their rank."""
    if not case.text("lora_rank"):
        return {}
    targets, base = case.text("lora_targets").split() or ["all"], case.text("lora_base") or "none"
    return {"lora": {"rank": case.positive_int("lora_rank"), "targets": targets, "base": base}}


def _recompute_section(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    """The key `recompute`, unless a row leaves it to its recipe."""
    is_left_out = not case.text("recompute") and defaults.leaves_to_recipe(case)
    return {} if is_left_out else {"recompute": _recompute_config(case)}


def _recompute_config(case: ValidationCase) -> Any:
    mode = case.text("recompute")
    if mode == "alternate-layers":
        return {"layers": case.positive_int("layers") // 2}
    layers = _RECOMPUTED_LAYERS.fullmatch(mode)
    if layers:
        return {"layers": int(layers[1])}
    module_list = _RECOMPUTE_MODULES.fullmatch(mode)
    if module_list:
        return {"modules": module_list[1].split()}
    if mode.startswith(_MODULES_PREFIX):
        return {"modules": mode.removeprefix(_MODULES_PREFIX).split("+")}
    if mode not in RECOMPUTE_MODES:
        raise CannotPredictError(f"recompute {mode} is not modelled")
    return {"mode": RECOMPUTE_MODES[mode]}
