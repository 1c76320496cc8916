"""How does a trace become a timeline? What each shown rank runs gets words and a colour.

A message is shown where it is sent: the receiver's row of the trace repeats it, so what waits for a message is said to
wait for what the sender waited for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.arrays import IntArray
from clustersim.cost.block import BlockTiming
from clustersim.parallel.mesh import HOST_ROLE, ROLES
from clustersim.program.action import Action, ActionKind
from clustersim.program.placement import Placement
from clustersim.program.task import Block, Compute, Exchange, HostExchange, Overlap, Receive, Send, Stream, Task, Work
from clustersim.report.rows import shown_rows
from clustersim.report.theme import AXIS_LOOKS, CATEGORIES, Category
from clustersim.report.view import Path, Row, Spans, Timeline
from clustersim.report.wording import PROVENANCE_NAMES, row_note, row_word, stage_name
from clustersim.units import format_bandwidth, format_flops, format_seconds
from clustersim.workload.kernels import Kernel

if TYPE_CHECKING:
    from clustersim.answer import Answer

LANES: Final = ("compute", "data parallel", "pipeline")
_HOST_LANES: Final = ("to the host", "host", "from the host")
_EXPERTS_LANE: Final = "experts"
_LANE_OF_STREAM: Final = {
    Stream.COMPUTE: 0,
    Stream.DATA: 1,
    Stream.SEND_NEXT: 2,
    Stream.SEND_PREVIOUS: 2,
    Stream.RECEIVE: -1,
    Stream.TO_HOST: 3,
    Stream.HOST: 4,
    Stream.FROM_HOST: 5,
}
_ACTION_LOOKS: Final[Mapping[ActionKind, Category]] = MappingProxyType(
    {
        ActionKind.FORWARD: Category.FORWARD,
        ActionKind.BACKWARD: Category.BACKWARD,
        ActionKind.INPUT_GRADIENT: Category.INPUT_GRADIENT,
        ActionKind.WEIGHT_GRADIENT: Category.WEIGHT_GRADIENT,
    }
)
WORK_LOOKS: Final[Mapping[Work, Category]] = MappingProxyType(
    {
        Work.FORWARD: Category.FORWARD,
        Work.BACKWARD: Category.BACKWARD,
        Work.RECOMPUTE: Category.RECOMPUTE,
        Work.OPTIMIZER: Category.OPTIMIZER,
    }
)
ROLE_LOOKS: Final[Mapping[str, Category]] = MappingProxyType(
    {role.name: AXIS_LOOKS[role.serves] for role in ROLES.values()}
)
_MOST_KERNELS: Final = 4
_MOST_STRAGGLERS: Final = 4


def shown_ranks(result: "Answer") -> list[int]:
    """Simulated ranks that say most: of each pipeline rank one, and stragglers, each beside one that is not.

    Of many pipeline ranks some are shown, evenly spaced. Of a pipeline rank's ranks the one is shown on which the
    critical path is longest, or that stands for most ranks. So the path can be followed, and the rows belong to one
    pipeline where every rank is simulated.
    """
    trace, kind = result.trace, result.program.kind
    stands_for = np.bincount(trace.representative, minlength=result.ranks)
    on_path = np.bincount(
        trace.rank[result.path], trace.end[result.path] - trace.start[result.path], minlength=result.ranks
    )
    order = np.lexsort((np.arange(result.ranks), -stands_for, -on_path))
    of_kind, first = np.unique(kind[order], return_index=True)
    stages = of_kind < len(result.ledgers)
    leading = order[first[stages]]
    chosen = set(leading[shown_rows(len(leading))].tolist())
    for straggler in result.stragglers.slowest[:_MOST_STRAGGLERS]:
        same = np.where(kind == straggler.kind, stands_for, -1)
        same[trace.representative[list(straggler.ranks)]] = -1
        chosen |= {int(trace.representative[straggler.ranks[0]]), int(same.argmax())}
    return sorted(chosen, key=lambda rank: (int(kind[rank]), rank))


def timeline_of(result: "Answer", ranks: Sequence[int]) -> Timeline:
    """Spans of these simulated ranks, a row for each, and the pieces of the critical path on them."""
    scenario = result.scenario
    stages = np.minimum(result.program.kind[list(ranks)], scenario.layout.pp - 1).tolist()
    stands_for = np.bincount(result.trace.representative, minlength=result.ranks)
    slow = {rank for straggler in result.stragglers.slowest for rank in straggler.ranks}
    rows = tuple(
        Row(
            stage_name(scenario, stage), f"{stage} slow" if rank in slow else str(stage), rank, int(stands_for[rank]),
            f"slow rank {rank}" if rank in slow else f"rank {rank}" if stages.count(stage) > 1 else "",
        )
        for stage, rank in zip(stages, ranks, strict=True)
    )  # fmt: skip
    return Timeline(
        rows, _lanes(result), _spans(result, ranks), _path(result, ranks), row_word(scenario), row_note(scenario),
        tuple(np.cumsum(result.step_times)[:-1].tolist()), of_rows=max(len(rows), len(result.ledgers)),
    )  # fmt: skip


def _lanes(result: "Answer") -> tuple[str, ...]:
    """Those of the host only where it does anything, that of experts only where tokens travel beside computation."""
    hosted = _HOST_LANES if HOST_ROLE.name in result.program.groups else ()
    experts = any(Stream.EXPERTS in each.streams for each in result.program.programs)
    return (*LANES, *hosted, *((_EXPERTS_LANE,) if experts else ()))


def _lane_of_stream(result: "Answer") -> IntArray:
    """The lane of every stream, -1: it has none."""
    last = {Stream.EXPERTS: len(_lanes(result)) - 1}
    return np.array([(_LANE_OF_STREAM | last)[stream] for stream in Stream])


def shown_rows_of(result: "Answer", ranks: Sequence[int]) -> IntArray:
    """Which rows of the trace are the spans of `timeline_of`, in its order."""
    row = _row_of(result, ranks, np.arange(len(result.trace)))
    return np.flatnonzero((row >= 0) & (_lane_of_stream(result)[result.trace.stream] >= 0))


def _row_of(result: "Answer", ranks: Sequence[int], rows: IntArray) -> IntArray:
    """The timeline's row of some rows of the trace, -1 if its rank is not shown."""
    table = np.full(result.ranks, -1)
    table[ranks] = np.arange(len(ranks))
    return table[result.trace.rank[rows]]


