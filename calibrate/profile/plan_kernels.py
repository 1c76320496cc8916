"""Which kernels does one rank of a plan run in a step, in order, and pass by pass?"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from clustersim.build import PreparedSimulation
from clustersim.common.units import Seconds
from clustersim.cost.timing import KernelCost
from clustersim.model.kernels import TENSOR_CORE_KINDS, Kernel
from clustersim.program.action import Action, ActionKind
from clustersim.program.task import CommOverlap, ComputeTask, Operation, WorkType


class PassKind(Enum):
    """What a run of kernels belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"  # and everything else outside passes


@dataclass(frozen=True, slots=True)
class PlanKernel:
    """A kernel of the plan, where it runs. role: name of its operator, equal in forward and backward.

    repeats: how often it runs in a row (chunks of an overlap); modelled: seconds of one by the accelerator's model;
    occurrence: number among equal names of its pass; from_end: the same counted backwards.
    """

    kernel: Kernel
    role: str
    work: WorkType
    modelled: Seconds
    repeats: int = 1
    occurrence: int = 0
    from_end: int = 0

    @property
    def is_tensor_kernel(self) -> bool:
        """Whether it is a matmul or attention."""
        return self.kernel.kind in TENSOR_CORE_KINDS

    @property
    def seconds(self) -> Seconds:
        """Modelled seconds of all repeats."""
        return self.modelled * self.repeats


@dataclass(frozen=True, slots=True)
class PlanPass:
    """Kernels between two passes. kind: of the pass; kernels: in order."""

    kind: PassKind
    kernels: tuple[PlanKernel, ...] = field(default=())


def plan_passes(prepared: PreparedSimulation, rank: int) -> tuple[PlanPass, ...]:
    """The passes of a rank's compute stream, in order; tasks of one action, or of none, are one."""
    program = prepared.program
    tasks = [task for task in program.programs[int(program.program_index[rank])].tasks if isinstance(task, ComputeTask)]
    devices = prepared.cost.device_models
    model = devices.models[int(devices.index_of_rank[rank])].kernels
    forward_names = {
        operation.kernel.name
        for task in tasks
        for operation in task.segment.operations
        if operation.kernel is not None and operation.work_type is WorkType.FORWARD
    }
    passes = []
    for action, run in groupby(tasks, key=lambda task: task.action):
        kernels = [
            _plan_kernel(operation, operation.kernel, forward_names, model)
            for task in run
            for operation in task.segment.operations
            if operation.kernel is not None
        ]
        passes.append(PlanPass(_pass_kind(action), tuple(_numbered(kernels))))
    return tuple(passes)


def _plan_kernel(operation: Operation, kernel: Kernel, forward_names: Set[str], model: KernelCost) -> PlanKernel:
    body, role, repeats = operation.body, _role(kernel.name, forward_names), 1
    if isinstance(body, CommOverlap) and not math.isinf(body.chunk_count):
        kernel, repeats = kernel.split_into(int(body.chunk_count)), int(body.chunk_count)
    return PlanKernel(kernel, role, operation.work_type, model.time_kernel(kernel).seconds, repeats)


def _role(name: str, forward_names: Set[str]) -> str:
    """The operator's name: that of its forward kernel, of which the names of its backward kernels are continuations."""
    segments = name.split(".")
    candidates = (".".join(segments[:count]) for count in range(len(segments), 0, -1))
    return next((candidate for candidate in candidates if candidate in forward_names), name)


def _numbered(kernels: Sequence[PlanKernel]) -> Iterable[PlanKernel]:
    """The kernels with their occurrences."""
    totals: dict[str, int] = {}
    for kernel in kernels:
        totals[kernel.kernel.name] = totals.get(kernel.kernel.name, 0) + 1
    seen: dict[str, int] = {}
    for kernel in kernels:
        name = kernel.kernel.name
        occurrence = seen[name] = seen.get(name, -1) + 1
        yield PlanKernel(
            kernel.kernel, kernel.role, kernel.work, kernel.modelled, kernel.repeats, occurrence,
            totals[name] - 1 - occurrence,
        )  # fmt: skip


def _pass_kind(action: Action | None) -> PassKind:
    if action is None:
        return PassKind.OPTIMIZER
    return PassKind.FORWARD if action.kind is ActionKind.FORWARD else PassKind.BACKWARD
