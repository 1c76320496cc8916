"""Reads and writes an irregular machine as a node-link graph file.

The format is networkx's node-link JSON (or the same in YAML). Every vertex has `id` and `kind`; GPUs also
have `node`, the host that they are in. Every edge has `source`, `target`, `kind`, `bandwidth` per direction
and `latency`; an edge of an undirected graph is one link in each direction. Edges of kind nvlink may have a
`generation` (default: the accelerator's), those between nodes (nic, leaf, spine) a `network` (default:
InfiniBand). The mapping `graph` holds accelerator, library, description and sources, and `ecmp` as regular
clusters have it. Other attributes (positions, colours) are ignored.
Reference: networkx, readwrite.json_graph.node_link_data (edges under "edges", before 3.4 under "links").
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Dimension
from clustersim.hardware.ecmp import SpreadEcmp
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.hardware.technology_reader import read_generation, read_network_kind
from clustersim.hardware.topology import LINK_KINDS, NETWORK_KINDS, VERTEX_KINDS, LinkKind

if TYPE_CHECKING:
    import networkx as nx

_LINK_KINDS: Final = [kind.value for kind in LINK_KINDS]


def is_graph(content: Mapping[str, Any]) -> bool:
    """Whether the content of a cluster file is a node-link graph."""
    return "nodes" in content


def read_graph(section: MappingReader, default_generation: LinkTechnology | None) -> "nx.DiGraph[str]":
    """A directed graph with SI attributes; raise InputError that names the invalid vertex or edge.

    default_generation: NVLink generation of the accelerator, if it has one.
    """
    import networkx as nx  # takes 0.15 s, which regular clusters do not need

    graph: nx.DiGraph[str] = nx.DiGraph()
    directed = section.get_bool("directed")
    section.get_bool("multigraph")
    for vertex in section.get_entries("nodes", "id"):
        _add_vertex(graph, vertex)
    for edge in section.get_entries("links" if section.has_key("links") else "edges", "source", "target"):
        _add_edge(graph, edge, both_directions=not directed, default_generation=default_generation)
    from clustersim.hardware.graph_tiers import vertex_kinds

    if "gpu" not in vertex_kinds(graph).values():
        raise section.input_error("nodes", "none of them is of kind gpu")
    return graph


def _add_vertex(graph: "nx.DiGraph[str]", vertex: MappingReader) -> None:
    name = vertex.get_name("id")
    if name in graph:
        raise vertex.input_error("id", "there is such a node already")
    kind = vertex.get_choice("kind", *VERTEX_KINDS, required=True)
    if kind == "gpu" or vertex.has_key("node"):
        graph.add_node(name, kind=kind, node=vertex.get_name("node"))
    else:
        graph.add_node(name, kind=kind)


def _add_edge(
    graph: "nx.DiGraph[str]", edge: MappingReader, *, both_directions: bool, default_generation: LinkTechnology | None
) -> None:
    endpoints = edge.get_name("source"), edge.get_name("target")
    for key, name in zip(("source", "target"), endpoints, strict=True):
        if name not in graph:
            raise edge.input_error(key, f"there is no node {name!r}")
    if endpoints[0] == endpoints[1]:
        raise edge.input_error("target", "the edge ends where it starts")
    kind = LinkKind(edge.get_choice("kind", *_LINK_KINDS, required=True))
    link = {
        "kind": kind.value,
        "technology": _read_technology(edge, kind, default_generation).value,
        "bandwidth": edge.get_quantity("bandwidth", Dimension.BANDWIDTH),
        "latency": edge.get_quantity("latency", Dimension.TIME, allow_zero=True),
    }
    for source, target in (endpoints, endpoints[::-1]) if both_directions else (endpoints,):
        if graph.has_edge(source, target):
            raise edge.input_error(
                "target", "there is such an edge already; write parallel links as one of their bandwidth"
            )
        graph.add_edge(source, target, **link)


def _read_technology(edge: MappingReader, kind: LinkKind, default_generation: LinkTechnology | None) -> LinkTechnology:
    if kind is LinkKind.NVLINK:
        return read_generation(edge, default_generation)
    return read_network_kind(edge) if kind in NETWORK_KINDS else LinkTechnology.PCIE


def _technology_attribute(kind: LinkKind, technology: str) -> dict[str, str]:
    """The file attribute for the technology of an edge."""
    if kind is LinkKind.NVLINK:
        return {"generation": technology}
    return {"network": technology} if kind in NETWORK_KINDS else {}


def to_file_graph(graph: "nx.DiGraph[str]", attributes: Mapping[str, Any]) -> "nx.DiGraph[str]":
    """The graph with attributes as in files; attributes: further graph attributes. `read_graph` reads it back."""
    import networkx as nx

    file_graph: nx.DiGraph[str] = nx.DiGraph(**{**SpreadEcmp().file_keys, **graph.graph, **attributes})
    file_graph.add_nodes_from(graph.nodes(data=True))
    file_graph.add_nodes_from((gpu, {"node": str(node)}) for gpu, node in graph.nodes(data="node") if node is not None)
    for source, target, link in graph.edges(data=True):
        ports = {"bandwidth": f"{link['bandwidth']!r} B/s", "latency": f"{link['latency']!r} s"}
        file_graph.add_edge(
            source,
            target,
            kind=link["kind"],
            **_technology_attribute(LinkKind(link["kind"]), link["technology"]),
            **ports,
        )
    return file_graph
