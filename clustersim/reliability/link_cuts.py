"""When does a cut of a link between sites stop local training?

Replicas go on through a cut until the next exchange is due, and as long as that overlaps inner steps; a cut that ends
before costs nothing. A site that other links still connect goes on, more slowly than is said here, as the traffic of
the cut link is not added to theirs. Of sites that are cut apart those with most GPUs go on together, where rounds do
not wait for the absent ones. A replica whose own sites are cut apart stops at once: it fails (`severing_cuts`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from clustersim.common.units import Seconds
from clustersim.hardware.failures import FailureComponent, FailureMode
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.reliability.failure_events import FailureEvent, generate_failures
from clustersim.reliability.run_estimate import failure_inputs
from clustersim.results.outer_rounds import OuterRounds
from clustersim.scenario import Scenario
from clustersim.scenario.reliability import ReliabilityModel


@dataclass(frozen=True, slots=True)
class Outage:
    """From `begin` to `end` the exchange of some replicas (by their position in the job) does not reach the others."""

    begin: Seconds
    end: Seconds
    absent_replicas: frozenset[int]


@dataclass(frozen=True)
class LinkCuts:
    """The cuts of a job's links. window: seconds that are drawn at a time."""

    scenario: Scenario
    rounds: OuterRounds
    seed: int
    window: Seconds

    def outages(self, run: int, horizon: Seconds) -> Iterator[Outage]:
        """What the cuts of a run stop until a time."""
        reliability, domains = self._wan_failures
        if not reliability.failures or not self._linked_sites:
            return
        failures = generate_failures(reliability, domains, self.seed, run, self.window)
        for event in takewhile(lambda event: event.time < horizon, failures):
            repair = reliability.failures[event.failure_index].repair_time.at_z_score(event.draws[0])
            yield from self._outage(event, repair)

    def severing_cuts(self, run: int, replica: int) -> Iterator[FailureEvent]:
        """Endless cuts of links that a replica (by its position) spans and needs; the modes are numbered as all are."""
        sites = set(self.rounds.replicas[replica].sites)
        severing = {
            cut
            for cut in range(len(self._linked_sites))
            if not any(sites <= connected for connected in self._connected_sites(self._linked_sites, cut))
        }
        reliability, domains = self._wan_failures
        if not severing or not reliability.failures:
            return
        modes = [index for index, mode in enumerate(self._failures) if mode in reliability.failures]
        for event in generate_failures(reliability, domains, self.seed, run, self.window):
            if event.node % len(self._linked_sites) in severing:
                yield event._replace(failure_index=modes[event.failure_index])

    @property
    def _failures(self) -> tuple[FailureMode, ...]:
        return self.scenario.reliability.failures

    @cached_property
    def _wan_failures(self) -> tuple[ReliabilityModel, FailureDomains]:
        """The failures of links between sites alone, and where they happen; the same in all runs."""
        reliability, domains, _ = failure_inputs(self.scenario)
        modes = tuple(mode for mode in reliability.failures if mode.rate.component is FailureComponent.WAN)
        return replace(reliability, failures=modes), domains

    def _outage(self, event: FailureEvent, repair: Seconds) -> Iterator[Outage]:
        begin, end = self._next_exchange(event.time), event.time + repair
        absent = self._absent_replicas(self._linked_sites, event.node % len(self._linked_sites))
        if absent and begin < end:
            yield Outage(begin, end, absent)

    def _next_exchange(self, time: Seconds) -> Seconds:
        """When replicas begin to wait for the first exchange that is due at this time or later."""
        settings, interval = self.rounds.settings, self.rounds.round_seconds / self.rounds.settings.fragments
        return math.ceil(time / interval) * interval + settings.overlap * self.rounds.inner_step_time

    @cached_property
    def _linked_sites(self) -> list[tuple[str, str]]:
        """Pairs of the job's sites that have a link."""
        sites = set(self._site_names)
        ends = [sorted((link.source, link.target)) for link in self.rounds.links if {link.source, link.target} <= sites]
        return list(dict.fromkeys((first, second) for first, second in ends))

    @property
    def _site_names(self) -> list[str]:
        """The job's sites, in the order of replicas."""
        return list(dict.fromkeys(site for replica in self.rounds.replicas for site in replica.sites))

    def _absent_replicas(self, pairs: Sequence[tuple[str, str]], cut: int) -> frozenset[int]:
        """Replicas that are not connected with those that have most GPUs once a link is cut."""
        names = self._site_names
        connected = self._connected_sites(pairs, cut)
        largest = min(connected, key=lambda sites: (-self._gpus(sites), min(map(names.index, sites))))
        return frozenset(
            index for index, replica in enumerate(self.rounds.replicas) if not largest >= set(replica.sites)
        )

    def _connected_sites(self, pairs: Sequence[tuple[str, str]], cut: int) -> list[set[str]]:
        """Sites that are connected with each other once a link is cut."""
        connected = [{name} for name in self._site_names]
        for index, pair in enumerate(pairs):
            if index != cut:
                joined = [sites for sites in connected if not sites.isdisjoint(pair)]
                connected = [sites for sites in connected if sites.isdisjoint(pair)] + [set().union(*joined)]
        return connected

    def _gpus(self, sites: set[str]) -> int:
        return sum(replica.gpus for replica in self.rounds.replicas if sites >= set(replica.sites))
