"""How faithfully do another program's arguments express a scenario? Export with a round-trip check.

Exported arguments are imported again; whatever differs from the scenario is what they cannot express.
Differences that change the model, layout or schedule are an error; others are reported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from clustersim.build import require_common_step
from clustersim.common.errors import InputError, format_value
from clustersim.interop.import_result import ImportResult
from clustersim.interop.model_equivalence import differing_fields, has_router_bias, models_equivalent
from clustersim.model.training import FusedKernel, NoRecompute
from clustersim.model.transformer import TransformerModel
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, FullyShard
from clustersim.parallel.layer_partition import mtp_stage_index, partition_layers
from clustersim.scenario import Scenario
from clustersim.scenario.changes.diff import changed_keys

_STEP_KEYS: Final = (
    "schedule",
    *(
        f"layout.{key}"
        for key in (
            "tp",
            "cp",
            "cp_kind",
            "cp_inner",
            "cp_balanced",
            "pp",
            "dp",
            "ep",
            "etp",
            "order",
            "dispatcher",
            "layers_per_stage",
        )
    ),
    "layout.sequence_parallel",
    *(f"training.{key}" for key in ("sequence", "global_batch", "microbatch", "recompute", "lora", "offload")),
    "training.optimizer",
    "training.precision.compute",
)
"""Keys whose values, nested ones included, define the training step."""
_HARMLESS_KEYS: Final = ("training.recompute.early_stop",)
"""Nested keys that do not."""
_DATA_PARALLEL_KEYS: Final = ("data", "stage", "shard", "zero_hpz_partition_size")
"""Keys of `layout.data` that define the training step: the strategy, and over how many ranks it shards what."""
_ARGUMENT_SECTIONS: Final = ("model", "layout", "schedule", "training", "framework")
"""Sections that arguments express; all others are taken from the scenario."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The exported arguments. differences: what of the scenario they do not express, as sentences by key."""

    text: str
    differences: tuple[str, ...] = ()


_FIELD_WORDS: Final = MappingProxyType({"mtp_spec": "multi-token prediction layers", "shared": "shared blocks"})
"""What fields of a model are called in sentences, where not as in the code."""


def _unchanged(scenario: Scenario) -> Scenario:
    """The scenario, whose layers a program has."""
    return scenario


@dataclass(frozen=True, slots=True)
class ArgumentExporter:
    """Exporter of one program's arguments.

    program: its name; framework: name of the framework in its scenarios; render: scenario to text; parse: text
    to scenario mapping; in_its_layers: the scenario with the same operators in layers as the program has them.
    """

    program: str
    framework: str
    render: Callable[[Scenario], str]
    parse: Callable[[str, str, str, int | None], ImportResult]
    in_its_layers: Callable[[Scenario], Scenario] = _unchanged


def export_scenario(scenario: Scenario, exporter: ArgumentExporter) -> ExportResult:
    """Export a scenario as arguments of a program; raises InputError if the model or step cannot be expressed."""
    require_common_step(scenario)
    if scenario.model.patches is not None or scenario.model.encoder is not None:
        raise InputError(
            f"{scenario_label(scenario)}: model: {exporter.program} trains models of tokens here, and "
            f"{scenario.model.name} reads images"
        )
    original = exporter.in_its_layers(scenario)
    text = exporter.render(original)
    reimported, differences = _reimport(scenario, exporter, text), []
    if original.model.layer_count != scenario.model.layer_count:
        layers = scenario.model.layer_count, original.model.layer_count
        differences.append(_describe_difference("model.layers", *layers))
    if scenario.framework.name != exporter.framework:
        stated = scenario.with_overrides(f"framework={exporter.framework}", *stated_kernels(scenario))
        original = exporter.in_its_layers(stated)
        differences.append(_describe_difference("framework", scenario.framework.name, exporter.framework))
    differences += [
        _describe_difference(*checked_difference)
        for checked_difference in _checked_differences(original, reimported, exporter.program)
    ]
    return ExportResult(_with_header(scenario, exporter, text, differences), tuple(differences))


def stated_kernels(scenario: Scenario) -> list[str]:
    """Overrides that state the kernels which the scenario has from its framework, so that another keeps them."""
    training = scenario.training
    kinds = ", ".join(kind.value for kind in FusedKernel if training.fuses(kind))
    return [
        f"training.fused=[{kinds}]",
        f"training.loss={training.loss.value}",
        f"training.attention={training.attention.value}",
    ]


