"""How long does a round of local training (DiLoCo) take?

Each replica is simulated as a job of its own on its GPUs, for one inner step; others in its site run their own next to
it on the same network. The exchange is an all-reduce of every shard of the outer gradients among the GPUs that hold it,
one in each replica, on the routes between the sites and with the limits of their transports. While it overlaps inner
steps it takes its share of the NICs, and an inner step is simulated with what is left of them. Without a quorum faster
replicas wait for the slowest one in each round; with one, for the slowest of the quorum.

Assumptions: outer gradients are sharded over all GPUs of a replica (of the smallest, if they differ), whatever the
inner strategy; replicas average all of a fragment; no inner step fails; an exchange takes as long as one among all
replicas, also where it waits for a quorum only (so a slow link slows all).
Reference: as `clustersim.scenario.diloco`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clustersim.build import resolved_library
from clustersim.collectives.flow_routes import route_phase
from clustersim.collectives.tuner import Selection, Tuner, select_variants
from clustersim.common.cached_method import cached_method
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.prices import Price
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind
from clustersim.model.transformer import parameter_count
from clustersim.program.task import CollectiveType
from clustersim.reliability.outer_exchange import exposed_seconds
from clustersim.reliability.outer_settings import outer_choices
from clustersim.reliability.replica_outages import simulate_replica_outages
from clustersim.reliability.replica_places import replica_places, replica_scenarios, site_scenarios
from clustersim.results.memory_check import peak_memory_use
from clustersim.results.outer_rounds import OuterRounds, ReplicaRound, UtilizationCurve
from clustersim.results.site_traffic import SiteLinkTraffic
from clustersim.scenario import Scenario
from clustersim.scenario.changes.links import with_link_bandwidth
from clustersim.scenario.diloco import DilocoSettings, OuterOptimizer
from clustersim.simulation import simulate

MIN_NIC_LOAD = 1e-3
"""Fraction of a NIC's bandwidth below which an overlapped exchange does not slow inner steps."""
MAX_NIC_LOAD = 0.9
UTILIZATIONS = (0.8, 0.9, 0.95)
"""Utilizations for which the needed bandwidth is reported."""
MIN_BANDWIDTH_FACTOR, MAX_BANDWIDTH_FACTOR = 1e-4, 1e4
_NESTEROV_TOUCHES = 6.0  # of 4 bytes for a parameter: reads weights, common weights, gradient, momentum; writes two
_SGD_TOUCHES = 4.0


def simulate_local_training(
    scenario: Scenario,
    *,
    curves: bool = False,
    days: float | None = None,
    runs: int = 20,
    utilization: float | None = None,
) -> OuterRounds:
    """Simulate a round; raise InputError where the scenario has no `diloco` section.

    curves: also utilization against bandwidth, for a tenth and ten times the inner steps as well; days: also that many
    days with failures of the replicas, as a mean of `runs`; utilization: also the settings that reach it.
    """
    if scenario.diloco is None:
        raise InputError(
            f"{scenario.path or scenario.name}: diloco: is missing; write such as diloco: {{inner_steps: 100}}"
        )
    training = LocalTraining(scenario)
    rounds = training.rounds(scenario.diloco)
    if rounds.links:
        needs = tuple((target, training.bandwidth_for(target)) for target in UTILIZATIONS)
        rounds = replace(rounds, bandwidth_needs=needs)
    if curves:
        rounds = replace(rounds, curves=tuple(training.curves(scenario.diloco)))
    if utilization is not None:
        layers = scenario.model.layer_count
        choices = outer_choices(training.rounds, scenario.diloco, layers, utilization)
        rounds = replace(rounds, choices=choices)
    if days is not None:
        outages = simulate_replica_outages(scenario, training.replicas, rounds, days, runs)
        rounds = replace(rounds, outages=outages)
    return rounds


