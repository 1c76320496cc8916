"""A custom cluster graph made with networkx: 8 nodes on a ring of switches, read by the scenario."""

import json
import tempfile
from pathlib import Path

import networkx as nx

from clustersim import Scenario, simulate

NODES, PER_NODE = 8, 8
LINK = {"bandwidth": "50 GB/s", "latency": "1 us"}


def switch_ring(cut_link: int | None = None) -> "nx.Graph[str]":
    """Nodes with NVLink, one switch per node, switches in a ring; cut_link: index of a missing link."""
    graph = nx.Graph(accelerator="h100-sxm-80gb", library="nccl", description="nodes on a ring of switches")
    for node in range(NODES):
        graph.add_node(f"nv{node}", kind="nvswitch")
        graph.add_node(f"s{node}", kind="switch")
        for gpu in range(PER_NODE):
            name = f"g{node}.{gpu}"
            graph.add_node(name, kind="gpu", node=node)
            graph.add_edge(name, f"nv{node}", kind="nvlink", bandwidth="450 GB/s", latency="0.3 us")
            graph.add_edge(name, f"s{node}", kind="nic", **LINK)
    for node in range(NODES):
        if node != cut_link:
            graph.add_edge(f"s{node}", f"s{(node + 1) % NODES}", kind="spine", bandwidth="400 GB/s", latency="1 us")
    return graph


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, cut_link in {"ring": None, "ring with one link cut": 3}.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(nx.node_link_data(switch_ring(cut_link), edges="edges")), encoding="utf-8")
            mapping = {
                "model": "llama3-8b",
                "cluster": {"path": str(path)},
                "layout": {"tp": 8, "dp": NODES, "sequence_parallel": True},
                "training": {"sequence": 8192, "global_batch": 64},
            }
            result_json = simulate(Scenario.from_mapping(mapping)).to_json()
            exposed = result_json["breakdown_s"]["exposed dp"]
            print(f"{name:23} {result_json['step_time_s']:.3f} s a step, exposed dp {exposed:.3f} s")


if __name__ == "__main__":
    main()
