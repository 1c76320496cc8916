"""How long does the run of a layout take, near enough to compare it with others?

Few runs, in which the same breaks for all layouts on the same nodes; checkpoints come as Daly says unless the scenario
says how often, and spares are as many as are in repair at a time with two deviations more. Assumed, so that no state of
the cluster is simulated: a slow part slows the whole job as much as itself, fewer replicas do their part of the work.
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
    Storing,
    formula,
    in_repair,
    mean_time_to_interruption,
    storing,
    work_of,
)
from clustersim.reliability.failure_domains import Site, site_of
from clustersim.reliability.failure_events import events_of
from clustersim.reliability.goodput_simulation import LONGEST, MOST_FAILURES
from clustersim.reliability.job_simulation import HEALTHY, Job, Pace, Terms
from clustersim.scenario.reliability import ReliabilityModel
from clustersim.scenario.resolved import ResolvedScenario

RUNS: Final = 8
_DAY: Final = 86400.0
_WINDOW: Final = 30.0 * _DAY  # for which failures are drawn at a time
_LONG: Final = 120.0 * _DAY  # of work: runs are known as far as that before layouts are


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run, the mean over a few: days, goodput, seconds between checkpoints, nodes of the job and beside it."""

    days: float
    goodput: float
    interval: Seconds
    nodes: int
    spare_nodes: int


def estimate(setup: ResolvedScenario, seconds: Seconds) -> Estimate:
    """The run of a scenario whose step takes so many seconds; raise InputError where it does not say its tokens."""
    work, _ = work_of(setup, seconds)
    terms = _terms(*_said(setup), work)
    runs = [_job(terms, number).run(number) for number in range(RUNS)]
    wall = sum(run.wall for run in runs)
    beside = (
        terms.reliability.spares.shared_nodes or 0
    ) + terms.reliability.spares.nodes_per_rack * terms.site.counts.racks
    return Estimate(
        wall / RUNS / _DAY, sum(run.work for run in runs) / wall, terms.saving.compute, terms.site.nodes, beside
    )


def least_days(setup: ResolvedScenario, seconds: Seconds) -> float:
    """Days that `estimate` does not undercut where a step takes so many seconds at least.

    Runs that differ in nothing but the work to do are the same until the first of them ends. So where one of more work
    had done p at time t, and no more before, one of work w >= p is not done before t + w - p.
    """
    work, _ = work_of(setup, seconds)
    said = _said(setup)
    longest, whole = _terms(*said, work).most, 0.0
    for walls, progress in _marks(*said):
        place = int(np.searchsorted(progress, work, side="right")) - 1
        whole += min(longest, float(walls[place] + work - progress[place]))
    return whole / RUNS / _DAY


def _said(setup: ResolvedScenario) -> tuple[ReliabilityModel, Site, Storing]:
    """What a run depends on beside its work; layouts of one job on one cluster have it in common."""
    said, site, stored = setup.reliability, replace(site_of(setup), replica=1), storing(setup)
    if said.spares.shared_nodes is not None:
        return said, site, stored
    broken = in_repair(said, site) * said.rate_geometric_std**2
    spares = min(site.nodes, math.ceil(broken + 2.0 * math.sqrt(broken)))
    return replace(said, spares=replace(said.spares, shared_nodes=spares)), site, stored


def _terms(said: ReliabilityModel, site: Site, stored: Storing, work: Seconds) -> Terms:
    between = mean_time_to_interruption(said, site)
    return Terms(
        reliability=said,
        site=site,
        saving=stored.saving(formula(said, stored, between, work)),
        work=work,
        load=stored.read,
        stop=stored.stop,
        pace=_near(site),
        most=min(LONGEST * work, MOST_FAILURES * between),
    )


def _job(terms: Terms, number: int) -> Job:
    return Job(terms, events_of(terms.reliability, terms.site, 0, number, _WINDOW))


@lru_cache(maxsize=32)
def _marks(said: ReliabilityModel, site: Site, stored: Storing) -> list[tuple[FloatArray, FloatArray]]:
    """Of each of the runs times, in order, and the most work that was done by then."""
    terms, found = _terms(said, site, stored, _LONG), []
    for number in range(RUNS):
        job = _job(terms, number)
        job.run()
        marks = np.array([(0.0, 0.0), *job.marks])
        most = np.maximum.accumulate(marks[:, 1])
        new = np.concatenate(([True], most[1:] > most[:-1]))
        found.append((marks[new, 0], most[new]))
    return found


def _near(site: Site) -> Pace:
    def pace(missing: int, slower: FailureSlowdown | None) -> tuple[str, float]:
        rate = (1.0 - missing / site.nodes) * (1.0 if slower is None else slower.remaining_fraction)
        return (HEALTHY if rate == 1.0 else f"{rate:.1%} of the pace"), rate

    return pace
