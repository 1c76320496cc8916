"""Does a scenario fit in memory, and what would make it fit? Nothing is simulated here.

Its legality was checked when the scenario was built.
"""

from dataclasses import dataclass, replace

import numpy as np

from clustersim.build import (
    build_plan,
    build_program,
    pass_orders,
    require_algorithms,
    require_consistent,
    schedule_order,
)
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes
from clustersim.memory.footprint import CONSTANT_CATEGORIES, Footprint
from clustersim.memory.host_memory import HostMemoryUse, host_memory_use
from clustersim.memory.ledger import MemoryLedger
from clustersim.memory.timeline import capacity_by_pipeline_rank, ledgers_from_order, max_utilization
from clustersim.model.framework import Framework
from clustersim.model.layer_stack import layer_count
from clustersim.model.offload import NO_OFFLOAD
from clustersim.parallel.expert_load_factors import most_loaded_factor
from clustersim.parallel.mesh import PIPELINE
from clustersim.parallel.plan import Plan
from clustersim.results.oom_suggestions import MemorySuggestion, PeakFunction, oom_suggestions
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.uncertainty.memory_error import default_headroom, fit_probability, fits_surely


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that the most loaded GPU needs, of its capacity. hosts_fit: whether offloaded memory fits the hosts'."""

    needed: Bytes
    capacity: Bytes
    hosts_fit: bool = True

    @property
    def fits(self) -> bool:
        """Whether every GPU and host has the memory."""
        return self.needed <= self.capacity and self.hosts_fit

    def leaves_headroom(self, headroom: float) -> bool:
        """Whether it fits and this share of every device stays free."""
        return self.fits and self.needed <= self.capacity * (1.0 - headroom)


@dataclass(frozen=True, slots=True)
class MemoryCheckReport:
    """Whether a scenario fits in memory. suggestions: changes that would make it fit, if it does not, or not surely.

    fit_probability: by the errors of published predictions (`uncertainty.memory_error`); host: memory of the most
    loaded node's host; None: nothing is offloaded.
    """

    peak_memory_bytes: Bytes
    memory_capacity_bytes: Bytes
    fit_probability: float
    warnings: tuple[str, ...]
    suggestions: tuple[MemorySuggestion, ...]
    host: HostMemoryUse | None = None

    @property
    def fits(self) -> bool:
        """Whether every GPU's peak is within its capacity, and offloaded memory within the hosts'."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes and (self.host is None or self.host.fits)


def check(scenario: Scenario) -> MemoryCheckReport:
    """Check whether a scenario fits in memory, and what would make it fit."""
    require_consistent(scenario)
    if scenario.cost.nccl_overrides.constrained_collectives:
        require_algorithms(scenario, build_program(scenario, build_plan(scenario)))
    report = report_without_suggestions(scenario)
    return replace(
        report, suggestions=suggest_memory_fixes(scenario, report.peak_memory_bytes, report.memory_capacity_bytes)
    )


def fits_in_memory(scenario: ResolvedScenario) -> bool:
    """Whether every GPU's peak is within its capacity, and offloaded memory within the hosts'."""
    return peak_memory_use(scenario).fits


def peak_memory_use(scenario: ResolvedScenario) -> MemoryUse:
    """Memory at the peak of a step."""
    plan = build_plan(scenario)
    use = MemoryUse(*max_utilization(_peak_bytes(scenario, plan), memory_capacities(scenario)))
    host = _max_host_use_of_plan(scenario, plan) if use.fits else None
    return use if host is None else replace(use, hosts_fit=host.fits)


def model_states_use(scenario: ResolvedScenario) -> MemoryUse:
    """Memory of model states alone (weights, gradients, optimizer), whatever the microbatches and recomputation."""
    footprint = build_footprint(scenario, build_plan(scenario))
    resident_bytes = (footprint.resident_bytes(rank) for rank in range(scenario.layout.pp))
    state_bytes = [sum(rank_bytes[use] for use in CONSTANT_CATEGORIES) for rank_bytes in resident_bytes]
    return MemoryUse(*max_utilization(state_bytes, memory_capacities(scenario)))


def required_headroom(scenario: ResolvedScenario, headroom: float | None) -> float:
    """The share of the device that a layout has to leave free; None: what published errors ask for."""
    return default_headroom(scenario.framework.name) if headroom is None else headroom


def memory_fit_probability(
    scenario: ResolvedScenario, peak: Bytes, capacity: Bytes, host: HostMemoryUse | None
) -> float:
    """Probability that a scenario with this peak of its most loaded GPU fits; 0 where hosts lack memory."""
    return 0.0 if host is not None and not host.fits else fit_probability(scenario.framework.name, peak, capacity)


def report_without_suggestions(scenario: Scenario) -> MemoryCheckReport:
    """The report, its suggestions still empty."""
    peak, capacity = max_memory_utilization(scenario)
    host = max_host_use(scenario)
    warnings = (*scenario.warnings, *(() if host is None else host.problems))
    probability = memory_fit_probability(scenario, peak, capacity, host)
    return MemoryCheckReport(peak, capacity, probability, warnings, (), host)


def max_memory_utilization(scenario: ResolvedScenario) -> tuple[Bytes, Bytes]:
    """(peak, capacity) in bytes of the GPU with the highest ratio of the two."""
    return max_utilization(_peak_bytes(scenario, build_plan(scenario)), memory_capacities(scenario))


def peak_memory(scenario: Scenario) -> Bytes:
    """Peak memory in bytes of the most loaded GPU."""
    return max(_peak_bytes(scenario, build_plan(scenario)))


def memory_timelines(scenario: Scenario) -> tuple[MemoryLedger, ...]:
    """Memory of the most loaded GPU of every pipeline rank, over the index of its pass."""
    plan = build_plan(scenario)
    return tuple(ledgers_from_order(build_footprint(scenario, plan), pass_orders(scenario, plan)))


def checkpoint_bytes(scenario: ResolvedScenario) -> Bytes:
    """Bytes of a checkpoint: weights and optimizer states of the whole model."""
    return build_footprint(scenario, build_plan(scenario)).checkpoint_bytes()


def build_footprint(scenario: ResolvedScenario, plan: Plan) -> Footprint:
    """The memory model of a plan, for the ranks whose experts get the most tokens."""
    plan = replace(plan, expert_token_ratio=most_loaded_factor(plan, scenario.steps))
    return Footprint(plan, anchored_framework(scenario, plan), scenario.cluster.accelerator.context_bytes)


def anchored_framework(scenario: ResolvedScenario, plan: Plan) -> Framework:
    """The scenario's framework; with the fragmentation and the unexplained memory of a profiled step, if known."""
    record = scenario.cost.record
    anchor = None if record is None or record.profile is None else record.profile.memory
    if anchor is None:
        return scenario.framework
    layers = max(rank_layers(plan, stage) for stage in range(plan.layout.pp))
    return replace(
        scenario.framework,
        fragmentation=anchor.fragmentation,
        selective_fragmentation=None,
        full_fragmentation=None,
        workspace_bytes=scenario.framework.workspace_bytes + anchor.residual_of(layers, rank_tokens(plan)),
    )