class LocalTraining:
    """The replicas of a scenario, each inner step simulated once; rounds of any settings follow from them."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.fabric = scenario, scenario.cluster.machine
        self.replicas = tuple(replica_scenarios(scenario))
        self.step_times = self._simulate_steps()
        memory = [peak_memory_use(replica) for replica in self.replicas]
        self._memory = max(memory, key=lambda use: use.needed / use.capacity)

    def _simulate_steps(self, nic_bandwidth: float = 1.0) -> tuple[Seconds, ...]:
        """An inner step of each replica while all of its site take theirs. nic_bandwidth: fraction that is left."""
        step_times: list[Seconds] = []
        for first in site_scenarios(self.scenario, self.replicas):
            loaded = first if nic_bandwidth == 1.0 else with_link_bandwidth(first, [LinkKind.NIC], nic_bandwidth)
            result, neighbours = simulate(loaded), len(first.co_scheduled_jobs) - len(self.scenario.co_scheduled_jobs)
            others = result.co_scheduled_jobs[len(result.co_scheduled_jobs) - neighbours :]
            step_times += [result.step_time, *(float(job.step_times.mean()) for job in others)]
        return tuple(step_times)

    def rounds(self, settings: DilocoSettings, bandwidth_factor: float = 1.0) -> OuterRounds:
        """A round. bandwidth_factor: on all links between sites."""
        scenario, fabric = self.scenario, self._scaled_fabric(bandwidth_factor)
        exchange = _Exchange(scenario, fabric, settings)
        fragment_seconds = exchange.transfer_seconds / settings.fragments + exchange.latency
        window = max(fragment_seconds, settings.overlap * max(self.step_times))
        load = exchange.nic_load(settings.fragments, window) if settings.overlap else 0.0
        state_bytes = settings.optimizer.state_bytes * exchange.shard_parameters
        rounds = OuterRounds(
            name=scenario.name,
            settings=settings,
            replicas=tuple(self._replica_rounds(settings, exchange, load)),
            links=(),
            exchange_seconds=fragment_seconds,
            optimizer_seconds=_optimizer_seconds(scenario, settings, exchange.shard_parameters),
            payload=exchange.payload,
            outer_bytes_per_gpu=0.0 if settings.offload else state_bytes,
            host_bytes_per_gpu=state_bytes if settings.offload else 0.0,
            algorithm=exchange.selection.slowest_variant.name,
            sequence_tokens=float(scenario.training.sequence),
            run_tokens=scenario.economics.training_tokens,
            peak_memory=self._memory.needed + (0.0 if settings.offload else state_bytes),
            memory_capacity=self._memory.capacity,
        )
        return replace(rounds, links=tuple(_link_traffic(fabric, exchange, rounds.round_seconds)))

    def _scaled_fabric(self, factor: float) -> Fabric:
        if factor == 1.0 or not isinstance(self.fabric, SitesFabric):
            return self.fabric
        factors = np.ones(len(self.fabric.links.kind))
        factors[list(self.fabric.site_link_ids)] = factor
        return self.fabric.with_degraded_links(factors)

    def _replica_rounds(
        self, settings: DilocoSettings, exchange: "_Exchange", nic_load: float
    ) -> Iterator[ReplicaRound]:
        slowed, layers = self._steps_during_exchange(nic_load), self.scenario.model.layer_count
        for index, (replica, slot) in enumerate(zip(self.replicas, replica_places(self.scenario), strict=True)):
            step_time = self.step_times[index]
            yield ReplicaRound(
                name=slot.name,
                site=slot.site,
                gpus=replica.layout.world_size,
                sequences=replica.training.global_batch,
                step_time=step_time,
                overlapped_step_time=slowed[index],
                exposed_seconds=exposed_seconds(
                    settings, step_time, layers, exchange.transfer_seconds, exchange.latency
                ),
                price_per_second=_price_per_second(replica),
            )

    def _steps_during_exchange(self, nic_load: float) -> tuple[Seconds, ...]:
        """Inner steps while the exchange takes a fraction of each NIC, rounded up to whole percents."""
        return self.step_times if nic_load < MIN_NIC_LOAD else self._loaded_steps(math.ceil(100.0 * nic_load) / 100.0)

    @cached_method
    def _loaded_steps(self, load: float) -> tuple[Seconds, ...]:
        return tuple(map(max, self.step_times, self._simulate_steps(1.0 - load)))

    def curves(self, settings: DilocoSettings) -> Iterator[UtilizationCurve]:
        """Utilization against the bandwidth of all links between sites, for fewer and more inner steps."""
        if not isinstance(self.fabric, SitesFabric):
            return
        slowest = min(link.bandwidth for link in self.fabric.site_links)
        factors = [10.0 ** (exponent / 3.0) for exponent in range(-6, 7)]
        fewest = max(settings.overlap + 1, settings.fragments)
        for inner_steps in dict.fromkeys(
            max(fewest, round(settings.inner_steps * scale)) for scale in (0.1, 1.0, 10.0)
        ):
            changed = replace(settings, inner_steps=inner_steps)
            utilizations = tuple(self.rounds(changed, factor).utilization for factor in factors)
            yield UtilizationCurve(inner_steps, tuple(slowest * factor for factor in factors), utilizations)

    def bandwidth_for(self, utilization: float) -> float | None:
        """Factor on the bandwidth of all links between sites that reaches a utilization, to 1 %; None: none does."""
        settings = self.scenario.diloco
        if settings is None or not isinstance(self.fabric, SitesFabric):
            return None
        low, high = math.log(MIN_BANDWIDTH_FACTOR), math.log(MAX_BANDWIDTH_FACTOR)
        if self.rounds(settings, MAX_BANDWIDTH_FACTOR).utilization < utilization:
            return None
        while high - low > 0.01:
            middle = (low + high) / 2.0
            reaches = self.rounds(settings, math.exp(middle)).utilization >= utilization
            low, high = (low, middle) if reaches else (middle, high)
        return math.exp(high)


def _price_per_second(replica: Scenario) -> Price | None:
    """What its GPUs cost; None where a price is unknown, or in several currencies."""
    economics, cluster = replica.economics, replica.cluster
    accelerators, kinds = cluster.accelerator_kinds()
    quotes = [economics.gpu_hour_quote(accelerator, cluster.name) for accelerator in accelerators]
    prices = [None if quote is None else quote.price for quote in quotes]
    known_prices = [price for price in prices if price is not None]
    if len(known_prices) < len(prices) or len({price.currency for price in known_prices}) != 1:
        return None
    counts = np.bincount(kinds[: replica.layout.world_size], minlength=len(known_prices)).tolist()
    hourly = sum(count * price.amount for count, price in zip(counts, known_prices, strict=True))
    return Price(hourly / 3600.0, known_prices[0].currency)


class _Exchange:
    """The all-reduce of all outer gradients: groups of one GPU in each replica, each with its shard."""

    def __init__(self, scenario: Scenario, fabric: Fabric, settings: DilocoSettings) -> None:
        slots = replica_places(scenario)
        self.fabric, self.shards = fabric, min(len(slot.gpus) for slot in slots)
        self.payload: Bytes = parameter_count(scenario.model) * settings.outer_gradients.bytes
        self.shard_parameters = parameter_count(scenario.model) / self.shards
        self.members = np.stack([slot.gpus[: self.shards] for slot in slots], axis=1)
        self._tuner = Tuner(fabric, resolved_library(scenario))
        costs = self._tuner.evaluate_variants(CollectiveType.ALL_REDUCE, self.members)
        self.selection: Selection = select_variants(costs, self.payload / self.shards)
        slowest = self.selection.slowest_group
        self.latency: Seconds = float(self.selection.latency[slowest])
        self.transfer_seconds: Seconds = float(self.selection.seconds[slowest]) - self.latency

    def site_link_shares(self) -> list[float]:
        """Bytes on each link between sites, relative to the payload of one group, of all groups together."""
        if not isinstance(self.fabric, SitesFabric):
            return []
        variant, loads = self.selection.slowest_variant, np.zeros(len(self.fabric.links.kind))
        for topology in self._tuner.group_topologies(self.members):
            for phase in self._tuner.library.algorithm(variant.algorithm).phases(CollectiveType.ALL_REDUCE, topology):
                loads += route_phase(phase, self.fabric).link_load[:-1]
        return [float(loads[link]) for link in self.fabric.site_link_ids]

    def nic_load(self, fragments: int, seconds: Seconds) -> float:
        """Fraction of each NIC's bandwidth that the exchange of a fragment takes if it lasts `seconds`."""
        links = self.fabric.links
        nics = links.kind == LINK_KINDS.index(LinkKind.NIC)
        sent: float = 2.0 * (self.members.shape[1] - 1) / self.members.shape[1] * self.payload / self.shards / fragments
        return min(MAX_NIC_LOAD, sent / seconds / float(links.bandwidth[nics].min()))


