"""How is one check run? Cut the model to what fits, train it, measure, predict, compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from calibrate.check.comparison import Comparison, Pair
from calibrate.check.here import Here, fitted_layers, note
from calibrate.check.measured import Rounds, Turns, record_of, run_rounds, typical
from calibrate.check.predict import Prediction, predict
from calibrate.check.profile import Profile
from calibrate.check.support import require_supported
from calibrate.check.timeline import Part, StepTime
from calibrate.check.training import training
from clustersim.cost.record import Record
from clustersim.cost.record_file import read_record
from clustersim.errors import InputError
from clustersim.scenario import Scenario
from clustersim.units import Seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """rounds, steps: of measuring, and of each round; layers: of the model, None: what fits; record: None: measure."""

    rounds: int = 4
    steps: int = 3
    layers: int | None = None
    record: Path | None = None


def checked(scenario: Scenario, here: Here, asked: Asked) -> Comparison:
    """Compare a real step with its prediction; on several processes all call it alike."""
    require_supported(scenario)
    record = None if asked.record is None else _record(scenario, asked.record)
    room = min(here.gathered(here.alone()))
    cut = fitted_layers(scenario, room, asked.layers)
    if cut.model.layers != scenario.model.layers:
        note(here, f"training {cut.model.layers} of the {scenario.model.layers} layers of {cut.model.name}")
    rounds = _measured(cut, here, Turns(asked.rounds, asked.steps, measuring=record is None))
    predicted = predict(cut, record or record_of(cut, rounds, here))
    made = _compared(predicted, typical(rounds.steps), rounds.profiles)
    times: list[Seconds] = [each.seconds for each in rounds.steps]
    return replace(
        made,
        name=cut.name,
        device=f"{here.device.name} ({torch.get_num_threads()} threads)",
        layout=_layout(cut),
        layers=cut.model.layers,
        layers_of=scenario.model.layers,
        steps=len(times),
        fastest=min(times),
        beside=rounds.beside,
        slowest=max(times),
    )


def _measured(scenario: Scenario, here: Here, turns: Turns) -> Rounds:
    with training(scenario, here) as (trainer, batch):
        return run_rounds(scenario, trainer, batch, here, turns)


def _record(scenario: Scenario, path: Path) -> Record:
    record, wanted = read_record(path), scenario.cluster.accelerator.name
    if record.device.accelerator != wanted:
        raise InputError(f"{path}: device.accelerator: {record.device.accelerator} is not the scenario's, {wanted}")
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
    degrees = {"tp": layout.tp, "dp": layout.dp, "pp": layout.pp}
    spread = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    if layout.dp > 1:
        spread.append("fsdp" if layout.data.stage else "ddp")
    if layout.tp > 1 and layout.sequence_parallel:
        spread.append("sequence parallel")
    if layout.pp > 1:
        spread.append(scenario.schedule.name)
    return ", ".join(spread) or "one process"
