"""How much of the time do replicas in several sites train, if each fails by itself?

Each site's replica is a job with the failures of its own components (`job_simulation`), as planned for a job by itself:
optimal checkpoints and spares unless the scenario says otherwise. Two ways to go on are compared: all wait until an
absent replica is back, as an all-reduce of fixed members does; or rounds go on with those that are present, and a
replica that comes back takes the common weights over (PRIME's ElasticDeviceMesh, arXiv:2412.01152; decoupled DiLoCo,
arXiv:2604.21428).

A cut of a link between sites stops the exchange, not the replicas (`link_cuts`).

Assumptions: a replica that fails goes back to its own checkpoint, although it could take its peers' weights; a round is
short compared with an outage.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.reliability.failure_events import generate_failures
from clustersim.reliability.job_simulation import LOSSES, JobSimulation
from clustersim.reliability.link_cuts import LinkCuts, Outage
from clustersim.reliability.run_estimate import failure_inputs, job_parameters
from clustersim.results.goodput import SECONDS_PER_DAY, TimelineInterval
from clustersim.results.outer_rounds import OuterRounds, ReplicaOutages
from clustersim.scenario import Scenario

MAX_DAYS = 3650.0
_DRAW_WINDOW: Seconds = 30.0 * SECONDS_PER_DAY
_SEED = 0


def simulate_replica_outages(
    scenario: Scenario, replicas: Sequence[Scenario], rounds: OuterRounds, days: float, runs: int
) -> ReplicaOutages:
    """Mean fractions of the time over some runs; raise InputError for days out of range.

    scenario: the whole job; replicas: the inner job of each site; rounds: without failures.
    """
    if not 0.0 < days <= MAX_DAYS:
        raise InputError(f"days: {days:g} is not above 0 and up to {MAX_DAYS:,.0f}")
    weights = np.array([replica.layout.world_size for replica in replicas], np.float64)
    weights /= weights.sum()
    horizon = days * SECONDS_PER_DAY
    uptimes, waiting, without = np.zeros(len(replicas)), 0.0, 0.0
    cuts = LinkCuts(scenario, rounds, _SEED, _DRAW_WINDOW)
    for run in range(runs):
        timelines = [_timeline(replica, horizon, run * len(replicas) + site) for site, replica in enumerate(replicas)]
        outages = tuple(cuts.outages(run, horizon))
        edges = _edges([*chain.from_iterable(timelines), *outages], horizon)
        middles, shares = (edges[:-1] + edges[1:]) / 2.0, np.diff(edges) / horizon / runs
        working = np.stack([_is_working(line, middles) for line in timelines])
        reached = _are_reached(outages, middles, len(replicas))
        uptimes += working @ shares
        waiting += float((working * reached).all(axis=0) @ shares)
        without += float(weights @ (working * reached) @ shares)
    return ReplicaOutages(days, runs, tuple(uptimes.tolist()), waiting, without)


def _edges(spans: Sequence[TimelineInterval | Outage], horizon: Seconds) -> FloatArray:
    """Times from 0 to the horizon between which nothing begins or ends."""
    marks = {0.0, horizon, *(min(time, horizon) for span in spans for time in (span.begin, span.end))}
    return np.array(sorted(marks))


def _are_reached(outages: Sequence[Outage], times: FloatArray, sites: int) -> FloatArray:
    """[sites, times] 0 where a site waits for an exchange that does not reach it."""
    reached = np.ones((sites, len(times)))
    for outage in outages:
        first, end = np.searchsorted(times, (outage.begin, outage.end))
        reached[sorted(outage.absent_sites), first:end] = 0.0
    return reached


def _is_working(timeline: Sequence[TimelineInterval], times: FloatArray) -> FloatArray:
    """[times] 1 where the job is up, and what it does is kept."""
    working = np.zeros(len(times))
    for is_loss in (False, True):
        for interval in timeline:
            if (interval.label in LOSSES) == is_loss:
                first, end = np.searchsorted(times, (interval.begin, interval.end))
                working[first:end] = 0.0 if is_loss else 1.0
    return working


def _timeline(replica: Scenario, horizon: Seconds, run: int) -> list[TimelineInterval]:
    """What one replica does up to a time."""
    parameters = job_parameters(*failure_inputs(replica), horizon)
    timeline: list[TimelineInterval] = []
    failures = generate_failures(parameters.reliability, parameters.domains, _SEED, run, _DRAW_WINDOW)
    JobSimulation(parameters, failures, timeline).run()
    return timeline
