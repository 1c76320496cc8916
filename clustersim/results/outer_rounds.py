"""What do the rounds of local training (DiLoCo) take? Times, traffic of the links between sites, memory.

Convergence is not simulated: what fewer exchanges cost in loss is published, for instance in arXiv:2503.09799.
"""

from dataclasses import dataclass
from typing import Any

from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.results.goodput import SECONDS_PER_DAY
from clustersim.results.site_traffic import SiteLinkTraffic
from clustersim.scenario.diloco import DilocoSettings


@dataclass(frozen=True, slots=True)
class SiteRound:
    """One site in a round. step_time: of one inner step of its replica; gpus: of the site; sequences: in its batch."""

    name: str
    gpus: int
    sequences: int
    step_time: Seconds
    overlapped_step_time: Seconds

    def to_json(self, utilization: float) -> dict[str, Any]:
        """As plain values; utilization: of the site."""
        return {
            "name": self.name,
            "gpus": self.gpus,
            "sequences": self.sequences,
            "step_s": self.step_time,
            "overlapped_step_s": self.overlapped_step_time,
            "utilization": utilization,
        }


@dataclass(frozen=True, slots=True)
class ReplicaOutages:
    """Fractions of the time over some days with failures, means of some runs.

    replicas: in which each replica works, and what it does is kept; waiting: in which all of them do, because all wait
    for an absent one; without_absent: the mean over the GPUs, if rounds go on without the absent ones.
    """

    days: float
    runs: int
    replicas: tuple[float, ...]
    waiting: float
    without_absent: float

    def to_json(self, utilization: float) -> dict[str, Any]:
        """As plain values; utilization: of a round without failures."""
        return {
            "days": self.days,
            "runs": self.runs,
            "goodput_waiting_for_all": self.waiting * utilization,
            "goodput_without_absent": self.without_absent * utilization,
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
    """A round of every site's replica: `inner_steps` steps, and one exchange of each fragment.

    exchange_seconds: one fragment's exchange by itself; exposed_seconds: of all exchanges in a round, that replicas
    wait for; optimizer_seconds: outer optimizer in a round; payload: bytes of outer gradients of all fragments;
    outer_bytes_per_gpu: the common weights and their momentum on one GPU, host_bytes_per_gpu: in its host's memory;
    algorithm: of the exchange; batch_tokens: of all sites, in one inner step; bandwidth_needs: for some utilizations,
    the factor on the bandwidth of all links between sites with which they are reached, None: with none; peak_memory,
    memory_capacity: of the most loaded GPU, its inner step and the outer state; curves: for fewer and more inner steps;
    choices: settings that reach an asked utilization, those with the fewest inner steps first.
    """

    name: str
    settings: DilocoSettings
    sites: tuple[SiteRound, ...]
    links: tuple[SiteLinkTraffic, ...]
    exchange_seconds: Seconds
    exposed_seconds: Seconds
    optimizer_seconds: Seconds
    payload: Bytes
    outer_bytes_per_gpu: Bytes
    host_bytes_per_gpu: Bytes
    algorithm: str
    batch_tokens: float
    peak_memory: Bytes
    memory_capacity: Bytes
    bandwidth_needs: tuple[tuple[float, float | None], ...] = ()
    curves: tuple[UtilizationCurve, ...] = ()
    outages: ReplicaOutages | None = None
    choices: "tuple[OuterChoice, ...]" = ()

    @property
    def fits(self) -> bool:
        """Whether the most loaded GPU has the memory."""
        return self.peak_memory <= self.memory_capacity

    @property
    def inner_step_time(self) -> Seconds:
        """The slowest site's inner step, which all wait for in each round."""
        return max(site.step_time for site in self.sites)

    @property
    def inner_seconds(self) -> Seconds:
        """Inner steps of a round, those during exchanges slowed by their traffic."""
        overlapped = min(self.settings.overlap * self.settings.fragments, self.settings.inner_steps)
        return max(
            (self.settings.inner_steps - overlapped) * site.step_time + overlapped * site.overlapped_step_time
            for site in self.sites
        )

    @property
    def round_seconds(self) -> Seconds:
        """One round."""
        return self.inner_seconds + self.exposed_seconds + self.optimizer_seconds

    @property
    def utilization(self) -> float:
        """Fraction of a round in which the slowest site's replica does inner steps at their full speed."""
        return self.settings.inner_steps * self.inner_step_time / self.round_seconds

    def site_utilization(self, site: SiteRound) -> float:
        """The same for one site; the rest of the time it waits for the exchange or for slower sites."""
        return self.settings.inner_steps * site.step_time / self.round_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all sites."""
        return self.settings.inner_steps * self.batch_tokens / self.round_seconds

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
            "utilization": self.utilization,
            "tokens_per_second": self.tokens_per_second,
            "outer_gradient_bytes": self.payload,
            "outer_state_bytes_per_gpu": self.outer_bytes_per_gpu,
            "outer_state_host_bytes_per_gpu": self.host_bytes_per_gpu,
            "peak_memory_bytes": self.peak_memory,
            "memory_capacity_bytes": self.memory_capacity,
            "fits": self.fits,
            "algorithm": self.algorithm,
            "sites": [site.to_json(self.site_utilization(site)) for site in self.sites],
            "links": [_link_json(link) for link in self.links],
            "outages": None if self.outages is None else self.outages.to_json(self.utilization),
            "curves": [curve.to_json() for curve in self.curves],
            "bandwidth_needs": [
                {"utilization": utilization, "bandwidth_factor": factor} for utilization, factor in self.bandwidth_needs
            ],
            "choices": [choice.to_json() for choice in self.choices],
        }


@dataclass(frozen=True, slots=True)
class OuterChoice:
    """Settings that reach a utilization, and their rounds."""

    settings: DilocoSettings
    rounds: OuterRounds

    @property
    def bytes_per_day(self) -> Bytes:
        """What the most loaded link between sites carries in a day."""
        sent: float = max(link.sent_bytes for link in self.rounds.links)
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
    }


def _link_json(link: SiteLinkTraffic) -> dict[str, Any]:
    return {
        "source": link.source,
        "target": link.target,
        "bytes_per_round": link.sent_bytes,
        "busy": link.busy,
        "egress_usd_per_round": link.cost,
    }
