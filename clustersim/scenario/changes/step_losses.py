"""What may a step lose time to? The losses that changes address, and by which results name them.

The parts of a step are these losses and the time of the model's FLOP at the peak, which is none; what is exposed
communication, and along which axis, is said by `results.time_categories`.
"""

from enum import Enum

from clustersim.parallel.mesh import COMM_AXES, Axis


class StepLoss(Enum):
    """What a step loses time to, in display order."""

    _ignore_ = "axis"
    MATMULS = "matmuls and attention below the peak"
    MEMORY_BOUND = "memory-bound kernels"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    LAUNCH = "kernel launch"
    SLOWED = "slowed by communication"
    for axis in COMM_AXES:
        vars()[f"EXPOSED_{axis.name.upper()}"] = f"exposed {axis.name}"
    BUBBLE = "pipeline bubble"
    IMBALANCE = "imbalance between pipeline ranks"
    WAIT = "wait"

    @classmethod
    def exposed(cls, *axes: Axis) -> frozenset["StepLoss"]:
        """Exposed communication along some axes."""
        return frozenset(cls(f"exposed {axis.name}") for axis in axes)


EXPOSED_LOSSES: frozenset[StepLoss] = StepLoss.exposed(*COMM_AXES)
"""Exposed communication, whatever its axis."""
