"""Jobs that tests run without simulating a step."""

from collections.abc import Sequence
from typing import Any

from clustersim.hardware.failures import (
    DurationDistribution,
    FailureComponent,
    FailureDomain,
    FailureMode,
    FailureRate,
    FailureSlowdown,
)
from clustersim.reliability.checkpoint_timeline import CheckpointTimeline
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.reliability.failure_events import DRAWS_PER_EVENT, FailureEvent, generate_failures
from clustersim.reliability.job_simulation import HEALTHY, JobParameters, JobSimulation
from clustersim.results.goodput import TrainingRun
from clustersim.scenario.reliability import ReliabilityModel, RestartTimes

HOUR, DAY = 3600.0, 86400.0


def site(nodes: int = 64, *, per_rack: int = 4, bound: bool = False) -> FailureDomains:
    """Nodes of 8 GPUs and NICs, 16 of them under a switch; every node is a replica."""
    leaf = tuple(node // 16 for node in range(nodes))
    return FailureDomains(8 * nodes, nodes, per_rack, bound, leaf, 8 * nodes, len(set(leaf)), 8)


def breaking(between: float, **more: Any) -> FailureMode:
    """Something that ends the job every so many seconds on average, and takes no node unless it is said."""
    return FailureMode(
        "it", FailureRate(FailureComponent.JOB, 1.0 / between), **{"takes": FailureDomain.NOTHING, **more}
    )


def pace(missing: int, slower: FailureSlowdown | None) -> tuple[str, float]:
    """Work of so many nodes of 64, slowed as much as the slowest part."""
    rate = (64 - missing) / 64 * (1.0 if slower is None else slower.remaining_fraction)
    return (HEALTHY if rate == 1.0 else f"{rate:.3f}"), rate


def terms(
    said: ReliabilityModel,
    saving: CheckpointTimeline,
    work: float,
    *,
    load: float = 0.0,
    place: FailureDomains | None = None,
) -> JobParameters:
    """What a job does."""
    return JobParameters(
        said, place or site(), saving, work, load, saving.block_seconds + saving.drain_seconds, pace, 100.0 * work
    )


def run(job: JobParameters, number: int = 0, seed: int = 1) -> TrainingRun:
    """One run."""
    events = generate_failures(job.reliability, job.domains, seed, number, job.work)
    return JobSimulation(job, events).run(number)


def run_at(job: JobParameters, *times: float) -> TrainingRun:
    """A run in which the first kind of failure happens at given times, on node 0."""
    return JobSimulation(job, iter([FailureEvent(time, 0, 0, (0.0,) * DRAWS_PER_EVENT) for time in times])).run()


def mean(job: JobParameters, many: int, *, seed: int = 1) -> float:
    """The mean wall time over runs."""
    return sum(run(job, number, seed).wall for number in range(many)) / many


def said(failures: Sequence[FailureMode], restart: float = 0.0, **more: Any) -> ReliabilityModel:
    """What is said, with restarts of so many seconds."""
    return ReliabilityModel(
        failures=tuple(failures), restart=RestartTimes(drain=DurationDistribution.constant(restart)), **more
    )
