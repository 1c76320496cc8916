"""Measurement of a prediction's kernels and of real steps under the same conditions.

Several rounds alternate between both, because a machine's speed drifts: kernels and collectives of the
scenario, each in isolation, then some training steps. With several processes all measure concurrently, as
they compute concurrently in a step. The time of a kernel is the median over rounds, and so is that of a
step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Final, TypeVar

from calibrate.check.context import CheckContext
from calibrate.check.cpu_collectives import measure_after_kernels
from calibrate.check.phase_timer import TIMED_PHASES, PhaseTimer, StepPhase, StepTime
from calibrate.check.step_profile import StepProfile, profile_step
from calibrate.check.trainer import Trainer, TrainingBatch, training_step
from calibrate.collectives.command import measure_calls
from calibrate.collectives.interference import KernelCallPair, heaviest_kernels, largest_calls, measure_interference
from calibrate.collectives.process_groups import collective_library
from calibrate.collectives.scenario_calls import distinct_comm_calls
from calibrate.devices.device import TorchDevice
from calibrate.devices.telemetry import mean_telemetry
from calibrate.kernels import measure as kernel_rows
from calibrate.kernels.timing import QUICK
from clustersim.build import distinct_kernels
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveSample,
    DeviceTelemetry,
    HostLaunchSample,
    InterferenceSample,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.program.task import CollectiveType
from clustersim.scenario import Scenario

T = TypeVar("T")
HostMeasurement = Callable[[Scenario, TorchDevice], Iterable[HostLaunchSample]]
"""Measures the host's launch times for a scenario's steps: `calibrate.host`, which depends on this package."""

WARM_UP: Final = 2  # steps: torch creates optimizer states in the first, DDP orders its buckets after it
SECONDS_PER_CALL: Final = 0.15  # seconds per call in a round
_INTERFERENCE_ROUNDS: Final = 2  # rounds over which interference measurements are spread: they take longest


@dataclass(frozen=True, slots=True)
class CheckMeasurements:
    """Measurements of all rounds: pooled samples, steps and profiles.

    interference: kernels overlapped with collectives, if the layout's data-parallel collectives are overlapped.
    """

    kernels: tuple[KernelSample, ...]
    collectives: tuple[CollectiveSample, ...]
    steps: tuple[StepTime, ...]
    profiles: tuple[StepProfile, ...]
    interference: tuple[InterferenceSample, ...]
    host: tuple[HostLaunchSample, ...] = ()
    under: DeviceTelemetry | None = None


@dataclass(frozen=True, slots=True)
class CheckSchedule:
    """How measuring and training alternate.

    steps_per_round: trained steps; measures_kernels: whether kernels are measured too; measure_host: measures
    the host.
    """

    rounds: int
    steps_per_round: int
    measures_kernels: bool
    measure_host: HostMeasurement


def run_rounds(
    scenario: Scenario, trainer: Trainer, batch: TrainingBatch, context: CheckContext, schedule: CheckSchedule
) -> CheckMeasurements:
    """Alternate between measuring and training."""
    train_steps(trainer, batch, context, WARM_UP)
    kernel_samples: list[KernelSample] = []
    call_samples: list[CollectiveSample] = []
    step_times: list[StepTime] = []
    profiles: list[StepProfile] = []
    interference: list[InterferenceSample] = []
    host_samples: list[HostLaunchSample] = []
    states: list[DeviceTelemetry] = []
    interference_rounds = min(_INTERFERENCE_ROUNDS, schedule.rounds)
    for round_index in range(schedule.rounds):
        if schedule.measures_kernels:
            kernel_samples += _measure_kernels(scenario, context)
            call_samples += _measure_calls(scenario, context, kernel_samples)
            interference += _measure_interference(
                _overlapped_pairs(scenario, kernel_samples, call_samples)[
                    round_index % interference_rounds :: interference_rounds
                ],
                context,
            )
            host_samples += schedule.measure_host(scenario, context.device)
            train_steps(trainer, batch, context, 1)  # restore caches and allocator state as in training
        with context.device.sample_telemetry() as seen:
            step_times += train_steps(trainer, batch, context, schedule.steps_per_round)
        states += seen.samples
        context.barrier()
        profiles += context.all_gather(profile_step(trainer, batch, context.device.torch))
    return CheckMeasurements(
        pool_kernels(kernel_samples),
        pool_calls(call_samples),
        tuple(step_times),
        tuple(profiles),
        pool_interference(interference),
        pool_host(host_samples),
        mean_telemetry(states),
    )


def train_steps(trainer: Trainer, batch: TrainingBatch, context: CheckContext, steps: int) -> list[StepTime]:
    """Real steps that all processes begin in sync: time of the slowest process, mean of the phases."""
    timeline = PhaseTimer(context.device.torch)
    local_times = []
    for _ in range(steps):
        context.barrier()
        training_step(trainer, batch, timeline)
        local_times.append(timeline.read_step())
    return [merge_rank_times(rank_times) for rank_times in zip(*context.all_gather(local_times), strict=True)]


def merge_rank_times(ranks: Sequence[StepTime]) -> StepTime:
    """One step over all ranks; waiting for the slowest one is `OTHER`."""
    seconds = max(rank.seconds for rank in ranks)
    phases = {phase: sum(step_time.phases[phase] for step_time in ranks) / len(ranks) for phase in StepPhase}
    return StepTime(seconds, {**phases, StepPhase.OTHER: seconds - sum(phases[phase] for phase in TIMED_PHASES)})


def median_step(steps: Sequence[StepTime]) -> StepTime:
    """Medians of the step time and of each phase."""
    phases = {phase: median(step_time.phases[phase] for step_time in steps) for phase in StepPhase}
    return StepTime(median(step.seconds for step in steps), phases)


def build_record(scenario: Scenario, measurements: CheckMeasurements, context: CheckContext) -> CalibrationRecord:
    """The measurements as a record of the scenario's accelerator."""
    device = context.device.describe(scenario.cluster.accelerator.name)
    if context.world.world_size > 1:
        device = replace(device, collectives=collective_library(context.device.torch))
    conditions = MeasurementConditions(
        date=datetime.now(UTC).date().isoformat(),
        command="calibrate --check",
        method=f"{QUICK}; median over rounds between training steps",
        processes=context.world.world_size,
        after=context.device.conditions(),
    )
    return CalibrationRecord(
        device,
        conditions,
        kernels=measurements.kernels,
        collectives=measurements.collectives,
        interference=measurements.interference,
        host_launches=measurements.host,
    )


