"""How does a torchtitan job file express a scenario? Export.

The inverse of `torchtitan_import`, with the same names; differences after re-import are what it cannot
express (`export_scenario`). The model must be one of torchtitan's flavors. Every key that the importer queries is
written, except those without effect.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.export import scenario_label
from clustersim.interop.model_equivalence import differing_fields, has_experts
from clustersim.interop.torchtitan_flavors import FLAVORS, flavor_model, matching_flavor
from clustersim.interop.torchtitan_import import (
    CP_KIND_BY_METHOD,
    LINEAR_CONVERTERS,
    MX_RECIPE,
    RECIPE_BY_NAME,
    RESHARD_BY_NAME,
)
from clustersim.interop.torchtitan_pipeline import (
    MODULES_KEY,
    SCHEDULES,
    is_single_stage,
    stage_module_names,
    torchtitan_layer_split,
)
from clustersim.model.training import (
    ALL_FUSED,
    FullRecompute,
    FusedKernel,
    LossImplementation,
    NoRecompute,
    SelectiveOpRecompute,
)
from clustersim.model.transformer import TransformerModel
from clustersim.parallel import layer_partition
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard
from clustersim.parallel.layout import Layout
from clustersim.program.task import TokenDispatcher
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import ScenarioConfig

_SCHEDULE_NAMES: Final = {ours: theirs for theirs, ours in SCHEDULES.items()}

TomlTable = Mapping[str, Any]


def torchtitan_toml(scenario: Scenario) -> str:
    """A job file; raises InputError if torchtitan has no such model or strategy."""
    tables = {
        "model": _model_table(scenario),
        "training": _training_table(scenario),
        "parallelism": _parallelism_table(scenario),
        "activation_checkpoint": _activation_checkpoint_table(scenario),
        "optimizer": _optimizer_table(scenario),
        "compile": _compile_table(scenario),
        **_quantize_tables(scenario),
    }
    return "\n".join(_format_table(name, table) for name, table in tables.items())


def _optimizer_table(scenario: Scenario) -> TomlTable:
    in_backward = {"early_step_in_backward": True} if scenario.training.optimizer_in_backward else {}
    return {"implementation": _optimizer_implementation(scenario), **in_backward}


def _format_table(name: str, table: TomlTable) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {_format_value(value)}\n" for key, value in table.items())])


def _format_value(value: Any) -> str:
    """A value in TOML; lists of lists have one line per list."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "".join(["[\n", *(f"    {json.dumps(element)},\n" for element in value), "]"])
    return json.dumps(value)


def _model_table(scenario: Scenario) -> TomlTable:
    flavor = matching_flavor(scenario.model, scenario.training.attention)
    if flavor is None:
        raise InputError(
            f"{scenario_label(scenario)}: model: torchtitan has no flavor of {_describe_nearest_flavor(scenario.model)}"
        )
    converters = [_linear_converter(scenario)] if _linear_converter(scenario) else []
    grouped = [converter.replace("linear", "grouped_mm") for converter in converters if has_experts(scenario.model)]
    return {"name": flavor.name, "flavor": flavor.flavor, "converters": [*converters, *grouped]}


def _describe_nearest_flavor(model: TransformerModel) -> str:
    """A model, and how the flavor with the same layer count and width differs from it."""
    sizes = (model.layer_count, model.hidden)
    nearest_flavor = next(
        (
            model_flavor
            for model_flavor in FLAVORS
            if (flavor_model(model_flavor).layer_count, flavor_model(model_flavor).hidden) == sizes
        ),
        None,
    )
    if nearest_flavor is None:
        model_names = sorted({flavor.name for flavor in FLAVORS})
        return f"{model.name}, of {sizes[0]} layers of {sizes[1]:,}; it has {', '.join(model_names)}"
    return (
        f"{model.name}; {nearest_flavor.name} {nearest_flavor.flavor} has another "
        f"{', '.join(differing_fields(model, flavor_model(nearest_flavor)))}"
    )


def _linear_converter(scenario: Scenario) -> str:
    compute = ScenarioConfig.model_validate(scenario.to_mapping()).training.precision.compute
    converter_type = "mx" if compute == MX_RECIPE else "float8" if compute in RECIPE_BY_NAME.values() else ""
    return next((name for name, mapped_type in LINEAR_CONVERTERS.items() if mapped_type == converter_type), "")


def _compile_table(scenario: Scenario) -> TomlTable:
    """Layers are compiled if all that a compiler fuses is fused; the loss is if it is as behind a compiler."""
    fuses_layers = scenario.training.fused >= ALL_FUSED - {FusedKernel.OPTIMIZER}
    compiles_loss = scenario.training.loss is LossImplementation.COMPILED
    components = [*(["model"] if fuses_layers else []), *(["loss"] if compiles_loss else [])]
    return {"enable": bool(components), **({"components": components} if components else {})}


def _optimizer_implementation(scenario: Scenario) -> str:
    return "fused" if scenario.training.fuses(FusedKernel.OPTIMIZER) else "foreach"


def _training_table(scenario: Scenario) -> TomlTable:
    training, layout = scenario.training, scenario.layout.as_configured
    weights = training.recipe.weight_formats
    local = training.microbatch if layout.pp == 1 else training.global_batch // layout.dp
    parameter_dtype = (
        "bfloat16" if weights.master is None and training.recipe.activations.value == "bf16" else "float32"
    )
    return {
        "seq_len": training.sequence,
        "local_batch_size": local,
        "global_batch_size": training.global_batch,
        "dtype": parameter_dtype,
        "mixed_precision_param": "float32" if training.recipe.activations.value == "fp32" else "bfloat16",
        "enable_cpu_offload": _offloads_parameters(scenario),
    }


