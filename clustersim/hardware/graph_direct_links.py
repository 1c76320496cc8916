"""Which GPUs of a graph are joined by links of their own, as in a node without NVLink switches?

Where NVLink edges lead from GPU to GPU alone, and every NVLink domain has the same of them, they are `PairLinks`, of
which a library makes several rings at once; how many links a pair has is its bandwidth over the narrowest pair's. Else
(a switch among them, domains that differ, pairs of which none is a multiple of the narrowest) they are links like any
others: one ring in the members' order.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.direct_links import MOST_PLACES, MOST_SEARCHED, PairLinks
from clustersim.hardware.topology import LinkKind

if TYPE_CHECKING:
    import networkx as nx

_ROUNDING = 1e-9


def pairs_of(graph: "nx.DiGraph[str]", gpus: list[str], seats: IntArray, places: int) -> PairLinks | None:
    """The links of each domain's pairs; seats: of each GPU, domain by domain, each with so many places."""
    if not 2 <= places <= MOST_PLACES or len(gpus) % places:
        return None
    seat = dict(zip(gpus, seats.tolist(), strict=True))
    bandwidth = _bandwidth(graph, seat, places)
    if bandwidth is None or not bandwidth.any() or (bandwidth != bandwidth[:1]).any():
        return None
    counts = bandwidth[0] / bandwidth[bandwidth > 0.0].min()
    whole = np.rint(counts).astype(np.int64)
    pairs = PairLinks(tuple(map(tuple, whole.tolist())))
    return pairs if np.abs(counts - whole).max() <= _ROUNDING * whole.max() and _even(pairs) else None


def _bandwidth(graph: "nx.DiGraph[str]", seat: Mapping[str, int], places: int) -> FloatArray | None:
    """Of the NVLink edges of each domain: [domains, places, places]; None where one leads elsewhere."""
    found: FloatArray = np.zeros((len(seat) // places, places, places))
    for source, target, edge in graph.edges(data=True):
        if edge["kind"] == LinkKind.NVLINK.value:
            here, there = (divmod(seat.get(item, -1), places) for item in (source, target))
            if source not in seat or here[0] != there[0]:
                return None
            found[here[0], here[1], there[1]] = edge["bandwidth"]
    return found


def _even(pairs: PairLinks) -> bool:
    """Whether links go both ways, as many from each GPU, with one GPU at most between two."""
    count = pairs.count
    alike = (count == count[0, 1])[~np.eye(len(count), dtype=np.bool_)].all()
    each = np.unique(count.sum(axis=1))
    both = (count == count.T).all() and len(each) == 1 and (pairs.over >= 0).all()
    return bool(both and (alike or pairs.places <= MOST_SEARCHED))
