"""How does a torchtitan job file say a scenario?

The inverse of `torchtitan_import`, by the same names; what differs when it is read again is what it cannot say (`exported`).
A model is one of torchtitan's flavors. Every key that the reader asks for is written, those that have no effect aside.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.export import place_of
from clustersim.interop.model_equivalence import apart, has_experts
from clustersim.interop.torchtitan_flavors import FLAVORS, flavor_of, model_of
from clustersim.interop.torchtitan_import import LINEAR, RECIPES, RESHARDS
from clustersim.interop.torchtitan_pipeline import MODULES, SCHEDULES, dealt, modules, single
from clustersim.model.training import FullRecompute, NoRecompute, SelectiveOpRecompute
from clustersim.model.transformer import TransformerModel
from clustersim.parallel import layer_partition
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard
from clustersim.program.task import TokenDispatcher
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.schedules.csv_schedule import CsvSchedule

_WORDS: Final = {ours: theirs for theirs, ours in SCHEDULES.items()}

Table = Mapping[str, Any]


def torchtitan_text(scenario: Scenario) -> str:
    """A job file; raise InputError where torchtitan has no such model or strategy."""
    tables = {
        "model": _model(scenario),
        "training": _training(scenario),
        "parallelism": _parallelism(scenario),
        "activation_checkpoint": _checkpoint(scenario),
        "compile": {"enable": _compiled(scenario)},
        **_quantize(scenario),
    }
    return "\n".join(_table(name, table) for name, table in tables.items())


def _table(name: str, table: Table) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {_value(value)}\n" for key, value in table.items())])


def _value(value: Any) -> str:
    """A value as TOML has it, of which lists of lists have a line for each."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "".join(["[\n", *(f"    {json.dumps(item)},\n" for item in value), "]"])
    return json.dumps(value)


def _model(scenario: Scenario) -> Table:
    found = flavor_of(scenario.model, scenario.training.attention)
    if found is None:
        raise InputError(f"{place_of(scenario)}: model: torchtitan has no flavor of {_nearest(scenario.model)}")
    converters = [_converter(scenario)] if _converter(scenario) else []
    grouped = [converter.replace("linear", "grouped_mm") for converter in converters if has_experts(scenario.model)]
    return {"name": found.name, "flavor": found.flavor, "converters": [*converters, *grouped]}


def _nearest(model: TransformerModel) -> str:
    """A model, and how the flavor of as many layers of its width differs from it."""
    sizes = (model.layer_count, model.hidden)
    near = next(
        (flavor for flavor in FLAVORS if (model_of(flavor).layer_count, model_of(flavor).hidden) == sizes), None
    )
    if near is None:
        known = sorted({item.name for item in FLAVORS})
        return f"{model.name}, of {sizes[0]} layers of {sizes[1]:,}; it has {', '.join(known)}"
    return f"{model.name}; {near.name} {near.flavor} has another {', '.join(apart(model, model_of(near)))}"


def _converter(scenario: Scenario) -> str:
    compute = ScenarioConfig.model_validate(scenario.to_mapping()).training.precision.compute
    kind = "mx" if compute == "mxfp8" else "float8" if compute in RECIPES.values() else ""
    return next((name for name, stands in LINEAR.items() if stands == kind), "")


def _compiled(scenario: Scenario) -> bool:
    return scenario.training.fused or scenario.framework.compiled


def _training(scenario: Scenario) -> Table:
    training, layout = scenario.training, scenario.layout.as_configured
    weights = training.recipe.weight_formats
    local = training.microbatch if layout.pp == 1 else training.global_batch // layout.dp
    kept = "bfloat16" if weights.master is None and training.recipe.activations.value == "bf16" else "float32"
    return {
        "seq_len": training.sequence,
        "local_batch_size": local,
        "global_batch_size": training.global_batch,
        "dtype": kept,
        "mixed_precision_param": "float32" if training.recipe.activations.value == "fp32" else "bfloat16",
        "enable_cpu_offload": _offloads(scenario),
    }


def _offloads(scenario: Scenario) -> bool:
    return ScenarioConfig.model_validate(scenario.to_mapping()).training.offload.parameters


