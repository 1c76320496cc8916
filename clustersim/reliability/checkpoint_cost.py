"""How long do checkpoints take, how often are they written, and how much work does a run have?"""

import math
from dataclasses import dataclass
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.failures import FailureEffect
from clustersim.reliability.checkpoint_timeline import CheckpointTimeline
from clustersim.reliability.failure_domains import FailureDomains, build_failure_domains
from clustersim.results.memory_check import checkpoint_bytes
from clustersim.scenario.reliability import CheckpointIntervalRule, CheckpointPolicy, CheckpointWrite, ReliabilityModel
from clustersim.scenario.resolved import ResolvedScenario

MIN_CHECKPOINT_COST: Final[Seconds] = 1e-3
"""Minimum cost in seconds of a checkpoint in interval formulas."""
_DEFAULT_HOST_BANDWIDTH: Final = (
    25e9  # bytes/s of a GPU's host link where the cluster does not specify it: PCIe 4.0 x16
)


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """Cost of a checkpoint, in seconds.

    checkpoint_bytes: its size; read_seconds: all of it, from storage; block_seconds: for
    which steps wait; drain_seconds: from then until it is in storage; slowdown_fraction: relative slowdown of
    steps meanwhile; stored_every: every n-th snapshot goes to storage; has_peer_copies: nodes hold copies
    of each other's snapshots.
    """

    checkpoint_bytes: Bytes
    read_seconds: Seconds
    block_seconds: Seconds
    drain_seconds: Seconds
    slowdown_fraction: float
    stored_every: int
    has_peer_copies: bool

    @property
    def synchronous_seconds(self) -> Seconds:
        """Seconds of a checkpoint that is waited for until it is in storage."""
        return self.block_seconds + self.drain_seconds

    @property
    def delay_seconds(self) -> Seconds:
        """Delay of the job by a checkpoint."""
        return self.block_seconds + self.slowdown_fraction * self.drain_seconds / self.stored_every

    def build_timeline(self, interval: Seconds) -> CheckpointTimeline:
        """Checkpoints with this interval, but not more often than storage sustains."""
        min_interval = self.drain_seconds / self.stored_every
        slowdown_seconds = self.slowdown_fraction * self.drain_seconds / self.stored_every
        return CheckpointTimeline(
            max(interval, min_interval),
            self.block_seconds,
            self.drain_seconds,
            slowdown_seconds,
            self.stored_every,
            self.has_peer_copies,
        )


def build_checkpoint_cost(resolved: ResolvedScenario) -> CheckpointCost:
    """The checkpoint cost of a scenario, from its bytes and the bandwidths on the way."""
    policy, domains = resolved.reliability.checkpoint, build_failure_domains(resolved)
    size = checkpoint_bytes(resolved) if policy.size is None else policy.size
    write = size / _storage_bandwidth(policy, policy.bandwidth, domains.nodes)
    read = size / _storage_bandwidth(policy, policy.read_bandwidth, domains.nodes)
    if policy.write is CheckpointWrite.SYNC:
        return CheckpointCost(size, read, policy.overhead + write, 0.0, 0.0, 1, has_peer_copies=False)
    host = resolved.cluster.host_memory
    copy_seconds = size / domains.gpus / (_DEFAULT_HOST_BANDWIDTH if host is None else host.device_to_host)
    storage_stride = policy.stored_every if policy.write is CheckpointWrite.PEERS else 1
    has_peer_copies = policy.write is CheckpointWrite.PEERS
    return CheckpointCost(
        size,
        read,
        policy.snapshot + copy_seconds,
        policy.overhead + write,
        policy.interference,
        storage_stride,
        has_peer_copies,
    )


def _storage_bandwidth(policy: CheckpointPolicy, bandwidth: float, node_count: int) -> float:
    """Bytes per second of the storage, or of all nodes' links to it, whichever is less."""
    return min(bandwidth, math.inf if policy.bandwidth_per_node is None else policy.bandwidth_per_node * node_count)


def mean_time_to_interruption(reliability: ReliabilityModel, domains: FailureDomains) -> Seconds:
    """Mean uptime until an unplanned stop, if failures are independent of age; inf: never."""
    interrupting = (
        failure
        for failure in reliability.failures
        if failure.effect in {FailureEffect.STOP, FailureEffect.HANG, FailureEffect.CORRUPT}
    )
    rate = (
        sum(
            failure_mode.rate.per_second * domains.counts.count_of(failure_mode.rate.component)
            for failure_mode in interrupting
        )
        * reliability.rate_factor
    )
    return 1.0 / rate if rate > 0.0 else math.inf


def mean_nodes_in_repair(reliability: ReliabilityModel, domains: FailureDomains) -> float:
    """Mean number of nodes in repair, by Little's law: nodes lost per second times repair seconds.

    Little 1961, "A proof for the queuing formula L = lambda W", Operations Research 9(3).
    """
    return reliability.rate_factor * sum(
        failure.rate.per_second
        * domains.counts.count_of(failure.rate.component)
        * failure.repair_time.mean
        * len(domains.lost_nodes(failure.failure_domain, 0))
        for failure in reliability.failures
    )


def checkpoint_interval(
    reliability: ReliabilityModel, checkpoint_cost: CheckpointCost, mtti: Seconds, work: Seconds
) -> Seconds:
    """The configured interval, or Young's, or Daly's; without failures only the final checkpoint."""
    configured, cost = reliability.checkpoint.interval, max(checkpoint_cost.delay_seconds, MIN_CHECKPOINT_COST)
    if not isinstance(configured, CheckpointIntervalRule):
        return configured
    if math.isinf(mtti):
        return work
    return min(
        work, young_interval(cost, mtti) if configured is CheckpointIntervalRule.YOUNG else daly_interval(cost, mtti)
    )


def young_interval(cost: Seconds, mtbf: Seconds) -> Seconds:
    """Young's checkpoint interval, the first-order optimum (Young 1974, CACM 17(9)).

    cost: seconds of a checkpoint; mtbf: mean time between failures.
    """
    return math.sqrt(2.0 * cost * mtbf)


def daly_interval(cost: Seconds, mtbf: Seconds) -> Seconds:
    """Daly's higher-order interval (Daly 2006, Future Generation Computer Systems 22(3), equation 37)."""
    if cost >= 2.0 * mtbf:
        return mtbf
    ratio = cost / (2.0 * mtbf)
    return young_interval(cost, mtbf) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def total_work(resolved: ResolvedScenario, step_time: Seconds) -> tuple[Seconds, float]:
    """(seconds of the healthy job, tokens) of a run; raise InputError where the tokens are missing."""
    tokens = resolved.economics.training_tokens
    if tokens is None:
        raise InputError(
            "how many tokens the run is of is not said; write --set economics.tokens=15T (goodput: --tokens 15T)"
        )
    tokens_per_step = resolved.training.global_batch * resolved.training.sequence
    if tokens < tokens_per_step:
        raise InputError(
            f"economics.tokens: {tokens:,.0f} are less than one step's {tokens_per_step:,}; write such as 15T or 300B"
        )
    steps = math.ceil(tokens / tokens_per_step)
    return steps * step_time, tokens
