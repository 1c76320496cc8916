"""A custom placement: the cluster GPU of each rank, computed by any function, here with networkx.

A scheduler allocates 16 nodes, alternating over 4 racks. Data-parallel rings connect nodes in rank order, so
the order decides how often they leave a rack. The shortest ring is a travelling salesman problem.
"""

from itertools import combinations

import networkx as nx

from clustersim import Scenario, simulate
from clustersim.hardware.cluster import load_cluster

NODES, PER_NODE = 16, 8
FABRIC = {"leaf": {"nodes": 4, "oversubscription": 4}}
ALLOCATED_NODES = [rack + 4 * turn for rack in range(4) for turn in range(4)]  # racks are nodes 0-3, 4-7, ...


def shortest_tour() -> list[int]:
    """The nodes in an order with short distances between neighbours."""
    cluster = load_cluster("dgx-h100", NODES * PER_NODE, {"fabric": FABRIC}).to_graph()
    distances = nx.Graph()
    for first, second in combinations(ALLOCATED_NODES, 2):
        hops = nx.shortest_path_length(cluster, f"nic{first}.0", f"nic{second}.0")
        distances.add_edge(first, second, weight=hops)
    tour = nx.approximation.greedy_tsp(distances, source=ALLOCATED_NODES[0])
    return list(tour[:-1])


def main() -> None:
    mapping = {
        "model": "llama3-8b",
        "layout": {"tp": PER_NODE, "dp": NODES, "sequence_parallel": True},
        "training": {"sequence": 4096, "global_batch": 2 * NODES},
    }
    for label, nodes in {"as handed out": ALLOCATED_NODES, "shortest way round": shortest_tour()}.items():
        order = [f"{PER_NODE * node}-{PER_NODE * node + PER_NODE - 1}" for node in nodes]  # GPUs, rank by rank
        cluster = {"name": "dgx-h100", "gpus": NODES * PER_NODE, "fabric": FABRIC, "placement": {"order": order}}
        result = simulate(Scenario.from_mapping(mapping | {"cluster": cluster}))
        print(f"{label:18} {result.step_time:.3f} s a step, nodes {' '.join(map(str, nodes))}")


if __name__ == "__main__":
    main()
