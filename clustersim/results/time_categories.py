"""What is a second of a rank's time called?

Kernels are called by why they run (`Work`), what the GPU waits for the host to launch them is a part of its own,
communication by the mesh axis that it serves; waiting for copies to and from the host, and for what it computes, is
*exposed host*. Reductions over all ranks
of a replica, over the world and of tied embeddings complete the gradients, so they count as data parallel.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.segment import SegmentTiming
from clustersim.parallel.mesh import COMM_AXES, COMM_GROUPS, PIPELINE, Axis
from clustersim.program.task import Segment, WorkType


class Part(Enum):
    """Names of a breakdown's parts, in the order in which they are shown."""

    _ignore_ = "axis"
    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    LAUNCH = "kernel launch"
    SLOWED = "slowed by communication"
    for axis in COMM_AXES:
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
EXPOSED: Final[Mapping[Axis, Part]] = MappingProxyType({axis: Part(f"exposed {axis.name}") for axis in COMM_AXES})
"""By axis, in the usual order of axes; the host last."""
BUBBLES: Final = (Part.BUBBLE_WARMUP, Part.BUBBLE_STEADY, Part.BUBBLE_COOLDOWN)

PART_OF_WORK: Final[Mapping[WorkType, Part]] = MappingProxyType(
    {
        WorkType.FORWARD: Part.COMPUTE,
        WorkType.BACKWARD: Part.COMPUTE,
        WorkType.RECOMPUTE: Part.RECOMPUTE,
        WorkType.OPTIMIZER: Part.OPTIMIZER,
    }
)

PART_OF_ROLE: Final[Mapping[str, Part]] = MappingProxyType(
    {role.name: EXPOSED[role.accounted_axis] for role in COMM_GROUPS.values()}
)

PIPELINE_ROLES: Final = frozenset(role.name for role in COMM_GROUPS.values() if role.accounted_axis is PIPELINE)
STAGE_CROSSING_ROLES: Final = frozenset(role.name for role in COMM_GROUPS.values() if role.crosses_stages)
"""Groups with members on several pipeline stages: who waits for them waits for the pipeline."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockParts:
    """Parts of the operations of a block, whatever they take.

    kernel: [operations] that of each one's kernels; moving: [exchanges] operations with one; exchange: that of each.
    """

    kernel: IntArray
    moving: IntArray
    exchange: IntArray

    @classmethod
    def of(cls, block: Segment) -> Self:
        """Those of a block."""
        kernel = [PART_OF_WORK[operation.work_type].place for operation in block.operations]
        roles = {place: item.comm_op.comm_group for place, item in enumerate(block.operations) if item.comm_op}
        exchange = [PART_OF_ROLE[role].place for role in roles.values()]
        return cls(*(np.array(element, dtype=np.int64) for element in (kernel, [*roles], exchange)))

    def kernels(self, timing: SegmentTiming) -> FloatArray:
        """Seconds of each part in which kernels run, as they take alone: [parts]."""
        seconds: FloatArray = np.zeros(len(PARTS))
        seconds += np.bincount(self.kernel, timing.kernel_seconds - timing.launch_stalls, minlength=len(PARTS))
        seconds[Part.LAUNCH.place] += float(timing.launch_stalls.sum())
        return seconds

    def exchanges(self, timing: SegmentTiming) -> FloatArray:
        """Seconds of exposed communication, and those by which it slows kernels of its own operation: [parts]."""
        seconds: FloatArray = np.zeros(len(PARTS))
        seconds += np.bincount(self.exchange, timing.exposed_comm[self.moving], minlength=len(PARTS))
        seconds[Part.SLOWED.place] = timing.overlap_delay.sum()
        return seconds


def named_parts(names: Iterable[str], parts: FloatArray) -> list[dict[str, Any]]:
    """Seconds of parts in both, as plain data. parts: [2, names]."""
    rows = zip(names, *parts.tolist(), strict=True)
    return [{"part": name, "first": first, "second": second, "delta": second - first} for name, first, second in rows]
