"""Job parameters and runs for tests that do not simulate a step."""

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


def failure_domains(nodes: int = 64, *, per_rack: int = 4, bound: bool = False) -> FailureDomains:
    """Nodes of 8 GPUs and NICs, 16 of them per leaf switch; every node is a replica."""
    leaf = tuple(node // 16 for node in range(nodes))
    return FailureDomains(8 * nodes, nodes, per_rack, bound, leaf, 8 * nodes, len(set(leaf)), 8)


def job_failure(mean_interval: float, **fields: Any) -> FailureMode:
    """A failure that interrupts the job with this mean time between failures, and takes out no node by default."""
    return FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, 1.0 / mean_interval),
        **{"failure_domain": FailureDomain.NOTHING, **fields},
    )


def relative_rate(missing_nodes: int, slowdown: FailureSlowdown | None) -> tuple[str, float]:
    """Rate relative to 64 nodes with some missing, reduced by the slowdown."""
    rate = (64 - missing_nodes) / 64 * (1.0 if slowdown is None else slowdown.remaining_fraction)
    return (HEALTHY if rate == 1.0 else f"{rate:.3f}"), rate


def job_parameters(
    reliability: ReliabilityModel,
    checkpoints: CheckpointTimeline,
    work: float,
    *,
    load: float = 0.0,
    domains: FailureDomains | None = None,
) -> JobParameters:
    """Parameters of a job simulation."""
    return JobParameters(
        reliability,
        domains or failure_domains(),
        checkpoints,
        work,
        load,
        checkpoints.block_seconds + checkpoints.drain_seconds,
        relative_rate,
        100.0 * work,
    )


def simulate_run(parameters: JobParameters, run_id: int = 0, seed: int = 1) -> TrainingRun:
    """One simulated run."""
    events = generate_failures(parameters.reliability, parameters.domains, seed, run_id, parameters.work)
    return JobSimulation(parameters, events).run(run_id)


def run_with_failures_at(parameters: JobParameters, *times: float) -> TrainingRun:
    """A run in which the first failure mode occurs at the given times, on node 0."""
    return JobSimulation(parameters, iter([FailureEvent(time, 0, 0, (0.0,) * DRAWS_PER_EVENT) for time in times])).run()


def mean_wall_seconds(parameters: JobParameters, run_count: int, *, seed: int = 1) -> float:
    """Mean wall time over runs."""
    return sum(simulate_run(parameters, run_id, seed).wall for run_id in range(run_count)) / run_count


def reliability_model(failures: Sequence[FailureMode], restart_seconds: float = 0.0, **fields: Any) -> ReliabilityModel:
    """A reliability model with these failures, and restarts of fixed duration."""
    return ReliabilityModel(
        failures=tuple(failures), restart=RestartTimes(drain=DurationDistribution.constant(restart_seconds)), **fields
    )
