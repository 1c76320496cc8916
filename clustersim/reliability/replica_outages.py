"""How much of the time do replicas train, if each fails by itself?

Each replica is a job with the failures of its own components (`job_simulation`), as planned for a job by itself:
optimal checkpoints and spares unless the scenario says otherwise. Outages of a site hit all of its replicas at once.
Two ways to go on are compared: all wait until an absent replica is back, as an all-reduce of fixed members does; or
rounds go on while a quorum is there, and a replica that comes back takes the common weights over (PRIME's
ElasticDeviceMesh, arXiv:2412.01152; decoupled DiLoCo, arXiv:2604.21428).

A replica that rejoins from its peers loses what it has done since its last exchange, at most a round, and loads states
over the links between them; otherwise it goes back to its own checkpoint. A cut of a link between sites stops the
exchange, not the replicas (`link_cuts`), except for one that spans these sites and is cut in two. Nobody waits for
replicas that are away as planned.

Assumptions: a round is short compared with an outage; the pace stays as it is while replicas are absent; a peer to load
from is there; replicas that share racks or switches of a site lose them independently.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.hardware.failures import FailureComponent, FailureMode
from clustersim.reliability.checkpoint_timeline import CheckpointTimeline
from clustersim.reliability.failure_events import FailureEvent, generate_failures
from clustersim.reliability.job_simulation import LOSSES, JobParameters, JobSimulation, mean_restart_seconds
from clustersim.reliability.link_cuts import LinkCuts, Outage
from clustersim.reliability.replica_places import replica_places, transfer_seconds
from clustersim.reliability.run_estimate import failure_inputs, job_parameters
from clustersim.results.goodput import SECONDS_PER_DAY, TimelineInterval
from clustersim.results.memory_check import checkpoint_bytes
from clustersim.results.outer_rounds import OuterRounds, ReplicaOutages
from clustersim.scenario import Scenario

MAX_DAYS = 3650.0
_DRAW_WINDOW: Seconds = 30.0 * SECONDS_PER_DAY
_SEED = 0


def simulate_replica_outages(
    scenario: Scenario, replicas: Sequence[Scenario], rounds: OuterRounds, days: float, runs: int
) -> ReplicaOutages:
    """Mean fractions of the time over some runs; raise InputError for days out of range.

    scenario: the whole job; replicas: the inner job of each; rounds: without failures.
    """
    if not 0.0 < days <= MAX_DAYS:
        raise InputError(f"days: {days:g} is not above 0 and up to {MAX_DAYS:,.0f}")
    horizon = days * SECONDS_PER_DAY
    gpus = np.array([replica.layout.world_size for replica in replicas], np.float64)
    jobs, quorum = replica_jobs(scenario, replicas, rounds, horizon), rounds.settings.quorum or 1
    cuts, planned = _link_cuts(scenario, rounds), list(_planned_absences(rounds, jobs, horizon))
    totals = np.zeros(len(replicas) + 2)
    for run in range(runs):
        timelines = [job.timeline(run) for job in jobs]
        presence = Presence.build(timelines, list(cuts.outages(run, horizon)), planned, horizon)
        waiting, with_quorum = presence.worked(gpus / gpus.sum(), quorum)
        totals += np.append(presence.uptimes, [waiting, with_quorum]) / runs
    *uptimes, waiting, with_quorum = totals.tolist()
    return ReplicaOutages(days, runs, tuple(uptimes), waiting, quorum, with_quorum)


@dataclass(frozen=True, slots=True)
class Presence:
    """[replicas, intervals] 1 where a replica works and keeps it, is reached by exchanges, takes part as planned.

    shares: [intervals] fractions of the time.
    """

    working: FloatArray
    reached: FloatArray
    planned: FloatArray
    shares: FloatArray

    @classmethod
    def build(
        cls,
        timelines: Sequence[Sequence[TimelineInterval]],
        cuts: Sequence[Outage],
        absences: Sequence[Outage],
        horizon: Seconds,
    ) -> "Presence":
        """From what each replica does up to a time, and when exchanges do not reach it or it is away."""
        edges = _edges([*chain.from_iterable(timelines), *cuts, *absences], horizon)
        middles = (edges[:-1] + edges[1:]) / 2.0
        working = np.stack([_is_working(line, middles) for line in timelines])
        reached, planned = (_without(outages, middles, len(timelines)) for outages in (cuts, absences))
        return cls(working, reached, planned, np.diff(edges) / horizon)

    @property
    def uptimes(self) -> FloatArray:
        """[replicas] fraction of the time in which each works."""
        uptimes: FloatArray = (self.working * self.planned) @ self.shares
        return uptimes

    def worked(self, weights: FloatArray, quorum: int) -> tuple[float, float]:
        """Fraction of the time that GPUs (by weight of their replica) work: all wait for absent ones; with a quorum."""
        exchanging = self.working * self.reached
        is_complete, active = (exchanging >= self.planned).all(axis=0), exchanging * self.planned
        is_quorum = active.sum(axis=0) >= quorum
        return (
            float((weights @ self.planned * is_complete) @ self.shares),
            float((weights @ active * is_quorum) @ self.shares),
        )


@dataclass(frozen=True, slots=True)
class ReplicaJob:
    """One replica as a job of its own. index: among the replicas; sites: indices of its sites; cuts: of links."""

    parameters: JobParameters
    index: int
    sites: tuple[int, ...]
    replica_count: int
    cuts: LinkCuts

    def timeline(self, run: int) -> list[TimelineInterval]:
        """What it does in one of the runs."""
        timeline: list[TimelineInterval] = []
        components = self._failures(run * self.replica_count + self.index, _is_local)
        sites = (self._site_outages(run, position) for position in range(len(self.sites)))
        cuts = self._cuts(run) if len(self.sites) > 1 else iter(())
        JobSimulation(self.parameters, merge(components, *sites, cuts), timeline).run()
        return timeline

    def _site_outages(self, run: int, position: int) -> Iterator[FailureEvent]:
        """Outages of one of its sites, which its neighbours see at the same times."""
        number = run * self.replica_count + self.sites[position]
        nodes = self._nodes_by_site[position]
        for event in self._failures(number, _is_site, share=1.0 / len(self.sites)):
            yield event._replace(node=int(nodes[event.node % len(nodes)]))

    def _cuts(self, run: int) -> Iterator[FailureEvent]:
        """Cuts that leave some of its nodes, its last ones, without the others."""
        for event in self.cuts.severing_cuts(run, self.index):
            yield event._replace(node=self.parameters.domains.nodes - 1)

    @property
    def _nodes_by_site(self) -> list[IntArray]:
        """Its nodes in each of its sites."""
        domains = self.parameters.domains
        site_by_node = np.array(domains.site_by_node or (0,) * domains.nodes)
        return [np.flatnonzero(site_by_node == site) for site in dict.fromkeys(site_by_node.tolist())]

    def _failures(
        self, number: int, is_counted: Callable[[FailureMode], bool], share: float = 1.0
    ) -> Iterator[FailureEvent]:
        """Failures of some modes only, of a share of their components. number: of their random numbers."""
        reliability, domains = self.parameters.reliability, self.parameters.domains
        modes = tuple(
            replace(mode, rate=replace(mode.rate, per_second=mode.rate.per_second * share * is_counted(mode)))
            for mode in reliability.failures
        )
        return generate_failures(replace(reliability, failures=modes), domains, _SEED, number, _DRAW_WINDOW)


def _is_site(mode: FailureMode) -> bool:
    """Whether it befalls whole sites."""
    return mode.rate.component is FailureComponent.SITE


def _is_local(mode: FailureMode) -> bool:
    """Whether it befalls components inside of sites."""
    return mode.rate.component not in (FailureComponent.SITE, FailureComponent.WAN)


def _link_cuts(scenario: Scenario, rounds: OuterRounds) -> LinkCuts:
    return LinkCuts(scenario, rounds, _SEED, _DRAW_WINDOW)


def replica_jobs(
    scenario: Scenario, replicas: Sequence[Scenario], rounds: OuterRounds, horizon: Seconds
) -> list[ReplicaJob]:
    """The replicas as jobs of so many seconds, with what their failures cost."""
    slots, cuts = replica_places(scenario), _link_cuts(scenario, rounds)
    sites = list(dict.fromkeys(site for slot in slots for site in slot.sites))
    jobs = []
    for index, (replica, slot) in enumerate(zip(replicas, slots, strict=True)):
        parameters = job_parameters(*failure_inputs(replica), horizon)
        if rounds.settings.rejoins_from_peers:
            peers = [
                transfer_seconds(scenario.cluster.machine, peer, slot, checkpoint_bytes(replica))
                for peer in slots
                if peer is not slot
            ]
            parameters = _rejoining(parameters, rounds.replica_round_seconds(rounds.replicas[index]), min(peers))
        jobs.append(ReplicaJob(parameters, index, tuple(map(sites.index, slot.sites)), len(replicas), cuts))
    return jobs


def _rejoining(parameters: JobParameters, round_seconds: Seconds, load_seconds: Seconds) -> JobParameters:
    """A job that continues from its peers' states, those of its last exchange; it writes checkpoints as before."""
    planned = parameters.checkpoint_timeline
    ratio = min(1.0, round_seconds / planned.interval)
    exchanges = CheckpointTimeline(
        planned.interval * ratio,
        block_seconds=planned.block_seconds * ratio,
        slowdown_seconds=planned.slowdown_seconds * ratio,
    )
    return replace(parameters, checkpoint_timeline=exchanges, load_seconds=load_seconds)


