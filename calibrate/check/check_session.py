"""How is one check run? Cut the model to what fits, train it, measure, predict, compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from calibrate.check.context import Here, Room, fitted_layers, note
from calibrate.check.failure_propagation import together
from calibrate.check.measurement import HostOf, Rounds, Turns, record_of, run_rounds, typical
from calibrate.check.phase_timer import Part, StepTime
from calibrate.check.prediction import Prediction, as_trained, predict
from calibrate.check.step_comparison import Clocks, Comparison, Modelled, Pair
from calibrate.check.step_profile import Profile
from calibrate.check.supported import require_supported
from calibrate.check.training_setup import training
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceTelemetry,
    MeasurementOutcome,
    RecordOrigin,
    signature_of,
)
from clustersim.cost.record_file import read_record
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Asked:
    """rounds, steps: of measuring, and of each round; layers: of the model, None: what fits; record: None: measure.

    host: what measures the host.
    """

    host: HostOf
    rounds: int = 4
    steps: int = 3
    layers: int | None = None
    record: Path | None = None


def checked(scenario: Scenario, here: Here, asked: Asked) -> Comparison:
    """Compare a real step with its prediction; on several processes all call it alike."""
    require_supported(scenario)
    record = None if asked.record is None else _record(scenario, asked.record, here.device.name)
    free = min(here.gathered(here.alone()))
    room = Room(free) if record else Room.shared(free, here.device.torch)
    cut = as_trained(fitted_layers(scenario, room, asked.layers), on_cpu=here.device.torch.type == "cpu")
    if cut.model.layer_count != scenario.model.layer_count:
        note(here, f"training {cut.model.layer_count} of the {scenario.model.layer_count} layers of {cut.model.name}")
    rounds = _measured(cut, here, Turns(asked.rounds, asked.steps, measuring=record is None, host=asked.host))
    record = record or record_of(cut, rounds, here)
    predicted = predict(cut, record)
    made = _compared(predicted, typical(rounds.steps), rounds.profiles)
    times: list[Seconds] = [step.seconds for step in rounds.steps]
    return replace(
        made,
        name=cut.name,
        device=f"{here.device.name} ({torch.get_num_threads()} threads)",
        layout=_layout(cut),
        layers=cut.model.layer_count,
        layers_of=scenario.model.layer_count,
        steps=len(times),
        fastest=min(times),
        beside=rounds.beside,
        slowest=max(times),
        modelled=modelled(predicted.kernels, record),
        clocks=clocks(predicted.kernels, record, rounds.under),
    )


def clocks(
    kernels: Mapping[Kernel, Seconds], record: CalibrationRecord, under: DeviceTelemetry | None
) -> Clocks | None:
    """The clock at which kernels were measured, each as long as it is predicted to last, and that of steps."""
    rows = {row.signature: row.under for row in record.kernels}
    known = [
        (seconds, state.sm_clock_mhz)
        for kernel, seconds in kernels.items()
        if (name := signature_of(kernel)) and (state := rows.get(name)) and state.sm_clock_mhz
    ]
    whole = sum(seconds for seconds, _ in known)
    if under is None or not under.sm_clock_mhz or not whole:
        return None
    return Clocks(sum(seconds * clock for seconds, clock in known) / whole, under.sm_clock_mhz)


def modelled(kernels: Mapping[Kernel, Seconds], record: CalibrationRecord) -> tuple[Modelled, ...]:
    """The kernels of a prediction that a record has no time of, and why, those with most seconds first."""
    rows = {row.signature: row for row in record.kernels}
    found = []
    for kernel, seconds in kernels.items():
        known = signature_of(kernel)
        row = None if known is None else rows.get(known)
        if row is None or row.time is None:
            why = "the record has no such kernel" if row is None else f"{_words(row.outcome)}: {row.source}"
            found.append(Modelled(kernel.name, seconds, why))
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _words(outcome: MeasurementOutcome) -> str:
    return outcome.value.replace("_", " ")


def _measured(scenario: Scenario, here: Here, turns: Turns) -> Rounds:
    """Build the model and train it, on all ranks or on none; raise InputError where it cannot be run here."""

    def run() -> Rounds:
        with training(scenario, here) as (trainer, batch):
            return run_rounds(scenario, trainer, batch, here, turns)

    return together(here.world, run)


def _record(scenario: Scenario, path: Path, device: str) -> CalibrationRecord:
    """The record to predict with: of the scenario's accelerator, and not measured on another device than this one."""
    record, wanted = read_record(path), scenario.cluster.accelerator.name
    if record.device.accelerator != wanted:
        raise InputError(f"{path}: device.accelerator: {record.device.accelerator} is not the scenario's, {wanted}")
    if record.origin is RecordOrigin.MEASURED and record.device.name != device:
        raise InputError(
            f"{path}: device.name: {record.device.name} was measured, and this is {device}; check it there, or leave "
            "--record out to measure here"
        )
    return record


def _compared(predicted: Prediction, step: StepTime, profiles: Sequence[Profile]) -> Comparison:
    return Comparison(
        name="",
        device="",
        layout="",
        layers=0,
        layers_of=0,
        steps=0,
        step=Pair(predicted.seconds, step.seconds),
        fastest=step.seconds,
        slowest=step.seconds,
        parts={part: Pair(predicted.parts[part], step.parts[part]) for part in Part},
        kinds=_kinds(predicted, profiles),
        predicted_peak=predicted.peak,
        measured_peak=max(profile.peak for profile in profiles),
        provenance=predicted.provenance,
    )


def _kinds(predicted: Prediction, profiles: Sequence[Profile]) -> Mapping[str, Pair]:
    found = dict.fromkeys((*predicted.kinds, *(kind for profile in profiles for kind in profile.kinds)))
    return {
        kind.value: Pair(
            predicted.kinds.get(kind, 0.0),
            median(profile.kinds.get(kind, 0.0) for profile in profiles),
        )
        for kind in found
    }


def _layout(scenario: Scenario) -> str:
    layout = scenario.layout
    degrees = {"tp": layout.tp, "dp": layout.dp, "ep": layout.ep, "pp": layout.pp}
    spread = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    if layout.dp > 1:
        spread.append("fsdp" if layout.data.zero_stage else "ddp")
    if layout.tp > 1 and layout.sequence_parallel:
        spread.append("sequence parallel")
    if layout.pp > 1:
        spread.append(scenario.schedule.name)
    return ", ".join(spread) or "one process"
