"""What is the flat table of all spans? One row for each pass, each operation inside one, each collective and message.

For those who would rather ask a data frame than look at a picture. `COLUMNS` says what each column holds. A row is
named by its rank, its task (the place in the rank's program) and its operation (the place in the pass, empty for the
task itself); the cause of a span is named in the same way. Where the cause ran on a rank of another class, that rank is
the simulated one which stands for it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.arrays import IntArray
from clustersim.cost.block import BlockTiming
from clustersim.parallel.mesh import AXES, PIPELINE
from clustersim.program.task import Block, Communicate, Compute, Exchange, Operation, Receive, Send, Stream, Task
from clustersim.report.answer_timeline import ROLE_LOOKS, WORK_LOOKS
from clustersim.report.operations import shape_words
from clustersim.report.slices import STREAM_NAMES
from clustersim.report.theme import Category
from clustersim.report.trace_ranks import TraceRank

if TYPE_CHECKING:
    from clustersim.answer import Answer

Values = NDArray[Any]
Columns = dict[str, Values]
INTEGER, NUMBER, WORD = "integer", "number", "word"
COLUMNS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "rank": (INTEGER, "global rank"),
        "simulated_rank": (INTEGER, "the rank that was simulated for it: itself, or one with provably equal times"),
        "stage": (INTEGER, "pipeline rank"),
        **{axis.name: (INTEGER, f"coordinate on the {axis.label} axis, if the layout has it") for axis in AXES},
        "stream": (WORD, "which of the rank's streams"),
        "kind": (WORD, "pass, kernel, exchange, overlap (a kernel and an exchange), collective, send or receive"),
        "category": (WORD, "what the page calls and colours it"),
        "name": (WORD, "what it is called"),
        "step": (INTEGER, "the step it belongs to, from 0"),
        "task": (INTEGER, "place in the rank's program"),
        "operation": (INTEGER, "place in the pass; empty for the task itself"),
        "microbatch": (INTEGER, "through all steps, from 0"),
        "chunk": (INTEGER, "model chunk of the stage, from 0"),
        "queued": (NUMBER, "seconds: the stream turned to it"),
        "ready": (NUMBER, "seconds: all that it waits for on its own rank had ended"),
        "start": (NUMBER, "seconds"),
        "end": (NUMBER, "seconds"),
        "waited": (NUMBER, "seconds inside a pass in which it waited for other ranks"),
        "slowed": (NUMBER, "seconds by which communication beside it made its kernels longer"),
        "contended": (NUMBER, "seconds by which sharing links made its exchanges longer"),
        "bytes": (NUMBER, "payload of communication, as nccl-tests count it"),
        "memory_bytes": (NUMBER, "read and written in device memory by kernels"),
        "flop": (NUMBER, "FLOP of kernels, as executed"),
        "shape": (WORD, "what a kernel computes"),
        "algorithm": (WORD, "of communication"),
        "bound": (WORD, "what limits it"),
        "provenance": (WORD, "where its duration comes from"),
        "cause_rank": (INTEGER, "rank of the span whose end allowed the start"),
        "cause_task": (INTEGER, "task of the span whose end allowed the start"),
    }
)
_NOWHERE: Final = -1
_KEPT: Final = 8  # simulated ranks whose rows are kept: ranks of several classes come in turn


def rows_of(result: "Answer", ranks: Sequence[TraceRank]) -> Iterator[Columns]:
    """All rows of each rank by start; integers below 0, numbers that are NaN and empty words stand for nothing."""
    tables: dict[int, Columns] = {}
    for rank in ranks:
        if rank.simulated not in tables:
            if len(tables) >= _KEPT:
                tables.clear()
            tables[rank.simulated] = _Table(result, rank.simulated).columns()
        yield _placed(rank, tables[rank.simulated])


def _placed(rank: TraceRank, table: Columns) -> Columns:
    """The rows of a simulated rank as those of a rank that it stands for."""
    count = len(table["task"])
    place = rank.coordinates
    own = {"rank": rank.rank, "simulated_rank": rank.simulated, "stage": place[PIPELINE.name]}
    own |= {axis.name: place.get(axis.name, _NOWHERE) for axis in AXES}
    found = {name: np.full(count, number) for name, number in own.items()} | table
    cause = found["cause_rank"]
    found["cause_rank"] = np.where(cause == rank.simulated, rank.rank, cause)
    return {name: found[name] for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class _Fact:
    """What rows say that does not depend on when and where they are."""

    kind: str
    category: str
    name: str
    bytes: float = np.nan
    memory_bytes: float = np.nan
    flop: float = np.nan
    shape: str = ""
    algorithm: str = ""
    bound: str = ""
    provenance: str = ""


@dataclass(slots=True)
class _Facts:
    """Facts by number, each once."""

    numbers: dict[_Fact, int] = field(default_factory=dict)

    def number(self, fact: _Fact) -> int:
        return self.numbers.setdefault(fact, len(self.numbers))

    def columns(self, which: IntArray) -> Columns:
        names = _Fact.__slots__
        return {name: _array(getattr(fact, name) for fact in self.numbers)[which] for name in names}


class _Table:
    """The rows of one simulated rank."""

    def __init__(self, result: "Answer", rank: int) -> None:
        self.result, self.rank = result, rank
        self.program = result.program.programs[int(result.program.kind[rank])]
        self._facts = _Facts()
        self._blocks: dict[Block, IntArray] = {}

    def columns(self) -> Columns:
        """Tasks and their operations together, by start."""
        tasks, operations = self._tasks(), self._operations()
        both = {name: np.concatenate((tasks[name], operations[name])) for name in tasks}
        order = np.lexsort((both["operation"], both["task"], both["start"]))
        columns = {name: values[order] for name, values in both.items()}
        columns |= self._facts.columns(columns.pop("fact")) | self._of_task(columns["task"])
        columns["stream"] = _array(STREAM_NAMES[stream] for stream in Stream)[columns["stream"]]
        return columns

    def _tasks(self) -> Columns:
        trace = self.result.trace
        rows = trace.rows(self.rank)
        task, cause = trace.task[rows], trace.cause[rows]
        facts = np.array([self._task(each) for each in self.program.tasks])
        times = {name: getattr(trace, name)[rows] for name in _TIMES}
        return times | {
            "task": task, "operation": np.full(len(rows), -1), "stream": trace.stream[rows], "fact": facts[task],
            "cause_rank": np.where(cause >= 0, trace.rank[cause], -1),
            "cause_task": np.where(cause >= 0, trace.task[cause], -1),
        }  # fmt: skip

    def _operations(self) -> Columns:
        found = self.result.operations(self.rank)
        order = np.lexsort((found.operation, found.task))
        blocks = [self._block(task.block) for task in self.program.tasks if isinstance(task, Compute)]
        nothing = np.full(len(found), -1)
        columns: Columns = {name: np.full(len(found), np.nan) for name in _TIMES}
        return columns | {
            "start": found.start[order], "end": found.end[order], "task": found.task[order],
            "operation": found.operation[order], "stream": np.full(len(found), int(Stream.COMPUTE)),
            "fact": np.concatenate([np.zeros(0, dtype=np.int64), *blocks]), "cause_rank": nothing,
            "cause_task": nothing,
        }  # fmt: skip

    def _of_task(self, task: IntArray) -> Columns:
        """What tasks share with the operations in them."""
        tags = [_tag(each) for each in self.program.tasks]
        placement = self.result.scenario.placement
        chunks = [placement.chunk_of(stage) for stage in range(len(placement.ranks))]
        microbatch = np.array([-1 if tag is None else tag.microbatch for tag in tags])
        chunk = np.array([-1 if tag is None else chunks[tag.stage] for tag in tags])
        step = self.program.step_of(self.result.scenario.steps)
        return {"microbatch": microbatch[task], "chunk": chunk[task], "step": step[task]}

    def _task(self, task: Task) -> int:
        if isinstance(task, Compute):
            return self._facts.number(self._pass(task))
        kind = {Communicate: "collective", Send: "send", Receive: "receive"}[type(task)]
        return self._facts.number(self._exchange(kind, task.exchange))

    def _pass(self, task: Compute) -> _Fact:
        operations = task.block.operations
        kernels = [operation.kernel for operation in operations if operation.kernel is not None]
        look = _look(task).label
        flop, moved = sum(kernel.flops for kernel in kernels), sum(kernel.bytes for kernel in kernels)
        payload = float(sum(exchange.payload for exchange in task.block.exchanges))
        return _Fact("pass", look, task.block.name, payload or np.nan, float(moved), float(flop))

    def _exchange(self, kind: str, exchange: Exchange) -> _Fact:
        timing = self.result.cost.exchange_timing(exchange)
        return _Fact(
            kind, ROLE_LOOKS[exchange.group].label, exchange.name, float(exchange.payload),
            algorithm=timing.algorithm, bound=timing.bound.value, provenance=timing.provenance.value,
        )  # fmt: skip

    def _block(self, block: Block) -> IntArray:
        """The facts of a block's operations."""
        if block not in self._blocks:
            timing = self.result.cost.block(self.rank, block)
            facts = [self._operation(operation, timing, place) for place, operation in enumerate(block.operations)]
            self._blocks[block] = np.array([self._facts.number(fact) for fact in facts], dtype=np.int64)
        return self._blocks[block]

    def _operation(self, operation: Operation, timing: BlockTiming, place: int) -> _Fact:
        kernel, exchange = operation.kernel, operation.exchange
        looks = WORK_LOOKS[operation.work]
        if exchange is not None and kernel is None:
            looks = ROLE_LOOKS[exchange.group]
        return _Fact(
            kind="kernel" if exchange is None else "exchange" if kernel is None else "overlap",
            category=looks.label,
            name=" + ".join(each.name for each in (kernel, exchange) if each is not None),
            bytes=np.nan if exchange is None else float(exchange.payload),
            memory_bytes=np.nan if kernel is None else float(kernel.bytes),
            flop=np.nan if kernel is None else float(kernel.flops),
            shape="" if kernel is None else shape_words(kernel.shape),
            algorithm="" if exchange is None else self.result.cost.exchange_timing(exchange).algorithm,
            bound=timing.bound[place].value,
            provenance=timing.provenance[place].value,
        )


_TIMES: Final = ("queued", "ready", "start", "end", "waited", "slowed", "contended")


def _look(task: Compute) -> Category:
    """As the page colours passes; categories of actions have their names."""
    if task.action is not None:
        return Category[task.action.kind.name]
    return WORK_LOOKS[task.block.operations[-1].work] if task.block.operations else Category.COMPUTE


def _tag(task: Task) -> Any:
    """The action that a task belongs to, if any."""
    return task.action if isinstance(task, Compute) else None if isinstance(task, Communicate) else task.tag


def _array(values: Iterable[object]) -> Values:
    """Numbers as numbers, words as objects."""
    found = list(values)
    return np.array(found, dtype=object if found and isinstance(found[0], str) else np.float64)
