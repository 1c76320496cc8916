"""What does a regular cluster look like as a graph?

Every link of the wiring becomes one directed edge, and every end of a link one vertex. Where uplinks are spread, a
layer of switches is one vertex, since its bundle is one link.
"""

import re
from typing import TYPE_CHECKING, Final

from clustersim.hardware.clos_spec import Node
from clustersim.hardware.clos_wiring import Wiring

if TYPE_CHECKING:
    import networkx as nx

_NAME: Final = re.compile(r"([a-z]+)(\d+)")
_IN_A_NODE: Final = ("host", "nic")  # the first number of these names is their node


def graph(gpus: int, wiring: Wiring, node: Node) -> "nx.DiGraph[str]":
    """Vertices have `kind` (and `node` inside nodes); edges `kind`, `technology`, bytes/s and seconds."""
    import networkx as nx  # 0.15 s that a simulation does not need

    whole: nx.DiGraph[str] = nx.DiGraph()
    for gpu in range(gpus):
        whole.add_node(f"gpu{gpu}", kind="gpu", node=gpu // node.gpus)
    for run in wiring.runs():
        ends = [run.ends(index) for index in range(run.count)]
        port, technology = run.port, node.technology(run.kind).value
        attributes = {
            "kind": run.kind.value,
            "bandwidth": port.bandwidth,
            "latency": port.latency,
            "technology": technology,
        }
        whole.add_nodes_from((name, _described(name)) for pair in ends for name in pair if name not in whole)
        whole.add_edges_from(ends, **attributes)
    return whole


def _described(name: str) -> dict[str, str | int]:
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name!r} is not a name that the wiring gives")
    kind, first = match[1], int(match[2])
    return {"kind": kind, "node": first} if kind in _IN_A_NODE else {"kind": kind}
