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

from calibrate.check.context import MemoryBudget, fit_layer_count, truncate_model
from calibrate.check.measurement import WARM_UP
from calibrate.check.prediction import StepPrediction, predict_step
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.scenario import Scenario

MIN_STEPS: Final = WARM_UP + 1  # steps that must fit into a variant's time
_MAX_MICROBATCHES: Final = 4  # microbatches of a step
_LARGE_MICROBATCH, _SMALL_MICROBATCH = 2, 1  # microbatches that are tried instead


@dataclass(frozen=True, slots=True)
class HoldoutVariant:
    """A step of one device, and what the record says of it."""

    scenario: Scenario
    prediction: StepPrediction

    @property
    def label(self) -> str:
        """The step, in words."""
        layer_count, count = self.scenario.model.layer_count, self.scenario.microbatch_count
        layers = "1 layer" if layer_count == 1 else f"{layer_count:,} layers"
        microbatches = "1 microbatch" if count == 1 else f"{count:,} microbatches"
        return f"{layers}, {microbatches} of {self.scenario.training.microbatch:,}"


def holdout_variants(
    base: Scenario, measured_depths: frozenset[int], record: CalibrationRecord, memory_limit: Bytes, seconds: Seconds
) -> list[HoldoutVariant]:
    """Steps of one device, each within its part of so many seconds; seen: numbers of layers to be avoided.

    Raise InputError where none fits into the memory or the time.
    """
    candidates = list(_holdout_scenarios(base, measured_depths, memory_limit))
    share = seconds / len(candidates)
    fitted = (_fit_into_time(scenario, record, share) for scenario in candidates)
    fitting = {variant.label: variant for variant in fitted if variant is not None}
    if not fitting:
        *_, shortest = _shorter_scenarios(candidates[0])
        smallest = _predict_variant(shortest, record)
        raise InputError(
            f"{MIN_STEPS} steps of {smallest.label} take about {format_seconds(MIN_STEPS * smallest.prediction.seconds)}, and there "
            f"are {format_seconds(share)} for them; give more time, or set training.sequence to less"
        )
    return list(fitting.values())


def _holdout_scenarios(base: Scenario, measured_depths: frozenset[int], memory_limit: Bytes) -> Iterator[Scenario]:
    same_microbatch = _with_microbatch(base, base.training.microbatch)
    max_depth = fit_layer_count(same_microbatch, MemoryBudget(memory_limit), None).model.layer_count
    depth = _unmeasured_depth(measured_depths | {max_depth}, max_depth)
    yield truncate_model(same_microbatch, depth)
    other_microbatch = _with_microbatch(
        base, _SMALL_MICROBATCH if base.training.microbatch >= _LARGE_MICROBATCH else _LARGE_MICROBATCH
    )
    with suppress(InputError):  # a wider one may not fit
        yield fit_layer_count(truncate_model(other_microbatch, depth), MemoryBudget(memory_limit), None)
    if depth > 1:
        yield truncate_model(same_microbatch, _unmeasured_depth(measured_depths, depth // 2))


def _unmeasured_depth(measured_depths: frozenset[int], max_depth: int) -> int:
    """The largest number of layers up to the most that was not seen, or the most where all were."""
    return max(set(range(1, max_depth + 1)) - measured_depths, default=max_depth)


def _with_microbatch(base: Scenario, microbatch: int) -> Scenario:
    """The step with microbatches of that many sequences, as many sequences as it has if they are not too many."""
    count = min(max(1, base.training.global_batch // microbatch), _MAX_MICROBATCHES)
    return replace(base, training=replace(base.training, microbatch=microbatch, global_batch=count * microbatch))


def _fit_into_time(scenario: Scenario, record: CalibrationRecord, seconds: Seconds) -> HoldoutVariant | None:
    """The step, or the longest shorter one of which the fewest steps fit into the time."""
    shorter_variants = (_predict_variant(candidate, record) for candidate in _shorter_scenarios(scenario))
    return next((variant for variant in shorter_variants if MIN_STEPS * variant.prediction.seconds <= seconds), None)


def _shorter_scenarios(scenario: Scenario) -> Iterator[Scenario]:
    """The step, with ever fewer microbatches, then with ever fewer layers."""
    yield scenario
    while scenario.microbatch_count > 1:
        training = scenario.training
        batch = scenario.microbatch_count // 2 * training.microbatch
        scenario = replace(scenario, training=replace(training, global_batch=batch))
        yield scenario
    while scenario.model.layer_count > 1:
        scenario = truncate_model(scenario, scenario.model.layer_count // 2)
        yield scenario


def _predict_variant(scenario: Scenario, record: CalibrationRecord) -> HoldoutVariant:
    return HoldoutVariant(scenario, predict_step(scenario, record))
