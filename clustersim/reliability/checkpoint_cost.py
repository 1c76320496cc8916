"""What does a job do whatever breaks? Its checkpoints, and how long they take, from the scenario."""

import math
from dataclasses import dataclass
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.failures import FailureEffect
from clustersim.reliability.checkpoint_timeline import Saving
from clustersim.reliability.failure_domains import Site, site_of
from clustersim.results.memory_check import checkpoint_bytes
from clustersim.scenario.reliability import CheckpointIntervalRule, CheckpointPolicy, CheckpointWrite, ReliabilityModel
from clustersim.scenario.resolved import ResolvedScenario

LEAST: Final[Seconds] = 1e-3
"""Of a checkpoint, where an interval is worked out from it."""
_HOST_LINK: Final = 25e9  # bytes/s of a GPU's link to its host where the cluster says nothing: PCIe 4.0 x16


@dataclass(frozen=True, slots=True)
class Storing:
    """Seconds that a checkpoint takes.

    size: bytes; write, read: all of it, to and from storage; block: for how long steps wait; drain: until it is in
    storage from then on; interference: by which steps are slower meanwhile.
    """

    size: Bytes
    write: Seconds
    read: Seconds
    block: Seconds
    drain: Seconds
    interference: float
    stored_every: int
    peers: bool

    @property
    def stop(self) -> Seconds:
        """A checkpoint that is waited for until it is in storage."""
        return self.block + self.drain

    @property
    def cost(self) -> Seconds:
        """By how much a checkpoint delays the job."""
        return self.block + self.interference * self.drain / self.stored_every

    def saving(self, interval: Seconds) -> Saving:
        """Checkpoints that come so often; not more often than storage takes them."""
        least = self.drain / self.stored_every
        drag = self.interference * self.drain / self.stored_every
        return Saving(max(interval, least), self.block, self.drain, drag, self.stored_every, self.peers)


def storing(scenario: ResolvedScenario) -> Storing:
    """How long the checkpoints of a scenario take, from their bytes and the bandwidths on the way."""
    said, site = scenario.reliability.checkpoint, site_of(scenario)
    size = checkpoint_bytes(scenario) if said.size is None else said.size
    write = size / _rate(said, said.bandwidth, site.nodes)
    read = size / _rate(said, said.read_bandwidth, site.nodes)
    if said.write is CheckpointWrite.SYNC:
        return Storing(size, write, read, said.overhead + write, 0.0, 0.0, 1, peers=False)
    host = scenario.cluster.host_memory
    copy = size / site.gpus / (_HOST_LINK if host is None else host.to_host)
    every = said.stored_every if said.write is CheckpointWrite.PEERS else 1
    peers = said.write is CheckpointWrite.PEERS
    return Storing(size, write, read, said.snapshot + copy, said.overhead + write, said.interference, every, peers)


def _rate(said: CheckpointPolicy, bandwidth: float, nodes: int) -> float:
    """Bytes per second of the storage, or of all nodes' ways to it, whichever is less."""
    return min(bandwidth, math.inf if said.bandwidth_per_node is None else said.bandwidth_per_node * nodes)


def mean_time_to_interruption(reliability: ReliabilityModel, site: Site) -> Seconds:
    """How long a job is up on average until it ends unplanned, if things break independently of age; inf: for ever."""
    ends = (
        failure
        for failure in reliability.failures
        if failure.effect in {FailureEffect.STOP, FailureEffect.HANG, FailureEffect.CORRUPT}
    )
    rate = sum(end.rate.per_second * site.counts.of(end.rate.component) for end in ends) * reliability.rate_factor
    return 1.0 / rate if rate > 0.0 else math.inf


def in_repair(reliability: ReliabilityModel, site: Site) -> float:
    """How many nodes are in repair at a time, on average: as many as are lost a second, times the seconds of a repair.

    Little 1961, "A proof for the queuing formula L = lambda W", Operations Research 9(3).
    """
    return reliability.rate_factor * sum(
        failure.rate.per_second
        * site.counts.of(failure.rate.component)
        * failure.repair_time.mean
        * len(site.taken(failure.failure_domain, 0))
        for failure in reliability.failures
    )


def formula(reliability: ReliabilityModel, storing: Storing, between: Seconds, work: Seconds) -> Seconds:
    """The interval that is said, or Young's, or Daly's; where nothing breaks there is only the last checkpoint."""
    asked, cost = reliability.checkpoint.interval, max(storing.cost, LEAST)
    if not isinstance(asked, CheckpointIntervalRule):
        return asked
    if math.isinf(between):
        return work
    return min(work, young(cost, between) if asked is CheckpointIntervalRule.YOUNG else daly(cost, between))


def young(cost: Seconds, between: Seconds) -> Seconds:
    """Young's interval between checkpoints, the first order of the best one (Young 1974, CACM 17(9)).

    cost: of one; between: the mean time between failures.
    """
    return math.sqrt(2.0 * cost * between)


def daly(cost: Seconds, between: Seconds) -> Seconds:
    """Daly's interval, of higher order (Daly 2006, Future Generation Computer Systems 22(3), equation 37)."""
    if cost >= 2.0 * between:
        return between
    part = cost / (2.0 * between)
    return young(cost, between) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - cost


def work_of(scenario: ResolvedScenario, step_time: Seconds) -> tuple[Seconds, float]:
    """Seconds of the healthy job for the tokens of a run, and the tokens; raise InputError where none are said."""
    tokens = scenario.economics.training_tokens
    if tokens is None:
        raise InputError(
            "how many tokens the run is of is not said; write --set economics.tokens=15T (goodput: --tokens 15T)"
        )
    step = scenario.training.global_batch * scenario.training.sequence
    if tokens < step:
        raise InputError(
            f"economics.tokens: {tokens:,.0f} are less than one step's {step:,}; write such as 15T or 300B"
        )
    steps = math.ceil(tokens / step)
    return steps * step_time, tokens
