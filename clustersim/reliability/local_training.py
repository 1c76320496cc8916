"""How long does a round of local training (DiLoCo) over several sites take?

Each site's replica is simulated as a job of its own on the site's GPUs, for one inner step. The exchange is an
all-reduce of every shard of the outer gradients among the GPUs that hold it, one in each site, on the routes between
the sites and with the limits of their transports. While it overlaps inner steps it takes its share of the NICs, and an
inner step is simulated with what is left of them. Sites that are faster wait for the slowest one in each round.

Assumptions: outer gradients are sharded over all GPUs of a site (of the smallest, if sites differ), whatever the inner
strategy; replicas average all of a fragment; no inner step fails.
Reference: as `clustersim.scenario.diloco`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clustersim.build import resolved_library
from clustersim.collectives.flow_routes import route_phase
from clustersim.collectives.tuner import Selection, Tuner, select_variants
from clustersim.common.arrays import IntArray
from clustersim.common.cached_method import cached_method
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.model.transformer import parameter_count
from clustersim.program.task import CollectiveType
from clustersim.reliability.outer_exchange import exposed_seconds
from clustersim.reliability.outer_settings import outer_choices
from clustersim.reliability.replica_outages import simulate_replica_outages
from clustersim.results.memory_check import peak_memory_use
from clustersim.results.outer_rounds import OuterRounds, SiteRound, UtilizationCurve
from clustersim.results.site_traffic import SiteLinkTraffic
from clustersim.scenario import Scenario
from clustersim.scenario.changes.links import with_link_bandwidth
from clustersim.scenario.diloco import DilocoSettings, OuterOptimizer
from clustersim.scenario.validation_rules.diloco import site_gpu_counts
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
    needs = tuple((utilization, training.bandwidth_for(utilization)) for utilization in UTILIZATIONS)
    rounds = replace(training.rounds(scenario.diloco), bandwidth_needs=needs)
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
    """The replicas of a scenario's sites, each inner step simulated once; rounds of any settings follow from them."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.fabric = scenario, _sites_fabric(scenario)
        self.replicas = tuple(site_scenarios(scenario))
        self.step_times = tuple(simulate(replica).step_time for replica in self.replicas)
        memory = [peak_memory_use(replica) for replica in self.replicas]
        self._memory = max(memory, key=lambda use: use.needed / use.capacity)

    def rounds(self, settings: DilocoSettings, bandwidth_factor: float = 1.0) -> OuterRounds:
        """A round. bandwidth_factor: on all links between sites."""
        scenario, fabric = self.scenario, self._scaled_fabric(bandwidth_factor)
        exchange = _Exchange(scenario, fabric, settings, min(site_gpu_counts(scenario)))
        slowest, layers = max(self.step_times), scenario.model.layer_count
        fragment_seconds = exchange.transfer_seconds / settings.fragments + exchange.latency
        window = max(fragment_seconds, settings.overlap * slowest)
        load = exchange.nic_load(settings.fragments, window) if settings.overlap else 0.0
        state_bytes = settings.optimizer.state_bytes * exchange.shard_parameters
        rounds = OuterRounds(
            name=scenario.name,
            settings=settings,
            sites=tuple(self._site_rounds(load)),
            links=(),
            exchange_seconds=fragment_seconds,
            exposed_seconds=exposed_seconds(settings, slowest, layers, exchange.transfer_seconds, exchange.latency),
            optimizer_seconds=_optimizer_seconds(scenario, settings, exchange.shard_parameters),
            payload=exchange.payload,
            outer_bytes_per_gpu=0.0 if settings.offload else state_bytes,
            host_bytes_per_gpu=state_bytes if settings.offload else 0.0,
            algorithm=exchange.selection.slowest_variant.name,
            batch_tokens=float(scenario.training.global_batch * scenario.training.sequence),
            peak_memory=self._memory.needed + (0.0 if settings.offload else state_bytes),
            memory_capacity=self._memory.capacity,
        )
        return replace(rounds, links=tuple(_link_traffic(fabric, exchange, rounds.round_seconds)))

    def _scaled_fabric(self, factor: float) -> SitesFabric:
        if factor == 1.0:
            return self.fabric
        factors = np.ones(len(self.fabric.links.kind))
        factors[list(self.fabric.site_link_ids)] = factor
        return self.fabric.with_degraded_links(factors)

    def _site_rounds(self, nic_load: float) -> Iterator[SiteRound]:
        names = [self.fabric.sites[site].name for site in _used_sites(self.scenario, self.fabric)]
        slowed = self._steps_during_exchange(nic_load)
        for name, replica, step_time, slow in zip(names, self.replicas, self.step_times, slowed, strict=True):
            yield SiteRound(name, replica.layout.world_size, replica.training.global_batch, step_time, slow)

    def _steps_during_exchange(self, nic_load: float) -> tuple[Seconds, ...]:
        """Inner steps while the exchange takes a fraction of each NIC, rounded up to whole percents."""
        return self.step_times if nic_load < MIN_NIC_LOAD else self._loaded_steps(math.ceil(100.0 * nic_load) / 100.0)

    @cached_method
    def _loaded_steps(self, load: float) -> tuple[Seconds, ...]:
        return tuple(
            max(step_time, simulate(with_link_bandwidth(replica, [LinkKind.NIC], 1.0 - load)).step_time)
            for replica, step_time in zip(self.replicas, self.step_times, strict=True)
        )

    def curves(self, settings: DilocoSettings) -> Iterator[UtilizationCurve]:
        """Utilization against the bandwidth of all links between sites, for fewer and more inner steps."""
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
        if settings is None:
            return None
        low, high = math.log(MIN_BANDWIDTH_FACTOR), math.log(MAX_BANDWIDTH_FACTOR)
        if self.rounds(settings, MAX_BANDWIDTH_FACTOR).utilization < utilization:
            return None
        while high - low > 0.01:
            middle = (low + high) / 2.0
            reaches = self.rounds(settings, math.exp(middle)).utilization >= utilization
            low, high = (low, middle) if reaches else (middle, high)
        return math.exp(high)


