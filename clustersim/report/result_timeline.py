"""How does a trace become a timeline? What each shown rank runs gets words and a colour.

A message is shown where it is sent: the receiver's row of the trace repeats it, so what waits for a message is said to
wait for what the sender waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.units import format_bandwidth, format_flops, format_seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.model.kernels import Kernel
from clustersim.parallel.mesh import HOST_GROUP
from clustersim.program.placement import looped_placement
from clustersim.program.task import CommOp, CommOverlap, ComputeTask, Segment, Stream, Task
from clustersim.report.export.span_descriptions import action_of, exchange_label, look_of
from clustersim.report.export.span_table import sent_cause
from clustersim.report.html_document import prose
from clustersim.report.kernel_templates import kernels_of
from clustersim.report.labels import row_word, stage_name
from clustersim.report.theme import CATEGORIES
from clustersim.report.timeline_data import Path, Row, Spans, Timeline
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario

_LANES: Final = {
    "compute": (Stream.COMPUTE,),
    "data parallel": (Stream.DP,),
    "pipeline": (Stream.SEND_NEXT, Stream.SEND_PREVIOUS),
}
_HOST_LANES: Final = {"to the host": (Stream.D2H,), "host": (Stream.HOST,), "from the host": (Stream.H2D,)}
_EXPERTS_LANES: Final = {"experts": (Stream.EP,)}
_MOST_KERNELS: Final = 4


def timeline_of(result: SimulationResult, ranks: Sequence[int]) -> Timeline:
    """Spans of these simulated ranks, a row for each, what runs inside them, and the critical path on them."""
    scenario = result.scenario
    stages = np.minimum(result.program.program_index[list(ranks)], scenario.layout.pp - 1).tolist()
    stands_for, slow = result.trace.represented_counts, result.stragglers.named
    rows = tuple(
        Row(
            stage_name(scenario, stage), f"{stage} slow" if rank in slow else str(stage), rank, int(stands_for[rank]),
            f"slow rank {rank}" if rank in slow else f"rank {rank}" if stages.count(stage) > 1 else "",
        )
        for stage, rank in zip(stages, ranks, strict=True)
    )  # fmt: skip
    places = _places(result, ranks)
    shown = np.flatnonzero((places >= 0).all(axis=0))
    return Timeline(
        rows, tuple(_lanes(result)), _spans(result, ranks, shown, places[:, shown]), _path(result, places),
        kernels_of(result, shown), row_word(scenario), row_note(scenario),
        tuple(np.cumsum(result.step_times)[:-1].tolist()), of_rows=max(len(rows), len(result.ledgers)),
    )  # fmt: skip


def row_note(scenario: Scenario) -> str:
    """What must be said of rows that hold several stages; empty if each is one stage."""
    placement = scenario.placement
    in_turn = placement == looped_placement(placement.pipeline_size, len(placement.stages_on_rank(0)))
    return prose("row_note", placement=placement, in_turn=in_turn, mirrored=scenario.layout.mirrored)


def _lanes(result: SimulationResult) -> dict[str, tuple[Stream, ...]]:
    """Those of the host only where it does anything, that of experts only where tokens travel beside computation."""
    hosted = HOST_GROUP.name in result.program.groups
    experts = any(Stream.EP in program.streams for program in result.program.programs)
    return _LANES | (_HOST_LANES if hosted else {}) | (_EXPERTS_LANES if experts else {})


def _places(result: SimulationResult, ranks: Sequence[int]) -> IntArray:
    """The timeline's row and lane of each row of the trace, -1 where there is none: [2, rows]."""
    row = np.full(result.rank_count, -1)
    row[ranks] = np.arange(len(ranks))
    lanes = {stream: lane for lane, streams in enumerate(_lanes(result).values()) for stream in streams}
    lane = np.array([lanes.get(stream, -1) for stream in Stream])
    return np.stack((row[result.trace.rank], lane[result.trace.stream]))


def _path(result: SimulationResult, places: IntArray) -> Path:
    path = result.critical_path[places[1, result.critical_path] >= 0]
    shown = places[0, path] >= 0
    follows = np.concatenate((shown[:1], shown[:-1]))[shown]
    path = path[shown]
    row, lane = places[:, path]
    return Path(row, lane, result.trace.start[path], result.trace.end[path], follows)


