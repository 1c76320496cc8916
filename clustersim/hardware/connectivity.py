"""Whom does a GPU reach over the links that are alive?

Breadth first over lists of links, all links of a step at once, so that 100,000 links take milliseconds.
"""

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.hardware.topology import Ends


def islands(ends: Ends, alive: BoolArray, gpus: IntArray) -> tuple[IntArray, IntArray] | None:
    """Two sets of some GPUs, of which the first cannot reach the second; None if every one reaches every other.

    alive: [links]; gpus: [n] ascending. If one GPU reaches all and all reach it, then all reach each other.
    """
    source, target = ends.source[alive], ends.target[alive]
    beyond = _unreached(source, target, ends.vertices, gpus)
    if beyond.any():
        return gpus[~beyond], gpus[beyond]
    behind = _unreached(target, source, ends.vertices, gpus)
    return (gpus[behind], gpus[~behind]) if behind.any() else None


def _unreached(source: IntArray, target: IntArray, vertices: int, gpus: IntArray) -> BoolArray:
    """Which of some GPUs no way leads to from the first of them: [gpus]."""
    found: BoolArray = np.zeros(vertices, np.bool_)
    found[gpus[0]], known, before = True, 1, 0
    while known > before and not found[gpus].all():
        found[target[found[source]]] = True
        known, before = int(np.count_nonzero(found)), known
    unreached: BoolArray = ~found[gpus]
    return unreached
