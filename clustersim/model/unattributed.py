"""What does a profiled step do besides its model? Work of no operator, as kernels whose times only a record knows.

A framework builds masks and position tables, waits for a scalar, logs. A record that was made of a profiled step
(`cost.calibration_record.ProfileAnchor`) has the seconds of all that once for each forward pass of a microbatch and
once for each step, as samples of the two kernels below; programs run them where a record has them. They compute and
move nothing that a model could scale, so that every layout has them as they were measured.
"""

from dataclasses import dataclass
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape


def _kernel(name: str, routine: MemoryBoundOp) -> Kernel:
    return Kernel(name, KernelKind.COPY, DType.BF16, 0.0, 0.0, MemoryBoundShape(routine, 1, 1))


PASS_OVERHEAD: Final = _kernel("unattributed.pass", MemoryBoundOp.PASS_OVERHEAD)
"""What is done once for each forward pass of a microbatch."""
STEP_OVERHEAD: Final = _kernel("unattributed.step", MemoryBoundOp.STEP_OVERHEAD)
"""What is done once for each step."""


@dataclass(frozen=True, slots=True)
class UnattributedWork:
    """Which of both a program runs."""

    in_passes: bool = False
    in_steps: bool = False


NO_UNATTRIBUTED_WORK: Final = UnattributedWork()
