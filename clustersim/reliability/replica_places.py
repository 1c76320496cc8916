"""Which GPUs does each replica of local training have, and how long does it take to move its states to another?

Without a number of replicas there is one in each site. With one, equal parts of the GPUs follow each other site by
site: several in a site, or one over several sites, which then trains synchronously over the links between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.units import Bytes, Seconds, format_seconds
from clustersim.hardware.site_links import route_latency
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import Fabric
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.diloco import site_names

S = TypeVar("S", bound=ResolvedScenario)


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where a replica is. name: its sites', numbered where these have several; gpus: ids on the machine."""

    name: str
    sites: tuple[str, ...]
    gpus: IntArray


def replica_places(scenario: ResolvedScenario) -> list[ReplicaPlace]:
    """The places of all replicas, site by site; several of one site share it in the order of ranks."""
    gpus, names = scenario.cluster.machine_gpu_ids, site_names(scenario)
    site_of_gpu = _site_indices(scenario)
    by_site = np.argsort(site_of_gpu, kind="stable")
    replicas = None if scenario.diloco is None else scenario.diloco.replicas
    bounds = np.cumsum(np.bincount(site_of_gpu))[:-1] if replicas is None else replicas
    members = np.split(by_site, bounds)
    sites = [tuple(names[site] for site in np.unique(site_of_gpu[ranks]).tolist()) for ranks in members]
    labels = _numbered([" + ".join(site) for site in sites])
    return [ReplicaPlace(*slot) for slot in zip(labels, sites, (gpus[ranks] for ranks in members), strict=True)]


def _site_indices(scenario: ResolvedScenario) -> IntArray:
    """[ranks] index of the site among the job's, in the order of ranks."""
    gpus, machine = scenario.cluster.machine_gpu_ids, scenario.cluster.machine
    site_ids = machine.site_ids(gpus) if isinstance(machine, SitesFabric) else None
    if site_ids is None:
        return np.zeros(len(gpus), np.int64)
    _, first, inverse = np.unique(site_ids, return_index=True, return_inverse=True)
    indices: IntArray = np.argsort(np.argsort(first))[inverse.reshape(-1)]
    return indices


def _numbered(names: Sequence[str]) -> list[str]:
    """Names, those that occur several times with a number."""
    return [
        f"{name} {names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def replica_scenarios(scenario: S) -> Iterator[S]:
    """The inner job of each replica: its GPUs, and its share of the batch."""
    for slot in replica_places(scenario):
        yield inner_scenario(scenario, slot)


def inner_scenario(scenario: S, slot: ReplicaPlace) -> S:
    """The inner job of one replica."""
    layout, training, gpus = scenario.layout, scenario.training, slot.gpus
    return replace(
        scenario,
        cluster=scenario.cluster.with_rank_mapping(gpus),
        layout=replace(layout, dp=len(gpus) // (layout.world_size // layout.dp)),
        training=replace(training, global_batch=training.global_batch * len(gpus) // scenario.cluster.gpu_count),
        diloco=None,
    )


def exchange_crossings(scenario: ResolvedScenario) -> Iterator[str]:
    """What local training sends between each pair of sites that different replicas are in."""
    machine, settings, slots = scenario.cluster.machine, scenario.diloco, replica_places(scenario)
    if settings is None or not isinstance(machine, SitesFabric):
        return
    pairs = {
        (source, target)
        for slot in slots
        for other in slots
        if other is not slot
        for source in slot.sites
        for target in other.sites
    }
    for (source, target), route in machine.routes.items():
        first, second = machine.sites[source].name, machine.sites[target].name
        if source < target and (first, second) in pairs:
            round_trip = format_seconds(2.0 * route_latency(route, machine.site_links))
            yield (
                f"outer gradients cross between {first} and {second} ({round_trip} round trip), every "
                f"{settings.inner_steps:,} steps"
            )


def transfer_seconds(fabric: Fabric, source: ReplicaPlace, target: ReplicaPlace, size: Bytes) -> Seconds:
    """Seconds for `size` bytes from one replica to another, evenly from GPU to GPU on their routes."""
    pairs = min(len(source.gpus), len(target.gpus))
    paths = fabric.find_paths(source.gpus[:pairs], target.gpus[:pairs])
    flows = np.bincount(paths.links[paths.links >= 0], minlength=len(fabric.links.kind))
    return float((flows / fabric.links.bandwidth).max()) * size / pairs + float(paths.latency.max())
