"""What runs inside a pass? Its kernels and exchanges, with what each does and how its duration is known.

Operations of a block run back to back, so a block's slices are one list that every pass through it shares.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clustersim.analysis.parts import PART_OF_ROLE
from clustersim.cost.block import BlockTiming
from clustersim.program.task import Block, Compute, Exchange, Operation
from clustersim.report.answer_timeline import EXCHANGE_LOOKS, WORK_LOOKS
from clustersim.report.slices import Arguments, Inside, Label
from clustersim.report.view import IntArray
from clustersim.report.wording import PROVENANCE_NAMES
from clustersim.workload.kernels import AttentionShape, Kernel, MatmulShape

if TYPE_CHECKING:
    from clustersim.result import Result


@dataclass(frozen=True, slots=True)
class Operations:
    """What runs inside the spans of a timeline. rows: the trace's row of each span; known: blocks already labelled."""

    result: "Result"
    rows: IntArray
    known: dict[tuple[int, Block], Inside] = field(default_factory=dict)

    def __call__(self, span: int) -> Inside | None:
        """The operations of a pass; none for communication."""
        row, trace, program = self.rows[span], self.result.trace, self.result.program
        rank = int(trace.rank[row])
        task = program.programs[int(program.kind[rank])].tasks[int(trace.task[row])]
        if not isinstance(task, Compute):
            return None
        key = (rank, task.block)
        if key not in self.known:
            self.known[key] = inside(task.block, self.result.cost.block(rank, task.block))
        return self.known[key]


def inside(block: Block, timing: BlockTiming) -> Inside:
    """The operations of a block; equal ones share a label."""
    labels: dict[Operation, Label] = {}
    for place, operation in enumerate(block.operations):
        if operation not in labels:
            labels[operation] = _label(operation, timing, place)
    return Inside(timing.offsets, tuple(labels[operation] for operation in block.operations))


def _label(operation: Operation, timing: BlockTiming, place: int) -> Label:
    kernel, exchange = operation.kernel, operation.exchange
    arguments: Arguments = {"work": operation.work.value}
    arguments |= _kernel(kernel) if kernel else {}
    arguments |= _exchange(exchange) if exchange else {}
    arguments["bound"] = timing.bound[place].value
    arguments["duration_from"] = PROVENANCE_NAMES[timing.provenance[place]]
    alone = exchange if kernel is None else None
    look = EXCHANGE_LOOKS[PART_OF_ROLE[alone.group]] if alone else WORK_LOOKS[operation.work]
    return Label(" + ".join(each.name for each in (kernel, exchange) if each), look, arguments)


def _kernel(kernel: Kernel) -> Arguments:
    arguments: Arguments = {"kernel": kernel.kind.value, "dtype": kernel.dtype.value}
    arguments |= {"flop": int(kernel.flops), "memory_bytes": int(kernel.bytes)}
    match kernel.shape:
        case MatmulShape(m, n, k, batch):
            arguments["shape"] = f"m {m}, n {n}, k {k}" + (f", batch {batch}" if batch > 1 else "")
        case AttentionShape() as shape:
            arguments["shape"] = (
                f"batch {shape.batch}, queries {shape.query}, keys {shape.key}, heads {shape.heads}, "
                f"kv heads {shape.kv_heads}, head dim {shape.head_dim}" + (", causal" if shape.causal else "")
            )
    return arguments


def _exchange(exchange: Exchange) -> Arguments:
    return {
        "collective": exchange.collective.value,
        "group": exchange.group,
        "payload_bytes": int(exchange.payload),
    }
