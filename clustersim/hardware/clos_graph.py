"""A regular cluster as a networkx graph.

Every link becomes one directed edge, and every endpoint of a link one vertex. Where uplinks are spread, a
tier of switches is one vertex, since its bundle is one link.
"""

import re
from typing import TYPE_CHECKING, Final

from clustersim.hardware.clos_spec import NodeSpec
from clustersim.hardware.clos_wiring import ClosWiring

if TYPE_CHECKING:
    import networkx as nx

_NAME: Final = re.compile(r"([a-z]+)(\d+)")
_INTRA_NODE_KINDS: Final = ("host", "nic")  # the first index in these names is their node


def build_graph(gpu_count: int, wiring: ClosWiring, node: NodeSpec) -> "nx.DiGraph[str]":
    """Vertices have `kind` (and `node` inside nodes).

    Edges `kind`, `technology`, bandwidth in bytes/s and latency in seconds.
    """
    import networkx as nx  # takes 0.15 s, which a simulation does not need

    graph: nx.DiGraph[str] = nx.DiGraph()
    for gpu in range(gpu_count):
        graph.add_node(f"gpu{gpu}", kind="gpu", node=gpu // node.gpu_count)
    for link_range in wiring.link_ranges():
        endpoints = [link_range.endpoint_names(index) for index in range(link_range.count)]
        port, technology = link_range.port, node.link_technology(link_range.kind).value
        attributes = {
            "kind": link_range.kind.value,
            "bandwidth": port.bandwidth,
            "latency": port.latency,
            "technology": technology,
        }
        graph.add_nodes_from(
            (name, _vertex_attributes(name)) for pair in endpoints for name in pair if name not in graph
        )
        graph.add_edges_from(endpoints, **attributes)
    return graph


def _vertex_attributes(name: str) -> dict[str, str | int]:
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name!r} is not a name that the wiring gives")
    kind, first = match[1], int(match[2])
    return {"kind": kind, "node": first} if kind in _INTRA_NODE_KINDS else {"kind": kind}