def _path(result: "Answer", ranks: Sequence[int]) -> Path:
    trace, path = result.trace, result.path
    lanes = _lane_of_stream(result)
    path = path[lanes[trace.stream[path]] >= 0]
    row = _row_of(result, ranks, path)
    shown = row >= 0
    follows = np.concatenate((shown[:1], shown[:-1]))[shown]
    lane = lanes[trace.stream[path[shown]]]
    return Path(row[shown], lane, trace.start[path[shown]], trace.end[path[shown]], follows)


def _spans(result: "Answer", ranks: Sequence[int]) -> Spans:
    trace = result.trace
    shown = shown_rows_of(result, ranks)
    row, lane = _row_of(result, ranks, shown), _lane_of_stream(result)[trace.stream[shown]]
    number = np.full(len(trace) + 1, -1)  # the last entry serves cause -1
    number[shown] = np.arange(len(shown))
    texts = _Texts({})
    columns = _task_columns(result, ranks, texts)[:, row, trace.task[shown]]
    waiting = np.where(lane == 0, trace.queued[shown], trace.ready[shown])
    return Spans(
        row=row, lane=lane, category=columns[0], microbatch=columns[1], chunk=columns[2],
        waiting=waiting, start=trace.start[shown], end=trace.end[shown], bytes=columns[3].astype(np.float64),
        name=columns[4], detail=columns[5], cause=number[_sent(result, shown)],
        waited=trace.waited[shown], slowed=trace.slowed[shown], texts=tuple(texts.numbers),
        per_step=result.scenario.microbatches if result.scenario.steps > 1 else 0,
    )  # fmt: skip


def _sent(result: "Answer", rows: IntArray) -> IntArray:
    """The cause of some rows; where that is the arrival of a message, what the message waited for."""
    trace = result.trace
    cause = trace.cause[rows]
    received = (cause >= 0) & (trace.stream[cause] == Stream.RECEIVE)
    return np.where(received, trace.cause[cause], cause)


