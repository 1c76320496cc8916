"""How far is a record from real steps that it was not measured for?

Some steps (`holdout.variants`) are predicted with the record and then run, as `calibrate.check` runs them: the real
model, forward, backward and optimizer, no profiler. They take turns, because a machine's speed changes; a step's time
is the median over all turns. What is missing in the record is not measured for it: that it must be interpolated or
fitted is what is tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Final

from calibrate.check.context import Here, note
from calibrate.check.measurement import WARM_UP, train
from calibrate.check.supported import require_supported
from calibrate.check.training_setup import training
from calibrate.collectives.process_groups import World
from calibrate.devices.device import TorchDevice
from calibrate.holdout.one_device import depths, one_device
from calibrate.holdout.variants import LEAST, Variant, variants
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord, HoldoutStep
from clustersim.scenario import Scenario
from clustersim.uncertainty.step_features import step_categories

TURNS: Final = 3
_ROOM: Final = 0.5  # of the free memory: the rest is the allocator's and the libraries'


def step_rows(
    scenario: Scenario, device: TorchDevice, record: CalibrationRecord, seconds: Seconds
) -> tuple[HoldoutStep, ...]:
    """Steps of the scenario as one device runs them, predicted and measured, in about so many seconds.

    None where none can be run here or the record says nothing of them; a line on stderr says why.
    """
    here = Here(device, World(0, 1, 1))
    try:
        runs = [_Run(variant) for variant in variants_of(scenario, device, record, seconds)]
    except InputError as reason:
        note(here, f"no real steps beside their prediction: {reason}")
        return ()
    _take_turns(runs, here, seconds)
    return tuple(run.row for run in runs if run.times)


def variants_of(scenario: Scenario, device: TorchDevice, record: CalibrationRecord, seconds: Seconds) -> list[Variant]:
    """The steps that `step_rows` runs, with their predictions; raise InputError where there are none."""
    if not any(row.time is not None for row in record.kernels):
        raise InputError("the record has no kernels to predict them with")
    one = one_device(scenario, record.device.accelerator)
    require_supported(one)
    return variants(one, depths(scenario), record, room=_ROOM * device.free_bytes(), seconds=seconds)


@dataclass(slots=True)
class _Run:
    """A step and the times that it took; over: it cannot be run again, or at all."""

    variant: Variant
    times: list[Seconds] = field(default_factory=list)
    over: bool = False

    @property
    def row(self) -> HoldoutStep:
        """The step, predicted and measured."""
        predicted = self.variant.predicted
        kinds = tuple(sorted(step_categories(self.variant.scenario)))
        return HoldoutStep(
            self.variant.what, predicted.seconds, median(self.times), predicted.expectation.per_kernel, kinds
        )

    def take(self, here: Here, seconds: Seconds) -> None:
        """Run steps for so many seconds, one at least; where not even that is likely, only the first time."""
        self.over |= bool(self.times) and LEAST * self.variant.predicted.seconds > seconds
        if self.over:
            return
        try:
            self.times += _timed(self.variant.scenario, here, seconds)
        except InputError as reason:
            self.over = True
            note(here, f"no real step of {self.variant.what}: {reason}")


def _take_turns(runs: Sequence[_Run], here: Here, seconds: Seconds) -> None:
    """Give each run its part of the time that is left, in turns."""
    end = monotonic() + seconds
    turns = [run for _ in range(TURNS) for run in runs]
    for number, run in enumerate(turns):
        run.take(here, max(0.0, end - monotonic()) / (len(turns) - number))
        here.device.release()


def _timed(scenario: Scenario, here: Here, seconds: Seconds) -> list[Seconds]:
    """Real steps for so many seconds, building and warming up included; one at least."""
    end = monotonic() + seconds
    times: list[Seconds] = []
    with training(scenario, here) as (trainer, batch):
        train(trainer, batch, here, WARM_UP)
        while not times or monotonic() < end:
            times += [step.seconds for step in train(trainer, batch, here, 1)]
    return times