def scenario_label(scenario: Scenario) -> str:
    """How error messages refer to a scenario: by its file, else its name."""
    return scenario.name if scenario.path is None else str(scenario.path)


def differing_keys(original: Scenario, reimported: Scenario) -> Iterator[tuple[str, Any, Any]]:
    """Keys in which scenarios of one model differ in what is simulated, with both values.

    Omitted degrees, and the schedule of a one-rank pipeline, are not differences.
    """
    if has_router_bias(original.model) != has_router_bias(reimported.model):
        yield "model.experts.router_bias", has_router_bias(original.model), has_router_bias(reimported.model)
    reported = set()
    for change in changed_keys(original, reimported):
        section = change.key.partition(".")[0]
        if (
            section in _ARGUMENT_SECTIONS
            and section != "model"
            and not _is_equivalent(change.key, original, reimported)
        ):
            reported.add(change.key)
            original_default, reimported_default = (
                _default_value(change.key, scenario) for scenario in (original, reimported)
            )
            yield (
                change.key,
                original_default if change.first is None else change.first,
                reimported_default if change.second is None else change.second,
            )
    reported_fields = {".".join(key.split(".")[:2]) for key in reported} - {"training.recompute"}
    for key, original_value, reimported_value in _default_differences(original, reimported):
        if ".".join(key.split(".")[:2]) not in reported_fields and key not in reported:
            yield key, original_value, reimported_value


def _default_value(key: str, scenario: Scenario) -> Any:
    """The effective value of an omitted key, if it is a plain value."""
    section, _, name = key.partition(".")
    value = _EFFECTIVE_VALUES[section](scenario).get(name) if section in _EFFECTIVE_VALUES else None
    return value if isinstance(value, bool | int | str) else None


def _default_differences(original: Scenario, reimported: Scenario) -> Iterator[tuple[str, Any, Any]]:
    """Differences of effective values of keys that neither scenario states, such as a strategy's bucket size."""
    for section, effective_values in _EFFECTIVE_VALUES.items():
        original_values, reimported_values = effective_values(original), effective_values(reimported)
        for name in original_values:
            yield from _value_differences(f"{section}.{name}", original_values[name], reimported_values[name])


def _value_differences(key: str, original: Any, reimported: Any) -> Iterator[tuple[str, Any, Any]]:
    """Differences of two values, field by field if they have the same dataclass type."""
    if is_dataclass(original) and type(original) is type(reimported):
        for dataclass_field in fields(original):
            yield from _value_differences(
                f"{key}.{dataclass_field.name}",
                getattr(original, dataclass_field.name),
                getattr(reimported, dataclass_field.name),
            )
    elif original != reimported:
        yield key, *(value.value if isinstance(value, Enum) else value for value in (original, reimported))


def _describe_difference(key: str, original: object, reimported: object) -> str:
    return f"{key}: {format_value(original)} in the scenario, {format_value(reimported)} with these arguments"


def _reimport(scenario: Scenario, exporter: ArgumentExporter, text: str) -> Scenario:
    """The scenario that the arguments express, on the original's cluster."""
    mapping = scenario.to_mapping()
    imported = exporter.parse(text, scenario_label(scenario), "dgx-h100", scenario.layout.world_size)
    other_sections = {key: value for key, value in mapping.items() if key not in _ARGUMENT_SECTIONS}
    return Scenario.from_mapping({**imported.mapping, **other_sections}, default_name=scenario.name, path=scenario.path)


def _checked_differences(original: Scenario, reimported: Scenario, program: str) -> Iterator[tuple[str, Any, Any]]:
    if not models_equivalent(original.model, reimported.model):
        raise InputError(
            f"{scenario_label(original)}: model: {program} cannot express the "
            f"{_describe_fields(original.model, reimported.model)} of {original.model.name}"
        )
    for key, original_value, reimported_value in differing_keys(original, reimported):
        if _changes_step(key):
            raise InputError(
                f"{scenario_label(original)}: {key}: {format_value(original_value)} cannot be expressed for {program}, "
                f"whose arguments would set {format_value(reimported_value)}"
            )
        yield key, original_value, reimported_value


