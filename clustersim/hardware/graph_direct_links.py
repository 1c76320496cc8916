"""Which GPUs of a graph are joined by links of their own, as in a node without NVLink switches?

Where NVLink edges lead from GPU to GPU alone, and every NVLink domain has the same of them, they are `DirectLinks`, of
which a library makes several rings at once; how many links a pair has is its bandwidth over the narrowest pair's. Else
(a switch among them, domains that differ, pairs of which none is a multiple of the narrowest) they are links like any
others: one ring in the members' order.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.direct_links import MAX_DOMAIN_GPUS, MAX_SEARCHED_GPUS, DirectLinks
from clustersim.hardware.topology import LinkKind

if TYPE_CHECKING:
    import networkx as nx

_TOLERANCE = 1e-9


def detect_direct_links(
    graph: "nx.DiGraph[str]", gpus: list[str], slots: IntArray, domain_size: int
) -> DirectLinks | None:
    """The links of each domain's pairs; seats: of each GPU, domain by domain, each with so many places."""
    if not 2 <= domain_size <= MAX_DOMAIN_GPUS or len(gpus) % domain_size:
        return None
    slot_by_name = dict(zip(gpus, slots.tolist(), strict=True))
    bandwidth = _pair_bandwidth(graph, slot_by_name, domain_size)
    if bandwidth is None or not bandwidth.any() or (bandwidth != bandwidth[:1]).any():
        return None
    counts = bandwidth[0] / bandwidth[bandwidth > 0.0].min()
    link_counts = np.rint(counts).astype(np.int64)
    direct_links = DirectLinks(tuple(map(tuple, link_counts.tolist())))
    return (
        direct_links
        if np.abs(counts - link_counts).max() <= _TOLERANCE * link_counts.max() and _is_regular(direct_links)
        else None
    )


def _pair_bandwidth(graph: "nx.DiGraph[str]", slot_by_name: Mapping[str, int], domain_size: int) -> FloatArray | None:
    """Of the NVLink edges of each domain: [domains, places, places]; None where one leads elsewhere."""
    bandwidth: FloatArray = np.zeros((len(slot_by_name) // domain_size, domain_size, domain_size))
    for source, target, edge in graph.edges(data=True):
        if edge["kind"] == LinkKind.NVLINK.value:
            source_slot, target_slot = (divmod(slot_by_name.get(item, -1), domain_size) for item in (source, target))
            if source not in slot_by_name or source_slot[0] != target_slot[0]:
                return None
            bandwidth[source_slot[0], source_slot[1], target_slot[1]] = edge["bandwidth"]
    return bandwidth


def _is_regular(direct_links: DirectLinks) -> bool:
    """Whether links go both ways, as many from each GPU, with one GPU at most between two."""
    count = direct_links.link_matrix
    is_uniform = (count == count[0, 1])[~np.eye(len(count), dtype=np.bool_)].all()
    degrees = np.unique(count.sum(axis=1))
    is_symmetric = (count == count.T).all() and len(degrees) == 1 and (direct_links.relay >= 0).all()
    return bool(is_symmetric and (is_uniform or direct_links.domain_size <= MAX_SEARCHED_GPUS))
