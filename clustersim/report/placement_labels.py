"""Which GPUs of the machine does a job have, in words?"""

from collections.abc import Iterator

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.clos import ClosTopology
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.rank_mapping import RankMappedFabric


def placement_line(cluster: Cluster) -> str:
    """How many nodes, how much of each, and in which order; empty where ranks simply are the cluster's GPUs."""
    return ", ".join(_words(cluster) if isinstance(cluster.fabric, RankMappedFabric) else _spread(cluster))


def home_of(cluster: Cluster, rank: int) -> str:
    """The machine's GPU and node of a rank; empty where ranks simply are the cluster's GPUs."""
    if not isinstance(cluster.fabric, RankMappedFabric):
        return ""
    place = cluster.machine_gpu_ids[rank : rank + 1]
    return f"GPU {place[0]} on node {cluster.machine.node_ids(place)[0]}"


def _spread(cluster: Cluster) -> Iterator[str]:
    """Where NVLink domains are filled evenly, as nothing is said of a placement."""
    nvlink = cluster.fabric.node.nvlink if isinstance(cluster.fabric, ClosTopology) else None
    if nvlink and nvlink.full_domain_gpus:
        sizes = _sizes(cluster.fabric.domain_ids(np.arange(cluster.gpu_count)))
        yield f"{len(sizes)} NVLink domains, {_range(sizes)} of the {nvlink.full_domain_gpus} GPUs of each"


def _words(cluster: Cluster) -> Iterator[str]:
    everyone, places = np.arange(cluster.machine.gpu_count), cluster.machine_gpu_ids
    nodes = cluster.machine.node_ids
    yield f"{cluster.node_count:,} of {int(nodes(everyone).max()) + 1:,} nodes"
    if _sizes(nodes(places)).min() < cluster.gpus_per_node:
        yield f"{_range(_sizes(nodes(places)))} of the {cluster.gpus_per_node} GPUs of each"
    domains, most = _sizes(cluster.machine.domain_ids(places)), int(_sizes(cluster.machine.domain_ids(everyone)).max())
    if most > cluster.gpus_per_node and domains.min() < most:
        yield f"{_range(domains)} of the {most} GPUs of an NVLink domain"
    if (np.diff(places) < 0).any():
        yield "nodes in another order" if _whole(nodes(places), places) else "GPUs in another order"


def _sizes(labels: IntArray) -> IntArray:
    """How often each label is there, those that are."""
    return np.unique(labels, return_counts=True)[1]


def _range(sizes: IntArray) -> str:
    least, most = int(sizes.min()), int(sizes.max())
    return f"{least}" if least == most else f"{least} to {most}"


def _whole(nodes: IntArray, places: IntArray) -> bool:
    """Whether the ranks of each node follow each other, in the order of its GPUs."""
    stays = nodes[1:] == nodes[:-1]
    return bool((np.count_nonzero(~stays) + 1 == len(np.unique(nodes))) and (np.diff(places)[stays] > 0).all())
