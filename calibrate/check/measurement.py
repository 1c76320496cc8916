"""How are a prediction's kernels and a real step measured so that they can be compared?

In turns, several rounds of both, because a machine's speed changes while it is measured: kernels and collectives of
the scenario, each by itself, then some training steps. In several processes all measure at the same time, as they
compute at the same time in a step. A kernel's time is the median over rounds, and so is a step's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Final, TypeVar

from calibrate.check.context import Here
from calibrate.check.cpu_collectives import measure_between
from calibrate.check.phase_timer import TIMED, Part, StepTime, Timeline
from calibrate.check.step_profile import Profile, profiled
from calibrate.check.trainer import Batch, Trainer, step
from calibrate.collectives.command import measure_calls
from calibrate.collectives.interference import Pair, beside, heaviest_kernels, largest_calls
from calibrate.collectives.process_groups import library
from calibrate.devices.device import TorchDevice
from calibrate.devices.telemetry import mean
from calibrate.kernels import measure as kernel_rows
from calibrate.kernels.timing import QUICK
from clustersim.build import distinct_comm_calls, distinct_kernels
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
HostOf = Callable[[Scenario, TorchDevice], Iterable[HostLaunchSample]]
"""What a device's host needs for the launches of a scenario's steps: `calibrate.host`, which builds on this room."""

WARM_UP: Final = 2  # steps: torch makes optimizer states in the first, DDP orders its buckets after it
PATIENCE: Final = 0.15  # seconds for each call in a round
_SHARED: Final = 2  # rounds over which kernels beside collectives are spread: they take longer than all else


@dataclass(frozen=True, slots=True)
class Rounds:
    """What was measured: pooled rows, steps and profiles of all rounds.

    beside: kernels and collectives beside each other, where the layout's data-parallel ones run so; under: this
    process's device during steps.
    """

    kernels: tuple[KernelSample, ...]
    collectives: tuple[CollectiveSample, ...]
    steps: tuple[StepTime, ...]
    profiles: tuple[Profile, ...]
    beside: tuple[InterferenceSample, ...]
    host: tuple[HostLaunchSample, ...] = ()
    under: DeviceTelemetry | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """How measuring and training take turns.

    steps: trained in each round; measuring: whether kernels are, too; host: what measures the host beside them.
    """

    rounds: int
    steps: int
    measuring: bool
    host: HostOf


def run_rounds(scenario: Scenario, trainer: Trainer, batch: Batch, here: Here, turns: Turns) -> Rounds:
    """Measure and train in turns."""
    train(trainer, batch, here, WARM_UP)
    kernels: list[KernelSample] = []
    calls: list[CollectiveSample] = []
    times: list[StepTime] = []
    profiles: list[Profile] = []
    together: list[InterferenceSample] = []
    host: list[HostLaunchSample] = []
    states: list[DeviceTelemetry] = []
    sharing = min(_SHARED, turns.rounds)
    for turn in range(turns.rounds):
        if turns.measuring:
            kernels += _kernels(scenario, here)
            calls += _calls(scenario, here, kernels)
            together += _beside(_pairs(scenario, kernels, calls)[turn % sharing :: sharing], here)
            host += turns.host(scenario, here.device)
            train(trainer, batch, here, 1)  # caches and allocator as in training
        with here.device.watched() as seen:
            times += train(trainer, batch, here, turns.steps)
        states += seen.states
        here.meet()
        profiles += here.gathered(profiled(trainer, batch, here.device.torch))
    return Rounds(
        pooled_kernels(kernels),
        pooled_calls(calls),
        tuple(times),
        tuple(profiles),
        pooled_beside(together),
        pooled_host(host),
        mean(states),
    )


def train(trainer: Trainer, batch: Batch, here: Here, steps: int) -> list[StepTime]:
    """Real steps, each of which all processes begin together: the slowest one's time, the mean of parts."""
    timeline = Timeline(here.device.torch)
    mine = []
    for _ in range(steps):
        here.meet()
        step(trainer, batch, timeline)
        mine.append(timeline.read())
    return [together(item) for item in zip(*here.gathered(mine), strict=True)]


def together(ranks: Sequence[StepTime]) -> StepTime:
    """One step of all ranks; waiting for the slowest one is `OTHER`."""
    seconds = max(rank.seconds for rank in ranks)
    parts = {part: sum(step_time.parts[part] for step_time in ranks) / len(ranks) for part in Part}
    return StepTime(seconds, {**parts, Part.OTHER: seconds - sum(parts[part] for part in TIMED)})