def _optimizer_seconds(scenario: Scenario, settings: DilocoSettings, shard_parameters: float) -> Seconds:
    """The outer optimizer's step on one GPU's shard, by the memory that it reads and writes."""
    touches = _NESTEROV_TOUCHES if settings.optimizer is OuterOptimizer.NESTEROV else _SGD_TOUCHES
    touched = touches * 4.0 * shard_parameters
    if not settings.offload:
        return touched / scenario.cluster.accelerator.memory_bandwidth
    host = scenario.cluster.host_memory
    if host is None:
        raise InputError(
            f"{scenario.name}: diloco.offload: {scenario.cluster.name} does not say what memory its hosts have; leave "
            "offload out, or give the sites' clusters a node.host_memory"
        )
    copies = 4.0 * shard_parameters * (1.0 / host.device_to_host + 1.0 / host.host_to_device)
    return copies + touched * scenario.cluster.gpus_per_node / (host.bandwidth * host.optimizer_fraction)


def _link_traffic(fabric: Fabric, exchange: _Exchange, round_seconds: Seconds) -> Iterator[SiteLinkTraffic]:
    """Traffic of each link between sites in a round."""
    shares = exchange.site_link_shares()
    if not isinstance(fabric, SitesFabric):
        return
    for link, share in zip(fabric.site_links, shares, strict=True):
        round_bytes = share * exchange.payload / exchange.shards
        yield SiteLinkTraffic(
            fabric.sites[link.source].name,
            fabric.sites[link.target].name,
            round_bytes,
            link.bandwidth,
            round_bytes / link.bandwidth / round_seconds,
            round_bytes * link.price_per_byte,
        )
