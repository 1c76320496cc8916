"""Which real steps show how well a record generalizes?

Three that it was not measured for: one layer fewer than leave half of the memory free (in-situ chains have
those), and other depths than the scenario's ranks have; the same with another microbatch size (1 if the
scenario's is larger, else 2); and half the layers. Kernels of another microbatch size, and optimizers over
other parameter counts, are then interpolated or fitted, as they are in a scenario that a user changes. A step
has as many microbatches as the scenario's, at most four, so that gradients are accumulated as well as
produced. Where time is short it has fewer microbatches, then fewer layers.
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

MIN_STEPS: Final = WARM_UP + 1  # steps that must fit into the time of a variant
_MAX_MICROBATCHES: Final = 4  # maximum microbatches of a step
_LARGE_MICROBATCH, _SMALL_MICROBATCH = 2, 1  # alternative microbatch sizes


@dataclass(frozen=True, slots=True)
class HoldoutVariant:
    """A step on one device, and its prediction from the record."""

    scenario: Scenario
    prediction: StepPrediction

    @property
    def label(self) -> str:
        """Description of the step."""
        layer_count, count = self.scenario.model.layer_count, self.scenario.microbatch_count
        layers = "1 layer" if layer_count == 1 else f"{layer_count:,} layers"
        microbatches = "1 microbatch" if count == 1 else f"{count:,} microbatches"
        return f"{layers}, {microbatches} of {self.scenario.training.microbatch:,}"


def holdout_variants(
    base: Scenario, measured_depths: frozenset[int], record: CalibrationRecord, memory_limit: Bytes, seconds: Seconds
) -> list[HoldoutVariant]:
    """Steps on one device, each within its share of `seconds`; measured_depths: layer counts to be avoided.

    Raises InputError where none fits into the memory or the time.
    """
    candidates = list(_holdout_scenarios(base, measured_depths, memory_limit))
    share = seconds / len(candidates)
    fitted = (_fit_into_time(scenario, record, share) for scenario in candidates)
    fitted_by_label = {variant.label: variant for variant in fitted if variant is not None}
    if not fitted_by_label:
        *_, shortest = _shorter_scenarios(candidates[0])
        smallest = _predict_variant(shortest, record)
        raise InputError(
            f"{MIN_STEPS} steps of {smallest.label} take about "
            f"{format_seconds(MIN_STEPS * smallest.prediction.seconds)}, and there "
            f"are {format_seconds(share)} for them; give more time, or set training.sequence to less"
        )
    return list(fitted_by_label.values())


def _holdout_scenarios(base: Scenario, measured_depths: frozenset[int], memory_limit: Bytes) -> Iterator[Scenario]:
    same_microbatch = _with_microbatch(base, base.training.microbatch)
    max_depth = fit_layer_count(same_microbatch, MemoryBudget(memory_limit), None).model.layer_count
    depth = _unmeasured_depth(measured_depths | {max_depth}, max_depth)
    yield truncate_model(same_microbatch, depth)
    other_microbatch = _with_microbatch(
        base, _SMALL_MICROBATCH if base.training.microbatch >= _LARGE_MICROBATCH else _LARGE_MICROBATCH
    )
    with suppress(InputError):  # a larger microbatch may not fit
        yield fit_layer_count(truncate_model(other_microbatch, depth), MemoryBudget(memory_limit), None)
    if depth > 1:
        yield truncate_model(same_microbatch, _unmeasured_depth(measured_depths, depth // 2))


def _unmeasured_depth(measured_depths: frozenset[int], max_depth: int) -> int:
    """The largest unmeasured depth up to max_depth, or max_depth where all were measured."""
    return max(set(range(1, max_depth + 1)) - measured_depths, default=max_depth)


def _with_microbatch(base: Scenario, microbatch: int) -> Scenario:
    """The step with microbatches of that many sequences; its number of sequences is kept as far as allowed."""
    count = min(max(1, base.training.global_batch // microbatch), _MAX_MICROBATCHES)
    return replace(base, training=replace(base.training, microbatch=microbatch, global_batch=count * microbatch))


def _fit_into_time(scenario: Scenario, record: CalibrationRecord, seconds: Seconds) -> HoldoutVariant | None:
    """The step, or the longest shorter one, of which MIN_STEPS fit into the time."""
    shorter_variants = (_predict_variant(candidate, record) for candidate in _shorter_scenarios(scenario))
    return next((variant for variant in shorter_variants if MIN_STEPS * variant.prediction.seconds <= seconds), None)


def _shorter_scenarios(scenario: Scenario) -> Iterator[Scenario]:
    """The step, then with ever fewer microbatches, then with ever fewer layers."""
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
