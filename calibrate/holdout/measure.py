"""What is a record's error on real steps that it was not measured for?

Some steps (`holdout.variants`) are predicted with the record and then run as `calibrate.check` runs them: the
real model, forward, backward and optimizer, without a profiler. They alternate, because a machine's speed
changes; a step's time is the median over all rounds. Kernels that are missing in the record are not measured:
their interpolation or fit is what is validated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Final

from calibrate.check.context import CheckContext, print_note
from calibrate.check.measurement import WARM_UP, train_steps
from calibrate.check.supported import require_supported
from calibrate.check.training_setup import training_setup
from calibrate.collectives.process_groups import World
from calibrate.devices.device import TorchDevice
from calibrate.holdout.one_device import one_device_scenario, pipeline_depths
from calibrate.holdout.variants import MIN_STEPS, HoldoutVariant, holdout_variants
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord, HoldoutStep
from clustersim.scenario import Scenario
from clustersim.uncertainty.step_features import step_categories

ROUNDS: Final = 3
_MEMORY_FRACTION: Final = 0.5  # fraction of the free memory; allocator and libraries need the remainder


def measure_holdout_steps(
    scenario: Scenario, device: TorchDevice, record: CalibrationRecord, seconds: Seconds
) -> tuple[HoldoutStep, ...]:
    """Steps of the scenario as one device runs them, predicted and measured, in about `seconds`.

    Empty where none can be run here or predicted from the record; the reason is printed on stderr.
    """
    context = CheckContext(device, World(0, 1, 1))
    try:
        runs = [_HoldoutRun(variant) for variant in select_variants(scenario, device, record, seconds)]
    except InputError as reason:
        print_note(context, f"no holdout steps: {reason}")
        return ()
    _run_rounds(runs, context, seconds)
    return tuple(run.holdout_step for run in runs if run.times)


def select_variants(
    scenario: Scenario, device: TorchDevice, record: CalibrationRecord, seconds: Seconds
) -> list[HoldoutVariant]:
    """The steps to be run, with their predictions; raise InputError where there are none."""
    if not any(sample.time is not None for sample in record.kernels):
        raise InputError("the record has no kernels to predict them with")
    base = one_device_scenario(scenario, record.device.accelerator)
    require_supported(base)
    return holdout_variants(
        base, pipeline_depths(scenario), record, memory_limit=_MEMORY_FRACTION * device.free_bytes(), seconds=seconds
    )


@dataclass(slots=True)
class _HoldoutRun:
    """A step and its measured times; is_finished: it cannot be run again, or at all."""

    variant: HoldoutVariant
    times: list[Seconds] = field(default_factory=list)
    is_finished: bool = False

    @property
    def holdout_step(self) -> HoldoutStep:
        """The step, predicted and measured."""
        prediction = self.variant.prediction
        kinds = tuple(sorted(step_categories(self.variant.scenario)))
        return HoldoutStep(
            self.variant.label, prediction.seconds, median(self.times), prediction.expectation.error_per_kernel, kinds
        )

    def run_for(self, context: CheckContext, seconds: Seconds) -> None:
        """Run steps for `seconds`, but at least one; after the first round, none if the time is too short for one."""
        self.is_finished |= bool(self.times) and MIN_STEPS * self.variant.prediction.seconds > seconds
        if self.is_finished:
            return
        try:
            self.times += _time_steps(self.variant.scenario, context, seconds)
        except InputError as reason:
            self.is_finished = True
            print_note(context, f"no real step of {self.variant.label}: {reason}")


def _run_rounds(runs: Sequence[_HoldoutRun], context: CheckContext, seconds: Seconds) -> None:
    """Give each run its share of the remaining time, in alternating rounds."""
    deadline = monotonic() + seconds
    queue = [run for _ in range(ROUNDS) for run in runs]
    for index, run in enumerate(queue):
        run.run_for(context, max(0.0, deadline - monotonic()) / (len(queue) - index))
        context.device.release_memory()


def _time_steps(scenario: Scenario, context: CheckContext, seconds: Seconds) -> list[Seconds]:
    """Real steps for `seconds`, building and warm-up included; at least one."""
    deadline = monotonic() + seconds
    times: list[Seconds] = []
    with training_setup(scenario, context) as (trainer, batch):
        train_steps(trainer, batch, context, WARM_UP)
        while not times or monotonic() < deadline:
            times += [step.seconds for step in train_steps(trainer, batch, context, 1)]
    return times