def _planned_absences(rounds: OuterRounds, jobs: Sequence[ReplicaJob], horizon: Seconds) -> Iterator[Outage]:
    """When replicas are away as planned, and restart when they are back."""
    for absence in rounds.settings.away:
        members = frozenset(index for index, replica in enumerate(rounds.replicas) if absence.site in replica.sites)
        begin, duration = absence.begin, absence.end - absence.begin
        duration += max(mean_restart_seconds(jobs[index].parameters) for index in members)
        while begin < horizon:
            yield Outage(begin, begin + duration, members)
            begin = math.inf if absence.period is None else begin + absence.period


def _edges(spans: Sequence[TimelineInterval | Outage], horizon: Seconds) -> FloatArray:
    """Times from 0 to the horizon between which nothing begins or ends."""
    marks = {0.0, horizon, *(min(time, horizon) for span in spans for time in (span.begin, span.end))}
    return np.array(sorted(marks))


def _without(outages: Sequence[Outage], times: FloatArray, replicas: int) -> FloatArray:
    """[replicas, times] 0 where a replica is absent."""
    present = np.ones((replicas, len(times)))
    for outage in outages:
        first, end = np.searchsorted(times, (outage.begin, outage.end))
        present[sorted(outage.absent_replicas), first:end] = 0.0
    return present


def _is_working(timeline: Sequence[TimelineInterval], times: FloatArray) -> FloatArray:
    """[times] 1 where the job is up, and what it does is kept."""
    working = np.zeros(len(times))
    for is_loss in (False, True):
        for interval in timeline:
            if (interval.label in LOSSES) == is_loss:
                first, end = np.searchsorted(times, (interval.begin, interval.end))
                working[first:end] = 0.0 if is_loss else 1.0
    return working
