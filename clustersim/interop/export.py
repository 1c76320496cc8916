"""What do another program's arguments say of a scenario, and what do they leave open?

Whoever writes arguments reads them again: what differs from the scenario is what they do not say. What makes another
model, layout or schedule is refused; the rest is named.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Final

from clustersim.common.errors import InputError, format_value
from clustersim.interop.import_result import Imported
from clustersim.interop.model_equivalence import alike, apart, corrects
from clustersim.model.training import NoRecompute
from clustersim.parallel.layer_partition import mtp_stage_index, partition_layers
from clustersim.scenario import Scenario
from clustersim.scenario.changes.diff import changed_keys

_ESSENTIAL: Final = (
    "schedule",
    *(f"layout.{key}" for key in ("tp", "cp", "pp", "dp", "ep", "etp", "order", "dispatcher", "layers_per_stage")),
    "layout.sequence_parallel",
    *(f"training.{key}" for key in ("sequence", "global_batch", "microbatch", "recompute", "lora", "offload")),
    "training.optimizer",
    "training.precision.compute",
)
"""Keys that make another step, and so what is in them."""
_HABITS: Final = ("training.recompute.early_stop",)
"""Keys in these that do not."""
_OF_DATA: Final = ("data", "stage", "shard", "secondary")
"""Of `layout.data`, which keys make another step: the strategy, and over how many ranks it cuts what."""
_READ: Final = ("model", "layout", "schedule", "training", "framework")
"""Sections that arguments say; all others are the scenario's."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What a program reads. remarks: what of the scenario it does not say, by key."""

    text: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Writer:
    """How arguments are written and read. program: its name; framework: that of its scenarios; text: the arguments."""

    program: str
    framework: str
    text: Callable[[Scenario], str]
    read: Callable[[str, str, str, int | None], Imported]


def export(scenario: Scenario, writer: Writer) -> Exported:
    """The scenario in the arguments of a program; raise InputError for what makes another model or step there."""
    text = writer.text(scenario)
    said, asked = _read_again(scenario, writer, text), scenario
    remarks = []
    if scenario.framework.name != writer.framework:
        asked = scenario.with_overrides(f"framework={writer.framework}")
        remarks.append(_remark("framework", scenario.framework.name, writer.framework))
    remarks += [_remark(*difference) for difference in _differences(asked, said, writer.program)]
    return Exported(_headed(scenario, writer, text, remarks), tuple(remarks))


def place_of(scenario: Scenario) -> str:
    """What an error calls a scenario: its file, if it has one."""
    return scenario.name if scenario.path is None else str(scenario.path)


def open_keys(asked: Scenario, said: Scenario) -> Iterator[tuple[str, Any, Any]]:
    """Keys by which scenarios of one model differ in what is simulated, with both values.

    A degree that one of them leaves out, or the schedule of a pipeline of one rank, differs in nothing.
    """
    if corrects(asked.model) != corrects(said.model):
        yield "model.experts.router_bias", corrects(asked.model), corrects(said.model)
    named = set()
    for change in changed_keys(asked, said):
        section = change.key.partition(".")[0]
        if section in _READ and section != "model" and not _same(change.key, asked, said):
            named.add(change.key)
            first, second = (_stated(change.key, scenario) for scenario in (asked, said))
            yield (
                change.key,
                first if change.first is None else change.first,
                second if change.second is None else change.second,
            )
    fields_named = {".".join(item.split(".")[:2]) for item in named} - {"training.recompute"}
    for key, mine, theirs in _unwritten(asked, said):
        if ".".join(key.split(".")[:2]) not in fields_named and key not in named:
            yield key, mine, theirs


def _stated(key: str, scenario: Scenario) -> Any:
    """What a key that is left out stands for, where that is a plain value."""
    section, _, name = key.partition(".")
    value = _STAND_FOR[section](scenario).get(name) if section in _STAND_FOR else None
    return value if isinstance(value, bool | int | str) else None


def _unwritten(asked: Scenario, said: Scenario) -> Iterator[tuple[str, Any, Any]]:
    """What defaults of keys that neither writes come to, as a strategy's bucket."""
    for section, of in _STAND_FOR.items():
        mine, theirs = of(asked), of(said)
        for name in mine:
            yield from _inside(f"{section}.{name}", mine[name], theirs[name])


