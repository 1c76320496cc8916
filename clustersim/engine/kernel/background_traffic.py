"""How do others load the network beside the ranks?

Each of them is a process of its own, which begins its activity at its times and is gone once all ranks are done. It
names real links, of which those that it loads are simulated themselves (`cost.rank_equivalence`).
"""

from collections.abc import Callable, Generator
from math import inf
from typing import Any

import simpy

from clustersim.common.arrays import IntArray
from clustersim.cost.background_traffic import Other
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.kernel.network.fluid_network import Load, Network


def beside(
    environment: Clock, network: Network, other: Other, colour: IntArray, finished: Callable[[], bool]
) -> Generator[simpy.Event, Any, None]:
    """Load links at the times of one of the others. colour: [links] the number of the link that stands for each."""
    load = Load(other.seconds, other.share, colour[other.link], other.busy)
    due, times = other.start, 0
    while due <= other.until and due < inf:
        yield environment.at(max(due, environment.now))
        if finished():
            return
        yield environment.wait(other.latency)
        yield network.start(load)
        times += 1
        due = max(other.start + times * other.every, environment.now)
