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


class TimeCategory(Enum):
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
    def index(self) -> int:
        """Its column in arrays [.., parts]."""
        return CATEGORY_INDEX[self]


TIME_CATEGORIES: Final = tuple(TimeCategory)
CATEGORY_INDEX: Final[Mapping[TimeCategory, int]] = MappingProxyType(
    {part: place for place, part in enumerate(TIME_CATEGORIES)}
)
KERNEL_CATEGORIES: Final = (TimeCategory.COMPUTE, TimeCategory.RECOMPUTE, TimeCategory.OPTIMIZER)
EXPOSED_CATEGORIES: Final[Mapping[Axis, TimeCategory]] = MappingProxyType(
    {axis: TimeCategory(f"exposed {axis.name}") for axis in COMM_AXES}
)
"""By axis, in the usual order of axes; the host last."""
BUBBLE_CATEGORIES: Final = (TimeCategory.BUBBLE_WARMUP, TimeCategory.BUBBLE_STEADY, TimeCategory.BUBBLE_COOLDOWN)

CATEGORY_BY_WORK_TYPE: Final[Mapping[WorkType, TimeCategory]] = MappingProxyType(
    {
        WorkType.FORWARD: TimeCategory.COMPUTE,
        WorkType.BACKWARD: TimeCategory.COMPUTE,
        WorkType.RECOMPUTE: TimeCategory.RECOMPUTE,
        WorkType.OPTIMIZER: TimeCategory.OPTIMIZER,
    }
)

CATEGORY_BY_COMM_GROUP: Final[Mapping[str, TimeCategory]] = MappingProxyType(
    {role.name: EXPOSED_CATEGORIES[role.accounted_axis] for role in COMM_GROUPS.values()}
)

PIPELINE_GROUPS: Final = frozenset(role.name for role in COMM_GROUPS.values() if role.accounted_axis is PIPELINE)
STAGE_CROSSING_GROUPS: Final = frozenset(role.name for role in COMM_GROUPS.values() if role.crosses_stages)
"""Groups with members on several pipeline stages: who waits for them waits for the pipeline."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCategories:
    """Parts of the operations of a block, whatever they take.

    kernel: [operations] that of each one's kernels; moving: [exchanges] operations with one; exchange: that of each.
    """

    kernel_category: IntArray
    comm_index: IntArray
    comm_category: IntArray

    @classmethod
    def from_segment(cls, segment: Segment) -> Self:
        """Those of a block."""
        kernel_category = [CATEGORY_BY_WORK_TYPE[operation.work_type].index for operation in segment.operations]
        comm_groups = {index: item.comm_op.comm_group for index, item in enumerate(segment.operations) if item.comm_op}
        comm_category = [CATEGORY_BY_COMM_GROUP[comm_group].index for comm_group in comm_groups.values()]
        return cls(*(np.array(element, dtype=np.int64) for element in (kernel_category, [*comm_groups], comm_category)))

    def kernel_seconds(self, timing: SegmentTiming) -> FloatArray:
        """Seconds of each part in which kernels run, as they take alone: [parts]."""
        seconds: FloatArray = np.zeros(len(TIME_CATEGORIES))
        seconds += np.bincount(
            self.kernel_category, timing.kernel_seconds - timing.launch_stalls, minlength=len(TIME_CATEGORIES)
        )
        seconds[TimeCategory.LAUNCH.index] += float(timing.launch_stalls.sum())
        return seconds

    def exposed_seconds(self, timing: SegmentTiming) -> FloatArray:
        """Seconds of exposed communication, and those by which it slows kernels of its own operation: [parts]."""
        seconds: FloatArray = np.zeros(len(TIME_CATEGORIES))
        seconds += np.bincount(self.comm_category, timing.exposed_comm[self.comm_index], minlength=len(TIME_CATEGORIES))
        seconds[TimeCategory.SLOWED.index] = timing.overlap_delay.sum()
        return seconds


def compare_seconds(names: Iterable[str], seconds: FloatArray) -> list[dict[str, Any]]:
    """Seconds of parts in both, as plain data. parts: [2, names]."""
    entries = zip(names, *seconds.tolist(), strict=True)
    return [
        {"part": name, "first": first, "second": second, "delta": second - first} for name, first, second in entries
    ]
