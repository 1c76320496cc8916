"""What do the rounds of local training (DiLoCo) take? Times, waiting, traffic of the links between sites, memory, cost.

Convergence is not simulated: what fewer exchanges cost in loss is published, for instance in arXiv:2503.09799.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.prices import Price
from clustersim.results.goodput import SECONDS_PER_DAY
from clustersim.results.site_traffic import SiteLinkTraffic
from clustersim.scenario.diloco import DilocoSettings, StepBudget

CONVERGENCE_NOTE: Final = (
    "Convergence is not simulated: what fewer exchanges cost in loss is published, see arXiv:2503.09799 (loss against "
    "inner steps and replicas), arXiv:2501.18512 (fragments, overlap, formats) and arXiv:2604.21428 (quorums)."
)
_SECONDS_PER_HOUR = 3600.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ReplicaRound:
    """One replica in a round. step_time: of one inner step; overlapped_step_time: while an exchange takes its NICs.

    sites: where it is; sequences: in its batch; exposed_seconds: of all exchanges in a round that it would wait for at
    this pace; is_waited_for: whether exchanges wait for it (for all, or a quorum); price_per_second: of its GPUs, None
    where it is unknown.
    """

    name: str
    sites: tuple[str, ...]
    gpus: int
    sequences: int
    step_time: Seconds
    overlapped_step_time: Seconds
    exposed_seconds: Seconds
    is_waited_for: bool = True
    price_per_second: Price | None = None


@dataclass(frozen=True, slots=True)
class ReplicaWaits:
    """What a replica does in one of its rounds besides inner steps at their full speed.

    slowed: inner steps take longer while an exchange takes its NICs; exchange: waiting for exchanges and the outer
    optimizer; slower: waiting for the replica that sets the pace.
    """

    slowed: Seconds
    exchange: Seconds
    slower: Seconds


@dataclass(frozen=True, slots=True)
class ReplicaOutages:
    """Fractions of the time over some days with failures, means of some runs.

    replicas: in which each replica works, and what it does is kept; waiting: in which all of them do, because all wait
    for an absent one; with_quorum: the mean over the GPUs, if rounds go on while `quorum` of them are there.
    """

    days: float
    runs: int
    replicas: tuple[float, ...]
    waiting: float
    quorum: int
    with_quorum: float

    def to_json(self, utilization: float) -> dict[str, Any]:
        """As plain values; utilization: of the GPUs in a round without failures."""
        return {
            "days": self.days,
            "runs": self.runs,
            "goodput_waiting_for_all": self.waiting * utilization,
            "quorum": self.quorum,
            "goodput_with_quorum": self.with_quorum * utilization,
            "uptime_of_replicas": list(self.replicas),
        }


@dataclass(frozen=True, slots=True)
class UtilizationCurve:
    """Utilization against bandwidth. bandwidths: of the slowest link between sites; all are scaled by one factor."""

    inner_steps: int
    bandwidths: tuple[BytesPerSecond, ...]
    utilizations: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "inner_steps": self.inner_steps,
            "bandwidth_bytes_per_s": list(self.bandwidths),
            "utilization": list(self.utilizations),
        }


@dataclass(frozen=True, slots=True)
class OuterRounds:
    """A round of every replica: `inner_steps` steps, and one exchange of each fragment.

    The replica that sets the pace is the last of those that exchanges wait for (all, or a quorum): faster ones wait for
    it, slower ones take part when they can.

    exchange_seconds: one fragment's exchange by itself; optimizer_seconds: outer optimizer in a round; payload: bytes
    of outer gradients of all fragments; outer_bytes_per_gpu: the common weights and their momentum on one GPU,
    host_bytes_per_gpu: in its host's memory; algorithm: of the exchange; sequence_tokens: tokens of a sequence;
    run_tokens: of the whole training, None: not stated; bandwidth_needs: for some utilizations, the factor on the
    bandwidth of all links between sites with which they are reached, None: with none; peak_memory, memory_capacity: of
    the most loaded GPU, its inner step and the outer state; curves: for fewer and more inner steps; choices: settings
    that reach an asked utilization, those with the fewest inner steps first.
    """

    name: str
    settings: DilocoSettings
    replicas: tuple[ReplicaRound, ...]
    links: tuple[SiteLinkTraffic, ...]
    exchange_seconds: Seconds
    optimizer_seconds: Seconds
    payload: Bytes
    outer_bytes_per_gpu: Bytes
    host_bytes_per_gpu: Bytes
    algorithm: str
    sequence_tokens: float
    peak_memory: Bytes
    memory_capacity: Bytes
    run_tokens: float | None = None
    bandwidth_needs: tuple[tuple[float, float | None], ...] = ()
    curves: tuple[UtilizationCurve, ...] = ()
    outages: ReplicaOutages | None = None
    choices: "tuple[OuterChoice, ...]" = ()

    @property
    def fits(self) -> bool:
        """Whether the most loaded GPU has the memory."""
        return self.peak_memory <= self.memory_capacity

    def inner_steps(self, replica: ReplicaRound) -> int:
        """Inner steps of a replica in a round: of the settings, or as many as fit into those of the slowest."""
        inner_steps = self.settings.inner_steps
        if self.settings.step_budget is StepBudget.SAME:
            return inner_steps
        slowest = max(other.step_time for other in self.replicas)
        return math.floor(inner_steps * slowest / replica.step_time * (1.0 + _ROUNDING))

    def own_seconds(self, replica: ReplicaRound) -> Seconds:
        """Inner steps of a round, those during exchanges slowed by their traffic."""
        inner_steps = self.inner_steps(replica)
        overlapped = min(self.settings.overlap * self.settings.fragments, inner_steps)
        return (inner_steps - overlapped) * replica.step_time + overlapped * replica.overlapped_step_time

    @property
    def pacer(self) -> ReplicaRound:
        """The replica that sets the pace: the last of those that exchanges wait for."""
        waited_for = (replica for replica in self.replicas if replica.is_waited_for)
        return max(waited_for, key=lambda replica: self.own_seconds(replica) + replica.exposed_seconds)

    @property
    def inner_step_time(self) -> Seconds:
        """Inner step of the replica that sets the pace."""
        return self.pacer.step_time

    @property
    def inner_seconds(self) -> Seconds:
        """Inner steps of a round of the replica that sets the pace."""
        return self.own_seconds(self.pacer)

    @property
    def exposed_seconds(self) -> Seconds:
        """What the replica that sets the pace waits for exchanges in a round."""
        return self.pacer.exposed_seconds

    @property
    def round_seconds(self) -> Seconds:
        """One round of the replica that sets the pace."""
        return self.inner_seconds + self.exposed_seconds + self.optimizer_seconds

    def replica_round_seconds(self, replica: ReplicaRound) -> Seconds:
        """One round of a replica; longer than others' where its exchange did not wait for it."""
        return max(self.round_seconds, self.own_seconds(replica))

    def waits(self, replica: ReplicaRound) -> ReplicaWaits:
        """What its round consists of besides inner steps at their full speed."""
        working = self.own_seconds(replica)
        rest = self.replica_round_seconds(replica) - working
        slower = min(rest, max(0.0, self.inner_seconds - working))
        return ReplicaWaits(working - self.inner_steps(replica) * replica.step_time, rest - slower, slower)

    @property
    def utilization(self) -> float:
        """Fraction of a round in which the replica that sets the pace does inner steps at their full speed."""
        return self.replica_utilization(self.pacer)

    def replica_utilization(self, replica: ReplicaRound) -> float:
        """The same for one replica; the rest of the time it waits for the exchange or for slower ones."""
        return self.inner_steps(replica) * replica.step_time / self.replica_round_seconds(replica)

    @property
    def gpu_utilization(self) -> float:
        """Mean of all GPUs."""
        total = sum(replica.gpus for replica in self.replicas)
        return sum(replica.gpus * self.replica_utilization(replica) for replica in self.replicas) / total

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas."""
        return sum(
            self.inner_steps(replica) * self.sequence_tokens * replica.sequences / self.replica_round_seconds(replica)
            for replica in self.replicas
        )

    @property
    def egress_per_second(self) -> float:
        """USD that links between sites cost."""
        return sum(link.cost for link in self.links) / self.round_seconds

    @property
    def price_per_second(self) -> Price | None:
        """What all GPUs and links cost; None where a price is unknown, or in several currencies."""
        prices = [replica.price_per_second for replica in self.replicas]
        known_prices = [price for price in prices if price is not None]
        egress = [Price(self.egress_per_second, "USD")] if self.egress_per_second else []
        if len(known_prices) < len(prices) or len({price.currency for price in (*known_prices, *egress)}) != 1:
            return None
        return Price(sum(price.amount for price in (*known_prices, *egress)), known_prices[0].currency)

    def run_days(self, goodput: float = 1.0) -> float | None:
        """Days of the whole training, of whose time this fraction is worked; None: its tokens are not stated."""
        if self.run_tokens is None or not goodput:
            return None
        return self.run_tokens / (self.tokens_per_second * goodput) / SECONDS_PER_DAY

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values, with units in the names."""
        return {
            "name": self.name,
            **_settings_json(self.settings),
            "round_s": self.round_seconds,
            "inner_step_s": self.inner_step_time,
            "inner_s": self.inner_seconds,
            "exchange_s": self.exchange_seconds,
            "exposed_exchange_s": self.exposed_seconds,
            "outer_optimizer_s": self.optimizer_seconds,
            "pace_set_by": self.pacer.name,
            "utilization": self.utilization,
            "utilization_of_gpus": self.gpu_utilization,
            "tokens_per_second": self.tokens_per_second,
            **_cost_json(self),
            "outer_gradient_bytes": self.payload,
            "outer_state_bytes_per_gpu": self.outer_bytes_per_gpu,
            "outer_state_host_bytes_per_gpu": self.host_bytes_per_gpu,
            "peak_memory_bytes": self.peak_memory,
            "memory_capacity_bytes": self.memory_capacity,
            "fits": self.fits,
            "algorithm": self.algorithm,
            "replicas": [_replica_json(self, replica) for replica in self.replicas],
            "links": [_link_json(link) for link in self.links],
            "outages": None if self.outages is None else self.outages.to_json(self.gpu_utilization),
            "curves": [curve.to_json() for curve in self.curves],
            "bandwidth_needs": [
                {"utilization": utilization, "bandwidth_factor": factor} for utilization, factor in self.bandwidth_needs
            ],
            "choices": [choice.to_json() for choice in self.choices],
            "convergence": CONVERGENCE_NOTE,
        }


