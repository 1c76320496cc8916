"""One check: truncate the model to what fits, train it, measure, predict, compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from calibrate.check.context import CheckContext, MemoryBudget, fit_layer_count, print_note
from calibrate.check.failure_propagation import run_on_all_ranks
from calibrate.check.measurement import (
    CheckMeasurements,
    CheckSchedule,
    HostMeasurement,
    build_record,
    median_step,
    run_rounds,
)
from calibrate.check.phase_timer import StepPhase, StepTime
from calibrate.check.prediction import StepPrediction, adapt_scenario, predict_step
from calibrate.check.step_comparison import Clocks, StepComparison, TimeComparison, UnmeasuredKernel
from calibrate.check.step_profile import StepProfile
from calibrate.check.supported import require_supported
from calibrate.check.training_setup import training_setup
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord, DeviceTelemetry, signature_of
from clustersim.cost.record_file import read_record
from clustersim.cost.record_kinds import MeasurementOutcome, RecordOrigin
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """rounds, steps_per_round: how often to measure and train; layers: of the model, None: as many as fit.

    record_path: None: measure; measure_host: measures the host.
    """

    measure_host: HostMeasurement
    rounds: int = 4
    steps_per_round: int = 3
    layers: int | None = None
    record_path: Path | None = None


def check_scenario(scenario: Scenario, context: CheckContext, request: CheckRequest) -> StepComparison:
    """Compare a real step with its prediction; all processes call it with equal arguments."""
    require_supported(scenario)
    record = (
        None
        if request.record_path is None
        else read_matching_record(scenario, request.record_path, context.device.name)
    )
    usable_bytes = min(context.all_gather(context.usable_bytes()))
    budget = (
        MemoryBudget(usable_bytes) if record else MemoryBudget.shared_with_kernels(usable_bytes, context.device.torch)
    )
    trained = adapt_scenario(
        fit_layer_count(scenario, budget, request.layers), on_cpu=context.device.torch.type == "cpu"
    )
    if trained.model.layer_count != scenario.model.layer_count:
        print_note(
            context,
            f"training {trained.model.layer_count} of the {scenario.model.layer_count} layers of {trained.model.name}",
        )
    measurements = _train_and_measure(
        trained,
        context,
        CheckSchedule(
            request.rounds, request.steps_per_round, measures_kernels=record is None, measure_host=request.measure_host
        ),
    )
    record = record or build_record(trained, measurements, context)
    prediction = predict_step(trained, record)
    comparison = _compare_step(prediction, median_step(measurements.steps), measurements.profiles)
    step_seconds: list[Seconds] = [step.seconds for step in measurements.steps]
    return replace(
        comparison,
        name=trained.name,
        device=f"{context.device.name} ({torch.get_num_threads()} threads)",
        layout=_layout_text(trained),
        layers=trained.model.layer_count,
        model_layers=scenario.model.layer_count,
        steps=len(step_seconds),
        fastest=min(step_seconds),
        interference=measurements.interference,
        slowest=max(step_seconds),
        unmeasured=unmeasured_kernels(prediction.kernel_seconds, record),
        clocks=clocks(prediction.kernel_seconds, record, measurements.under),
    )


def clocks(
    kernels: Mapping[Kernel, Seconds], record: CalibrationRecord, under: DeviceTelemetry | None
) -> Clocks | None:
    """Mean clock under which kernels were measured, weighted by predicted duration, and the clock in steps."""
    telemetry_by_signature = {sample.signature: sample.telemetry for sample in record.kernels}
    weighted_clocks = [
        (seconds, state.sm_clock_mhz)
        for kernel, seconds in kernels.items()
        if (name := signature_of(kernel)) and (state := telemetry_by_signature.get(name)) and state.sm_clock_mhz
    ]
    total_seconds = sum(seconds for seconds, _ in weighted_clocks)
    if under is None or not under.sm_clock_mhz or not total_seconds:
        return None
    return Clocks(sum(seconds * clock for seconds, clock in weighted_clocks) / total_seconds, under.sm_clock_mhz)


def unmeasured_kernels(kernels: Mapping[Kernel, Seconds], record: CalibrationRecord) -> tuple[UnmeasuredKernel, ...]:
    """Kernels of a prediction that a record has no time of, with the reason, longest first."""
    sample_by_signature = {sample.signature: sample for sample in record.kernels}
    unmeasured = []
    for kernel, seconds in kernels.items():
        key = signature_of(kernel)
        sample = None if key is None else sample_by_signature.get(key)
        if sample is None or sample.time is None:
            reason = (
                "the record has no such kernel"
                if sample is None
                else f"{_outcome_text(sample.outcome)}: {sample.source}"
            )
            unmeasured.append(UnmeasuredKernel(kernel.name, seconds, reason))
    return tuple(sorted(unmeasured, key=lambda kernel: -kernel.seconds))


def _outcome_text(outcome: MeasurementOutcome) -> str:
    return outcome.value.replace("_", " ")


def _train_and_measure(scenario: Scenario, context: CheckContext, schedule: CheckSchedule) -> CheckMeasurements:
    """Build the model and train it, on all ranks or on none; raise InputError if it cannot be run here."""

    def measure_rounds() -> CheckMeasurements:
        with training_setup(scenario, context) as (trainer, batch):
            return run_rounds(scenario, trainer, batch, context, schedule)

    return run_on_all_ranks(context.world, measure_rounds)


def read_matching_record(scenario: Scenario, path: Path, device: str) -> CalibrationRecord:
    """The record to predict with, which must be of the scenario's accelerator and, if measured, of this device."""
    record, expected = read_record(path), scenario.cluster.accelerator.name
    if record.device.accelerator != expected:
        raise InputError(f"{path}: device.accelerator: {record.device.accelerator} is not the scenario's, {expected}")
    is_named = bool(record.device.name)  # traces of a CPU do not say which one it is
    if record.origin is RecordOrigin.MEASURED and is_named and record.device.name != device:
        raise InputError(
            f"{path}: device.name: {record.device.name} was measured, and this is {device}; check it there, or leave "
            "--record out to measure here"
        )
    return record


