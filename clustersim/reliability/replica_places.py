"""Which GPUs does each replica of local training have, and how long does it take to move its states to another?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import Fabric
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedJob
from clustersim.scenario.validation_rules.diloco import site_names


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where a replica is. name: its site's, numbered where that has several; gpus: ids on the machine."""

    name: str
    site: str
    gpus: IntArray


def replica_places(scenario: Scenario) -> list[ReplicaPlace]:
    """The places of all replicas, site by site; several of one site share it in the order of ranks."""
    gpus, machine = scenario.cluster.machine_gpu_ids, scenario.cluster.machine
    site_ids = machine.site_ids(gpus) if isinstance(machine, SitesFabric) else None
    replicas = None if scenario.diloco is None else scenario.diloco.replicas
    slots = []
    for site, name in zip(_distinct(site_ids), site_names(scenario), strict=True):
        members = gpus if site_ids is None else gpus[site_ids == site]
        count = 1 if replicas is None else len(members) * replicas // len(gpus)
        for number, slot_gpus in enumerate(np.split(members, count), start=1):
            slots.append(ReplicaPlace(name if count == 1 else f"{name} {number}", name, slot_gpus))
    return slots


def _distinct(site_ids: IntArray | None) -> list[int]:
    """Sites in the order of ranks; a single one where there are none."""
    return [0] if site_ids is None else list(dict.fromkeys(site_ids.tolist()))


def replica_scenarios(scenario: Scenario) -> Iterator[Scenario]:
    """The inner job of each replica: its GPUs, and its share of the batch."""
    for slot in replica_places(scenario):
        yield _inner_scenario(scenario, slot.gpus)


def site_scenarios(scenario: Scenario, replicas: Sequence[Scenario]) -> Iterator[Scenario]:
    """For each site its first replica, with the others of the site on the same network next to it."""
    sites = [slot.site for slot in replica_places(scenario)]
    for site in dict.fromkeys(sites):
        first, *others = (replica for replica, own_site in zip(replicas, sites, strict=True) if own_site == site)
        neighbours = tuple(ResolvedJob(other) for other in others)
        yield replace(first, co_scheduled_jobs=(*first.co_scheduled_jobs, *neighbours)) if neighbours else first


def _inner_scenario(scenario: Scenario, gpus: IntArray) -> Scenario:
    layout, training = scenario.layout, scenario.training
    return replace(
        scenario,
        cluster=scenario.cluster.with_rank_mapping(gpus),
        layout=replace(layout, dp=len(gpus) // (layout.world_size // layout.dp)),
        training=replace(training, global_batch=training.global_batch * len(gpus) // scenario.cluster.gpu_count),
        diloco=None,
    )


def transfer_seconds(fabric: Fabric, source: ReplicaPlace, target: ReplicaPlace, size: Bytes) -> Seconds:
    """Seconds for `size` bytes from one replica to another, evenly from GPU to GPU on their routes."""
    pairs = min(len(source.gpus), len(target.gpus))
    paths = fabric.find_paths(source.gpus[:pairs], target.gpus[:pairs])
    flows = np.bincount(paths.links[paths.links >= 0], minlength=len(fabric.links.kind))
    return float((flows / fabric.links.bandwidth).max()) * size / pairs + float(paths.latency.max())
