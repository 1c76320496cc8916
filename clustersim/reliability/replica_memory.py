"""Does every replica of local training fit in memory, with its outer state?

The common weights and their momentum are sharded over all GPUs of a replica (of the smallest, if they differ).
Suggestions name what the file states: degrees and batch of all replicas together.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from clustersim.common.errors import InputError
from clustersim.common.units import Bytes
from clustersim.model.transformer import parameter_count
from clustersim.reliability.replica_places import S, inner_scenario, replica_places
from clustersim.results.memory_check import (
    MemoryCheckReport,
    MemoryUse,
    memory_fit_probability,
    peak_memory_use,
    report_without_suggestions,
    suggest_memory_fixes,
)
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems


def outer_state_bytes(scenario: ResolvedScenario) -> Bytes:
    """Common weights and momentum of one GPU's shard, wherever they are kept."""
    settings, shards = scenario.diloco, min(len(slot.gpus) for slot in replica_places(scenario))
    return 0.0 if settings is None else settings.optimizer.state_bytes * parameter_count(scenario.model) / shards


def outer_gpu_bytes(scenario: ResolvedScenario) -> Bytes:
    """What of them is in GPU memory: nothing where they are offloaded."""
    return 0.0 if scenario.diloco is None or scenario.diloco.offload else outer_state_bytes(scenario)


def distinct_replicas(scenario: S) -> Iterator[S]:
    """One replica of each size and kind of GPUs: others need the same memory."""
    seen: set[object] = set()
    accelerators, kinds = scenario.cluster.accelerator_kinds()
    kind_by_gpu = dict(zip(scenario.cluster.machine_gpu_ids.tolist(), kinds.tolist(), strict=True))
    for slot in replica_places(scenario):
        used = tuple(map(kind_by_gpu.__getitem__, slot.gpus.tolist())) if len(accelerators) > 1 else ()
        if (len(slot.gpus), used) not in seen:
            seen.add((len(slot.gpus), used))
            yield inner_scenario(scenario, slot)


def replica_memory_use(
    scenario: ResolvedScenario, use_of: Callable[[ResolvedScenario], MemoryUse] = peak_memory_use
) -> MemoryUse:
    """Memory of the replica with least room, its outer state included. use_of: of a job, such as its states alone."""
    outer = outer_gpu_bytes(scenario)
    uses = [use_of(replica) for replica in distinct_replicas(scenario)]
    return max(
        (replace(use, needed=use.needed + outer) for use in uses), key=lambda use: (not use.hosts_fit, _filled(use))
    )


def check_replicas(scenario: Scenario) -> MemoryCheckReport:
    """Whether all replicas fit, and what would make them fit."""
    outer = outer_gpu_bytes(scenario)
    reports = [report_without_suggestions(replica) for replica in distinct_replicas(scenario)]
    report = max(reports, key=lambda report: report.peak_memory_bytes / report.memory_capacity_bytes)
    peak, capacity = report.peak_memory_bytes + outer, report.memory_capacity_bytes
    return replace(
        report,
        peak_memory_bytes=peak,
        fit_probability=memory_fit_probability(scenario, peak, capacity, report.host),
        warnings=tuple(dict.fromkeys((*scenario.warnings, *report.warnings))),
        suggestions=suggest_memory_fixes(scenario, peak, capacity, _peak_of_replicas),
    )


def _peak_of_replicas(scenario: Scenario) -> Bytes:
    """Peak memory of a changed scenario; raise InputError where it is inconsistent, or hosts lack memory."""
    replicas = tuple(distinct_replicas(scenario)) if not find_problems(scenario) else ()
    if not replicas or any(find_problems(replica) for replica in replicas):
        raise InputError("the changed scenario is inconsistent")
    use = replica_memory_use(scenario)
    if not use.hosts_fit:
        raise InputError("out of host memory")
    return use.needed


def _filled(use: MemoryUse) -> float:
    return use.needed / use.capacity
