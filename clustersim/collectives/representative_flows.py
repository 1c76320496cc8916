"""Which flows of a phase are rotations of each other?

A group of complete nodes is mapped to itself where rotating the local ranks of all nodes is an automorphism of the
fabric (`hardware.rotation`), and often each of its flows to the next. Then one flow of each orbit is routed, and links
carry its images as well.
"""

import numpy as np

from clustersim.collectives.phase import Flows, Phase
from clustersim.common.arrays import IntArray
from clustersim.hardware.rotation import FabricRotation


def representative_flows(phase: Phase, rotation: FabricRotation) -> Phase | None:
    """One flow of each orbit, where the flows of a phase form complete orbits along their last axis; else None."""
    if not all(
        _is_full_rotation(ends, rotation.period) for flows in phase.flows for ends in (flows.sources, flows.targets)
    ):
        return None
    representatives = (
        Flows(flows.sources[..., 0], flows.targets[..., 0], flows.share, flows.is_p2p) for flows in phase.flows
    )
    return Phase(tuple(representatives), phase.latency_steps, phase.fill_stages)


def _is_full_rotation(gpus: IntArray, gpus_per_node: int) -> bool:
    """Whether the last axis visits all local ranks of a node in rotation, starting at each first GPU."""
    if gpus.shape[-1] != gpus_per_node:
        return False
    first = gpus[..., :1]
    local_rank = first % gpus_per_node
    return bool((gpus == first - local_rank + (local_rank + np.arange(gpus_per_node)) % gpus_per_node).all())