def _measure_kernels(scenario: Scenario, context: CheckContext) -> Iterable[KernelSample]:
    return kernel_rows.measure_sequence(distinct_kernels(scenario), context.device, QUICK)


def _measure_calls(
    scenario: Scenario, context: CheckContext, kernels: Sequence[KernelSample]
) -> list[CollectiveSample]:
    calls = [call for call in distinct_comm_calls(scenario) if call.ranks > 1]

    if calls and context.device.torch.type == "cpu" and context.world.node_count == 1:
        return measure_after_kernels(calls, kernels, context)
    return measure_calls(calls, context.device, max_seconds_per_call=SECONDS_PER_CALL) if calls else []


def _overlapped_pairs(
    scenario: Scenario, kernel_samples: Sequence[KernelSample], call_samples: Sequence[CollectiveSample]
) -> list[KernelCallPair]:
    """Kernels and data-parallel collectives that overlap in a step; collectives of experts are excluded."""
    if scenario.layout.dp == 1:
        return []
    data_parallel_calls = [
        sample.call for sample in call_samples if sample.call.collective is not CollectiveType.ALL_TO_ALL
    ]
    heaviest = heaviest_kernels(sample.kernel for sample in kernel_samples if sample.time is not None)
    return [(kernel, call) for call in largest_calls(data_parallel_calls) for kernel in heaviest]


def _measure_interference(pairs: Sequence[KernelCallPair], context: CheckContext) -> list[InterferenceSample]:
    return (
        [
            sample
            for sample in measure_interference(pairs, context.device, rounds=1)
            if isinstance(sample, InterferenceSample)
        ]
        if pairs
        else []
    )


def pool_kernels(samples: Iterable[KernelSample]) -> tuple[KernelSample, ...]:
    """One sample per kernel: the median of its medians."""
    return tuple(
        replace(duplicates[0], time=_pool_statistics([sample.time for sample in duplicates if sample.time is not None]))
        for duplicates in _group_by(samples, lambda sample: sample.signature)
    )


def pool_calls(samples: Iterable[CollectiveSample]) -> tuple[CollectiveSample, ...]:
    """One sample per collective call: the median of its medians."""
    groups = _group_by(samples, lambda sample: sample.call)
    return tuple(
        replace(duplicates[0], time=_pool_statistics([sample.time for sample in duplicates]) or duplicates[0].time)
        for duplicates in groups
    )


def pool_host(samples: Iterable[HostLaunchSample]) -> tuple[HostLaunchSample, ...]:
    """One sample per host state: medians of its seconds."""
    return tuple(
        replace(
            duplicates[0],
            forward=median(sample.forward for sample in duplicates),
            backward=median(sample.backward for sample in duplicates),
            in_kernel_times=(
                median(sample.in_kernel_times[0] for sample in duplicates),
                median(sample.in_kernel_times[1] for sample in duplicates),
            ),
        )
        for duplicates in _group_by(samples, lambda sample: sample.mode)
    )


def pool_interference(samples: Iterable[InterferenceSample]) -> tuple[InterferenceSample, ...]:
    """One sample per kernel and call: the one with the median slowdown."""
    groups = _group_by(samples, lambda sample: (sample.kernel.signature, sample.call))
    return tuple(
        sorted(duplicates, key=lambda sample: sample.kernel_slowdown)[(len(duplicates) - 1) // 2]
        for duplicates in groups
    )


def _group_by(samples: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    groups: dict[object, list[T]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return list(groups.values())


def _pool_statistics(statistics: Sequence[TimeStatistics]) -> TimeStatistics | None:
    if not statistics:
        return None
    return TimeStatistics(
        seconds=median(statistic.seconds for statistic in statistics),
        p5=min(item.p5 for item in statistics),
        p95=max(item.p95 for item in statistics),
        repetitions=sum(item.repetitions for item in statistics),
        dropped=sum(item.dropped for item in statistics),
    )
