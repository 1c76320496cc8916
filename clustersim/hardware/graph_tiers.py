"""Tiers of a graph: which GPUs the links of each tier connect, and what the graph consists of.

A tier connects two GPUs if links of its kind and of the kinds below (without NVLink, from the leaf upwards)
join them in both directions.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.errors import suggest_nearest
from clustersim.hardware.topology import LINK_KINDS, VERTEX_KINDS, Fabric, FabricTier, LinkKind

if TYPE_CHECKING:
    import networkx as nx

_INTRA_NODE_KINDS: Final = (LinkKind.PCIE, LinkKind.HOST)
_TIER_KINDS: Final[dict[str, tuple[LinkKind, ...]]] = {
    "nvlink": (LinkKind.NVLINK,),
    "host": (LinkKind.NVLINK, *_INTRA_NODE_KINDS),
    "leaf": (*_INTRA_NODE_KINDS, LinkKind.NIC),
    "spine": (*_INTRA_NODE_KINDS, LinkKind.NIC, LinkKind.LEAF),
}
_KINDS_ABOVE: Final[dict[str, tuple[str, ...]]] = {  # kinds of the next tier: the first one that a vertex has links to
    "gpu": ("nvswitch", "gpu", "host", "nic", "leaf", "switch"),
    "host": ("host", "nic"),
    "nic": ("leaf", "switch", "spine", "core"),
    "leaf": ("spine", "switch", "core"),
    "spine": ("core", "switch"),
    "switch": ("spine", "core"),
}
MAX_LISTED: Final = 8
_SWITCH_KINDS: Final = ("leaf", "switch", "spine")

TierKey = tuple[str, int]  # kind of a vertex and, for a plain switch, its height


def vertex_kinds(graph: "nx.DiGraph[str]") -> dict[str, str]:
    """The kind of every vertex."""
    return {name: attributes["kind"] for name, attributes in graph.nodes(data=True)}


def label_by_tier(graph: "nx.DiGraph[str]", gpus: list[str]) -> dict[str, IntArray]:
    """For each tier, from the lowest, a component label per GPU, [gpus]; equal labels are connected.

    Labels start at 0.
    """
    return {tier: _component_labels(_tier_subgraph(graph, tier, kinds), gpus) for tier, kinds in _TIER_KINDS.items()}


def _tier_subgraph(graph: "nx.DiGraph[str]", tier: str, kinds: tuple[LinkKind, ...]) -> "nx.DiGraph[str]":
    """The subgraph of links of some kinds; inside a host, traffic does not pass through NICs."""
    names = {kind.value for kind in kinds}
    edges = [(source, target) for source, target, edge in graph.edges(data=True) if edge["kind"] in names]
    subgraph = graph.edge_subgraph(edges)
    if tier != "host":
        return subgraph
    return subgraph.subgraph([name for name in subgraph if graph.nodes[name]["kind"] != "nic"])


def _component_labels(subgraph: "nx.DiGraph[str]", gpus: list[str]) -> IntArray:
    import networkx as nx  # takes 0.15 s, which regular clusters do not need

    component = {
        name: index for index, names in enumerate(nx.strongly_connected_components(subgraph)) for name in names
    }
    first_singleton = len(component)  # a GPU without any such link is a singleton component
    components = [component.get(gpu, first_singleton + index) for index, gpu in enumerate(gpus)]
    order = {label: position for position, label in enumerate(dict.fromkeys(components))}
    return np.array([order[label] for label in components], np.int64)


def reachable_vertices(graph: "nx.DiGraph[str]", source: str, *, backwards: bool) -> set[str]:
    """Vertices reachable from `source`, or (backwards) from which it is reachable."""
    import networkx as nx  # 0.15 s that regular clusters do not need

    return nx.ancestors(graph, source) if backwards else nx.descendants(graph, source)


def describe_tiers(graph: "nx.DiGraph[str]") -> tuple[FabricTier, ...]:
    """One entry per kind of vertex, with averages over its vertices; plain switches by their height."""
    heights = _switch_heights(graph)
    members: dict[TierKey, list[str]] = {(kind, 0): [] for kind in VERTEX_KINDS}
    members |= {("switch", height): [] for height in sorted(set(heights.values()))}
    tier_keys = {name: (kind, heights.get(name, 0)) for name, kind in vertex_kinds(graph).items()}
    for name, key in tier_keys.items():
        members[key].append(name)
    ordered = sorted(members, key=lambda key: (VERTEX_KINDS.index(key[0]), key[1]))
    return tuple(_build_tier(graph, key, members[key], tier_keys) for key in ordered if members[key])


def _switch_heights(graph: "nx.DiGraph[str]") -> dict[str, int]:
    """Hops from the nearest GPU to every plain switch, relative to the lowest switches."""
    import networkx as nx  # 0.15 s that regular clusters do not need

    kinds = vertex_kinds(graph)
    gpus = {name for name, kind in kinds.items() if kind == "gpu"}
    hops = nx.multi_source_dijkstra_path_length(graph, gpus, weight=None)
    heights = {name: int(hops.get(name, 1)) for name, kind in kinds.items() if kind == "switch"}
    return {name: height - min(heights.values()) for name, height in heights.items()}


def _build_tier(graph: "nx.DiGraph[str]", key: TierKey, names: list[str], tier_keys: dict[str, TierKey]) -> FabricTier:
    sent_bandwidth = _bandwidth_by_tier(
        tier_keys, ((target, edge) for _, target, edge in graph.out_edges(names, data=True))
    )
    above = _tiers_above(key, sent_bandwidth)
    if not above:
        return FabricTier(key[0], len(names), sum(sent_bandwidth.values()) / len(names), None)
    received_bandwidth = _bandwidth_by_tier(
        tier_keys, ((source, edge) for source, _, edge in graph.in_edges(names, data=True))
    )
    below = sum(bandwidth for lower, bandwidth in received_bandwidth.items() if lower not in above and lower != key)
    upwards = sum(sent_bandwidth[higher] for higher in above)
    return FabricTier(key[0], len(names), upwards / len(names), below / upwards if key[0] in _SWITCH_KINDS else None)


def _tiers_above(key: TierKey, sent_bandwidth: dict[TierKey, float]) -> list[TierKey]:
    """The tiers that vertices of this one send upwards to."""
    kind, height = key
    if kind == "switch":
        return [
            higher
            for higher in sent_bandwidth
            if higher[0] in _KINDS_ABOVE[kind] or (higher[0] == kind and higher[1] > height)
        ]
    next_kind = next(
        (higher for higher in _KINDS_ABOVE.get(kind, ()) if higher in {sent_kind for sent_kind, _ in sent_bandwidth}),
        None,
    )
    return [higher for higher in sent_bandwidth if higher[0] == next_kind]


def _bandwidth_by_tier(
    tier_keys: dict[str, TierKey], edges: Iterable[tuple[str, dict[str, Any]]]
) -> dict[TierKey, float]:
    """Sum of bandwidths by the tier of the vertex at the other end."""
    sums: dict[TierKey, float] = {}
    for name, edge in edges:
        sums[tier_keys[name]] = sums.get(tier_keys[name], 0.0) + edge["bandwidth"]
    return sums


def nearest_nic_links(fabric: Fabric, gpu: int) -> IntArray:
    """The nearest links of kind nic on paths from a GPU over PCIe and host links, and on paths to it."""
    source, target = fabric.link_endpoints.source, fabric.link_endpoints.target
    return np.concatenate(
        [_nearest_nic_links(fabric, source, target, gpu), _nearest_nic_links(fabric, target, source, gpu)]
    )


def _nearest_nic_links(fabric: Fabric, near_ends: IntArray, far_ends: IntArray, gpu: int) -> IntArray:
    """NIC links of the nearest vertices that have some; near_ends, far_ends: [links] endpoints in search direction."""
    is_intra_node = np.isin(fabric.links.kind, [LINK_KINDS.index(kind) for kind in _INTRA_NODE_KINDS])
    is_nic = fabric.links.kind == LINK_KINDS.index(LinkKind.NIC)
    frontier, visited = np.array([gpu]), np.zeros(fabric.link_endpoints.vertex_count, np.bool_)
    while len(frontier):
        nic_links = np.flatnonzero(is_nic & np.isin(near_ends, frontier))
        if len(nic_links):
            return nic_links
        visited[frontier] = True
        neighbors = np.unique(far_ends[is_intra_node & np.isin(near_ends, frontier)])
        frontier = neighbors[~visited[neighbors] & (neighbors >= fabric.gpu_count)]
    return np.empty(0, np.int64)


def suggest_vertex(name: str, names: Sequence[str]) -> str:
    """Complete an error message about an unknown vertex with the nearest name, or with some names."""
    listed = names if len(names) <= MAX_LISTED else [*names[: MAX_LISTED - 1], names[-1]]
    return suggest_nearest(name, listed, unlisted=names)