def rank_layers(plan: Plan, pipeline_rank: int) -> int:
    """Transformer layers of a pipeline rank."""
    return max(1, sum(layer_count(stage.stack) for stage in plan.stages_on_rank(pipeline_rank)))


def rank_tokens(plan: Plan) -> int:
    """Tokens of a microbatch on one rank."""
    return max(1, plan.training.microbatch * plan.training.sequence // plan.layout.cp)


def memory_capacities(scenario: ResolvedScenario) -> tuple[Bytes, ...]:
    """Memory in bytes of the smallest GPU of each pipeline rank."""
    accelerators, kind = scenario.cluster.accelerator_kinds()
    memory = np.array([accelerator.memory_bytes for accelerator in accelerators])
    return capacity_by_pipeline_rank(
        memory[kind[: scenario.layout.world_size]], scenario.layout.rank_coordinates(PIPELINE)
    )


def max_host_use(scenario: Scenario) -> HostMemoryUse | None:
    """Memory of the most loaded node's host; None where nothing is offloaded."""
    return _max_host_use_of_plan(scenario, build_plan(scenario))


def _max_host_use_of_plan(scenario: ResolvedScenario, plan: Plan) -> HostMemoryUse | None:
    host = scenario.cluster.host_memory
    if plan.training.offload == NO_OFFLOAD or host is None:
        return None
    stage = plan.layout.rank_coordinates(PIPELINE)
    nodes = scenario.cluster.fabric.node_ids(np.arange(plan.layout.world_size))
    by_stage = nodes[np.argsort(stage, kind="stable")].reshape(plan.layout.pp, -1)
    return host_memory_use(plan, schedule_order(scenario, plan), by_stage, host.capacity)


def suggest_memory_fixes(
    scenario: Scenario, peak: Bytes, capacity: Bytes, peak_of: PeakFunction | None = None
) -> tuple[MemorySuggestion, ...]:
    """Single changes (and a few sensible pairs of them) after which the scenario fits, if it does not, or not surely.

    peak, capacity: of the most loaded GPU; peak_of: the peak of a changed scenario, None: that of its step.
    """
    fits = peak <= capacity
    if fits and fits_surely(fit_probability(scenario.framework.name, peak, capacity)):
        return ()
    smallest = min(memory_capacities(scenario))
    safe_capacity = smallest * (1.0 - required_headroom(scenario, None))
    peak_function = peak_of or _peak_of_legal_scenario
    return tuple(oom_suggestions(scenario, smallest, safe_capacity, peak_function, fits=fits))


def _peak_of_legal_scenario(scenario: Scenario) -> Bytes:
    """Peak memory of a changed scenario; raise InputError where it is inconsistent, or hosts lack memory."""
    errors = find_problems(scenario)
    if errors:
        raise InputError(errors[0])
    plan = build_plan(scenario)
    host = _max_host_use_of_plan(scenario, plan)
    if host is not None and not host.fits:
        raise InputError(f"out of host memory: {host.total_bytes} of {host.capacity} bytes")
    return max(_peak_bytes(scenario, plan))


def _peak_bytes(scenario: ResolvedScenario, plan: Plan) -> list[Bytes]:
    """Peak memory in bytes of the most loaded GPU of each pipeline rank."""
    return [
        memory_ledger.peak
        for memory_ledger in ledgers_from_order(build_footprint(scenario, plan), pass_orders(scenario, plan))
    ]