def _spans(result: SimulationResult, ranks: Sequence[int], shown: IntArray, places: IntArray) -> Spans:
    """Some rows of the trace. places: of them."""
    trace, (row, lane) = result.trace, places
    number = np.full(len(trace) + 1, -1)  # the last entry serves cause -1
    number[shown] = np.arange(len(shown))
    texts: dict[str, int] = {}
    columns = _task_columns(result, ranks, texts)[:, row, trace.task[shown]]
    waiting = np.where(lane == 0, trace.queued[shown], trace.ready[shown])
    return Spans(
        row=row, lane=lane, category=columns[0], microbatch=columns[1], chunk=columns[2],
        waiting=waiting, start=trace.start[shown], end=trace.end[shown], bytes=columns[3].astype(np.float64),
        name=columns[4], detail=columns[5], cause=number[sent_cause(trace, shown)],
        waited=trace.waited[shown], slowed=trace.slowed[shown], texts=tuple(texts),
        per_step=result.scenario.microbatch_count if result.scenario.steps > 1 else 0,
    )  # fmt: skip


def _task_columns(result: SimulationResult, ranks: Sequence[int], texts: dict[str, int]) -> IntArray:
    """Category, microbatch, chunk, bytes, name and detail of every task: [columns, stages, tasks]."""
    programs = [result.program.programs[int(result.program.program_index[rank])] for rank in ranks]
    table = np.full((6, len(ranks), max(len(program.tasks) for program in programs)), -1)
    for stage, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
        words = _Words(result, rank, texts)
        for place, task in enumerate(program.tasks):
            table[:, stage, place] = words.columns(task)
    return table


@dataclass(frozen=True, slots=True)
class _Words:
    """Words for the tasks of one rank. texts: with their numbers; known: of what was already put into words."""

    result: SimulationResult
    rank: int
    texts: dict[str, int]
    known: dict[Segment | CommOp, tuple[int, int]] = field(default_factory=dict)

    def columns(self, task: Task) -> tuple[int, ...]:
        """Category, microbatch, chunk, bytes, name and detail."""
        does = task.segment if isinstance(task, ComputeTask) else task.comm_op
        action, payload = action_of(task), 0 if isinstance(task, ComputeTask) else int(task.comm_op.payload)
        chunk = -1 if action is None else self.result.scenario.placement.chunk_index(action.stage)
        if does not in self.known:
            name, detail = self._words(task)
            self.known[does] = self._number(name), self._number(detail)
        look = CATEGORIES.index(look_of(task))
        return look, -1 if action is None else action.microbatch, chunk, payload, *self.known[does]

    def _number(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts)) if text else -1

    def _words(self, task: Task) -> tuple[str, str]:
        if isinstance(task, ComputeTask):
            return task.segment.name, self._kernels(task.segment)
        label = exchange_label(task, self.result.cost.comm_timing_by_group(task.comm_op))
        return label.does, label.detail

    def _kernels(self, block: Segment) -> str:
        """The operations of a block that take longest, equal ones together: how long, bound by what, at which rate."""
        timing = self.result.cost.time_segment(self.rank, block)
        places: dict[Kernel | CommOp | CommOverlap, list[int]] = {}
        for place, operation in enumerate(block.operations):
            places.setdefault(operation.body, []).append(place)
        longest = sorted(places.values(), key=lambda equal: -len(equal) * timing.durations[equal[0]])[:_MOST_KERNELS]
        return "\n".join(_line(block, timing, equal) for equal in longest)


def _line(block: Segment, timing: SegmentTiming, equal: Sequence[int]) -> str:
    """How often an operation runs, and each run's duration, rate and bound. equal: its places in the block."""
    operation, seconds = block.operations[equal[0]], timing.durations[equal[0]]
    kernel = operation.kernel
    count = f"{len(equal)} × " if len(equal) > 1 else ""
    name = " + ".join(item.name for item in (kernel, operation.comm_op) if item is not None)
    rate = _rate(seconds, kernel.flops if kernel else 0.0, kernel.bytes if kernel else 0.0)
    return f"  {count}{name} {format_seconds(seconds)}{rate}, {timing.bottleneck[equal[0]].value}"


def _rate(seconds: float, flops: float, moved: float) -> str:
    """The rate that says most: FLOP per second if the work is dense, else bytes per second."""
    if seconds <= 0:
        return ""
    if flops > 20 * moved:
        return f" at {format_flops(flops / seconds)}"
    return f" at {format_bandwidth(moved / seconds)}" if moved > 0 else ""