@dataclass(frozen=True, slots=True)
class OuterChoice:
    """Settings that reach a utilization, and their rounds."""

    settings: DilocoSettings
    rounds: OuterRounds

    @property
    def bytes_per_day(self) -> Bytes:
        """What the most loaded link between sites carries in a day."""
        sent: float = max((link.sent_bytes for link in self.rounds.links), default=0.0)
        return sent / self.rounds.round_seconds * SECONDS_PER_DAY

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **_settings_json(self.settings),
            "round_s": self.rounds.round_seconds,
            "utilization": self.rounds.utilization,
            "tokens_per_second": self.rounds.tokens_per_second,
            "bytes_per_day_of_a_link": self.bytes_per_day,
        }


def _settings_json(settings: DilocoSettings) -> dict[str, Any]:
    return {
        "inner_steps": settings.inner_steps,
        "fragments": settings.fragments,
        "overlap_steps": settings.overlap,
        "outer_gradients": settings.outer_gradients.value,
        "quorum": settings.quorum,
        "step_budget": settings.step_budget.value,
    }


def _replica_json(rounds: OuterRounds, replica: ReplicaRound) -> dict[str, Any]:
    waits = rounds.waits(replica)
    return {
        "name": replica.name,
        "sites": list(replica.sites),
        "gpus": replica.gpus,
        "sequences": replica.sequences,
        "inner_steps": rounds.inner_steps(replica),
        "step_s": replica.step_time,
        "overlapped_step_s": replica.overlapped_step_time,
        "round_s": rounds.replica_round_seconds(replica),
        "slowed_by_exchange_s": waits.slowed,
        "waits_for_exchange_s": waits.exchange,
        "waits_for_slower_s": waits.slower,
        "utilization": rounds.replica_utilization(replica),
    }


def _cost_json(rounds: OuterRounds) -> dict[str, Any]:
    price = rounds.price_per_second
    return {
        "cost_per_hour": None if price is None else price.amount * _SECONDS_PER_HOUR,
        "currency": None if price is None else price.currency,
        "egress_usd_per_hour": rounds.egress_per_second * _SECONDS_PER_HOUR,
        "tokens_per_currency_unit": None if price is None else rounds.tokens_per_second / price.amount,
        "run_days": rounds.run_days(),
    }


def _link_json(link: SiteLinkTraffic) -> dict[str, Any]:
    return {
        "source": link.source,
        "target": link.target,
        "bytes_per_round": link.sent_bytes,
        "busy": link.busy,
        "egress_usd_per_round": link.cost,
    }
