"""How do a scenario file's degradations apply to the cluster?

Ids of GPUs and nodes are checked against the cluster's size, links are looked up in its fabric.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.common.errors import InputError, combined_error, problems_of
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.cluster import Cluster, with_accelerators
from clustersim.hardware.degradation import Degradations, DegradedNics, SlowGpus, resolve_link_ids
from clustersim.hardware.topology import Fabric
from clustersim.scenario.config.degradations import (
    BackgroundTrafficConfig,
    DegradationsConfig,
    GpuSelectionConfig,
    MixedNodesConfig,
)
from clustersim.scenario.loaders import resolve_accelerator


def apply_mixed_nodes(sections: Iterable[MixedNodesConfig], base_dir: Path, cluster: Cluster) -> Cluster:
    """The cluster with other accelerators on some nodes; raises InputError for unknown or repeated nodes."""
    replacements: list[tuple[tuple[int, ...], Accelerator]] = []
    for section_index, section in enumerate(sections):
        nodes = _expand_ids(f"mixed.{section_index}", "node", (*section.node, *section.nodes), cluster.node_count)
        replacements.append((nodes, _load_accelerator(f"mixed.{section_index}", section.accelerator, base_dir)))
    _refuse_duplicates("mixed", [nodes for nodes, _ in replacements], lambda node: f"node {node}")
    return with_accelerators(cluster, replacements)


def _load_accelerator(key: str, source: str | dict[str, Any], base_dir: Path) -> Accelerator:
    try:
        return load_accelerator(resolve_accelerator(source, base_dir))
    except InputError as error:
        prefix = f"{key}.accelerator: " if isinstance(source, str) else f"{key}."  # which a mapping's problems name
        raise combined_error("", [f"{prefix}{problem}" for problem in problems_of(error)]) from error


def read_degradations(config: DegradationsConfig, cluster: Cluster) -> Degradations:
    """The cluster's degradations; raises InputError for unknown components, or ones that two entries name."""
    slow = [
        SlowGpus(_selected_gpus(f"slow.{config_index}", slow_gpu_config, cluster), slow_gpu_config.speed)
        for config_index, slow_gpu_config in enumerate(config.slow)
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
    """The background traffic; raises InputError for unknown GPUs, or ones repeated within an entry."""
    flows: list[TrafficPattern] = []
    for section_index, section in enumerate(sections):
        given_ids = [gpu for gpu_range in section.gpus for gpu in gpu_range]
        gpus = _expand_ids(f"traffic.{section_index}", "GPU", section.gpus, cluster.machine.gpu_count)
        if len(gpus) < len(given_ids):
            raise InputError(f"traffic.{section_index}: a GPU comes twice in {len(given_ids):,}; keep one")
        flows.append(section.background_flow(gpus))
    return tuple(flows)


def _refuse_ambiguous(degradations: Degradations, fabric: Fabric) -> None:
    """Raise InputError if two entries name the same GPU, NIC or link: likelier a mistake than a product of factors."""

    def describe_link(link_id: int) -> str:
        endpoints = fabric.link_info(link_id)
        return f"the link from {endpoints.source} to {endpoints.target}"

    for key, degraded in (("slow", degradations.slow_gpus), ("nics", degradations.nics)):
        _refuse_duplicates(key, [degradation.gpu_ids for degradation in degraded], lambda gpu: f"GPU {gpu:,}")
    ports = [fabric.nic_links(np.array(nic.gpu_ids, np.int64)).tolist() for nic in degradations.nics]
    _refuse_duplicates("nics", ports, lambda link_id: f"{describe_link(link_id)}, which GPUs share,")
    _refuse_duplicates("links", resolve_link_ids(fabric, degradations.links), describe_link)


def _refuse_duplicates(key: str, ids_by_entry: Sequence[Iterable[int]], describe: Callable[[int], str]) -> None:
    """Raise InputError for an id that two entries of a list contain."""
    first_entry: dict[int, int] = {}
    for entry, ids in enumerate(ids_by_entry):
        for element_id in ids:
            if element_id in first_entry:
                raise InputError(
                    f"{key}.{entry}: {describe(element_id)} is in {key}.{first_entry[element_id]} already; keep one"
                )
        first_entry.update(dict.fromkeys(ids, entry))


def _selected_gpus(key: str, section: GpuSelectionConfig, cluster: Cluster) -> tuple[int, ...]:
    """Ids of the GPUs that a section selects, without duplicates."""
    gpus = _expand_ids(key, "GPU", (*section.gpu, *section.gpus), cluster.gpu_count)
    nodes = _expand_ids(key, "node", (*section.node, *section.nodes), cluster.node_count)
    if nodes:
        node_ids = cluster.fabric.node_ids(np.arange(cluster.gpu_count))
        gpus = (*gpus, *np.flatnonzero(np.isin(node_ids, nodes)).tolist())
    return tuple(dict.fromkeys(gpus))


def _expand_ids(key: str, noun: str, ranges: Iterable[range], count: int) -> tuple[int, ...]:
    """The ids of some ranges, without duplicates; raises InputError unless all are below `count`."""
    ids: dict[int, None] = {}
    for id_range in ranges:
        if id_range.stop > count:
            valid_range = f"{noun}s are 0 to {count - 1:,}" if count > 1 else f"there is only {noun} 0"
            raise InputError(f"{key}: there is no {noun} {max(id_range.start, count):,}; {valid_range}")
        ids.update(dict.fromkeys(id_range))
    return tuple(ids)
