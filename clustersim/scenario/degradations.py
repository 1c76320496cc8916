"""How do a file's disturbances change the cluster?

Numbers of GPUs and nodes are checked against the cluster's, links are looked up on its fabric.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.cost.background_traffic import Traffic
from clustersim.hardware.cluster import Cluster, mix
from clustersim.hardware.degradation import Disturbances, Slow, SlowNic, placed
from clustersim.hardware.topology import Fabric
from clustersim.scenario.config.degradations import DisturbancesSection, GpusSection, MixedSection, TrafficSection


def read_mixed(sections: Iterable[MixedSection], base: Path, cluster: Cluster) -> Cluster:
    """The cluster with other accelerators on some nodes; raise InputError for nodes that do not exist or come twice."""
    parts: list[tuple[tuple[int, ...], str]] = []
    for entry, section in enumerate(sections):
        nodes = _numbers(f"mixed.{entry}", "node", (*section.node, *section.nodes), cluster.nodes)
        parts.append((nodes, _accelerator(f"mixed.{entry}", section.accelerator, base)))
    _refuse_twice("mixed", [nodes for nodes, _ in parts], lambda node: f"node {node}")
    return mix(cluster, parts)


def _accelerator(key: str, name: str, base: Path) -> str:
    place = str(data_files.beside(base, name)) if data_files.is_path(name) else name
    try:
        data_files.find("accelerators", place)
    except InputError as error:
        raise InputError(f"{key}.accelerator: {error}") from error
    return place


def read_disturbances(section: DisturbancesSection, cluster: Cluster) -> Disturbances:
    """What is wrong; raise InputError for what does not exist or is named by two entries."""
    slow = [
        Slow(_chosen(f"slow.{entry}", slow_section, cluster), slow_section.speed)
        for entry, slow_section in enumerate(section.slow)
    ]
    nics = [SlowNic(_chosen(f"nics.{entry}", nic, cluster), nic.left) for entry, nic in enumerate(section.nics)]
    links = tuple(link.change() for link in section.links)
    found = Disturbances(tuple(slow), tuple(nics), links, section.background.loads())
    _refuse_ambiguous(found, cluster.fabric)
    return found


def read_traffic(sections: Iterable[TrafficSection], cluster: Cluster) -> tuple[Traffic, ...]:
    """What others send; raise InputError for GPUs that do not exist or come twice in one entry."""
    found: list[Traffic] = []
    for entry, section in enumerate(sections):
        listed = [gpu for item in section.gpus for gpu in item]
        gpus = _numbers(f"traffic.{entry}", "GPU", section.gpus, cluster.machine.gpus)
        if len(gpus) < len(listed):
            raise InputError(f"traffic.{entry}: a GPU comes twice in {len(listed):,}; keep one")
        found.append(section.traffic(gpus))
    return tuple(found)


def _refuse_ambiguous(found: Disturbances, fabric: Fabric) -> None:
    """Two entries that say different things of one GPU, NIC or link are likelier a mistake than a product."""

    def link(number: int) -> str:
        named = fabric.link(number)
        return f"the link from {named.source} to {named.target}"

    for key, entries in (("slow", found.slow), ("nics", found.nics)):
        _refuse_twice(key, [entry.gpus for entry in entries], lambda gpu: f"GPU {gpu:,}")
    ports = [fabric.nics(np.array(nic.gpus, np.int64)).tolist() for nic in found.nics]
    _refuse_twice("nics", ports, lambda number: f"{link(number)}, which GPUs share,")
    _refuse_twice("links", placed(fabric, found.links), link)


def _refuse_twice(key: str, entries: Sequence[Iterable[int]], name: Callable[[int], str]) -> None:
    """Refuse a number that two entries of a list have."""
    first: dict[int, int] = {}
    for entry, numbers in enumerate(entries):
        for number in numbers:
            if number in first:
                raise InputError(f"{key}.{entry}: {name(number)} is in {key}.{first[number]} already; keep one")
        first.update(dict.fromkeys(numbers, entry))


def _chosen(key: str, section: GpusSection, cluster: Cluster) -> tuple[int, ...]:
    """The GPUs that a section names, each once."""
    gpus = _numbers(key, "GPU", (*section.gpu, *section.gpus), cluster.gpus)
    nodes = _numbers(key, "node", (*section.node, *section.nodes), cluster.nodes)
    if nodes:
        homes = cluster.fabric.nodes(np.arange(cluster.gpus))
        gpus = (*gpus, *np.flatnonzero(np.isin(homes, nodes)).tolist())
    return tuple(dict.fromkeys(gpus))


def _numbers(key: str, word: str, ranges: Iterable[range], count: int) -> tuple[int, ...]:
    """The numbers of some ranges, each once, all below `count`."""
    found: dict[int, None] = {}
    for item in ranges:
        if item.stop > count:
            legal = f"{word}s are 0 to {count - 1:,}" if count > 1 else f"there is only {word} 0"
            raise InputError(f"{key}: there is no {word} {max(item.start, count):,}; {legal}")
        found.update(dict.fromkeys(item))
    return tuple(found)
