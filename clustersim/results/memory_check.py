"""Does a scenario fit in memory, and what would make it fit? Nothing here is simulated.

Whether it is legal is known before: a scenario that was built is.
"""

from dataclasses import dataclass, replace

import numpy as np

from clustersim.build import lowered, order_of, plan_of, require, require_offers, turns_of
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes
from clustersim.memory.footprint import STATES, Footprint
from clustersim.memory.host_memory import HostUse, host_use
from clustersim.memory.ledger import Ledger
from clustersim.memory.oom_suggestions import remedies
from clustersim.memory.timeline import capacities, ordered_ledgers, tightest
from clustersim.model.offload import NOTHING
from clustersim.parallel.expert_load_factors import most_loaded_factor
from clustersim.parallel.mesh import PIPELINE
from clustersim.parallel.plan import Plan
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import Setup
from clustersim.scenario.validation_rules.consistency import problems


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Whether a scenario fits, without simulating it. suggestions: what would make it fit if it does not.

    host: memory of the fullest node's host; None: nothing is offloaded.
    """

    peak_memory_bytes: Bytes
    memory_capacity_bytes: Bytes
    warnings: tuple[str, ...]
    suggestions: tuple[str, ...]
    host: HostUse | None = None

    @property
    def fits(self) -> bool:
        """Whether every GPU's peak is within its capacity, and what is offloaded within the hosts'."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes and (self.host is None or self.host.fits)


def check(scenario: Scenario) -> CheckReport:
    """Say whether a scenario fits in memory, and what would make it fit."""
    require(scenario)
    if scenario.cost.switches.constrained_collectives:
        require_offers(scenario, lowered(scenario, plan_of(scenario)))
    report = _report(scenario)
    full = report.peak_memory_bytes > report.memory_capacity_bytes
    return replace(report, suggestions=suggest_memory_fixes(scenario)) if full else report


def fits(scenario: Setup) -> bool:
    """Whether every GPU's peak is within its capacity, and what is offloaded within the hosts'."""
    plan = plan_of(scenario)
    ledgers = ordered_ledgers(footprint_of(scenario, plan), turns_of(scenario, plan))
    if any(ledger.peak > capacity for ledger, capacity in zip(ledgers, capacities_of(scenario), strict=True)):
        return False
    host = _host_use(scenario, plan)
    return host is None or host.fits


def states_fit(scenario: Setup) -> bool:
    """Whether what stays for the whole step, whatever the microbatches and what is computed again, would fit alone."""
    footprint = footprint_of(scenario, plan_of(scenario))
    sizes = (footprint.resident(rank) for rank in range(scenario.layout.pp))
    needed = (sum(item[use] for use in STATES) for item in sizes)
    return all(size <= capacity for size, capacity in zip(needed, capacities_of(scenario), strict=True))


def _report(scenario: Scenario) -> CheckReport:
    """Without suggestions."""
    peak, capacity = tightest_memory(scenario)
    host = host_use_of(scenario)
    warnings = (*scenario.warnings, *(() if host is None else host.problems))
    return CheckReport(peak, capacity, warnings, (), host)


def tightest_memory(scenario: Setup) -> tuple[Bytes, Bytes]:
    """What the GPU that is fullest for its size needs, and what it has."""
    return tightest(_peaks(scenario, plan_of(scenario)), capacities_of(scenario))


def peak_memory(scenario: Scenario) -> Bytes:
    """Bytes that the fullest GPU needs."""
    return max(_peaks(scenario, plan_of(scenario)))


def ledgers_of(scenario: Scenario) -> tuple[Ledger, ...]:
    """Memory of the fullest GPU of every pipeline rank, over the number of its pass."""
    plan = plan_of(scenario)
    return tuple(ordered_ledgers(footprint_of(scenario, plan), turns_of(scenario, plan)))


def checkpoint_bytes(scenario: Setup) -> Bytes:
    """Bytes of a checkpoint: weights and optimizer states of the whole model."""
    return footprint_of(scenario, plan_of(scenario)).saved()


def footprint_of(scenario: Setup, plan: Plan) -> Footprint:
    """What stays in memory for the whole step; of the ranks to whose experts the most rows come."""
    plan = replace(plan, expert_token_ratio=most_loaded_factor(plan, scenario.steps))
    return Footprint(plan, scenario.framework, scenario.cluster.accelerator.context_bytes)


def capacities_of(scenario: Setup) -> tuple[Bytes, ...]:
    """Memory of the smallest GPU of each pipeline rank."""
    accelerators, kind = scenario.cluster.kinds()
    memory = np.array([accelerator.memory_bytes for accelerator in accelerators])
    return capacities(memory[kind[: scenario.layout.world_size]], scenario.layout.mesh.rank_coordinates(PIPELINE))


def host_use_of(scenario: Scenario) -> HostUse | None:
    """Memory of the fullest node's host; None where nothing is offloaded."""
    return _host_use(scenario, plan_of(scenario))


def _host_use(scenario: Setup, plan: Plan) -> HostUse | None:
    host = scenario.cluster.host
    if plan.training.offload == NOTHING or host is None:
        return None
    stage = plan.layout.mesh.rank_coordinates(PIPELINE)
    nodes = scenario.cluster.fabric.nodes(np.arange(plan.layout.world_size))
    by_stage = nodes[np.argsort(stage, kind="stable")].reshape(plan.layout.pp, -1)
    return host_use(plan, order_of(scenario, plan), by_stage, host.capacity)


def suggest_memory_fixes(scenario: Scenario) -> tuple[str, ...]:
    """Single changes (and the few sensible pairs of them) after which the scenario fits."""
    domains = scenario.cluster.fabric.domains(np.arange(scenario.cluster.gpus))
    domain = int(np.count_nonzero(domains == domains[0]))

    def peak_of(plan: Plan) -> Bytes:
        """The peak of the scenario with another plan; raise InputError where its parts would not agree."""
        found = problems(replace(scenario, training=plan.training, layout=plan.layout))
        if found:
            raise InputError(found[0])
        host = _host_use(scenario, plan)
        if host is not None and not host.fits:
            raise InputError(f"the host lacks memory: {host.memory} of {host.capacity} bytes")
        return max(_peaks(scenario, plan))

    return tuple(remedies(plan_of(scenario), min(capacities_of(scenario)), peak_of, domain=domain))


def _peaks(scenario: Setup, plan: Plan) -> list[Bytes]:
    """What the fullest GPU of each pipeline rank of a plan needs."""
    return [
        ordered_ledger.peak
        for ordered_ledger in ordered_ledgers(footprint_of(scenario, plan), turns_of(scenario, plan))
    ]
