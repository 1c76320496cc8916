"""Time categories: the classification of a rank's time.

Kernels are classified by work type; waiting for the host to launch kernels is a category of its own;
communication is classified by the mesh axis that it is accounted to; waiting for host copies and for host
computation is *exposed host*. Reductions over all ranks of a replica, over the world and of tied embeddings
complete the gradients, so they count as data parallel.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.segment import SegmentTiming
from clustersim.parallel.mesh import COMM_AXES, COMM_GROUPS, LAUNCH_GROUP, PIPELINE, Axis
from clustersim.program.task import Segment, WorkType


class TimeCategory(Enum):
    """Categories of a time breakdown, in display order."""

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
        """Its column in arrays [.., categories]."""
        return CATEGORY_INDEX[self]


TIME_CATEGORIES: Final = tuple(TimeCategory)
CATEGORY_INDEX: Final[Mapping[TimeCategory, int]] = MappingProxyType(
    {category: index for index, category in enumerate(TIME_CATEGORIES)}
)
KERNEL_CATEGORIES: Final = (TimeCategory.COMPUTE, TimeCategory.RECOMPUTE, TimeCategory.OPTIMIZER)
EXPOSED_CATEGORIES: Final[Mapping[Axis, TimeCategory]] = MappingProxyType(
    {axis: TimeCategory(f"exposed {axis.name}") for axis in COMM_AXES}
)
"""Exposed communication by axis, in the usual order of axes; the host last."""
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
    {comm_group.name: EXPOSED_CATEGORIES[comm_group.accounted_axis] for comm_group in COMM_GROUPS.values()}
    | {LAUNCH_GROUP.name: TimeCategory.LAUNCH}
)

PIPELINE_GROUPS: Final = frozenset(
    comm_group.name for comm_group in COMM_GROUPS.values() if comm_group.accounted_axis is PIPELINE
)
STAGE_CROSSING_GROUPS: Final = frozenset(
    comm_group.name for comm_group in COMM_GROUPS.values() if comm_group.crosses_stages
)
"""Process groups with members on several pipeline stages: waiting for them is waiting for the pipeline."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCategories:
    """Time categories of a segment's operations, independent of their durations.

    kernel_category: [operations] category index of each operation's kernel; comm_index: [comm ops] index of the
    operations with communication; comm_category: [comm ops] category index of the communication.
    """

    kernel_category: IntArray
    comm_index: IntArray
    comm_category: IntArray

    @classmethod
    def from_segment(cls, segment: Segment) -> Self:
        """Categories of a segment."""
        kernel_category = [CATEGORY_BY_WORK_TYPE[operation.work_type].index for operation in segment.operations]
        comm_groups = {
            index: operation.comm_op.comm_group
            for index, operation in enumerate(segment.operations)
            if operation.comm_op
        }
        comm_category = [CATEGORY_BY_COMM_GROUP[comm_group].index for comm_group in comm_groups.values()]
        return cls(*(np.array(values, dtype=np.int64) for values in (kernel_category, [*comm_groups], comm_category)))

    def kernel_seconds(self, timing: SegmentTiming) -> FloatArray:
        """Seconds of kernels by category, without slowdown by communication: [categories]."""
        seconds: FloatArray = np.zeros(len(TIME_CATEGORIES))
        seconds += np.bincount(
            self.kernel_category, timing.kernel_seconds - timing.launch_stalls, minlength=len(TIME_CATEGORIES)
        )
        seconds[TimeCategory.LAUNCH.index] += float(timing.launch_stalls.sum())
        return seconds

    def exposed_seconds(self, timing: SegmentTiming) -> FloatArray:
        """Seconds of exposed communication, and of the slowdown of the kernels overlapped with it: [categories]."""
        seconds: FloatArray = np.zeros(len(TIME_CATEGORIES))
        seconds += np.bincount(self.comm_category, timing.exposed_comm[self.comm_index], minlength=len(TIME_CATEGORIES))
        seconds[TimeCategory.SLOWED.index] = timing.overlap_delay.sum()
        return seconds


def compare_seconds(names: Iterable[str], seconds: FloatArray) -> list[dict[str, Any]]:
    """Seconds by name in two steps, as plain data. seconds: [2, names]."""
    entries = zip(names, *seconds.tolist(), strict=True)
    return [
        {"category": name, "first": first, "second": second, "delta": second - first} for name, first, second in entries
    ]
