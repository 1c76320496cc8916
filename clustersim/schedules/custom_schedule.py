"""Schedules given by a user's own Python class: it is called, and what it returns is validated.

A `CustomScheduleRule` is a class with two methods: `placement(ranks)`, the pipeline rank of each stage, and
`order(ranks, microbatches)`, the actions of each rank. Both may return plain lists and texts (`[0, 1, 1, 0]`,
`[["0F0", "0B0"]]`), so a rule needs nothing of this package. It is called once for each combination of ranks
and microbatches, and what it returns must satisfy the rules of `validation.validate_order`.

`plugins` describes where its class is looked up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, SupportsIndex

from clustersim.common.cached_method import cached_method
from clustersim.common.errors import InputError, format_value
from clustersim.common.pickling import FieldPickling
from clustersim.common.plugins import PLUGIN_EXCEPTIONS, PluginInterface, as_input_errors, format_exception, load_class
from clustersim.program.action import Action, OverlappedPair, PipelineOrder, ScheduleEntry
from clustersim.program.placement import Placement
from clustersim.schedules.csv_format import parse_entry
from clustersim.schedules.schedule import ScheduleTraits
from clustersim.schedules.validation import IndexLabels, validate_order

_INTERFACE: Final = PluginInterface(
    "a schedule", "my_module:MySchedule", {"placement": "ranks", "order": "ranks, microbatches"}
)


class CustomScheduleRule(Protocol):
    """Interface of a schedule outside the package; its constructor takes the scenario's `arguments`, if any."""

    def placement(self, ranks: int) -> Placement | Sequence[int]:
        """[stages] pipeline rank of each stage, in model order.

        Consecutive stages are on one rank or on neighbours. Any exception means that this number of ranks is
        not supported.
        """

    def order(self, ranks: int, microbatches: int) -> Sequence[Sequence[ScheduleEntry | str]]:
        """[ranks][entries] what each rank runs, as `Action` or in torch's notation.

        In torch's notation `"2B1"` is stage, kind, microbatch. Kinds are F, and B or its halves I and W; an
        `OverlappedPair` is `"(0F3;3B1)OVERLAP_F_B"`. Any exception means that these numbers of
        ranks and microbatches are not supported.
        """


@dataclass(frozen=True)
class CustomSchedule(ScheduleTraits, FieldPickling):
    """A user's Python schedule. name: module:Class; folder: where its file is looked up first.

    Cached results are not pickled: another process imports the class and calls it again.
    """

    may_pair_passes: ClassVar[bool] = True
    name: str
    folder: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def rule(self) -> CustomScheduleRule:
        """The instance; raise InputError where it cannot be imported or constructed."""
        rule_class = load_class(self.name, self.folder, _INTERFACE)
        try:
            rule: CustomScheduleRule = rule_class(**self.arguments)
        except PLUGIN_EXCEPTIONS as error:
            argument_text = ", ".join(f"{key}: {format_value(value)}" for key, value in self.arguments.items())
            raise InputError(
                f"{self.name} cannot be made with arguments {{{argument_text}}}: {format_exception(error)}"
            ) from error
        return rule

    @cached_method
    def placement(self, ranks: int) -> Placement:
        """What the rule returns; raise InputError where it refuses or returns an invalid placement."""
        call = f"{self.name}.placement({ranks})"
        with as_input_errors(call):
            placement = self.rule.placement(ranks)
            checked = (
                placement
                if isinstance(placement, Placement)
                else Placement(tuple(map(_parse_rank, _list_items(placement))))
            )
        if checked.pipeline_size != ranks:
            raise InputError(f"{call} places stages on {checked.pipeline_size} pipeline ranks, not on {ranks}")
        return checked

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Call for the order; raise InputError as `order` does."""
        self.order(ranks, microbatches)

    @cached_method
    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """What the rule returns; raise InputError where it refuses, or returns an invalid order."""
        placement, call = self.placement(ranks), f"{self.name}.order({ranks}, {microbatches})"
        with as_input_errors(call):
            order = tuple(
                tuple(map(_parse_entry, _list_items(rank_entries)))
                for rank_entries in _list_items(self.rule.order(ranks, microbatches))
            )
        validate_order(order, placement=placement, microbatches=microbatches, labels=IndexLabels(f"{call}:"))
        return order


def load_custom_schedule(name: str, arguments: Mapping[str, Any], folder: Path) -> CustomSchedule:
    """The schedule called `my_module:MySchedule`; raise InputError where there is none."""
    schedule = CustomSchedule(name, folder.resolve(), arguments)
    _ = schedule.rule
    return schedule


def _list_items(value: object) -> Iterable[object]:
    """Items of a list that the user's code returned; raise InputError if it is none."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InputError(f"{format_value(value)} is not a list")
    return value


def _parse_rank(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < 0:
        raise InputError(f"{format_value(value)} is no pipeline rank; it must give a whole number for each stage")
    return index(value)


def _parse_entry(value: object) -> ScheduleEntry:
    if isinstance(value, (Action, OverlappedPair)):
        return value
    if not isinstance(value, str):
        raise InputError(f"{format_value(value)} is neither an Action nor a text such as '0F0'")
    return parse_entry(value)
