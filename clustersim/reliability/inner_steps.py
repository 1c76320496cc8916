"""How long is an inner step of each replica of local training, while others train next to it?

Replicas that share a site, or a link between sites that several of them span, are simulated together on its network;
all others by themselves. Of groups on equal sites one stands for all, where nothing distinguishes them: no degraded
GPU or link, jitter or other job.

While an exchange overlaps inner steps it takes its share of the NICs, and of the links between sites of replicas that
span these: the steps are simulated with what it leaves of both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import LinkKind
from clustersim.reliability.replica_places import ReplicaPlace
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.site_traffic import site_traffic
from clustersim.scenario import Scenario
from clustersim.scenario.changes.links import with_link_bandwidth
from clustersim.scenario.resolved import ResolvedJob
from clustersim.simulation import simulate


@dataclass(frozen=True, slots=True)
class ExchangeLoad:
    """Fractions of the NICs' and of the site links' bandwidth that an exchange takes while inner steps go on."""

    nics: float = 0.0
    site_links: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Replicas that share a network, by their indices. simulated: those of the group that stands for this one.

    spans_sites: whether one of them is in several sites.
    """

    replicas: tuple[int, ...]
    simulated: tuple[int, ...]
    spans_sites: bool


@dataclass(frozen=True, slots=True)
class InnerStep:
    """An inner step of a replica. result: of the first replica of its group."""

    seconds: Seconds
    result: SimulationResult


def replica_groups(
    scenario: Scenario, slots: Sequence[ReplicaPlace], replicas: Sequence[Scenario]
) -> list[ReplicaGroup]:
    """The groups of replicas that share a network, in the order of their first replicas."""
    groups: list[ReplicaGroup] = []
    keys: list[tuple[Any, tuple[int, ...]]] = []
    for members in _connected([_shared_resources(scenario, slot) for slot in slots]):
        key = _network_key(scenario, [slots[index] for index in members], replicas[members[0]])
        same = next((simulated for other, simulated in keys if key is not None and other == key), members)
        keys.append((key, members))
        groups.append(ReplicaGroup(members, same, any(len(slots[index].sites) > 1 for index in members)))
    return groups


def simulate_inner_steps(
    scenario: Scenario, replicas: Sequence[Scenario], groups: Sequence[ReplicaGroup], load: ExchangeLoad
) -> tuple[InnerStep, ...]:
    """An inner step of each replica, next to the others of its group."""
    steps: dict[int, InnerStep] = {}
    for group in groups:
        if group.simulated[0] not in steps:
            steps |= zip(group.simulated, _simulate_group(scenario, replicas, group.simulated, load), strict=True)
        steps |= {index: steps[other] for index, other in zip(group.replicas, group.simulated, strict=True)}
    return tuple(steps[index] for index in range(len(replicas)))


def inner_link_bytes(groups: Sequence[ReplicaGroup], steps: Sequence[InnerStep], link_count: int) -> FloatArray:
    """[site links] bytes of an inner step of all replicas, of those that span sites."""
    loads = np.zeros(link_count)
    for group in groups:
        traffic = site_traffic(steps[group.replicas[0]].result) if group.spans_sites else ()
        loads += [link.sent_bytes for link in traffic] or 0.0
    return loads


def _simulate_group(
    scenario: Scenario, replicas: Sequence[Scenario], members: Sequence[int], load: ExchangeLoad
) -> Iterator[InnerStep]:
    """The first with the others as co-scheduled jobs, besides those of the scenario."""
    first, *others = (replicas[index] for index in members)
    neighbours = tuple(ResolvedJob(other) for other in others)
    job = replace(first, co_scheduled_jobs=(*first.co_scheduled_jobs, *neighbours)) if neighbours else first
    result = simulate(_loaded(job, load))
    yield InnerStep(result.step_time, result)
    for other in result.co_scheduled_jobs[len(scenario.co_scheduled_jobs) :]:
        yield InnerStep(float(other.step_times.mean()), result)


def _loaded(scenario: Scenario, load: ExchangeLoad) -> Scenario:
    """The scenario with what an exchange leaves of the links."""
    for kind, fraction in ((LinkKind.NIC, load.nics), (LinkKind.WAN, load.site_links)):
        if fraction:
            scenario = with_link_bandwidth(scenario, [kind], 1.0 - fraction)
    return scenario


def _shared_resources(scenario: Scenario, slot: ReplicaPlace) -> set[object]:
    """The sites of a replica, and the links between them that its own traffic takes."""
    machine = scenario.cluster.machine
    if len(slot.sites) == 1 or not isinstance(machine, SitesFabric):
        return set(slot.sites)
    indices = [index for index, site in enumerate(machine.sites) if site.name in slot.sites]
    return set(slot.sites).union(
        *(machine.routes[source, target] for source in indices for target in indices if source != target)
    )


def _connected(resources: Sequence[set[object]]) -> list[tuple[int, ...]]:
    """Indices of the sets that are connected by common elements, in groups."""
    groups: list[tuple[set[object], list[int]]] = []
    for index, used in enumerate(resources):
        joined = [group for group in groups if not group[0].isdisjoint(used)]
        groups = [group for group in groups if group[0].isdisjoint(used)]
        groups.append((used.union(*(shared for shared, _ in joined)), [*(i for _, old in joined for i in old), index]))
    return sorted(tuple(sorted(members)) for _, members in groups)


def _network_key(scenario: Scenario, slots: Sequence[ReplicaPlace], first: Scenario) -> Any:
    """What the steps of a group depend on, apart from which site it is in; None where they depend on that, too."""
    machine, degradations = scenario.cluster.machine, scenario.degradations
    is_distinguished = bool(
        degradations.slow_gpus
        or degradations.nics
        or degradations.links
        or scenario.co_scheduled_jobs
        or scenario.background_traffic
    )
    if is_distinguished or scenario.jitter is not None or not isinstance(machine, SitesFabric):
        return None
    if any(len(slot.sites) > 1 for slot in slots):
        return None
    site = next(index for index, site in enumerate(machine.sites) if site.name == slots[0].sites[0])
    offset = sum(earlier.fabric.gpu_count for earlier in machine.sites[:site])
    accelerators, kinds = first.cluster.accelerator_kinds()
    used = [accelerators[kind] for kind in np.unique(kinds[: first.layout.world_size])]
    gpus = [(slot.gpus - offset).tolist() for slot in slots]
    return machine.sites[site].fabric, used if len(used) == 1 else object(), gpus
