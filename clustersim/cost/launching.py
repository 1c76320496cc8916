"""When does the GPU wait for its host?

The host launches the kernels and collectives of a block one after the other, the first of them while the block before
still runs, and the GPU runs them in that order. So the k-th begins when the host has launched it and the one before it
has ended: with h seconds for each launch and g on the GPU,

    end(k) = max over j <= k of  h(2) + ... + h(j) + g(j) + ... + g(k)

and the block lasts no less than all its launches, h(1) + ... + h(n): then the host turns to the next. What the host
does while the GPU is behind is hidden, what the GPU has to do while the host is behind is not: a pass that is busy on
the whole may wait at its short kernels. A kernel of several launches counts as so many equal ones.

Example: two kernels of 1 s, then one of 4 s, launched in 2 s each. They begin at 0, 2 and 4 s: the GPU waits 1 s before
the second and 1 s before the third, and is done after 8 s, though 6 s of kernels are no less than 6 s of launches.

Assumed: the host gets no further ahead than one block, as in frameworks that wait for the GPU between passes. Forward
(run again or not) and backward have launches of their own: one is Python, the other autograd, whose kernels are fewer
than those that it launches, with hooks of parameters between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.program.task import Block, Exchange, Overlap, Work
from clustersim.units import Seconds
from clustersim.workload.kernels import Kernel


@dataclass(frozen=True, slots=True)
class Launching:
    """Seconds that the host needs for one kernel or collective, of forward (and the optimizer) and of backward."""

    forward: Seconds = 0.0
    backward: Seconds = 0.0

    def waits(self, block: Block, seconds: Sequence[Seconds]) -> FloatArray:
        """[operations] how long the GPU waits for the host, from what operations take without waiting.

        Waiting before an operation that an exchange is part of is counted at the kernel that comes next (or, behind
        the last, at that); a block without kernels by themselves does not wait.
        """
        if self.forward == self.backward == 0.0 or not block.operations:
            return np.zeros(len(block.operations))
        launches = np.array([_launches(operation.does) for operation in block.operations])
        backward = np.array([operation.work is Work.BACKWARD for operation in block.operations])
        each = np.where(backward, self.backward, self.forward)
        return _at_kernels(block, _late(launches, each, np.array(seconds, dtype=np.float64)))


def _late(launches: IntArray, each: FloatArray, seconds: FloatArray) -> FloatArray:
    """[operations] how long the GPU waits before and within operations of so many launches, of `each` seconds."""
    issued = np.cumsum(np.repeat(each, launches))
    part = np.repeat(seconds / launches, launches)
    idle = np.maximum.accumulate(issued - issued[0] - (np.cumsum(part) - part))  # so far
    waited = idle[np.cumsum(launches) - 1]
    waited[-1] = max(waited[-1], issued[-1] - part.sum())
    late: FloatArray = np.diff(waited, prepend=0.0)
    return late


def _at_kernels(block: Block, late: FloatArray) -> FloatArray:
    """The same waits, each at the next kernel that runs by itself."""
    own = np.flatnonzero([isinstance(operation.does, Kernel) for operation in block.operations])
    waits = np.zeros(len(late))
    if len(own):
        following = own[np.minimum(np.searchsorted(own, np.arange(len(late))), len(own) - 1)]
        np.add.at(waits, following, late)
    return waits


def _launches(does: Kernel | Exchange | Overlap) -> int:
    """What the host launches for an operation."""
    match does:
        case Exchange():
            return 1
        case Overlap(kernel=kernel, chunks=chunks):
            return (kernel.launches + 1) * (1 if math.isinf(chunks) else int(chunks))
        case kernel:
            return kernel.launches
