"""Detects direct GPU-to-GPU links in a graph, as in a node without NVLink switches.

Where NVLink edges join GPUs only to each other, and every NVLink domain has the same ones, they are
`DirectLinks`, over which a library forms several rings at once; the number of links of a pair is its
bandwidth over that of the narrowest pair. Otherwise (a switch among them, domains that differ, pairs that are
not multiples of the narrowest) they are ordinary links: one ring in the members' order.
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
    """The direct links of each domain, None if there are none.

    slots: of each GPU, domain by domain, domain_size each.
    """
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
    """[domains, domain GPUs, domain GPUs] bandwidth of NVLink edges; None where one leads outside its domain."""
    bandwidth: FloatArray = np.zeros((len(slot_by_name) // domain_size, domain_size, domain_size))
    for source, target, edge in graph.edges(data=True):
        if edge["kind"] == LinkKind.NVLINK.value:
            source_slot, target_slot = (
                divmod(slot_by_name.get(slot_name, -1), domain_size) for slot_name in (source, target)
            )
            if source not in slot_by_name or source_slot[0] != target_slot[0]:
                return None
            bandwidth[source_slot[0], source_slot[1], target_slot[1]] = edge["bandwidth"]
    return bandwidth


def _is_regular(direct_links: DirectLinks) -> bool:
    """Whether links are symmetric, of equal number per GPU, and each pair is joined directly or by one relay GPU."""
    count = direct_links.link_matrix
    is_uniform = (count == count[0, 1])[~np.eye(len(count), dtype=np.bool_)].all()
    degrees = np.unique(count.sum(axis=1))
    is_symmetric = (count == count.T).all() and len(degrees) == 1 and (direct_links.relay >= 0).all()
    return bool(is_symmetric and (is_uniform or direct_links.domain_size <= MAX_SEARCHED_GPUS))
