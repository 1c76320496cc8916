"""Which calls of a profiled step copied parameters and gradients for FSDP2's collectives?

FSDP2 copies shards into the buffer of an all-gather, gathered parameters out of it, and gradients into that of a
reduce-scatter. As many bytes move whatever a microbatch has of tokens, so these calls belong to the plan's copies of
parameters. The operators that launch them say of how many elements their unit is: a copy in the plan has the calls of
the units that are nearest in size, equal ones in order. On a GPU those in and of gradients run on other streams, on a
CPU on the thread that computes.
"""

import math
from collections.abc import Sequence

from calibrate.profile.anchors import Share
from calibrate.profile.plan_kernels import PlanKernel
from calibrate.profile.step_calls import Call
from clustersim.lowering.fsdp import COPY_OUT_PREFIX
from clustersim.model.kernels import MemoryBoundShape


def is_transfer(kernel: PlanKernel) -> bool:
    """Whether it copies a unit's parameters."""
    return kernel.kernel.name.startswith(COPY_OUT_PREFIX)


def match_transfers(kernels: Sequence[PlanKernel], calls: Sequence[Call]) -> list[Share]:
    """Match the copies of FSDP2 with the plan's; none where the plan has no such copies."""
    by_elements: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        shape = kernel.kernel.shape
        if is_transfer(kernel) and isinstance(shape, MemoryBoundShape):
            by_elements.setdefault(shape.elements, []).append(index)
    if not by_elements:
        return []
    members: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        if call.transfer:
            nearest = min(by_elements, key=lambda elements: abs(math.log(elements / call.transfer)))
            members.setdefault(nearest, []).append(index)
    return [
        (index, by_elements[elements][number * len(by_elements[elements]) // len(group)], 1.0)
        for elements, group in members.items()
        for number, index in enumerate(group)
    ]
