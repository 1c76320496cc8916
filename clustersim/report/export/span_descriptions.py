"""What does a span say? Its kind, category and name, what it computes or moves, and how its duration is known.

Said once, for the page and for all that is exported: a writer says the parts that its format has a place for. Labels do
not depend on when a span ran, so that all runs of a block share them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.cost.segment import SegmentTiming
from clustersim.cost.timing import CommTiming, Provenance
from clustersim.model.kernels import AttentionShape, Kernel, KernelShape, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.parallel.mesh import COMM_GROUPS
from clustersim.program.action import Action
from clustersim.program.task import (
    CollectiveTask,
    CommOp,
    ComputeTask,
    HostOp,
    Operation,
    ReceiveTask,
    SendTask,
    Stream,
    Task,
)
from clustersim.report.labels import PROVENANCE_NAMES
from clustersim.report.theme import AXIS_LOOKS, Category
from clustersim.scenario import Scenario

Arguments = dict[str, str | int | float]
STREAM_NAMES: Final = {
    Stream.COMPUTE: "compute",
    Stream.DP: "data parallel",
    Stream.SEND_NEXT: "send to the next stage",
    Stream.SEND_PREVIOUS: "send to the stage before",
    Stream.RECEIVE: "receive",
    Stream.D2H: "copies to the host",
    Stream.HOST: "the host's work",
    Stream.H2D: "copies from the host",
    Stream.EP: "tokens to and from experts",
}
_KINDS: Final = {CollectiveTask: "collective", SendTask: "send", ReceiveTask: "receive"}


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What a span says. Compared by identity: operations that are repeated share one.

    kind, name, bytes, memory_bytes, flop, shape, algorithm, bound, provenance: as the columns of `table.COLUMNS` say,
    NaN or empty where there is no such thing; does, detail: of a task, in more words; work: what an operation is for.
    """

    kind: str
    category: Category
    name: str
    does: str = ""
    detail: str = ""
    work: str = ""
    kernel: Kernel | None = None
    exchange: CommOp | None = None
    bytes: float = np.nan
    memory_bytes: float = np.nan
    flop: float = np.nan
    algorithm: str = ""
    bound: str = ""
    provenance: str = ""

    @property
    def shape(self) -> str:
        """What its kernel computes, in the field's terms; empty where nothing says it."""
        return "" if self.kernel is None else shape_words(self.kernel.shape)

    @property
    def arguments(self) -> Arguments:
        """What an operation inside a pass says beside its name."""
        said: Arguments = {"work": self.work} if self.work else {}
        if self.kernel is not None:
            said |= {"kernel": self.kernel.kind.value, "dtype": self.kernel.dtype.value}
            said |= {"flop": int(self.flop), "memory_bytes": int(self.memory_bytes)}
            said |= {"shape": self.shape} if self.shape else {}
        if self.exchange is not None:
            said |= {"collective": self.exchange.collective.value, "group": self.exchange.comm_group}
            said |= {"payload_bytes": int(self.bytes)}
        return said | {"bound": self.bound, "duration_from": PROVENANCE_NAMES[Provenance(self.provenance)]}


def operation_label(operation: Operation, timing: SegmentTiming, place: int, algorithm: str = "") -> Label:
    """What an operation says at a place of its block. algorithm: of its exchange, if it has one."""
    kernel, exchange = operation.kernel, operation.comm_op
    alone = exchange if kernel is None else None
    return Label(
        kind="kernel" if exchange is None else "exchange" if kernel is None else "overlap",
        category=AXIS_LOOKS[COMM_GROUPS[alone.comm_group].accounted_axis] if alone else Category[operation.work_type.name],
        name=" + ".join(item.name for item in (kernel, exchange) if item is not None),
        work=operation.work_type.value, kernel=kernel, exchange=exchange,
        bytes=np.nan if exchange is None else float(exchange.payload),
        memory_bytes=np.nan if kernel is None else float(kernel.bytes),
        flop=np.nan if kernel is None else float(kernel.flops),
        algorithm=algorithm, bound=timing.bottleneck[place].value, provenance=timing.provenance[place].value,
    )  # fmt: skip