def _parallelism(scenario: Scenario) -> Table:
    layout = scenario.layout.as_configured
    return {
        **_data(scenario),
        "tensor_parallel_degree": layout.tp,
        "enable_async_tensor_parallel": layout.tensor_overlap,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        **(_pipeline(scenario) if layout.pp > 1 else {}),
        **(_experts(scenario) if has_experts(scenario.model) else {}),
    }


def _data(scenario: Scenario) -> Table:
    layout = scenario.layout.as_configured
    match layout.data:
        case FullyShard() as sharded:
            cut = sharded.shard or layout.cp * layout.dp
            if cut % layout.cp:
                raise InputError(f"{place_of(scenario)}: torchtitan's shards are on whole groups of cp {layout.cp}")
            shard, reshards = cut // layout.cp, sharded.reshard_after_forward
        case DdpStrategy():
            shard, reshards = 1, None
        case _:
            chosen = ScenarioConfig.model_validate(scenario.to_mapping()).layout.data.chosen[0]
            written = f"zero{layout.data.zero_stage}" if chosen == "zero" else chosen
            raise InputError(f"{place_of(scenario)}: layout.data: torchtitan has no {written}; write ddp, fsdp or hsdp")
    word = next(word for word, stands in RESHARDS.items() if stands is reshards)
    return {
        "data_parallel_replicate_degree": layout.dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": word,
    }


def _experts(scenario: Scenario) -> Table:
    layout = scenario.layout.as_configured
    folded = {"expert_parallel_degree": layout.ep, "expert_tensor_parallel_degree": layout.effective_etp}
    return folded | ({"expert_parallel_comm_backend": "deepep"} if layout.dispatcher is TokenDispatcher.DEEPEP else {})


def _pipeline(scenario: Scenario) -> Table:
    """Modules of each stage are listed where they are not those that torchtitan would deal."""
    schedule, split = scenario.schedule, scenario.layout.layers_per_stage
    if isinstance(schedule, CsvSchedule) or schedule.name not in _WORDS:
        raise InputError(
            f"{place_of(scenario)}: schedule: torchtitan has no {schedule.name} by name; write {', '.join(_WORDS)}"
        )
    counts = layer_partition.partition_layers(split, scenario.model.layer_count, scenario.placement)
    usual = len(counts) == scenario.layout.as_configured.pp * (1 if single(schedule.name) else 2)
    plain = usual and counts == dealt(scenario.model.layer_count, len(counts))
    overlaps = (
        {} if scenario.layout.overlap_expert_communication else {"pipeline_parallel_expert_parallel_overlap": False}
    )
    return {
        "pipeline_parallel_schedule": _WORDS[schedule.name],
        "pipeline_parallel_microbatch_size": scenario.training.microbatch,
        **({} if plain else {MODULES: modules(counts)}),
        **(overlaps if schedule.name == "dualpipev" else {}),
    }


def _checkpoint(scenario: Scenario) -> Table:
    """Option N recomputes every N-th layer: of each stage as many as the scenario says."""
    training = scenario.training
    early = {"early_stop": training.early_stop}
    match training.recompute:
        case NoRecompute():
            return {"mode": "none"}
        case FullRecompute(layers=None):
            return {"mode": "full", **early}
        case SelectiveOpRecompute():
            return {"mode": "selective", "selective_ac_option": "op", **early}
        case FullRecompute(layers=int(layers)):
            counts = layer_partition.partition_layers(
                scenario.layout.layers_per_stage, scenario.model.layer_count, scenario.placement
            )
            return {"mode": "selective", "selective_ac_option": str(max(1, max(counts) // layers)), **early}
    raise InputError(
        f"{place_of(scenario)}: training.recompute: torchtitan has none, full, selective_op and {{layers: 2}}"
    )


def _quantize(scenario: Scenario) -> Mapping[str, Table]:
    kind = LINEAR.get(_converter(scenario))
    if kind is None:
        return {}
    said = ScenarioConfig.model_validate(scenario.to_mapping()).training.precision
    experts = has_experts(scenario.model)
    linear: dict[str, Any] = {"filter_fqns": ["output", "router.gate"] if experts else ["output"]}
    if said.compute == RECIPES["rowwise"]:
        linear["recipe_name"] = "rowwise"
    if said.gathered is not None:
        linear["enable_fsdp_float8_all_gather"] = True
    return {
        f"quantize.linear.{kind}": linear,
        **({f"quantize.grouped_mm.{kind}": {"fqns": ["experts"]}} if experts else {}),
    }