def _describe_fields(original: TransformerModel, reimported: TransformerModel) -> str:
    """What differs between two models, mixers by their names."""
    kept_mixers = {mixer.label for mixer in reimported.distinct_mixers}
    mixers = dict.fromkeys(mixer.label for mixer in original.distinct_mixers if mixer.label not in kept_mixers)
    descriptions = dict(_FIELD_WORDS) | ({"mixer": f"mixers ({', '.join(mixers)})"} if mixers else {})
    return ", ".join(descriptions.get(field, field) for field in differing_fields(original, reimported))


def _changes_step(key: str) -> bool:
    """Whether another value of the key defines another training step."""
    if key.startswith("layout.data"):
        return key.rpartition(".")[2] in _DATA_PARALLEL_KEYS
    is_step_key = any(key == step_key or key.startswith(f"{step_key}.") for step_key in _STEP_KEYS)
    return is_step_key and key not in _HARMLESS_KEYS


def _is_equivalent(key: str, original: Scenario, reimported: Scenario) -> bool:
    """Whether both values of a key have the same effect."""
    section, _, remainder = key.partition(".")
    if section == "schedule":
        return original.layout.pp == 1 or original.schedule == reimported.schedule
    if section == "framework":
        return False
    original_values, reimported_values = _EFFECTIVE_VALUES[section](original), _EFFECTIVE_VALUES[section](reimported)
    name = remainder if remainder in original_values else remainder.partition(".")[0]
    return bool(original_values[name] == reimported_values[name])


def _effective_layout(scenario: Scenario) -> dict[str, Any]:
    """Effective values of the keys of `layout`; keys without effect have a common value."""
    layout, layer_split = scenario.layout, scenario.layout.layers_per_stage
    values = {dataclass_field.name: getattr(layout, dataclass_field.name) for dataclass_field in fields(layout)}
    counts = partition_layers(layer_split, scenario.model.layer_count, scenario.placement)
    values |= dict.fromkeys(("overlap_p2p_comm", "deallocate_pipeline_outputs"), False) if layout.pp == 1 else {}
    values |= (
        dict.fromkeys(("async_tensor_model_parallel_allreduce", "tp_comm_overlap", "sequence_parallel"), False)
        if layout.tp == 1
        else {}
    )
    values["data"] = None if layout.cp * layout.dp == 1 else _effective_strategy(layout.data)
    values["order"] = [axis for axis in layout.order if layout.degrees[axis] > 1]
    return values | {
        "etp": layout.effective_etp,
        "layers_per_stage": (counts, mtp_stage_index(layer_split, len(counts))),
    }


def _effective_strategy(strategy: DataParallelStrategy) -> DataParallelStrategy:
    """The strategy, which all-reduces nothing across replicas where there are none."""
    match strategy:
        case FullyShard(shard=None):
            return replace(strategy, all_reduce=FullyShard().all_reduce)
    return strategy


def _effective_training(scenario: Scenario) -> dict[str, Any]:
    """Effective values of the keys of `training`; `recompute` covers two of them."""
    training = scenario.training
    values = {dataclass_field.name: getattr(training, dataclass_field.name) for dataclass_field in fields(training)}
    early_stop = values.pop("early_stop") and training.recompute != NoRecompute()
    return values | {"precision": values.pop("recipe"), "recompute.early_stop": early_stop}


_EFFECTIVE_VALUES: Final = {"layout": _effective_layout, "training": _effective_training}


def _with_header(scenario: Scenario, exporter: ArgumentExporter, text: str, differences: Sequence[str]) -> str:
    """The arguments below a header of comments."""
    gpus = f"{scenario.layout.world_size:,} GPU{'s' if scenario.layout.world_size > 1 else ''}"
    hardware = f"{gpus} of {scenario.cluster.name}"
    lines = [
        f"{scenario.name} on {hardware} for {exporter.program}, by clustersim",
        "to be added: data, tokenizer, learning rate, number of steps, checkpoints",
        *(f"not exported: {difference}" for difference in differences),
    ]
    header = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    first_line, _, remaining_lines = text.partition("\n")
    return f"{first_line}\n{header}{remaining_lines}" if first_line.startswith("#!") else header + text
