"""Does a scenario fit in memory, and what would make it fit? Nothing is simulated here.

Its legality was checked when the scenario was built.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

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
from clustersim.model.offload import NO_OFFLOAD
from clustersim.parallel.expert_load_factors import most_loaded_factor
from clustersim.parallel.mesh import PIPELINE
from clustersim.parallel.plan import Plan
from clustersim.results.oom_suggestions import oom_suggestions
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.uncertainty.memory_error import default_headroom, fit_probability


class MemoryFit(Enum):
    """Whether a layout fits into memory and leaves the required headroom."""

    NONE = "does not fit"
    WITHOUT_HEADROOM = "does not leave the headroom"
    WITH_HEADROOM = "fits"


@dataclass(frozen=True, slots=True)
class MemoryCheckReport:
    """Whether a scenario fits in memory. suggestions: changes that would make it fit, if it does not.

    fit_probability: by the errors of published predictions (`uncertainty.memory_error`); host: memory of the most
    loaded node's host; None: nothing is offloaded.
    """

    peak_memory_bytes: Bytes
    memory_capacity_bytes: Bytes
    fit_probability: float
    warnings: tuple[str, ...]
    suggestions: tuple[str, ...]
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
    report = _report_without_suggestions(scenario)
    exceeds_memory = report.peak_memory_bytes > report.memory_capacity_bytes
    return replace(report, suggestions=suggest_memory_fixes(scenario)) if exceeds_memory else report


def fits_in_memory(scenario: ResolvedScenario) -> bool:
    """Whether every GPU's peak is within its capacity, and offloaded memory within the hosts'."""
    return memory_fit(scenario, headroom=0.0) is MemoryFit.WITH_HEADROOM


def memory_fit(scenario: ResolvedScenario, headroom: float) -> MemoryFit:
    """Whether a scenario fits, and leaves this share of every device free."""
    plan = build_plan(scenario)
    fit = _fit_of(scenario, _peak_bytes(scenario, plan), headroom)
    host = None if fit is MemoryFit.NONE else _max_host_use_of_plan(scenario, plan)
    return fit if host is None or host.fits else MemoryFit.NONE


def model_states_fit(scenario: ResolvedScenario, headroom: float = 0.0) -> MemoryFit:
    """The same of model states alone (weights, gradients, optimizer), whatever the microbatches and recomputation."""
    footprint = build_footprint(scenario, build_plan(scenario))
    resident_bytes = (footprint.resident_bytes(rank) for rank in range(scenario.layout.pp))
    return _fit_of(
        scenario, [sum(rank_bytes[use] for use in CONSTANT_CATEGORIES) for rank_bytes in resident_bytes], headroom
    )


def _fit_of(scenario: ResolvedScenario, sizes: Sequence[Bytes], headroom: float) -> MemoryFit:
    """Whether bytes by pipeline rank fit. The rule of headroom is this one, wherever layouts are compared with it."""
    pairs = [*zip(sizes, memory_capacities(scenario), strict=True)]
    if any(size > capacity for size, capacity in pairs):
        return MemoryFit.NONE
    if all(leaves_headroom(size, capacity, headroom) for size, capacity in pairs):
        return MemoryFit.WITH_HEADROOM
    return MemoryFit.WITHOUT_HEADROOM


def leaves_headroom(size: Bytes, capacity: Bytes, headroom: float) -> bool:
    """Whether bytes leave this share of a device free."""
    return size <= capacity * (1.0 - headroom)


def required_headroom(scenario: ResolvedScenario, headroom: float | None) -> float:
    """The share of the device that a layout has to leave free; None: what published errors ask for."""
    return default_headroom(scenario.framework.name) if headroom is None else headroom


def memory_fit_probability(
    scenario: ResolvedScenario, peak: Bytes, capacity: Bytes, host: HostMemoryUse | None
) -> float:
    """Probability that a scenario with this peak of its most loaded GPU fits; 0 where hosts lack memory."""
    return 0.0 if host is not None and not host.fits else fit_probability(scenario.framework.name, peak, capacity)


def _report_without_suggestions(scenario: Scenario) -> MemoryCheckReport:
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
    return Footprint(plan, scenario.framework, scenario.cluster.accelerator.context_bytes)


def memory_capacities(scenario: ResolvedScenario) -> tuple[Bytes, ...]:
    """Memory in bytes of the smallest GPU of each pipeline rank."""
    accelerators, kind = scenario.cluster.accelerator_kinds()
    memory = np.array([accelerator.memory_bytes for accelerator in accelerators])
    return capacity_by_pipeline_rank(
        memory[kind[: scenario.layout.world_size]], scenario.layout.mesh.rank_coordinates(PIPELINE)
    )


def max_host_use(scenario: Scenario) -> HostMemoryUse | None:
    """Memory of the most loaded node's host; None where nothing is offloaded."""
    return _max_host_use_of_plan(scenario, build_plan(scenario))


def _max_host_use_of_plan(scenario: ResolvedScenario, plan: Plan) -> HostMemoryUse | None:
    host = scenario.cluster.host_memory
    if plan.training.offload == NO_OFFLOAD or host is None:
        return None
    stage = plan.layout.mesh.rank_coordinates(PIPELINE)
    nodes = scenario.cluster.fabric.node_ids(np.arange(plan.layout.world_size))
    by_stage = nodes[np.argsort(stage, kind="stable")].reshape(plan.layout.pp, -1)
    return host_memory_use(plan, schedule_order(scenario, plan), by_stage, host.capacity)


def suggest_memory_fixes(scenario: Scenario) -> tuple[str, ...]:
    """Single changes (and a few sensible pairs of them) after which the scenario fits."""
    return tuple(oom_suggestions(scenario, min(memory_capacities(scenario)), _peak_of_legal_scenario))


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