def _task_columns(result: "Answer", ranks: Sequence[int], texts: "_Texts") -> IntArray:
    """Category, microbatch, chunk, bytes, name and detail of every task: [columns, stages, tasks]."""
    programs = [result.program.programs[int(result.program.kind[rank])] for rank in ranks]
    table = np.full((6, len(ranks), max(len(program.tasks) for program in programs)), -1)
    placement = result.scenario.placement
    for stage, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
        words = _Words(result, rank, texts, placement, {})
        for place, task in enumerate(program.tasks):
            table[:, stage, place] = words.columns(task)
    return table


@dataclass(frozen=True, slots=True)
class _Texts:
    """Numbers given to texts as they are met."""

    numbers: dict[str, int]

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers)) if text else -1


@dataclass(frozen=True, slots=True)
class _Words:
    """Words for the tasks of one rank; known: blocks and exchanges already put into words, by identity."""

    result: "Answer"
    rank: int
    texts: _Texts
    placement: Placement
    known: dict[Block | Exchange, tuple[int, int, int]]

    def columns(self, task: Task) -> tuple[int, int, int, int, int, int]:
        """Category, microbatch, chunk, bytes, name and detail."""
        match task:
            case Compute(block=block, action=action):
                look, name, detail = self._block(block)
                look = look if action is None else CATEGORIES.index(_ACTION_LOOKS[action.kind])
                return look, *self._place(action), 0, name, detail
            case Send(exchange=exchange, tag=tag) | Receive(exchange=exchange, tag=tag):
                look, name, detail = self._exchange(exchange)
                return look, *self._place(tag), int(exchange.payload), name, detail
        look, name, detail = self._exchange(task.exchange)
        return look, -1, -1, int(task.exchange.payload), name, detail

    def _place(self, action: Action | None) -> tuple[int, int]:
        """Microbatch and chunk."""
        if action is None:
            return -1, -1
        return action.microbatch, self.placement.chunk_of(action.stage)

    def _block(self, block: Block) -> tuple[int, int, int]:
        if block not in self.known:
            work = block.operations[-1].work if block.operations else Work.FORWARD
            look = CATEGORIES.index(WORK_LOOKS[work])
            self.known[block] = look, self.texts.number(block.name), self.texts.number(self._kernels(block))
        return self.known[block]

    def _exchange(self, exchange: Exchange) -> tuple[int, int, int]:
        if exchange not in self.known:
            timing = self.result.cost.exchange_timing(exchange)
            source = PROVENANCE_NAMES[timing.provenance]
            hosted = isinstance(exchange, HostExchange)
            how = "" if hosted else f"{timing.algorithm} in a group that spans {timing.tier}, "
            detail = f"{how}bound by {timing.bound.value}, {source}"
            look = CATEGORIES.index(ROLE_LOOKS[exchange.group])
            name = exchange.name + ("" if hosted else f" ({exchange.collective.value} of {exchange.group})")
            self.known[exchange] = look, self.texts.number(name), self.texts.number(detail)
        return self.known[exchange]

    def _kernels(self, block: Block) -> str:
        """The operations of a block that take longest, equal ones together: how long, bound by what, at which rate."""
        timing = self.result.cost.block(self.rank, block)
        places: dict[Kernel | Exchange | Overlap, list[int]] = {}
        for place, operation in enumerate(block.operations):
            places.setdefault(operation.does, []).append(place)
        longest = sorted(places.values(), key=lambda equal: -len(equal) * timing.durations[equal[0]])[:_MOST_KERNELS]
        return "\n".join(_line(block, timing, equal) for equal in longest)


def _line(block: Block, timing: BlockTiming, equal: Sequence[int]) -> str:
    """How often an operation runs, and each run's duration, rate and bound. equal: its places in the block."""
    operation, seconds = block.operations[equal[0]], timing.durations[equal[0]]
    kernel = operation.kernel
    count = f"{len(equal)} × " if len(equal) > 1 else ""
    name = " + ".join(each.name for each in (kernel, operation.exchange) if each is not None)
    rate = _rate(seconds, kernel.flops if kernel else 0.0, kernel.bytes if kernel else 0.0)
    return f"  {count}{name} {format_seconds(seconds)}{rate}, {timing.bound[equal[0]].value}"


def _rate(seconds: float, flops: float, moved: float) -> str:
    """The rate that says most: FLOP per second if the work is dense, else bytes per second."""
    if seconds <= 0:
        return ""
    if flops > 20 * moved:
        return f" at {format_flops(flops / seconds)}"
    return f" at {format_bandwidth(moved / seconds)}" if moved > 0 else ""
