"""What is a second of a rank's time called?

Kernels are called by why they run (`Work`), what the GPU waits for the host to launch them is a part of its own,
communication by the mesh axis that it serves; waiting for copies to and from the host, and for what it computes, is
*exposed host*. Reductions over all ranks
of a replica, over the world and of tied embeddings complete the gradients, so they count as data parallel.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.arrays import FloatArray
from clustersim.cost.block import BlockTiming
from clustersim.parallel.mesh import PIPELINE, ROLES, SERVED, Axis
from clustersim.program.task import Block, Work


class Part(Enum):
    """Names of a breakdown's parts, in the order in which they are shown."""

    _ignore_ = "axis"
    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    LAUNCH = "kernel launch"
    SLOWED = "slowed by communication"
    for axis in SERVED:
        vars()[f"EXPOSED_{axis.name.upper()}"] = f"exposed {axis.name}"
    BUBBLE_WARMUP = "bubble warm-up"
    BUBBLE_STEADY = "bubble steady"
    BUBBLE_COOLDOWN = "bubble cool-down"
    WAIT = "wait"

    @property
    def place(self) -> int:
        """Its column in arrays [.., parts]."""
        return PLACES[self]


PARTS: Final = tuple(Part)
PLACES: Final[Mapping[Part, int]] = MappingProxyType({part: place for place, part in enumerate(PARTS)})
KERNELS: Final = (Part.COMPUTE, Part.RECOMPUTE, Part.OPTIMIZER)
EXPOSED: Final[Mapping[Axis, Part]] = MappingProxyType({axis: Part(f"exposed {axis.name}") for axis in SERVED})
"""By axis, in the usual order of axes; the host last."""
BUBBLES: Final = (Part.BUBBLE_WARMUP, Part.BUBBLE_STEADY, Part.BUBBLE_COOLDOWN)

PART_OF_WORK: Final[Mapping[Work, Part]] = MappingProxyType(
    {
        Work.FORWARD: Part.COMPUTE,
        Work.BACKWARD: Part.COMPUTE,
        Work.RECOMPUTE: Part.RECOMPUTE,
        Work.OPTIMIZER: Part.OPTIMIZER,
    }
)

PART_OF_ROLE: Final[Mapping[str, Part]] = MappingProxyType({role.name: EXPOSED[role.serves] for role in ROLES.values()})

PIPELINE_ROLES: Final = frozenset(role.name for role in ROLES.values() if role.serves is PIPELINE)
STAGE_CROSSING_ROLES: Final = frozenset(role.name for role in ROLES.values() if role.crosses_stages)
"""Groups with members on several pipeline stages: who waits for them waits for the pipeline."""


def kernel_parts(block: Block, timing: BlockTiming) -> FloatArray:
    """Seconds of each part in which kernels run, as they take alone: [parts]."""
    seconds = np.zeros(len(PARTS))
    running = timing.kernels - timing.launching
    for operation, duration in zip(block.operations, running.tolist(), strict=True):
        seconds[PART_OF_WORK[operation.work].place] += duration
    seconds[Part.LAUNCH.place] += float(timing.launching.sum())
    return seconds


def exchange_parts(block: Block, timing: BlockTiming) -> FloatArray:
    """Seconds of exposed communication, and those by which it slows kernels of its own operation: [parts]."""
    seconds = np.zeros(len(PARTS))
    for operation, exposed in zip(block.operations, timing.exposed.tolist(), strict=True):
        if operation.exchange is not None:
            seconds[PART_OF_ROLE[operation.exchange.group].place] += exposed
    seconds[Part.SLOWED.place] = timing.slowed.sum()
    return seconds