def pass_label(task: ComputeTask) -> Label:
    """What a pass says: the sums of what is in it."""
    block, kernels = (
        task.segment,
        [operation.kernel for operation in task.segment.operations if operation.kernel is not None],
    )
    return Label(
        "pass", look_of(task), block.name, does=block.name,
        bytes=float(sum(exchange.payload for exchange in block.comm_ops)) or np.nan,
        memory_bytes=float(sum(kernel.bytes for kernel in kernels)),
        flop=float(sum(kernel.flops for kernel in kernels)),
    )  # fmt: skip


def exchange_label(task: CollectiveTask | SendTask | ReceiveTask, timing: CommTiming) -> Label:
    """What a collective or a message says."""
    exchange, hosted = task.comm_op, isinstance(task.comm_op, HostOp)
    how = "" if hosted else f"{timing.algorithm} in a group that spans {timing.tier}, "
    return Label(
        _KINDS[type(task)], look_of(task), exchange.name,
        does=exchange.name + ("" if hosted else f" ({exchange.collective.value} of {exchange.comm_group})"),
        detail=f"{how}bound by {timing.bottleneck.value}, {PROVENANCE_NAMES[timing.provenance]}",
        exchange=exchange, bytes=float(exchange.payload), algorithm=timing.algorithm,
        bound=timing.bottleneck.value, provenance=timing.provenance.value,
    )  # fmt: skip


def look_of(task: Task) -> Category:
    """The category of a task: of a pass that is no action, what its last operation is for."""
    if not isinstance(task, ComputeTask):
        return AXIS_LOOKS[COMM_GROUPS[task.comm_op.comm_group].accounted_axis]
    if task.action is not None:
        return Category[task.action.kind.name]
    return Category[task.segment.operations[-1].work_type.name] if task.segment.operations else Category.COMPUTE


def action_of(task: Task) -> Action | None:
    """The action that a task belongs to, if any."""
    return task.action if isinstance(task, ComputeTask) else None if isinstance(task, CollectiveTask) else task.tag


def place_of(task: Task, scenario: Scenario) -> Arguments:
    """Microbatch of its step, the step (from 1) where there are several, and chunk; empty for what belongs to none."""
    action = action_of(task)
    if action is None:
        return {}
    step, microbatch = divmod(action.microbatch, scenario.microbatch_count)
    several = {"step": step + 1} if scenario.steps > 1 else {}
    return {"microbatch": microbatch, **several, "chunk": scenario.placement.chunk_index(action.stage)}


def task_words(task: Task, scenario: Scenario) -> str:
    """What a task is called: its category, and for which microbatch, chunk and step it is."""
    place = place_of(task, scenario)
    words = "receive for" if isinstance(task, ReceiveTask) else f"{look_of(task).label} of"
    if not place:
        return look_of(task).label
    words += f" microbatch {place['microbatch']}" + (f", chunk {place['chunk']}" if place["chunk"] else "")
    return words + (f", step {place['step']}" if "step" in place else "")


def shape_words(shape: KernelShape | None) -> str:
    """What a kernel computes, in the field's terms; empty where nothing says it."""
    match shape:
        case MatmulShape(m, n, k, batch, operands, accumulated):
            more = f", batch {batch}" if batch > 1 else ""
            return f"{operands.value} m {m}, n {n}, k {k}{more}{', accumulated' if accumulated else ''}"
        case AttentionShape():
            return (
                f"batch {shape.batch}, queries {shape.query}, keys {shape.key}, heads {shape.heads}, "
                f"kv heads {shape.kv_heads}, head dim {shape.head_dim}{', causal' if shape.causal else ''}"
                f"{'' if shape.window is None else f', window {shape.window}'}"
            )
        case MemoryBoundShape(routine, rows, width, backward, fused):
            copies = " and ".join(dtype.value for dtype in shape.formats) if routine is MemoryBoundOp.QUANTIZE else ""
            how = f"{', backward' * backward}{'' if fused else ', unfused'}{f', into {copies}' if copies else ''}"
            return f"{routine.value} {f'{rows} x ' if rows > 1 else ''}{width}{how}"
    return ""
