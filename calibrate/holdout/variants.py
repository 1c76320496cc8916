"""Which real steps say how far a record carries?

Three that it was not measured for: one layer fewer than leave half of the memory free (chains of kernels have those),
and other numbers than the scenario's ranks have; as many with another microbatch (1 if the scenario's is larger, else
2); and half of them. Kernels of another microbatch, and optimizers over other numbers of parameters, are then
interpolated or fitted, as they are in a scenario that a user changes. A step has as many microbatches as the
scenario's, at most four, so that gradients are added up as well as made. Where time is short it has fewer microbatches,
then fewer layers.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from calibrate.check.context import Room, fitted_layers, truncated
from calibrate.check.measurement import WARM_UP
from calibrate.check.prediction import Prediction, predict
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.scenario import Scenario

LEAST: Final = WARM_UP + 1  # steps that must fit into a variant's time
_MOST: Final = 4  # microbatches of a step
_WIDE, _NARROW = 2, 1  # microbatches that are tried instead


@dataclass(frozen=True, slots=True)
class Variant:
    """A step of one device, and what the record says of it."""

    scenario: Scenario
    predicted: Prediction

    @property
    def what(self) -> str:
        """The step, in words."""
        deep, count = self.scenario.model.layer_count, self.scenario.microbatch_count
        layers = "1 layer" if deep == 1 else f"{deep:,} layers"
        microbatches = "1 microbatch" if count == 1 else f"{count:,} microbatches"
        return f"{layers}, {microbatches} of {self.scenario.training.microbatch:,}"


def variants(
    one: Scenario, seen: frozenset[int], record: CalibrationRecord, room: Bytes, seconds: Seconds
) -> list[Variant]:
    """Steps of one device, each within its part of so many seconds; seen: numbers of layers to be avoided.

    Raise InputError where none fits into the memory or the time.
    """
    asked = list(_unseen(one, seen, room))
    share = seconds / len(asked)
    found = (_within(scenario, record, share) for scenario in asked)
    fitting = {item.what: item for item in found if item is not None}
    if not fitting:
        *_, shortest = _shorter(asked[0])
        least = _variant(shortest, record)
        raise InputError(
            f"{LEAST} steps of {least.what} take about {format_seconds(LEAST * least.predicted.seconds)}, and there "
            f"are {format_seconds(share)} for them; give more time, or set training.sequence to less"
        )
    return list(fitting.values())


def _unseen(one: Scenario, seen: frozenset[int], room: Bytes) -> Iterator[Scenario]:
    usual = _batched(one, one.training.microbatch)
    most = fitted_layers(usual, Room(room), None).model.layer_count
    depth = _avoiding(seen | {most}, most)
    yield truncated(usual, depth)
    other = _batched(one, _NARROW if one.training.microbatch >= _WIDE else _WIDE)
    with suppress(InputError):  # a wider one may not fit
        yield fitted_layers(truncated(other, depth), Room(room), None)
    if depth > 1:
        yield truncated(usual, _avoiding(seen, depth // 2))


def _avoiding(seen: frozenset[int], most: int) -> int:
    """The largest number of layers up to the most that was not seen, or the most where all were."""
    return max(set(range(1, most + 1)) - seen, default=most)


def _batched(one: Scenario, microbatch: int) -> Scenario:
    """The step with microbatches of that many sequences, as many sequences as it has if they are not too many."""
    count = min(max(1, one.training.global_batch // microbatch), _MOST)
    return replace(one, training=replace(one.training, microbatch=microbatch, global_batch=count * microbatch))


def _within(scenario: Scenario, record: CalibrationRecord, seconds: Seconds) -> Variant | None:
    """The step, or the longest shorter one of which the fewest steps fit into the time."""
    made = (_variant(item, record) for item in _shorter(scenario))
    return next((variant for variant in made if LEAST * variant.predicted.seconds <= seconds), None)


def _shorter(scenario: Scenario) -> Iterator[Scenario]:
    """The step, with ever fewer microbatches, then with ever fewer layers."""
    yield scenario
    while scenario.microbatch_count > 1:
        training = scenario.training
        batch = scenario.microbatch_count // 2 * training.microbatch
        scenario = replace(scenario, training=replace(training, global_batch=batch))
        yield scenario
    while scenario.model.layer_count > 1:
        scenario = truncated(scenario, scenario.model.layer_count // 2)
        yield scenario


def _variant(scenario: Scenario, record: CalibrationRecord) -> Variant:
    return Variant(scenario, predict(scenario, record))
