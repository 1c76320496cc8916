"""Connectivity of GPUs over the alive links.

Breadth-first over link arrays, vectorized over all links of a level, so that 100,000 links take milliseconds.
"""

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.hardware.topology import LinkEndpoints


def find_partition(
    endpoints: LinkEndpoints, is_alive: BoolArray, gpu_ids: IntArray
) -> tuple[IntArray, IntArray] | None:
    """Two sets of GPUs of which the first cannot reach the second; None if all given GPUs reach each other.

    is_alive: [links]; gpu_ids: [n] ascending. If one GPU reaches all and all reach it, then all reach each other.
    """
    source, target = endpoints.source[is_alive], endpoints.target[is_alive]
    is_unreached = _is_unreached(source, target, endpoints.vertex_count, gpu_ids)
    if is_unreached.any():
        return gpu_ids[~is_unreached], gpu_ids[is_unreached]
    cannot_reach = _is_unreached(target, source, endpoints.vertex_count, gpu_ids)
    return (gpu_ids[cannot_reach], gpu_ids[~cannot_reach]) if cannot_reach.any() else None


def _is_unreached(source: IntArray, target: IntArray, vertex_count: int, gpu_ids: IntArray) -> BoolArray:
    """[gpus] which of the GPUs cannot be reached from the first of them."""
    is_reached: BoolArray = np.zeros(vertex_count, np.bool_)
    is_reached[gpu_ids[0]], reached_count, previous_count = True, 1, 0
    while reached_count > previous_count and not is_reached[gpu_ids].all():
        is_reached[target[is_reached[source]]] = True
        reached_count, previous_count = int(np.count_nonzero(is_reached)), reached_count
    is_unreached: BoolArray = ~is_reached[gpu_ids]
    return is_unreached
