"""Background traffic: flows of other users of the network, as simpy processes.

Each is a process that starts its flow at its given times and ends once all ranks are done. Its links are
those of the fabric; links that it loads are always simulated in a class of their own (`cost.rank_equivalence`).
"""

from collections.abc import Callable, Generator
from math import inf
from typing import Any

import simpy

from clustersim.common.arrays import IntArray
from clustersim.cost.background_traffic import BackgroundFlow
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.fluid_network import FlowDemand, FluidNetwork


def run_background_flow(
    environment: SimEnvironment,
    network: FluidNetwork,
    background: BackgroundFlow,
    link_colours: IntArray,
    is_finished: Callable[[], bool],
) -> Generator[simpy.Event, Any, None]:
    """Process that loads links at the times of a background flow. link_colours: [links] simulated link of each."""
    demand = FlowDemand(
        background.transfer_seconds, background.fair_share, link_colours[background.link_ids], background.link_seconds
    )
    next_start, repetition = background.start_seconds, 0
    while next_start <= background.end_seconds and next_start < inf:
        yield environment.event_at(max(next_start, environment.now))
        if is_finished():
            return
        yield simpy.Timeout(environment, background.latency)
        yield network.start_flow(demand)
        repetition += 1
        next_start = max(background.start_seconds + repetition * background.period_seconds, environment.now)