def _offloads_parameters(scenario: Scenario) -> bool:
    return ScenarioConfig.model_validate(scenario.to_mapping()).training.offload.parameters


def _parallelism_table(scenario: Scenario) -> TomlTable:
    layout = scenario.layout.as_configured
    return {
        **_data_parallel_keys(scenario),
        "tensor_parallel_degree": layout.tp,
        "enable_async_tensor_parallel": layout.tp_comm_overlap,
        "context_parallel_degree": layout.cp,
        **_context_keys(layout),
        "pipeline_parallel_degree": layout.pp,
        **(_pipeline_keys(scenario) if layout.pp > 1 else {}),
        **(_moe_keys(scenario) if has_experts(scenario.model) else {}),
    }


def _context_keys(layout: Layout) -> TomlTable:
    methods = {kind: method for method, kind in CP_KIND_BY_METHOD.items()}
    if layout.cp == 1 or layout.cp_kind.value not in methods:
        return {}
    return {"context_parallel_rotate_method": methods[layout.cp_kind.value]}


def _data_parallel_keys(scenario: Scenario) -> TomlTable:
    layout = scenario.layout.as_configured
    match layout.data:
        case FullyShard() as sharded:
            shard_size = sharded.shard or layout.cp * layout.dp
            if shard_size % layout.cp:
                raise InputError(
                    f"{scenario_label(scenario)}: torchtitan's shards are on whole groups of cp {layout.cp}"
                )
            shard, reshard = shard_size // layout.cp, sharded.reshard_after_forward
        case DdpStrategy():
            shard, reshard = 1, None
        case _:
            strategy_key = ScenarioConfig.model_validate(scenario.to_mapping()).layout.data.chosen[0]
            strategy_label = f"zero{layout.data.zero_stage}" if strategy_key == "zero" else strategy_key
            raise InputError(
                f"{scenario_label(scenario)}: layout.data: torchtitan has no {strategy_label}; write ddp, fsdp or hsdp"
            )
    reshard_name = next(
        reshard_name for reshard_name, reshard_value in RESHARD_BY_NAME.items() if reshard_value is reshard
    )
    return {
        "data_parallel_replicate_degree": layout.dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": reshard_name,
    }


def _moe_keys(scenario: Scenario) -> TomlTable:
    layout = scenario.layout.as_configured
    degrees = {"expert_parallel_degree": layout.ep, "expert_tensor_parallel_degree": layout.effective_etp}
    return degrees | ({"expert_parallel_comm_backend": "deepep"} if layout.dispatcher is TokenDispatcher.DEEPEP else {})


def _pipeline_keys(scenario: Scenario) -> TomlTable:
    """Pipeline keys; the modules of each stage are listed if the split is not torchtitan's default."""
    schedule, layer_split = scenario.schedule, scenario.layout.layers_per_stage
    if schedule.csv_lines or schedule.name not in _SCHEDULE_NAMES:
        raise InputError(
            f"{scenario_label(scenario)}: schedule: torchtitan has no {schedule.name} by name; write "
            f"{', '.join(_SCHEDULE_NAMES)}"
        )
    counts = layer_partition.partition_layers(layer_split, scenario.model.layer_count, scenario.placement)
    has_default_stage_count = len(counts) == scenario.layout.as_configured.pp * (
        1 if is_single_stage(schedule.name) else 2
    )
    is_default_split = has_default_stage_count and counts == torchtitan_layer_split(
        scenario.model.layer_count, len(counts)
    )
    overlaps = (
        {} if scenario.layout.overlap_moe_expert_parallel_comm else {"pipeline_parallel_expert_parallel_overlap": False}
    )
    return {
        "pipeline_parallel_schedule": _SCHEDULE_NAMES[schedule.name],
        "pipeline_parallel_microbatch_size": scenario.training.microbatch,
        **({} if is_default_split else {MODULES_KEY: stage_module_names(counts)}),
        **(overlaps if schedule.name == "dualpipev" else {}),
    }


def _activation_checkpoint_table(scenario: Scenario) -> TomlTable:
    """Option N recomputes every N-th layer, so that each stage recomputes as many as the scenario says."""
    training = scenario.training
    early_stop = {"early_stop": training.early_stop}
    match training.recompute:
        case NoRecompute():
            return {"mode": "none"}
        case FullRecompute(layers=None):
            return {"mode": "full", **early_stop}
        case SelectiveOpRecompute():
            return {"mode": "selective", "selective_ac_option": "op", **early_stop}
        case FullRecompute(layers=int(layers)):
            counts = layer_partition.partition_layers(
                scenario.layout.layers_per_stage, scenario.model.layer_count, scenario.placement
            )
            return {"mode": "selective", "selective_ac_option": str(max(1, max(counts) // layers)), **early_stop}
    raise InputError(
        f"{scenario_label(scenario)}: training.recompute: torchtitan has none, full, selective_op and {{layers: 2}}"
    )


def _quantize_tables(scenario: Scenario) -> Mapping[str, TomlTable]:
    converter_type = LINEAR_CONVERTERS.get(_linear_converter(scenario))
    if converter_type is None:
        return {}
    precision = ScenarioConfig.model_validate(scenario.to_mapping()).training.precision
    is_moe = has_experts(scenario.model)
    linear: dict[str, Any] = {"filter_fqns": ["output", "router.gate"] if is_moe else ["output"]}
    if precision.compute == RECIPE_BY_NAME["rowwise"]:
        linear["recipe_name"] = "rowwise"
    if precision.gathered is not None:
        linear["enable_fsdp_float8_all_gather"] = True
    return {
        f"quantize.linear.{converter_type}": linear,
        **({f"quantize.grouped_mm.{converter_type}": {"fqns": ["experts"]}} if is_moe else {}),
    }
