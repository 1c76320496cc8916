"""How do a file's disturbances change the cluster?

Numbers of GPUs and nodes are checked against the cluster's, links are looked up on its fabric.
"""

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

import numpy as np

from clustersim import shipped
from clustersim.errors import InputError
from clustersim.hardware.cluster import Cluster, mix
from clustersim.hardware.disturbance import Disturbances, Slow, SlowNic
from clustersim.scenario.disturbances import DisturbancesSection, GpusSection, MixedSection


def read_mixed(sections: Iterable[MixedSection], base: Path, cluster: Cluster) -> Cluster:
    """The cluster with other accelerators on some nodes; raise InputError for nodes that do not exist or come twice."""
    parts: list[tuple[tuple[int, ...], str]] = []
    seen: set[int] = set()
    for entry, section in enumerate(sections):
        _require(f"mixed.{entry}", "node", section.chosen, cluster.nodes)
        twice = seen.intersection(section.chosen)
        if twice:
            raise InputError(f"mixed.{entry}: node {min(twice)} has another accelerator already")
        seen.update(section.chosen)
        parts.append((section.chosen, _accelerator(f"mixed.{entry}", section.accelerator, base)))
    return mix(cluster, parts)


def _accelerator(key: str, name: str, base: Path) -> str:
    place = str(shipped.beside(base, name)) if shipped.is_path(name) else name
    try:
        shipped.find("accelerators", place)
    except InputError as error:
        raise InputError(f"{key}.accelerator: {error}") from error
    return place


def read_disturbances(section: DisturbancesSection, cluster: Cluster) -> Disturbances:
    """What is wrong; raise InputError for GPUs and nodes that do not exist."""
    slow = [Slow(_chosen(f"slow.{entry}", each, cluster), each.speed) for entry, each in enumerate(section.slow)]
    nics = [SlowNic(_chosen(f"nics.{entry}", each, cluster), each.bandwidth) for entry, each in enumerate(section.nics)]
    links = tuple(each.change() for each in section.links)
    return Disturbances(tuple(slow), tuple(nics), links, MappingProxyType(section.background.loads()))


def _chosen(key: str, section: GpusSection, cluster: Cluster) -> tuple[int, ...]:
    """The GPUs that a section names, each once."""
    gpus, nodes = (*section.gpu, *section.gpus), (*section.node, *section.nodes)
    _require(key, "GPU", gpus, cluster.gpus)
    _require(key, "node", nodes, cluster.nodes)
    if nodes:
        homes = cluster.fabric.nodes(np.arange(cluster.gpus))
        gpus = (*gpus, *np.flatnonzero(np.isin(homes, nodes)).tolist())
    return tuple(dict.fromkeys(gpus))


def _require(key: str, word: str, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if number >= count:
            legal = f"{word}s are 0 to {count - 1:,}" if count > 1 else f"there is only {word} 0"
            raise InputError(f"{key}: there is no {word} {number:,}; {legal}")
