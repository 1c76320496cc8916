"""Which GPUs of a graph do the links of each tier connect, and what is the graph built of?

A tier connects two GPUs if links of its kind and of the kinds below (without NVLink, from the leaf upwards) lead both
ways between them.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.errors import nearest
from clustersim.hardware.topology import LINK_KINDS, VERTEX_KINDS, Fabric, LinkKind, Tier

if TYPE_CHECKING:
    import networkx as nx

_INSIDE: Final = (LinkKind.PCIE, LinkKind.HOST)
_KINDS: Final[dict[str, tuple[LinkKind, ...]]] = {
    "nvlink": (LinkKind.NVLINK,),
    "host": (LinkKind.NVLINK, *_INSIDE),
    "leaf": (*_INSIDE, LinkKind.NIC),
    "spine": (*_INSIDE, LinkKind.NIC, LinkKind.LEAF),
}
_ABOVE: Final[dict[str, tuple[str, ...]]] = {  # where a vertex sends upwards: the first of these kinds that it has
    "gpu": ("nvswitch", "gpu", "host", "nic", "leaf", "switch"),
    "host": ("host", "nic"),
    "nic": ("leaf", "switch", "spine", "core"),
    "leaf": ("spine", "switch", "core"),
    "spine": ("core", "switch"),
    "switch": ("spine", "core"),
}
MOST_LISTED: Final = 8
_SWITCHES: Final = ("leaf", "switch", "spine")

Place = tuple[str, int]  # kind of a vertex and, for a plain switch, how high it is


def vertex_kinds(graph: "nx.DiGraph[str]") -> dict[str, str]:
    """The kind of every vertex."""
    return {name: attributes["kind"] for name, attributes in graph.nodes(data=True)}


def levels(graph: "nx.DiGraph[str]", gpus: list[str]) -> dict[str, IntArray]:
    """For each tier, from the lowest, a label per GPU, [gpus]; equal labels are connected. Labels count from 0."""
    return {tier: _labels(_part(graph, tier, kinds), gpus) for tier, kinds in _KINDS.items()}


def _part(graph: "nx.DiGraph[str]", tier: str, kinds: tuple[LinkKind, ...]) -> "nx.DiGraph[str]":
    """The graph with only links of some kinds; inside a host, traffic does not pass through NICs."""
    names = {kind.value for kind in kinds}
    kept = [(source, target) for source, target, edge in graph.edges(data=True) if edge["kind"] in names]
    part = graph.edge_subgraph(kept)
    if tier != "host":
        return part
    return part.subgraph([name for name in part if graph.nodes[name]["kind"] != "nic"])


def _labels(part: "nx.DiGraph[str]", gpus: list[str]) -> IntArray:
    import networkx as nx  # 0.15 s that regular clusters do not need

    component = {name: index for index, names in enumerate(nx.strongly_connected_components(part)) for name in names}
    alone = len(component)  # a GPU without any such link is a component of its own
    found = [component.get(gpu, alone + index) for index, gpu in enumerate(gpus)]
    order = {label: place for place, label in enumerate(dict.fromkeys(found))}
    return np.array([order[label] for label in found], np.int64)


def reached(graph: "nx.DiGraph[str]", source: str, *, backwards: bool) -> set[str]:
    """Vertices to which some way leads from `source`, or from which some way leads to it."""
    import networkx as nx  # 0.15 s that regular clusters do not need

    return nx.ancestors(graph, source) if backwards else nx.descendants(graph, source)


def tiers(graph: "nx.DiGraph[str]") -> tuple[Tier, ...]:
    """One row per kind of vertex, with averages over the vertices of that kind; plain switches by their height."""
    heights = _heights(graph)
    members: dict[Place, list[str]] = {(kind, 0): [] for kind in VERTEX_KINDS}
    members |= {("switch", height): [] for height in sorted(set(heights.values()))}
    places = {name: (kind, heights.get(name, 0)) for name, kind in vertex_kinds(graph).items()}
    for name, place in places.items():
        members[place].append(name)
    ordered = sorted(members, key=lambda place: (VERTEX_KINDS.index(place[0]), place[1]))
    return tuple(_tier(graph, place, members[place], places) for place in ordered if members[place])


def _heights(graph: "nx.DiGraph[str]") -> dict[str, int]:
    """How many links every plain switch is above the nearest GPU, counted from the lowest switches as 0."""
    import networkx as nx  # 0.15 s that regular clusters do not need

    kinds = vertex_kinds(graph)
    gpus = {name for name, kind in kinds.items() if kind == "gpu"}
    hops = nx.multi_source_dijkstra_path_length(graph, gpus, weight=None)
    found = {name: int(hops.get(name, 1)) for name, kind in kinds.items() if kind == "switch"}
    return {name: height - min(found.values()) for name, height in found.items()}


def _tier(graph: "nx.DiGraph[str]", place: Place, names: list[str], places: dict[str, Place]) -> Tier:
    sent = _bandwidths(places, ((target, edge) for _, target, edge in graph.out_edges(names, data=True)))
    above = _above(place, sent)
    if not above:
        return Tier(place[0], len(names), sum(sent.values()) / len(names), None)
    received = _bandwidths(places, ((source, edge) for source, _, edge in graph.in_edges(names, data=True)))
    below = sum(bandwidth for lower, bandwidth in received.items() if lower not in above and lower != place)
    upwards = sum(sent[higher] for higher in above)
    return Tier(place[0], len(names), upwards / len(names), below / upwards if place[0] in _SWITCHES else None)


def _above(place: Place, sent: dict[Place, float]) -> list[Place]:
    """The places that vertices of this one send upwards to."""
    kind, height = place
    if kind == "switch":
        return [higher for higher in sent if higher[0] in _ABOVE[kind] or (higher[0] == kind and higher[1] > height)]
    first = next((higher for higher in _ABOVE.get(kind, ()) if higher in {known for known, _ in sent}), None)
    return [higher for higher in sent if higher[0] == first]


def _bandwidths(places: dict[str, Place], edges: Iterable[tuple[str, dict[str, Any]]]) -> dict[Place, float]:
    """Sum of bandwidths by the place of the vertex at the other end."""
    sums: dict[Place, float] = {}
    for name, edge in edges:
        sums[places[name]] = sums.get(places[name], 0.0) + edge["bandwidth"]
    return sums


def nics(fabric: Fabric, gpu: int) -> IntArray:
    """The nearest links of kind nic on the ways from a GPU over PCIe and host links, and on the ways to it."""
    source, target = fabric.ends.source, fabric.ends.target
    return np.concatenate([_nearest(fabric, source, target, gpu), _nearest(fabric, target, source, gpu)])


def _nearest(fabric: Fabric, here: IntArray, there: IntArray, gpu: int) -> IntArray:
    """NIC links from the vertices first met that have some; `here` and `there` are the ends in the order of search."""
    inside = np.isin(fabric.links.kind, [LINK_KINDS.index(kind) for kind in _INSIDE])
    nic = fabric.links.kind == LINK_KINDS.index(LinkKind.NIC)
    layer, seen = np.array([gpu]), np.zeros(fabric.ends.vertices, np.bool_)
    while len(layer):
        found = np.flatnonzero(nic & np.isin(here, layer))
        if len(found):
            return found
        seen[layer] = True
        onwards = np.unique(there[inside & np.isin(here, layer)])
        layer = onwards[~seen[onwards] & (onwards >= fabric.gpus)]
    return np.empty(0, np.int64)


def near(name: str, names: Sequence[str]) -> str:
    """End a sentence about an unknown vertex with the nearest name, or with some."""
    few = names if len(names) <= MOST_LISTED else [*names[: MOST_LISTED - 1], names[-1]]
    return nearest(name, few, elsewhere=names)
