"""How is the set of GPUs that a job occupies described?"""

from collections.abc import Iterator

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.clos import ClosTopology
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.rank_mapping import RankMappedFabric


def describe_placement(cluster: Cluster) -> str:
    """Node count, share of each node used, and order; empty if ranks map one to one to the cluster's GPUs."""
    return ", ".join(
        _describe_rank_mapping(cluster)
        if isinstance(cluster.fabric, RankMappedFabric)
        else _describe_domain_fill(cluster)
    )


def describe_gpu_of_rank(cluster: Cluster, rank: int) -> str:
    """Machine GPU and node of a rank; empty if ranks map one to one to the cluster's GPUs."""
    if not isinstance(cluster.fabric, RankMappedFabric):
        return ""
    gpu_id = cluster.machine_gpu_ids[rank : rank + 1]
    return f"GPU {gpu_id[0]} on node {cluster.machine.node_ids(gpu_id)[0]}"


def _describe_domain_fill(cluster: Cluster) -> Iterator[str]:
    """Fill of NVLink domains, for the default mapping that fills them evenly."""
    nvlink_spec = cluster.fabric.node.nvlink if isinstance(cluster.fabric, ClosTopology) else None
    if nvlink_spec and nvlink_spec.full_domain_gpus:
        gpus_per_domain = _label_counts(cluster.fabric.domain_ids(np.arange(cluster.gpu_count)))
        yield (
            f"{len(gpus_per_domain)} NVLink domains, {_format_range(gpus_per_domain)} of the "
            f"{nvlink_spec.full_domain_gpus} GPUs of each"
        )


def _describe_rank_mapping(cluster: Cluster) -> Iterator[str]:
    all_gpus, gpu_ids = np.arange(cluster.machine.gpu_count), cluster.machine_gpu_ids
    nodes = cluster.machine.node_ids
    yield f"{cluster.node_count:,} of {int(nodes(all_gpus).max()) + 1:,} nodes"
    if _label_counts(nodes(gpu_ids)).min() < cluster.gpus_per_node:
        yield f"{_format_range(_label_counts(nodes(gpu_ids)))} of the {cluster.gpus_per_node} GPUs of each"
    gpus_per_domain, max_domain_size = (
        _label_counts(cluster.machine.domain_ids(gpu_ids)),
        int(_label_counts(cluster.machine.domain_ids(all_gpus)).max()),
    )
    if max_domain_size > cluster.gpus_per_node and gpus_per_domain.min() < max_domain_size:
        yield f"{_format_range(gpus_per_domain)} of the {max_domain_size} GPUs of an NVLink domain"
    if (np.diff(gpu_ids) < 0).any():
        yield "nodes in another order" if _keeps_nodes_contiguous(nodes(gpu_ids), gpu_ids) else "GPUs in another order"


def _label_counts(labels: IntArray) -> IntArray:
    """How often each occurring label occurs."""
    return np.unique(labels, return_counts=True)[1]


def _format_range(sizes: IntArray) -> str:
    smallest, largest = int(sizes.min()), int(sizes.max())
    return f"{smallest}" if smallest == largest else f"{smallest} to {largest}"


def _keeps_nodes_contiguous(nodes: IntArray, gpu_ids: IntArray) -> bool:
    """Whether the ranks of each node are contiguous and in the order of its GPUs."""
    same_node = nodes[1:] == nodes[:-1]
    return bool((np.count_nonzero(~same_node) + 1 == len(np.unique(nodes))) and (np.diff(gpu_ids)[same_node] > 0).all())