def _compare_step(prediction: StepPrediction, step: StepTime, profiles: Sequence[StepProfile]) -> StepComparison:
    return StepComparison(
        name="",
        device="",
        layout="",
        layers=0,
        model_layers=0,
        steps=0,
        step=TimeComparison(prediction.seconds, step.seconds),
        fastest=step.seconds,
        slowest=step.seconds,
        phases={phase: TimeComparison(prediction.phases[phase], step.phases[phase]) for phase in StepPhase},
        kernel_kinds=_compare_kinds(prediction, profiles),
        predicted_peak=prediction.peak_bytes,
        measured_peak=max(profile.peak_bytes for profile in profiles),
        provenance=prediction.provenance,
    )


def _compare_kinds(prediction: StepPrediction, profiles: Sequence[StepProfile]) -> Mapping[str, TimeComparison]:
    kinds = dict.fromkeys((*prediction.kernel_kinds, *(kind for profile in profiles for kind in profile.kernel_kinds)))
    return {
        kind.value: TimeComparison(
            prediction.kernel_kinds.get(kind, 0.0),
            median(profile.kernel_kinds.get(kind, 0.0) for profile in profiles),
        )
        for kind in kinds
    }


def _layout_text(scenario: Scenario) -> str:
    layout = scenario.layout
    degrees = {"tp": layout.tp, "dp": layout.dp, "ep": layout.ep, "pp": layout.pp}
    labels = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    if layout.dp > 1:
        labels.append("fsdp" if layout.data.zero_stage else "ddp")
    if layout.tp > 1 and layout.sequence_parallel:
        labels.append("sequence parallel")
    if layout.pp > 1:
        labels.append(scenario.schedule.name)
    return ", ".join(labels) or "one process"
