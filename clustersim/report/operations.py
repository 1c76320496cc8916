"""What runs inside a pass? Its kernels and exchanges, with what each does and how its duration is known.

When each operation ran is worked out for one rank at a time; what it says is the same in every run of its block.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.cost.block import BlockTiming
from clustersim.program.task import Block, Compute, Exchange, Operation
from clustersim.report.answer_timeline import ROLE_LOOKS, WORK_LOOKS
from clustersim.report.theme import Category
from clustersim.report.wording import PROVENANCE_NAMES
from clustersim.trace.store import OperationSpans
from clustersim.workload.kernels import AttentionShape, Kernel, MatmulShape, Routine, Shape, StreamShape

if TYPE_CHECKING:
    from clustersim.answer import Answer


Arguments = dict[str, str | int | float]
_KEPT: Final = 8  # ranks whose times are kept: ranks of several classes may come in turn


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What a slice says. Compared by identity: operations that are repeated share one."""

    name: str
    category: Category
    arguments: Arguments


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """What runs in a slice, in order. start, end: [labels] seconds; exposed, moved: as in `OperationSpans`."""

    start: FloatArray
    end: FloatArray
    exposed: FloatArray
    moved: FloatArray
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Operations:
    """What runs inside the spans of a timeline. rows: the trace's row of each span; labels: of blocks already met."""

    result: "Answer"
    rows: IntArray
    labels: dict[tuple[int, Block], tuple[Label, ...]] = field(default_factory=dict)
    times: dict[int, "_Times"] = field(default_factory=dict)

    def __call__(self, span: int) -> Inside | None:
        """The operations of a pass; none for communication, and for one that only waits."""
        row, trace, program = self.rows[span], self.result.trace, self.result.program
        rank, number = int(trace.rank[row]), int(trace.task[row])
        task = program.programs[int(program.kind[rank])].tasks[number]
        if not isinstance(task, Compute) or not task.block.operations:
            return None
        if rank not in self.times:
            if len(self.times) >= _KEPT:
                self.times.clear()
            self.times[rank] = _Times.of(self.result.operations(rank))
        key = (rank, task.block)
        if key not in self.labels:
            self.labels[key] = labels_of(task.block, self.result.cost.block(rank, task.block))
        start, end, exposed, moved = self.times[rank].task(number)
        return Inside(start, end, exposed, moved, self.labels[key])


@dataclass(frozen=True, slots=True)
class _Times:
    """When the operations of a rank ran, in order of their tasks; first: where those of each task begin.

    times: start, end, exposed, moved of each operation.
    """

    times: FloatArray
    first: IntArray

    @classmethod
    def of(cls, operations: OperationSpans) -> Self:
        order = np.lexsort((operations.operation, operations.task))
        task = operations.task[order]
        first = np.searchsorted(task, np.arange(int(task.max(initial=-1)) + 2))
        return cls(np.stack(operations.columns[3:])[:, order], first)

    def task(self, number: int) -> FloatArray:
        """Times of the operations of a task: [4, operations]."""
        return self.times[:, int(self.first[number]) : int(self.first[number + 1])]


def labels_of(block: Block, timing: BlockTiming) -> tuple[Label, ...]:
    """What the operations of a block say; equal ones share a label."""
    labels: dict[Operation, Label] = {}
    for place, operation in enumerate(block.operations):
        if operation not in labels:
            labels[operation] = _label(operation, timing, place)
    return tuple(labels[operation] for operation in block.operations)


def _label(operation: Operation, timing: BlockTiming, place: int) -> Label:
    kernel, exchange = operation.kernel, operation.exchange
    arguments: Arguments = {"work": operation.work.value}
    arguments |= _kernel(kernel) if kernel else {}
    arguments |= _exchange(exchange) if exchange else {}
    arguments["bound"] = timing.bound[place].value
    arguments["duration_from"] = PROVENANCE_NAMES[timing.provenance[place]]
    alone = exchange if kernel is None else None
    look = ROLE_LOOKS[alone.group] if alone else WORK_LOOKS[operation.work]
    return Label(" + ".join(each.name for each in (kernel, exchange) if each), look, arguments)


def _kernel(kernel: Kernel) -> Arguments:
    arguments: Arguments = {"kernel": kernel.kind.value, "dtype": kernel.dtype.value}
    arguments |= {"flop": int(kernel.flops), "memory_bytes": int(kernel.bytes)}
    words = shape_words(kernel.shape)
    return arguments | ({"shape": words} if words else {})


def shape_words(shape: Shape | None) -> str:
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
        case StreamShape(routine, rows, width, backward, fused):
            how = f"{', backward' if backward else ''}{'' if fused else ', unfused'}{_written(shape)}"
            return f"{routine.value} {rows} x {width}{how}" if rows > 1 else f"{routine.value} {width}{how}"
    return ""


def _written(shape: StreamShape) -> str:
    """The formats of the copies that a cast writes."""
    if shape.routine is not Routine.QUANTIZE:
        return ""
    return f", into {' and '.join(dtype.value for dtype in shape.formats)}"


def _exchange(exchange: Exchange) -> Arguments:
    return {
        "collective": exchange.collective.value,
        "group": exchange.group,
        "payload_bytes": int(exchange.payload),
    }