def _inside(key: str, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """What differs of two values, field by field where they are of one kind."""
    if is_dataclass(mine) and type(mine) is type(theirs):
        for dataclass_field in fields(mine):
            yield from _inside(
                f"{key}.{dataclass_field.name}",
                getattr(mine, dataclass_field.name),
                getattr(theirs, dataclass_field.name),
            )
    elif mine != theirs:
        yield key, *(item.value if isinstance(item, Enum) else item for item in (mine, theirs))


def _remark(key: str, mine: object, theirs: object) -> str:
    return f"{key}: {format_value(mine)} in the scenario, {format_value(theirs)} with these arguments"


def _read_again(scenario: Scenario, writer: Writer, text: str) -> Scenario:
    """The scenario that the arguments say, on the scenario's cluster."""
    mine = scenario.to_mapping()
    found = writer.read(text, place_of(scenario), "dgx-h100", scenario.layout.world_size)
    kept = {key: value for key, value in mine.items() if key not in _READ}
    return Scenario.from_mapping({**found.mapping, **kept}, default_name=scenario.name, path=scenario.path)


def _differences(asked: Scenario, said: Scenario, program: str) -> Iterator[tuple[str, Any, Any]]:
    if not alike(asked.model, said.model):
        kinds = ", ".join(apart(asked.model, said.model))
        raise InputError(f"{place_of(asked)}: model: {program} cannot be told the {kinds} of {asked.model.name}")
    for key, mine, theirs in open_keys(asked, said):
        if _essential(key):
            raise InputError(
                f"{place_of(asked)}: {key}: {format_value(mine)} cannot be said to {program}, only {format_value(theirs)}"
            )
        yield key, mine, theirs


def _essential(key: str) -> bool:
    """Whether another value makes another step."""
    if key.startswith("layout.data"):
        return key.rpartition(".")[2] in _OF_DATA
    inside = any(key == item or key.startswith(f"{item}.") for item in _ESSENTIAL)
    return inside and key not in _HABITS


def _same(key: str, asked: Scenario, said: Scenario) -> bool:
    """Whether a key with two values comes to the same."""
    section, _, rest = key.partition(".")
    if section == "schedule":
        return asked.layout.pp == 1 or asked.schedule == said.schedule
    if section == "framework":
        return False
    mine, theirs = _STAND_FOR[section](asked), _STAND_FOR[section](said)
    name = rest if rest in mine else rest.partition(".")[0]
    return bool(mine[name] == theirs[name])


def _layout(scenario: Scenario) -> dict[str, Any]:
    """What keys of `layout` stand for; of those without effect, all the same."""
    layout, split = scenario.layout, scenario.layout.layers_per_stage
    plain = {dataclass_field.name: getattr(layout, dataclass_field.name) for dataclass_field in fields(layout)}
    counts = partition_layers(split, scenario.model.layer_count, scenario.placement)
    plain |= dict.fromkeys(("pipeline_overlap", "release_outputs"), False) if layout.pp == 1 else {}
    plain |= dict.fromkeys(("backward_overlap", "tensor_overlap", "sequence_parallel"), False) if layout.tp == 1 else {}
    plain |= {"data": None} if layout.cp * layout.dp == 1 else {}
    plain["order"] = [axis for axis in layout.order if layout.degrees[axis] > 1]
    return plain | {"etp": layout.effective_etp, "layers_per_stage": (counts, mtp_stage_index(split, len(counts)))}


def _training(scenario: Scenario) -> dict[str, Any]:
    """What keys of `training` stand for; those of `recompute` are two things."""
    training = scenario.training
    plain = {dataclass_field.name: getattr(training, dataclass_field.name) for dataclass_field in fields(training)}
    early_stop = plain.pop("early_stop") and training.recompute != NoRecompute()
    return plain | {"precision": plain.pop("recipe"), "recompute.early_stop": early_stop}


_STAND_FOR: Final = {"layout": _layout, "training": _training}


def _headed(scenario: Scenario, writer: Writer, text: str, remarks: Sequence[str]) -> str:
    """The arguments below what is to be known of them, as comments."""
    gpus = f"{scenario.layout.world_size:,} GPU{'s' if scenario.layout.world_size > 1 else ''}"
    on = f"{gpus} of {scenario.cluster.name}"
    lines = [
        f"{scenario.name} on {on} for {writer.program}, by clustersim",
        "to be added: data, tokenizer, learning rate, number of steps, checkpoints",
        *(f"not said here: {remark}" for remark in remarks),
    ]
    head = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    first, _, rest = text.partition("\n")
    return f"{first}\n{head}{rest}" if first.startswith("#!") else head + text
