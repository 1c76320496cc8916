"""How is a span described?

Its kind, category and name, what it computes or transfers, and its duration's provenance.

One description serves the page and all exporters, which write the attributes that their format supports. It
does not depend on when a span ran, so that all runs of a segment share it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.cost.segment import SegmentTiming
from clustersim.cost.timing import CommTiming, Provenance
from clustersim.model.kernels import Kernel, format_kernel_shape
from clustersim.parallel.mesh import COMM_GROUPS
from clustersim.program.action import Action
from clustersim.program.task import (
    CollectiveTask,
    CommOp,
    ComputeTask,
    HostOp,
    LaunchOp,
    Operation,
    ReceiveTask,
    SendTask,
    Stream,
    Task,
)
from clustersim.report.labels import PROVENANCE_LABELS
from clustersim.report.theme import AXIS_STYLES, CategoryStyle
from clustersim.scenario import Scenario

Arguments = dict[str, str | int | float]
STREAM_LABELS: Final = {
    Stream.COMPUTE: "compute",
    Stream.DP: "data parallel",
    Stream.SEND_NEXT: "send to the next stage",
    Stream.SEND_PREVIOUS: "send to the stage before",
    Stream.RECEIVE: "receive",
    Stream.D2H: "copies to the host",
    Stream.HOST: "the host's work",
    Stream.H2D: "copies from the host",
    Stream.EP: "tokens to and from experts",
    Stream.LAUNCH: "the host's launches",
    Stream.IMAGES: "images to the model",
}
_TASK_KINDS: Final = {CollectiveTask: "collective", SendTask: "send", ReceiveTask: "receive"}


@dataclass(frozen=True, slots=True, eq=False)
class SpanDescription:
    """Description of a span. Compared by identity: repeated operations share one.

    kind, name, bytes, memory_bytes, flop, shape, algorithm, bottleneck, provenance: as in the columns of
    `table.COLUMNS`, NaN or empty if not applicable; title, detail: longer texts of a task; work: work type of
    an operation.
    """

    kind: str
    category: CategoryStyle
    name: str
    title: str = ""
    detail: str = ""
    work: str = ""
    kernel: Kernel | None = None
    comm_op: CommOp | None = None
    bytes: float = np.nan
    memory_bytes: float = np.nan
    flop: float = np.nan
    algorithm: str = ""
    bottleneck: str = ""
    provenance: str = ""

    @property
    def shape(self) -> str:
        """Shape of its kernel as text; empty if unknown."""
        return "" if self.kernel is None else format_kernel_shape(self.kernel.shape)

    @property
    def arguments(self) -> Arguments:
        """Arguments of an operation inside a pass, in addition to its name."""
        arguments: Arguments = {"work": self.work} if self.work else {}
        if self.kernel is not None:
            arguments |= {"kernel": self.kernel.kind.value, "dtype": self.kernel.dtype.value}
            arguments |= {"flop": int(self.flop), "memory_bytes": int(self.memory_bytes)}
            arguments |= {"shape": self.shape} if self.shape else {}
        if self.comm_op is not None:
            arguments |= {"collective": self.comm_op.collective.value, "group": self.comm_op.comm_group}
            arguments |= {"payload_bytes": int(self.bytes)}
        return arguments | {
            "bottleneck": self.bottleneck,
            "duration_from": PROVENANCE_LABELS[Provenance(self.provenance)],
        }


def describe_operation(operation: Operation, timing: SegmentTiming, index: int, algorithm: str = "") -> SpanDescription:
    """Description of the operation at an index of its segment. algorithm: of its comm op, if it has one."""
    kernel, comm_op = operation.kernel, operation.comm_op
    standalone_op = comm_op if kernel is None else None
    return SpanDescription(
        kind="kernel" if comm_op is None else "communication" if kernel is None else "overlap",
        category=AXIS_STYLES[COMM_GROUPS[standalone_op.comm_group].accounted_axis]
        if standalone_op
        else CategoryStyle[operation.work_type.name],
        name=" + ".join(component.name for component in (kernel, comm_op) if component is not None),
        work=operation.work_type.value,
        kernel=kernel,
        comm_op=comm_op,
        bytes=np.nan if comm_op is None else float(comm_op.payload),
        memory_bytes=np.nan if kernel is None else float(kernel.bytes),
        flop=np.nan if kernel is None else float(kernel.flops),
        algorithm=algorithm,
        bottleneck=timing.bottleneck[index].value,
        provenance=timing.provenance[index].value,
    )


def describe_pass(task: ComputeTask) -> SpanDescription:
    """Description of a pass: the sums over its operations."""
    segment, kernels = (
        task.segment,
        [operation.kernel for operation in task.segment.operations if operation.kernel is not None],
    )
    return SpanDescription(
        "pass", style_of_task(task), segment.name, title=segment.name,
        bytes=float(sum(comm_op.payload for comm_op in segment.comm_ops)) or np.nan,
        memory_bytes=float(sum(kernel.bytes for kernel in kernels)),
        flop=float(sum(kernel.flops for kernel in kernels)),
    )  # fmt: skip


def describe_comm_task(task: CollectiveTask | SendTask | ReceiveTask, timing: CommTiming) -> SpanDescription:
    """Description of a collective or a message."""
    comm_op, is_host_op = task.comm_op, isinstance(task.comm_op, HostOp)
    algorithm_note = "" if is_host_op else f"{timing.algorithm} in a group that spans {timing.tier}, "
    return SpanDescription(
        _TASK_KINDS[type(task)], style_of_task(task), comm_op.name,
        title=comm_op.name + ("" if is_host_op else f" ({comm_op.collective.value} of {comm_op.comm_group})"),
        detail=f"{algorithm_note}bound by {timing.bottleneck.value}, {PROVENANCE_LABELS[timing.provenance]}",
        comm_op=comm_op, bytes=float(comm_op.payload), algorithm=timing.algorithm,
        bottleneck=timing.bottleneck.value, provenance=timing.provenance.value,
    )  # fmt: skip


def style_of_task(task: Task) -> CategoryStyle:
    """Style of a task: of a pass that is no action, by the work type of its last operation."""
    if isinstance(task, CollectiveTask) and isinstance(task.comm_op, LaunchOp):
        return CategoryStyle.LAUNCH
    if not isinstance(task, ComputeTask):
        return AXIS_STYLES[COMM_GROUPS[task.comm_op.comm_group].accounted_axis]
    if task.action is not None:
        return CategoryStyle[task.action.kind.name]
    return (
        CategoryStyle[task.segment.operations[-1].work_type.name] if task.segment.operations else CategoryStyle.COMPUTE
    )


def action_of_task(task: Task) -> Action | None:
    """The schedule action that a task belongs to, if any."""
    return task.action if isinstance(task, ComputeTask) else None if isinstance(task, CollectiveTask) else task.tag


def action_arguments(task: Task, scenario: Scenario) -> Arguments:
    """Microbatch within its step, step (from 1) if there are several, and chunk; empty for tasks without an action."""
    action = action_of_task(task)
    if action is None:
        return {}
    step, microbatch = divmod(action.microbatch, scenario.microbatch_count)
    step_argument = {"step": step + 1} if scenario.steps > 1 else {}
    return {"microbatch": microbatch, **step_argument, "chunk": scenario.placement.chunk_index(action.stage)}


def task_title(task: Task, scenario: Scenario) -> str:
    """Title of a task: its category, and its microbatch, chunk and step."""
    arguments = action_arguments(task, scenario)
    title = "receive for" if isinstance(task, ReceiveTask) else f"{style_of_task(task).label} of"
    if not arguments:
        return style_of_task(task).label
    title += f" microbatch {arguments['microbatch']}" + (f", chunk {arguments['chunk']}" if arguments["chunk"] else "")
    return title + (f", step {arguments['step']}" if "step" in arguments else "")
