"""How is an irregular machine written in a file, and written out again?

As a node-link graph, networkx's JSON (or the same in YAML). Every vertex has `id` and `kind`; GPUs also have `node`,
the host that they are in. Every edge has `source`, `target`, `kind`, `bandwidth` per direction and `latency`; an edge
of an undirected graph is one link each way. Edges of kind nvlink may have a `generation` (else the accelerator's),
those between nodes (nic, leaf, spine) a `network` (else InfiniBand). The mapping `graph` holds accelerator, library,
description and sources, and `ecmp` as regular clusters have it. Other attributes (positions, colours) are left alone.
Reference: networkx, readwrite.json_graph.node_link_data (edges under "edges", before 3.4 under "links").
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from clustersim.common.mapping_reader import Section
from clustersim.common.units import Dimension
from clustersim.hardware.ecmp import Spread
from clustersim.hardware.graph_tiers import vertex_kinds
from clustersim.hardware.link_technology import Technology
from clustersim.hardware.technology_reader import read_generation, read_network_kind
from clustersim.hardware.topology import LINK_KINDS, NETWORK_KINDS, VERTEX_KINDS, LinkKind

if TYPE_CHECKING:
    import networkx as nx

_LINK_KINDS: Final = [kind.value for kind in LINK_KINDS]


def is_graph(content: Mapping[str, Any]) -> bool:
    """Whether a cluster file is a node-link graph."""
    return "nodes" in content


def read_graph(section: Section, own: Technology | None = None) -> "nx.DiGraph[str]":
    """A directed graph with SI attributes; raise InputError that names the vertex or edge that cannot be used.

    own: the NVLink generation of the accelerator, if it has one.
    """
    import networkx as nx  # 0.15 s that regular clusters do not need

    graph: nx.DiGraph[str] = nx.DiGraph()
    directed = section.flag("directed")
    section.flag("multigraph")
    for vertex in section.entries("nodes", "id"):
        _add_vertex(graph, vertex)
    for edge in section.entries("links" if section.has("links") else "edges", "source", "target"):
        _add_edge(graph, edge, both_ways=not directed, own=own)
    if "gpu" not in vertex_kinds(graph).values():
        raise section.refuse("nodes", "none of them is of kind gpu")
    return graph


def _add_vertex(graph: "nx.DiGraph[str]", vertex: Section) -> None:
    name = vertex.name("id")
    if name in graph:
        raise vertex.refuse("id", "there is such a node already")
    kind = vertex.choice("kind", *VERTEX_KINDS, required=True)
    if kind == "gpu" or vertex.has("node"):
        graph.add_node(name, kind=kind, node=vertex.name("node"))
    else:
        graph.add_node(name, kind=kind)


def _add_edge(graph: "nx.DiGraph[str]", edge: Section, *, both_ways: bool, own: Technology | None) -> None:
    ends = edge.name("source"), edge.name("target")
    for key, name in zip(("source", "target"), ends, strict=True):
        if name not in graph:
            raise edge.refuse(key, f"there is no node {name!r}")
    if ends[0] == ends[1]:
        raise edge.refuse("target", "the edge ends where it starts")
    kind = LinkKind(edge.choice("kind", *_LINK_KINDS, required=True))
    link = {
        "kind": kind.value,
        "technology": _technology(edge, kind, own).value,
        "bandwidth": edge.quantity("bandwidth", Dimension.BANDWIDTH),
        "latency": edge.quantity("latency", Dimension.TIME, zero=True),
    }
    for source, target in (ends, ends[::-1]) if both_ways else (ends,):
        if graph.has_edge(source, target):
            raise edge.refuse("target", "there is such an edge already; write parallel links as one of their bandwidth")
        graph.add_edge(source, target, **link)


def _technology(edge: Section, kind: LinkKind, own: Technology | None) -> Technology:
    if kind is LinkKind.NVLINK:
        return read_generation(edge, own)
    return read_network_kind(edge) if kind in NETWORK_KINDS else Technology.PCIE


def _named(kind: LinkKind, technology: str) -> dict[str, str]:
    """The key of a file that says of what make an edge is."""
    if kind is LinkKind.NVLINK:
        return {"generation": technology}
    return {"network": technology} if kind in NETWORK_KINDS else {}


def written(graph: "nx.DiGraph[str]", about: Mapping[str, Any]) -> "nx.DiGraph[str]":
    """The same graph with attributes as files have them; about: more of the graph's own. `read_graph` reads it back."""
    import networkx as nx

    whole: nx.DiGraph[str] = nx.DiGraph(**{**Spread().keys, **graph.graph, **about})
    whole.add_nodes_from(graph.nodes(data=True))
    whole.add_nodes_from((gpu, {"node": str(node)}) for gpu, node in graph.nodes(data="node") if node is not None)
    for source, target, link in graph.edges(data=True):
        ports = {"bandwidth": f"{link['bandwidth']!r} B/s", "latency": f"{link['latency']!r} s"}
        whole.add_edge(source, target, kind=link["kind"], **_named(LinkKind(link["kind"]), link["technology"]), **ports)
    return whole