def _sites_fabric(scenario: Scenario) -> SitesFabric:
    machine = scenario.cluster.machine
    if not isinstance(machine, SitesFabric):
        raise InputError(f"{scenario.name}: diloco: {scenario.cluster.name} is a single site")
    return machine


def _rank_gpus(scenario: Scenario) -> IntArray:
    return scenario.cluster.machine_gpu_ids


def _used_sites(scenario: Scenario, fabric: SitesFabric) -> list[int]:
    """Sites that have GPUs of the job, in the order of ranks."""
    site_ids = fabric.site_ids(_rank_gpus(scenario))
    return [] if site_ids is None else list(dict.fromkeys(site_ids.tolist()))


def _site_gpus(scenario: Scenario, fabric: SitesFabric) -> list[IntArray]:
    """Machine ids of the job's GPUs, site by site."""
    gpus = _rank_gpus(scenario)
    site_ids = np.asarray(fabric.site_ids(gpus))
    return [gpus[site_ids == site] for site in _used_sites(scenario, fabric)]


def site_scenarios(scenario: Scenario) -> Iterator[Scenario]:
    """The inner job of each site: its GPUs, its share of the replicas and of the batch."""
    fabric, layout, training = _sites_fabric(scenario), scenario.layout, scenario.training
    for gpus in _site_gpus(scenario, fabric):
        dp = len(gpus) // (layout.world_size // layout.dp)
        yield replace(
            scenario,
            cluster=scenario.cluster.with_rank_mapping(gpus),
            layout=replace(layout, dp=dp),
            training=replace(training, global_batch=training.global_batch * len(gpus) // scenario.cluster.gpu_count),
            diloco=None,
        )


class _Exchange:
    """The all-reduce of all outer gradients: groups of one GPU in each site, each with its shard."""

    def __init__(self, scenario: Scenario, fabric: SitesFabric, settings: DilocoSettings, shards: int) -> None:
        self.fabric, self.shards = fabric, shards
        self.payload: Bytes = parameter_count(scenario.model) * settings.outer_gradients.bytes
        self.shard_parameters = parameter_count(scenario.model) / shards
        self.members = np.stack([gpus[:shards] for gpus in _site_gpus(scenario, fabric)], axis=1)
        self._tuner = Tuner(fabric, resolved_library(scenario))
        costs = self._tuner.evaluate_variants(CollectiveType.ALL_REDUCE, self.members)
        self.selection: Selection = select_variants(costs, self.payload / shards)
        slowest = self.selection.slowest_group
        self.latency: Seconds = float(self.selection.latency[slowest])
        self.transfer_seconds: Seconds = float(self.selection.seconds[slowest]) - self.latency

    def site_link_shares(self) -> list[float]:
        """Bytes on each link between sites, relative to the payload of one group, of all groups together."""
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


def _link_traffic(fabric: SitesFabric, exchange: _Exchange, round_seconds: Seconds) -> Iterator[SiteLinkTraffic]:
    """Traffic of each link between sites in a round."""
    shares = exchange.site_link_shares()
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
