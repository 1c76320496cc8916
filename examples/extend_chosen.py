"""A collective algorithm of your own that a scenario names: the library may choose it, or must.

All-gather and reduce-scatter by recursive doubling and halving (Thakur, Rabenseifner and Gropp 2005, section 4) in
log2(n) rounds, farthest partners first (or last), so that the network carries few parts of the payload and NVLink many.
"""

from pathlib import Path

import numpy as np

from clustersim import Scenario, simulate
from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.program.task import CollectiveType

BOTH = (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER)
NAME = f"{Path(__file__).stem}:Doubling"  # looked for beside the scenario, which is said to be this file
GIVEN = {
    "model": "llama-tiny",
    "cluster": {"name": "aws-p5", "gpus": 64},
    "layout": {"dp": 64, "data": "fsdp"},
    "training": {"sequence": 2048, "global_batch": 64},
}


class Doubling:
    """An `CollectiveAlgorithm`: partners at distance d exchange 1/2d of the payload, in one round for each d."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase for each distance; none where it cannot do a collective."""
        size, members, local = topology.size, topology.members, topology.rails
        if collective not in BOTH or size & (size - 1):
            return ()
        distances, place = [2**k for k in range(size.bit_length() - 1)], np.arange(size)
        return tuple(
            build_phase(
                Flows(members, members[:, place ^ distance], 0.5 / distance),
                latency_steps=LatencySteps(local=1) if distance < local else LatencySteps(network=1),
            )
            for distance in distances
        )


def main() -> None:
    mine = {kind.value: NAME for kind in BOTH}
    for words, cost in {
        "its own": {},
        "may be mine": {"candidates": mine},
        "must be mine": {"collectives": mine},
    }.items():
        result = simulate(Scenario.from_mapping(GIVEN | {"cost": cost}, path=Path(__file__)))
        print(f"{words:12} {1e3 * result.step_time:.2f} ms a step")
        for selected_algorithm in result.selected_algorithms:
            size, time = selected_algorithm.payload / 1e6, 1e6 * selected_algorithm.seconds
            print(
                f"  {selected_algorithm.collective:14} {size:7.3f} MB in {time:4.0f} us by {selected_algorithm.algorithm}"
            )


if __name__ == "__main__":
    main()