def typical(steps: Sequence[StepTime]) -> StepTime:
    """Medians of the step and of each part."""
    parts = {part: median(step_time.parts[part] for step_time in steps) for part in Part}
    return StepTime(median(item.seconds for item in steps), parts)


def record_of(scenario: Scenario, rounds: Rounds, here: Here) -> CalibrationRecord:
    """What was measured, as a record of the scenario's accelerator."""
    device = here.device.describe(scenario.cluster.accelerator.name)
    if here.world.ranks > 1:
        device = replace(device, collectives=library(here.device.torch))
    conditions = MeasurementConditions(
        date=datetime.now(UTC).date().isoformat(),
        command="calibrate --check",
        method=f"{QUICK}; median over rounds between training steps",
        processes=here.world.ranks,
        after=here.device.conditions(),
    )
    return CalibrationRecord(
        device,
        conditions,
        kernels=rounds.kernels,
        collectives=rounds.collectives,
        beside=rounds.beside,
        host=rounds.host,
    )


def _kernels(scenario: Scenario, here: Here) -> Iterable[KernelSample]:
    return kernel_rows.rows(distinct_kernels(scenario), here.device, QUICK)


def _calls(scenario: Scenario, here: Here, kernels: Sequence[KernelSample]) -> list[CollectiveSample]:
    calls = [call for call in distinct_comm_calls(scenario) if call.ranks > 1]

    if calls and here.device.torch.type == "cpu" and here.world.nodes == 1:
        return measure_between(calls, kernels, here)
    return measure_calls(calls, here.device, patience=PATIENCE) if calls else []


def _pairs(scenario: Scenario, kernels: Sequence[KernelSample], calls: Sequence[CollectiveSample]) -> list[Pair]:
    """Kernels and collectives that are beside each other in a step: collectives of replicas, not those of experts."""
    if scenario.layout.dp == 1:
        return []
    of_replicas = [row.call for row in calls if row.call.collective is not CollectiveType.ALL_TO_ALL]
    heaviest = heaviest_kernels(row.kernel for row in kernels if row.time is not None)
    return [(kernel, call) for call in largest_calls(of_replicas) for kernel in heaviest]


def _beside(pairs: Sequence[Pair], here: Here) -> list[InterferenceSample]:
    return [row for row in beside(pairs, here.device, rounds=1) if isinstance(row, InterferenceSample)] if pairs else []


def pooled_kernels(rows: Iterable[KernelSample]) -> tuple[KernelSample, ...]:
    """One row of each kernel: the median of its medians."""
    return tuple(
        replace(same[0], time=_pooled([row.time for row in same if row.time is not None]))
        for same in _alike(rows, lambda row: row.signature)
    )


def pooled_calls(rows: Iterable[CollectiveSample]) -> tuple[CollectiveSample, ...]:
    """One row of each call: the median of its medians."""
    alike = _alike(rows, lambda row: row.call)
    return tuple(replace(same[0], time=_pooled([row.time for row in same]) or same[0].time) for same in alike)


def pooled_host(rows: Iterable[HostLaunchSample]) -> tuple[HostLaunchSample, ...]:
    """One row of each state: medians of its seconds."""
    return tuple(
        replace(
            same[0],
            forward=median(row.forward for row in same),
            backward=median(row.backward for row in same),
            alone=(median(row.alone[0] for row in same), median(row.alone[1] for row in same)),
        )
        for same in _alike(rows, lambda row: row.state)
    )


def pooled_beside(rows: Iterable[InterferenceSample]) -> tuple[InterferenceSample, ...]:
    """One row of each kernel beside each call: that with the median of slowings."""
    alike = _alike(rows, lambda row: (row.kernel.signature, row.call))
    return tuple(sorted(same, key=lambda row: row.kernel_slowdown)[(len(same) - 1) // 2] for same in alike)


def _alike(rows: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    found: dict[object, list[T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _pooled(times: Sequence[TimeStatistics]) -> TimeStatistics | None:
    if not times:
        return None
    return TimeStatistics(
        seconds=median(time.seconds for time in times),
        p5=min(time_statistics.p5 for time_statistics in times),
        p95=max(item.p95 for item in times),
        repetitions=sum(element.repetitions for element in times),
        dropped=sum(entry.dropped for entry in times),
    )
