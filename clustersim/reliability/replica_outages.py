"""How much of the time do replicas in several sites train, if each fails by itself?

Each site's replica is a job with the failures of its own components (`job_simulation`), as planned for a job by itself:
optimal checkpoints and spares unless the scenario says otherwise. Two ways to go on are compared: all wait until an
absent replica is back, as an all-reduce of fixed members does; or rounds go on with those that are present, and a
replica that comes back takes the common weights over (PRIME's ElasticDeviceMesh, arXiv:2412.01152; decoupled DiLoCo,
arXiv:2604.21428).

Assumptions: a replica that fails goes back to its own checkpoint, although it could take its peers' weights; outages of
links between sites only delay an exchange and are left out; a round is short compared with an outage.
"""

from collections.abc import Sequence

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.reliability.failure_events import generate_failures
from clustersim.reliability.job_simulation import LOSSES, JobSimulation
from clustersim.reliability.run_estimate import failure_inputs, job_parameters
from clustersim.results.goodput import SECONDS_PER_DAY, TimelineInterval
from clustersim.results.outer_rounds import ReplicaOutages
from clustersim.scenario import Scenario

MAX_DAYS = 3650.0
_DRAW_WINDOW: Seconds = 30.0 * SECONDS_PER_DAY


def simulate_replica_outages(replicas: Sequence[Scenario], days: float, runs: int, seed: int = 0) -> ReplicaOutages:
    """Mean fractions of the time over some runs; raise InputError for days out of range.

    replicas: the inner job of each site.
    """
    if not 0.0 < days <= MAX_DAYS:
        raise InputError(f"days: {days:g} is not above 0 and up to {MAX_DAYS:,.0f}")
    weights = np.array([replica.layout.world_size for replica in replicas], np.float64)
    weights /= weights.sum()
    uptimes, waiting, without = np.zeros(len(replicas)), 0.0, 0.0
    for run in range(runs):
        begins, ends, working = _working_intervals(replicas, days, run, seed)
        shares = (ends - begins) / (days * SECONDS_PER_DAY) / runs
        uptimes += working @ shares
        waiting += float(working.all(axis=0) @ shares)
        without += float(weights @ working @ shares)
    return ReplicaOutages(days, runs, tuple(uptimes.tolist()), waiting, without)


def _working_intervals(
    replicas: Sequence[Scenario], days: float, run: int, seed: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Begin and end of intervals, and [replicas, intervals] 1 where a replica does work that is not lost."""
    horizon = days * SECONDS_PER_DAY
    timelines = [
        _timeline(replica, horizon, run * len(replicas) + index, seed) for index, replica in enumerate(replicas)
    ]
    marks = {0.0, horizon}
    marks.update(
        min(time, horizon) for line in timelines for interval in line for time in (interval.begin, interval.end)
    )
    edges = np.array(sorted(marks))
    middles = (edges[:-1] + edges[1:]) / 2.0
    working = np.stack([_is_working(line, middles) for line in timelines])
    return edges[:-1], edges[1:], working


def _is_working(timeline: Sequence[TimelineInterval], times: FloatArray) -> FloatArray:
    """[times] 1 where the job is up, and what it does is kept."""
    working = np.zeros(len(times))
    for is_loss in (False, True):
        for interval in timeline:
            if (interval.label in LOSSES) == is_loss:
                first, end = np.searchsorted(times, (interval.begin, interval.end))
                working[first:end] = 0.0 if is_loss else 1.0
    return working


def _timeline(replica: Scenario, horizon: Seconds, run: int, seed: int) -> list[TimelineInterval]:
    """What one replica does up to a time."""
    parameters = job_parameters(*failure_inputs(replica), horizon)
    timeline: list[TimelineInterval] = []
    failures = generate_failures(parameters.reliability, parameters.domains, seed, run, _DRAW_WINDOW)
    JobSimulation(parameters, failures, timeline).run()
    return timeline
