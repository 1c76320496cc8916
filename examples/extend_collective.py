"""A custom collective algorithm compared with the ring: sent bytes, and time on the links of a cluster.

All-reduce by recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005, section 4.4): log2(n) steps
each way, with doubling partner distances.
"""

import numpy as np

from clustersim.collectives.flow_routes import route_phase
from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase, group_topology
from clustersim.collectives.ring import RingAlgorithm
from clustersim.hardware.cluster import load_cluster
from clustersim.program.task import CollectiveType


class HalvingDoubling:
    """A `CollectiveAlgorithm`: in step k partners 2^k apart exchange 1/2^(k+1) of the payload, and back."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase for each distance; none for unsupported collectives."""
        size, members = topology.size, topology.members
        if collective is not CollectiveType.ALL_REDUCE or size & (size - 1):
            return ()
        rank_index = np.arange(size)
        distances = [2**k for k in range(size.bit_length() - 1)]
        return tuple(
            build_phase(
                Flows(members, members[:, rank_index ^ distance], 1 / distance), latency_steps=LatencySteps(network=2)
            )
            for distance in distances
        )


def main() -> None:
    print("nodes  algorithm         sent per GPU   1 GB over the links  rounds")
    for nodes in (1, 2, 16):
        fabric = load_cluster("dgx-h100", gpu_count=8 * nodes).fabric
        (group,) = group_topology(np.arange(8 * nodes)[None], fabric)
        for algorithm in (RingAlgorithm(), HalvingDoubling()):
            phases = algorithm.phases(CollectiveType.ALL_REDUCE, group)
            sent = sum(float(phase_.share.sum()) for phase_ in phases) / group.size
            loads = [route_phase(phase_, fabric).link_load[:-1] for phase_ in phases]  # payloads, by link
            seconds = sum(1e9 * float((load / fabric.links.bandwidth).max()) for load in loads)
            rounds = sum(int(phase_.latency_steps.local) + int(phase_.latency_steps.network) for phase_ in phases)
            name = type(algorithm).__name__
            print(f"{nodes:5}  {name:16} {sent:5.3f} payloads {1e3 * seconds:14.1f} ms {rounds:9}")


if __name__ == "__main__":
    main()
