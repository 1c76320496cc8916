"""Custom networks made with networkx, compared with a packaged cluster exported to networkx and read back.

A 3D torus of switches; a dragonfly (Kim et al. 2008, ISCA: fully connected groups, one link between any two);
a rail-only network (Wang et al. 2023, arXiv:2307.12169: one switch per local rank).
"""

import json
import tempfile
from pathlib import Path

import networkx as nx

from clustersim import Scenario, simulate
from clustersim.hardware.cluster import load_cluster

NODES, PER_NODE = 64, 8
NVLINK = {"kind": "nvlink", "bandwidth": "450 GB/s", "latency": "0.3 us"}
NIC = {"kind": "nic", "bandwidth": "50 GB/s", "latency": "1 us"}
WIRE = {"kind": "leaf", "bandwidth": "400 GB/s", "latency": "1 us"}


def attach_nodes(network: "nx.Graph[str]", switch_format: str) -> "nx.Graph[str]":
    """Nodes with NVLink whose GPUs attach to a network's switches; switch_format: format string of a GPU's switch."""
    graph = nx.Graph(nx.relabel_nodes(network, "s{}".format), accelerator="h100-sxm-80gb")
    nx.set_node_attributes(graph, "switch", "kind")
    nx.set_edge_attributes(graph, dict.fromkeys(graph.edges, WIRE))
    for node, local_rank in ((gpu // PER_NODE, gpu % PER_NODE) for gpu in range(NODES * PER_NODE)):
        graph.add_node(f"nv{node}", kind="nvswitch")
        graph.add_node(f"g{node}.{local_rank}", kind="gpu", node=node)
        graph.add_edge(f"g{node}.{local_rank}", f"nv{node}", **NVLINK)
        graph.add_edge(f"g{node}.{local_rank}", switch_format.format(node=node, local_rank=local_rank), **NIC)
    return graph


def networks() -> "dict[str, nx.Graph[str]]":  # for 64 nodes of 8 GPUs
    torus = nx.convert_node_labels_to_integers(nx.grid_graph((4, 4, 4), periodic=True))
    dragonfly = nx.disjoint_union_all([nx.complete_graph(8) for _ in range(8)])
    dragonfly.add_edges_from((8 * a + b, 8 * b + a) for a in range(8) for b in range(a))
    return {
        "dgx-h100": load_cluster("dgx-h100", NODES * PER_NODE).to_graph(),
        "torus": attach_nodes(torus, "s{node}"),
        "dragonfly": attach_nodes(dragonfly, "s{node}"),
        "rail-only": attach_nodes(nx.empty_graph(PER_NODE), "s{local_rank}"),
    }


def main() -> None:
    layout = {"tp": PER_NODE, "dp": NODES, "sequence_parallel": True}
    mapping = {"model": "llama3-8b", "layout": layout, "training": {"sequence": 8192, "global_batch": NODES}}
    with tempfile.TemporaryDirectory() as folder:
        for name, graph in networks().items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(nx.node_link_data(graph, edges="edges")), encoding="utf-8")
            result = simulate(Scenario.from_mapping(mapping | {"cluster": {"path": str(path)}}))
            print(f"{name:10} {result.step_time:.3f} s a step")


if __name__ == "__main__":
    main()
