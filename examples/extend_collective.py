"""A collective algorithm of your own: what it moves, and how long a cluster's links need for that, beside the ring.

All-reduce by recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005, section 4.4): log2(n) rounds each
way, with partners ever farther away.
"""

import numpy as np

from clustersim.collectives.flow_routes import route
from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, arrange, phase
from clustersim.collectives.ring import Ring
from clustersim.hardware.cluster import load_cluster
from clustersim.program.task import CollectiveType


class HalvingDoubling:
    """An `Algorithm`: in the k-th round partners 2^k apart exchange 1/2^(k+1) of the payload, and back."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase for each distance; none where it cannot do a collective."""
        size, members = arrangement.size, arrangement.members
        if kind is not CollectiveType.ALL_REDUCE or size & (size - 1):
            return ()
        place = np.arange(size)
        distances = [2**k for k in range(size.bit_length() - 1)]
        return tuple(
            phase(Flows(members, members[:, place ^ distance], 1 / distance), rounds=Rounds(network=2))
            for distance in distances
        )


def main() -> None:
    print("nodes  algorithm         sent per GPU   1 GB over the links  rounds")
    for nodes in (1, 2, 16):
        fabric = load_cluster("dgx-h100", gpus=8 * nodes).fabric
        (group,) = arrange(np.arange(8 * nodes)[None], fabric)
        for algorithm in (Ring(), HalvingDoubling()):
            found = algorithm.phases(CollectiveType.ALL_REDUCE, group)
            sent = sum(float(item.share.sum()) for item in found) / group.size
            loads = [route(element, fabric).load[:-1] for element in found]  # payloads, by link
            seconds = sum(1e9 * float((load / fabric.links.bandwidth).max()) for load in loads)
            rounds = sum(int(entry.rounds.local) + int(entry.rounds.network) for entry in found)
            name = type(algorithm).__name__
            print(f"{nodes:5}  {name:16} {sent:5.3f} payloads {1e3 * seconds:14.1f} ms {rounds:9}")


if __name__ == "__main__":
    main()
