"""How does a trace become a timeline? What each shown rank runs gets words and a colour.

A message is shown where it is sent: the receiver's row of the trace repeats it, so what waits for a message is said to
wait for what the sender waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.answer import Answer
from clustersim.arrays import IntArray
from clustersim.cost.block import BlockTiming
from clustersim.parallel.mesh import HOST_ROLE
from clustersim.program.action import Action
from clustersim.program.placement import Placement
from clustersim.program.task import Block, Communicate, Compute, Exchange, Overlap, Receive, Send, Stream, Task
from clustersim.report.export.spans import sent_cause
from clustersim.report.export.words import action_of, exchange_label, look_of
from clustersim.report.theme import CATEGORIES
from clustersim.report.view import Path, Row, Spans, Timeline
from clustersim.report.wording import row_note, row_word, stage_name
from clustersim.units import format_bandwidth, format_flops, format_seconds
from clustersim.workload.kernels import Kernel

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
_MOST_KERNELS: Final = 4


def timeline_of(result: Answer, ranks: Sequence[int]) -> Timeline:
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


def _lanes(result: Answer) -> tuple[str, ...]:
    """Those of the host only where it does anything, that of experts only where tokens travel beside computation."""
    hosted = _HOST_LANES if HOST_ROLE.name in result.program.groups else ()
    experts = any(Stream.EXPERTS in each.streams for each in result.program.programs)
    return (*LANES, *hosted, *((_EXPERTS_LANE,) if experts else ()))


def _lane_of_stream(result: Answer) -> IntArray:
    """The lane of every stream, -1: it has none."""
    last = {Stream.EXPERTS: len(_lanes(result)) - 1}
    return np.array([(_LANE_OF_STREAM | last)[stream] for stream in Stream])


def shown_rows_of(result: Answer, ranks: Sequence[int]) -> IntArray:
    """Which rows of the trace are the spans of `timeline_of`, in its order."""
    row = _row_of(result, ranks, np.arange(len(result.trace)))
    return np.flatnonzero((row >= 0) & (_lane_of_stream(result)[result.trace.stream] >= 0))


def _row_of(result: Answer, ranks: Sequence[int], rows: IntArray) -> IntArray:
    """The timeline's row of some rows of the trace, -1 if its rank is not shown."""
    table = np.full(result.ranks, -1)
    table[ranks] = np.arange(len(ranks))
    return table[result.trace.rank[rows]]


def _path(result: Answer, ranks: Sequence[int]) -> Path:
    trace, path = result.trace, result.path
    lanes = _lane_of_stream(result)
    path = path[lanes[trace.stream[path]] >= 0]
    row = _row_of(result, ranks, path)
    shown = row >= 0
    follows = np.concatenate((shown[:1], shown[:-1]))[shown]
    lane = lanes[trace.stream[path[shown]]]
    return Path(row[shown], lane, trace.start[path[shown]], trace.end[path[shown]], follows)


def _spans(result: Answer, ranks: Sequence[int]) -> Spans:
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
        name=columns[4], detail=columns[5], cause=number[sent_cause(trace, shown)],
        waited=trace.waited[shown], slowed=trace.slowed[shown], texts=tuple(texts.numbers),
        per_step=result.scenario.microbatches if result.scenario.steps > 1 else 0,
    )  # fmt: skip


def _task_columns(result: Answer, ranks: Sequence[int], texts: "_Texts") -> IntArray:
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

    result: Answer
    rank: int
    texts: _Texts
    placement: Placement
    known: dict[Block | Exchange, tuple[int, int]]

    def columns(self, task: Task) -> tuple[int, int, int, int, int, int]:
        """Category, microbatch, chunk, bytes, name and detail."""
        match task:
            case Compute(block=block):
                payload, (name, detail) = 0, self._block(block)
            case _:
                payload, (name, detail) = int(task.exchange.payload), self._exchange(task)
        return CATEGORIES.index(look_of(task)), *self._place(action_of(task)), payload, name, detail

    def _place(self, action: Action | None) -> tuple[int, int]:
        """Microbatch and chunk."""
        if action is None:
            return -1, -1
        return action.microbatch, self.placement.chunk_of(action.stage)

    def _block(self, block: Block) -> tuple[int, int]:
        if block not in self.known:
            self.known[block] = self.texts.number(block.name), self.texts.number(self._kernels(block))
        return self.known[block]

    def _exchange(self, task: Communicate | Send | Receive) -> tuple[int, int]:
        if task.exchange not in self.known:
            label = exchange_label(task, self.result.cost.exchange_timing(task.exchange))
            self.known[task.exchange] = self.texts.number(label.does), self.texts.number(label.detail)
        return self.known[task.exchange]

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
