"""How long does the run of a layout take, accurately enough to compare it with others?

A few runs with common random numbers: the same failures for all layouts on the same nodes. Checkpoints
follow Daly's interval unless the scenario sets one; spares are the mean number of nodes in repair plus two
standard deviations. Cluster states are not simulated but approximated: a slow component slows the whole job
by its own slowdown, and fewer replicas do a proportional share of the work.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.hardware.failures import FailureSlowdown
from clustersim.reliability.checkpoint_cost import (
    CheckpointCost,
    build_checkpoint_cost,
    checkpoint_interval,
    mean_nodes_in_repair,
    mean_time_to_interruption,
    total_work,
)
from clustersim.reliability.failure_domains import FailureDomains, build_failure_domains
from clustersim.reliability.failure_events import generate_failures
from clustersim.reliability.goodput_simulation import MAX_FAILURES, MAX_SLOWDOWN
from clustersim.reliability.job_simulation import HEALTHY, JobParameters, JobSimulation, StateRate
from clustersim.scenario.reliability import ReliabilityModel
from clustersim.scenario.resolved import ResolvedScenario

ESTIMATE_RUNS: Final = 8
_SECONDS_PER_DAY: Final = 86400.0
_DRAW_WINDOW: Final = 30.0 * _SECONDS_PER_DAY  # seconds for which failures are drawn at a time
_REFERENCE_WORK: Final = 120.0 * _SECONDS_PER_DAY  # work in seconds up to which runs are precomputed


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """A run, averaged over a few: days, goodput, checkpoint interval in seconds, nodes of the job and spare nodes."""

    days: float
    goodput: float
    interval: Seconds
    nodes: int
    spare_nodes: int


def estimate_run(resolved: ResolvedScenario, step_time: Seconds) -> RunEstimate:
    """Estimate the run of a scenario with this step time in seconds; raise InputError where its tokens are missing."""
    work, _ = total_work(resolved, step_time)
    parameters = job_parameters(*failure_inputs(resolved), work)
    runs = [_build_job(parameters, run_index).run(run_index) for run_index in range(ESTIMATE_RUNS)]
    wall = sum(run.wall for run in runs)
    spare_nodes = (
        parameters.reliability.spares.shared_nodes or 0
    ) + parameters.reliability.spares.nodes_per_rack * parameters.domains.counts.racks
    return RunEstimate(
        wall / ESTIMATE_RUNS / _SECONDS_PER_DAY,
        sum(run.work for run in runs) / wall,
        parameters.checkpoint_timeline.interval,
        parameters.domains.nodes,
        spare_nodes,
    )


def days_lower_bound(resolved: ResolvedScenario, step_time: Seconds) -> float:
    """Lower bound of the days of `estimate_run`, given a lower bound of the step time in seconds.

    Runs that differ only in the work to do are identical until the first of them ends. So where one with more
    work had done p at time t, and no more before, one with work w >= p is not done before t + w - p.
    """
    work, _ = total_work(resolved, step_time)
    inputs = failure_inputs(resolved)
    max_wall, total = job_parameters(*inputs, work).max_wall, 0.0
    for wall_seconds, progress in _progress_curves(*inputs):
        index = int(np.searchsorted(progress, work, side="right")) - 1
        total += min(max_wall, float(wall_seconds[index] + work - progress[index]))
    return total / ESTIMATE_RUNS / _SECONDS_PER_DAY


def failure_inputs(resolved: ResolvedScenario) -> tuple[ReliabilityModel, FailureDomains, CheckpointCost]:
    """What a run depends on besides its work; the same for all layouts of a job on a cluster."""
    reliability, domains, checkpoint_cost = (
        resolved.reliability,
        replace(build_failure_domains(resolved), replica_ranks=1),
        build_checkpoint_cost(resolved),
    )
    if reliability.spares.shared_nodes is not None:
        return reliability, domains, checkpoint_cost
    mean_in_repair = mean_nodes_in_repair(reliability, domains) * reliability.rate_geometric_std**2
    spares = min(domains.nodes, math.ceil(mean_in_repair + 2.0 * math.sqrt(mean_in_repair)))
    return replace(reliability, spares=replace(reliability.spares, shared_nodes=spares)), domains, checkpoint_cost


def job_parameters(
    reliability: ReliabilityModel, domains: FailureDomains, checkpoint_cost: CheckpointCost, work: Seconds
) -> JobParameters:
    """A job of `work` seconds, without simulated cluster states."""
    mtti = mean_time_to_interruption(reliability, domains)
    return JobParameters(
        reliability=reliability,
        domains=domains,
        checkpoint_timeline=checkpoint_cost.build_timeline(
            checkpoint_interval(reliability, checkpoint_cost, mtti, work)
        ),
        work=work,
        load_seconds=checkpoint_cost.read_seconds,
        final_checkpoint_seconds=checkpoint_cost.synchronous_seconds,
        state_rate=_approximate_state_rate(domains),
        max_wall=min(MAX_SLOWDOWN * work, MAX_FAILURES * mtti),
    )


def _build_job(parameters: JobParameters, run_index: int) -> JobSimulation:
    return JobSimulation(
        parameters, generate_failures(parameters.reliability, parameters.domains, 0, run_index, _DRAW_WINDOW)
    )


@lru_cache(maxsize=32)
def _progress_curves(
    reliability: ReliabilityModel, domains: FailureDomains, checkpoint_cost: CheckpointCost
) -> list[tuple[FloatArray, FloatArray]]:
    """For each run, times in ascending order and the maximum work done by then."""
    parameters, curves = job_parameters(reliability, domains, checkpoint_cost, _REFERENCE_WORK), []
    for run_index in range(ESTIMATE_RUNS):
        job = _build_job(parameters, run_index)
        job.run()
        marks = np.array([(0.0, 0.0), *job.progress_marks])
        max_work = np.maximum.accumulate(marks[:, 1])
        is_increase = np.concatenate(([True], max_work[1:] > max_work[:-1]))
        curves.append((marks[is_increase, 0], max_work[is_increase]))
    return curves


def _approximate_state_rate(domains: FailureDomains) -> StateRate:
    def state_rate(missing: int, slowdown: FailureSlowdown | None) -> tuple[str, float]:
        rate = (1.0 - missing / domains.nodes) * (1.0 if slowdown is None else slowdown.remaining_fraction)
        return (HEALTHY if rate == 1.0 else f"{rate:.1%} of the healthy rate"), rate

    return state_rate
