"""A custom collective algorithm named by a scenario: as a candidate of the library, or forced.

All-gather and reduce-scatter by recursive doubling and halving (Thakur, Rabenseifner and Gropp 2005, section
4) in log2(n) steps, farthest partners first (or last), so that the network carries a small share and NVLink a
large one.
"""

from pathlib import Path

import numpy as np

from clustersim import Scenario, simulate
from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.program.task import CollectiveType

SUPPORTED_COLLECTIVES = (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER)
ALGORITHM_NAME = f"{Path(__file__).stem}:Doubling"  # resolved relative to the scenario, whose path is set to this file
BASE_MAPPING = {
    "model": "llama-tiny",
    "cluster": {"name": "aws-p5", "gpus": 64},
    "layout": {"dp": 64, "data": "fsdp"},
    "training": {"sequence": 2048, "global_batch": 64},
}


class Doubling:
    """A `CollectiveAlgorithm`: partners at distance d exchange 1/2d of the payload, in one step for each d."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase for each distance; none for unsupported collectives."""
        size, members, local = topology.size, topology.members, topology.rails
        if collective not in SUPPORTED_COLLECTIVES or size & (size - 1):
            return ()
        distances, rank_index = [2**k for k in range(size.bit_length() - 1)], np.arange(size)
        return tuple(
            build_phase(
                Flows(members, members[:, rank_index ^ distance], 0.5 / distance),
                latency_steps=LatencySteps(local=1) if distance < local else LatencySteps(network=1),
            )
            for distance in distances
        )


def main() -> None:
    algorithms = {kind.value: ALGORITHM_NAME for kind in SUPPORTED_COLLECTIVES}
    for label, cost in {
        "its own": {},
        "may be mine": {"candidates": algorithms},
        "must be mine": {"collectives": algorithms},
    }.items():
        result = simulate(Scenario.from_mapping(BASE_MAPPING | {"cost": cost}, path=Path(__file__)))
        print(f"{label:12} {1e3 * result.step_time:.2f} ms a step")
        for collective in result.selected_algorithms:
            size, time = collective.payload / 1e6, 1e6 * collective.seconds
            print(f"  {collective.collective:14} {size:7.3f} MB in {time:4.0f} us by {collective.algorithm}")


if __name__ == "__main__":
    main()
