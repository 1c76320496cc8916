"""How do a file's disturbances change the cluster?

Numbers of GPUs and nodes are checked against the cluster's, links are looked up on its fabric.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.hardware.cluster import Cluster, with_accelerators
from clustersim.hardware.degradation import Degradations, DegradedNics, SlowGpus, resolve_link_ids
from clustersim.hardware.topology import Fabric
from clustersim.scenario.config.degradations import (
    BackgroundTrafficConfig,
    DegradationsConfig,
    GpuSelectionConfig,
    MixedNodesConfig,
)


def apply_mixed_nodes(sections: Iterable[MixedNodesConfig], base_dir: Path, cluster: Cluster) -> Cluster:
    """The cluster with other accelerators on some nodes; raise InputError for nodes that do not exist or come twice."""
    replacements: list[tuple[tuple[int, ...], str]] = []
    for entry, section in enumerate(sections):
        nodes = _expand_ids(f"mixed.{entry}", "node", (*section.node, *section.nodes), cluster.node_count)
        replacements.append((nodes, _find_accelerator(f"mixed.{entry}", section.accelerator, base_dir)))
    _refuse_duplicates("mixed", [nodes for nodes, _ in replacements], lambda node: f"node {node}")
    return with_accelerators(cluster, replacements)


def _find_accelerator(key: str, name: str, base_dir: Path) -> str:
    name_or_path = str(data_files.resolve_relative(base_dir, name)) if data_files.is_path(name) else name
    try:
        data_files.find_file("accelerators", name_or_path)
    except InputError as error:
        raise InputError(f"{key}.accelerator: {error}") from error
    return name_or_path


def read_degradations(config: DegradationsConfig, cluster: Cluster) -> Degradations:
    """What is wrong; raise InputError for what does not exist or is named by two entries."""
    slow = [
        SlowGpus(_selected_gpus(f"slow.{entry}", slow_gpu_config, cluster), slow_gpu_config.speed)
        for entry, slow_gpu_config in enumerate(config.slow)
    ]
    nics = [
        DegradedNics(_selected_gpus(f"nics.{entry}", nic, cluster), nic.bandwidth_fraction)
        for entry, nic in enumerate(config.nics)
    ]
    links = tuple(link.link_change() for link in config.links)
    degradations = Degradations(tuple(slow), tuple(nics), links, config.background.load_by_kind())
    _refuse_ambiguous(degradations, cluster.fabric)
    return degradations


def read_background_traffic(
    sections: Iterable[BackgroundTrafficConfig], cluster: Cluster
) -> tuple[TrafficPattern, ...]:
    """What others send; raise InputError for GPUs that do not exist or come twice in one entry."""
    flows: list[TrafficPattern] = []
    for entry, section in enumerate(sections):
        given_ids = [gpu for item in section.gpus for gpu in item]
        gpus = _expand_ids(f"traffic.{entry}", "GPU", section.gpus, cluster.machine.gpu_count)
        if len(gpus) < len(given_ids):
            raise InputError(f"traffic.{entry}: a GPU comes twice in {len(given_ids):,}; keep one")
        flows.append(section.background_flow(gpus))
    return tuple(flows)


def _refuse_ambiguous(degradations: Degradations, fabric: Fabric) -> None:
    """Two entries that say different things of one GPU, NIC or link are likelier a mistake than a product."""

    def describe_link(link_id: int) -> str:
        endpoints = fabric.link_info(link_id)
        return f"the link from {endpoints.source} to {endpoints.target}"

    for key, entries in (("slow", degradations.slow_gpus), ("nics", degradations.nics)):
        _refuse_duplicates(key, [entry.gpu_ids for entry in entries], lambda gpu: f"GPU {gpu:,}")
    ports = [fabric.nic_links(np.array(nic.gpu_ids, np.int64)).tolist() for nic in degradations.nics]
    _refuse_duplicates("nics", ports, lambda link_id: f"{describe_link(link_id)}, which GPUs share,")
    _refuse_duplicates("links", resolve_link_ids(fabric, degradations.links), describe_link)


def _refuse_duplicates(key: str, entries: Sequence[Iterable[int]], describe: Callable[[int], str]) -> None:
    """Refuse a number that two entries of a list have."""
    first_entry: dict[int, int] = {}
    for entry, ids in enumerate(entries):
        for id_ in ids:
            if id_ in first_entry:
                raise InputError(f"{key}.{entry}: {describe(id_)} is in {key}.{first_entry[id_]} already; keep one")
        first_entry.update(dict.fromkeys(ids, entry))


def _selected_gpus(key: str, section: GpuSelectionConfig, cluster: Cluster) -> tuple[int, ...]:
    """The GPUs that a section names, each once."""
    gpus = _expand_ids(key, "GPU", (*section.gpu, *section.gpus), cluster.gpu_count)
    nodes = _expand_ids(key, "node", (*section.node, *section.nodes), cluster.node_count)
    if nodes:
        node_ids = cluster.fabric.node_ids(np.arange(cluster.gpu_count))
        gpus = (*gpus, *np.flatnonzero(np.isin(node_ids, nodes)).tolist())
    return tuple(dict.fromkeys(gpus))


def _expand_ids(key: str, noun: str, ranges: Iterable[range], count: int) -> tuple[int, ...]:
    """The numbers of some ranges, each once, all below `count`."""
    ids: dict[int, None] = {}
    for item in ranges:
        if item.stop > count:
            valid_range = f"{noun}s are 0 to {count - 1:,}" if count > 1 else f"there is only {noun} 0"
            raise InputError(f"{key}: there is no {noun} {max(item.start, count):,}; {valid_range}")
        ids.update(dict.fromkeys(item))
    return tuple(ids)
