"""How long does a round of local training (DiLoCo) take?

Each replica is simulated as a job of its own for one inner step (`inner_steps`). The exchange is an all-reduce of the
outer gradients among the replicas (`outer_all_reduce`), which takes its share of the links while it overlaps inner
steps. Without a quorum faster replicas wait for the slowest one in each round; with one, for the last of those that are
ready first (`outer_quorum`), and the exchange is among these, at least two: others take part when they can.

Assumptions: replicas average all of a fragment; no inner step fails.
Reference: as `clustersim.scenario.diloco`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.cached_method import cached_method
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.hardware.prices import Price
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import Fabric
from clustersim.model.transformer import parameter_count
from clustersim.reliability.inner_steps import (
    ExchangeLoad,
    InnerStep,
    inner_link_bytes,
    replica_groups,
    simulate_inner_steps,
)
from clustersim.reliability.outer_all_reduce import MIN_LOAD, OuterAllReduce, site_link_traffic
from clustersim.reliability.outer_exchange import exposed_seconds
from clustersim.reliability.outer_quorum import first_ready
from clustersim.reliability.outer_settings import outer_choices
from clustersim.reliability.replica_memory import outer_state_bytes, replica_memory_use
from clustersim.reliability.replica_outages import simulate_replica_outages
from clustersim.reliability.replica_places import replica_places, replica_scenarios
from clustersim.results.outer_rounds import OuterRounds, ReplicaRound, UtilizationCurve
from clustersim.scenario import Scenario
from clustersim.scenario.diloco import DilocoSettings, OuterFormat, OuterOptimizer, StepBudget

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

    curves: also utilization against bandwidth, for a tenth and ten times the inner steps as well, where inner steps do
    not depend on it (like the bandwidth that some utilizations need); days: also that many
    days with failures of the replicas, as a mean of `runs`; utilization: also the settings that reach it.
    """
    if scenario.diloco is None:
        raise InputError(
            f"{scenario.path or scenario.name}: diloco: is missing; write such as diloco: {{inner_steps: 100}}"
        )
    training = LocalTraining(scenario)
    rounds = training.rounds(scenario.diloco)
    if rounds.links and not training.spans_sites:
        needs = tuple((target, training.bandwidth_for(target)) for target in UTILIZATIONS)
        rounds = replace(rounds, bandwidth_needs=needs)
    if curves and not training.spans_sites:
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
        self.slots, self.replicas = replica_places(scenario), tuple(replica_scenarios(scenario))
        self._groups = replica_groups(scenario, self.slots, self.replicas)
        self.inner_steps = self._inner_steps(ExchangeLoad())
        self._memory = replica_memory_use(scenario)

    @property
    def spans_sites(self) -> bool:
        """Whether a replica is in several sites, so that its inner steps depend on the links between them."""
        return any(group.spans_sites for group in self._groups)

    @property
    def step_times(self) -> tuple[Seconds, ...]:
        """An inner step of each replica without an exchange."""
        return tuple(step.seconds for step in self.inner_steps)

    @cached_method
    def _inner_steps(self, load: ExchangeLoad) -> tuple[InnerStep, ...]:
        return simulate_inner_steps(self.scenario, self.replicas, self._groups, load)

    def rounds(self, settings: DilocoSettings, bandwidth_factor: float = 1.0) -> OuterRounds:
        """A round. bandwidth_factor: on all links between sites."""
        scenario, ready = self.scenario, self._first_ready(settings, bandwidth_factor)
        exchange, everyone = self._exchanges(tuple(sorted(ready)), settings.outer_gradients, bandwidth_factor)
        state_bytes = outer_state_bytes(scenario)
        waited_for = frozenset(ready[: settings.quorum])
        rounds = OuterRounds(
            name=scenario.name,
            settings=settings,
            replicas=tuple(self._replica_rounds(settings, exchange, waited_for)),
            links=(),
            exchange_seconds=exchange.transfer_seconds / settings.fragments + exchange.latency,
            optimizer_seconds=_optimizer_seconds(scenario, settings, parameter_count(scenario.model) / everyone.shards),
            payload=exchange.payload,
            outer_bytes_per_gpu=0.0 if settings.offload else state_bytes,
            host_bytes_per_gpu=state_bytes if settings.offload else 0.0,
            algorithm=exchange.algorithm,
            sequence_tokens=float(scenario.training.sequence),
            run_tokens=scenario.economics.training_tokens,
            peak_memory=self._memory.needed,
            memory_capacity=self._memory.capacity,
        )
        inner_bytes = settings.inner_steps * self._inner_link_bytes
        return replace(rounds, links=tuple(site_link_traffic(everyone, inner_bytes, rounds.round_seconds)))

    @cached_property
    def _prices(self) -> tuple[Price | None, ...]:
        """What the GPUs of each replica cost per second."""
        return tuple(map(_price_per_second, self.replicas))

    @cached_property
    def _inner_link_bytes(self) -> FloatArray:
        """[site links] bytes of an inner step of all replicas."""
        link_count = len(self.fabric.site_links) if isinstance(self.fabric, SitesFabric) else 0
        return inner_link_bytes(self._groups, self.inner_steps, link_count)

    def _first_ready(self, settings: DilocoSettings, bandwidth_factor: float) -> tuple[int, ...]:
        """The replicas of an exchange, in the order in which they are ready."""
        count = len(self.slots) if settings.quorum is None else max(2, settings.quorum)
        payload = parameter_count(self.scenario.model) * settings.outer_gradients.bytes
        layers, steps = self.scenario.model.layer_count, self.step_times

        def ready(index: int, exchange: Seconds) -> Seconds:
            pace = max(steps) if settings.step_budget is StepBudget.BY_SPEED else steps[index]
            return settings.inner_steps * pace + exposed_seconds(settings, steps[index], layers, exchange, 0.0)

        return first_ready(self._scaled_fabric(bandwidth_factor), self.slots, payload, count=count, ready=ready)

    def _exchanges(
        self, members: tuple[int, ...], outer_format: OuterFormat, bandwidth_factor: float
    ) -> tuple[OuterAllReduce, OuterAllReduce]:
        """The exchange among some replicas, and among all of them."""
        fabric = self._scaled_fabric(bandwidth_factor)
        build = self._own_exchange if fabric is self.fabric else partial(self._build_exchange, fabric)
        everyone = build(tuple(range(len(self.slots))), outer_format)
        return everyone if len(members) == len(self.slots) else build(members, outer_format), everyone

    @cached_method
    def _own_exchange(self, members: tuple[int, ...], outer_format: OuterFormat) -> OuterAllReduce:
        return self._build_exchange(self.fabric, members, outer_format)

    def _build_exchange(self, fabric: Fabric, members: tuple[int, ...], outer_format: OuterFormat) -> OuterAllReduce:
        return OuterAllReduce(self.scenario, fabric, [self.slots[index] for index in members], outer_format)

    def _scaled_fabric(self, factor: float) -> Fabric:
        if factor == 1.0 or not isinstance(self.fabric, SitesFabric):
            return self.fabric
        factors = np.ones(len(self.fabric.links.kind))
        factors[list(self.fabric.site_link_ids)] = factor
        return self.fabric.with_degraded_links(factors)

    def _replica_rounds(
        self, settings: DilocoSettings, exchange: OuterAllReduce, waited_for: frozenset[int]
    ) -> Iterator[ReplicaRound]:
        slowed, layers = self._steps_during_exchange(settings, exchange), self.scenario.model.layer_count
        for index, (replica, slot) in enumerate(zip(self.replicas, self.slots, strict=True)):
            step_time = self.step_times[index]
            yield ReplicaRound(
                name=slot.name,
                sites=slot.sites,
                gpus=replica.layout.world_size,
                sequences=replica.training.global_batch,
                step_time=step_time,
                overlapped_step_time=slowed[index],
                exposed_seconds=exposed_seconds(
                    settings, step_time, layers, exchange.transfer_seconds, exchange.latency
                ),
                is_waited_for=index in waited_for,
                price_per_second=self._prices[index],
            )

    def _steps_during_exchange(self, settings: DilocoSettings, exchange: OuterAllReduce) -> tuple[Seconds, ...]:
        """Inner steps while the exchange of a fragment takes a fraction of the links."""
        if not settings.overlap:
            return self.step_times
        fragment_seconds = exchange.transfer_seconds / settings.fragments + exchange.latency
        load = exchange.load(settings.fragments, max(fragment_seconds, settings.overlap * max(self.step_times)))
        rounded = ExchangeLoad(
            _whole_percents(load.nics), _whole_percents(load.site_links) if self.spans_sites else 0.0
        )
        return tuple(map(max, self.step_times, (step.seconds for step in self._inner_steps(rounded))))

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


def _whole_percents(load: float) -> float:
    """A load rounded up to whole percents; none where it does not slow inner steps."""
    return 0.0 if load < MIN_LOAD else math.ceil(100.0 * load) / 100.0


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
