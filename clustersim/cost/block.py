"""How long does a block of operations take, and when does each operation inside it run?

Operations of a block run back to back, so their offsets are running sums. A block that holds exchanges is timed for
one rank, because exchanges of different groups may differ.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clustersim.cost.timing import Bound, Provenance
from clustersim.units import Seconds

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockTiming:
    """Timing of every operation of a block, in the block's order.

    offsets: [operations + 1] seconds from the block's start, so operation i runs from offsets[i] to offsets[i+1];
    exposed: [operations] the part of each that is communication not hidden by a kernel (all of an exchange's time,
    none of a kernel's); provenance, bound: one per operation.
    """

    offsets: FloatArray
    exposed: FloatArray
    provenance: tuple[Provenance, ...]
    bound: tuple[Bound, ...]

    @property
    def seconds(self) -> Seconds:
        """Duration of the whole block."""
        return float(self.offsets[-1])
