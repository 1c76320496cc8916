"""What stands in an exported trace? Every span, with its arguments, on a track on which nothing overlaps.

Trace viewers draw overlapping slices of one track wrongly, so a stream whose spans overlap (received messages) is split
into as many tracks as it needs. For the same reason times are whole nanoseconds, and what runs inside a slice ends with
it at the latest. Received messages come last: who follows a flow from a slice to the next meets their sending first.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.parallel.mesh import PIPELINE
from clustersim.program.task import Compute, Receive, Stream, Task
from clustersim.report.answer_timeline import shown_rows_of, timeline_of
from clustersim.report.hover import what
from clustersim.report.operations import Arguments, Inside, Label, Operations
from clustersim.report.theme import AXIS_LOOKS, CATEGORIES
from clustersim.report.trace_flows import NONE, Flows
from clustersim.report.trace_ranks import TraceRank
from clustersim.report.view import Timeline
from clustersim.report.wording import stage_name
from clustersim.units import Seconds, format_seconds

if TYPE_CHECKING:
    from clustersim.answer import Answer

Nanoseconds = int
_ROUNDING: Final = 5e-10  # seconds: less than a trace can show
STREAM_NAMES: Final = MappingProxyType(
    {
        Stream.COMPUTE: "compute",
        Stream.DATA: "data parallel",
        Stream.SEND_NEXT: "send to the next stage",
        Stream.SEND_PREVIOUS: "send to the stage before",
        Stream.RECEIVE: "receive",
        Stream.TO_HOST: "copies to the host",
        Stream.HOST: "the host's work",
        Stream.FROM_HOST: "copies from the host",
        Stream.EXPERTS: "tokens to and from experts",
    }
)


@dataclass(frozen=True, slots=True)
class Nested:
    """Slices inside a slice, in order: [n] each. start, end: nanoseconds; flows: empty where none has any."""

    labels: tuple[Label, ...]
    start: IntArray
    end: IntArray
    flows: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Slice:
    """One span on a track.

    track: 0 ... within its rank and stream; flow: the number that slices of one message or collective share; inside:
    the slices nested in it, if any.
    """

    rank: int
    stream: Stream
    track: int
    start: Nanoseconds
    end: Nanoseconds
    label: Label
    flow: int = NONE
    inside: Nested | None = None


def slices(result: "Answer", ranks: Sequence[TraceRank]) -> Iterator[Slice]:
    """All spans of these ranks: rank by rank, stream by stream, track by track, by start; then what they receive."""
    source = _Source.of(result, ranks)
    for received in (False, True):
        for rank in ranks:
            yield from source.slices(rank, received=received)


@dataclass(frozen=True, slots=True)
class _Source:
    """spans: of each row of the trace the span of the timeline, or -1; track: [rows]."""

    result: "Answer"
    timeline: Timeline
    spans: IntArray
    track: IntArray
    operations: Operations
    flows: Flows

    @classmethod
    def of(cls, result: "Answer", ranks: Sequence[TraceRank]) -> Self:
        simulated = sorted({rank.simulated for rank in ranks})
        trace, shown = result.trace, shown_rows_of(result, simulated)
        spans = np.full(len(trace), -1)
        spans[shown] = np.arange(len(shown))
        flows = Flows.among(result.program, [rank.rank for rank in ranks])
        lanes = trace.rank * len(Stream) + trace.stream
        track = np.zeros(len(trace), dtype=np.int64)
        mine = np.flatnonzero(np.isin(trace.rank, simulated))
        track[mine] = tracks(lanes[mine], trace.start[mine], trace.end[mine])
        everything = Operations(result, np.arange(len(trace)))
        return cls(result, timeline_of(result, simulated), spans, track, everything, flows)

    def slices(self, rank: TraceRank, *, received: bool) -> Iterator[Slice]:
        """Those of one rank, either what it receives or all else."""
        trace = self.result.trace
        rows = np.flatnonzero((trace.rank == rank.simulated) & ((trace.stream == Stream.RECEIVE) == received))
        order = np.lexsort((trace.end[rows], trace.start[rows], self.track[rows], trace.stream[rows]))
        for row in rows[order].tolist():
            yield self._slice(rank, row)

    def _slice(self, rank: TraceRank, row: int) -> Slice:
        trace, number = self.result.trace, int(self.result.trace.task[row])
        task = self.result.program.programs[int(self.result.program.kind[rank.rank])].tasks[number]
        place = (rank.rank, Stream(int(trace.stream[row])), int(self.track[row]))
        start, end = float(trace.start[row]), float(trace.end[row])
        inside = self.operations(row)
        nested = None
        if inside is not None and isinstance(task, Compute):
            nested = _nested(inside, start, end, self.flows.inside(rank.rank, number, task.block))
        flow = self.flows.of_task(rank.rank, number, task)
        return Slice(*place, round(start * 1e9), round(end * 1e9), self._label(row, task, inside), flow, nested)

    def _label(self, row: int, task: Task, inside: Inside | None) -> Label:
        if isinstance(task, Receive):
            return self._received(task)
        span, spans = int(self.spans[row]), self.timeline.spans
        return Label(what(spans, span), CATEGORIES[spans.category[span]], self._arguments(row, span, inside))

    def _received(self, task: Receive) -> Label:
        """A message where it comes in: its sending says the rest."""
        exchange, place = task.exchange, self._place(task.tag.microbatch)
        chunk = self.result.scenario.placement.chunk_of(task.tag.stage)
        words = f"receive for microbatch {place['microbatch']}" + (f", chunk {chunk}" if chunk else "")
        words += f", step {place['step']}" if "step" in place else ""
        does = f"{exchange.name} ({exchange.collective.value} of {exchange.group})"
        arguments: Arguments = {"does": does, **place, "chunk": chunk, "bytes": int(exchange.payload)}
        return Label(words, AXIS_LOOKS[PIPELINE], arguments)

    def _place(self, microbatch: int) -> Arguments:
        """A microbatch, of those of all steps, as its name says it: in which step, and which of that."""
        step, number = divmod(microbatch, self.result.scenario.microbatches)
        place: Arguments = {"microbatch": number}
        return place | ({"step": step + 1} if self.result.scenario.steps > 1 else {})

    def _arguments(self, row: int, span: int, inside: Inside | None) -> Arguments:
        spans = self.timeline.spans
        arguments: Arguments = {}
        for key, text in (("does", spans.name[span]), ("detail", -1 if inside else spans.detail[span])):
            if text >= 0:
                arguments[key] = spans.texts[text]
        if spans.microbatch[span] >= 0:
            arguments |= self._place(int(spans.microbatch[span]))
        if spans.chunk[span] >= 0:
            arguments["chunk"] = int(spans.chunk[span])
        if spans.bytes[span] > 0:
            arguments["bytes"] = int(spans.bytes[span])
        return arguments | self._waits(row, span, inside)

    def _waits(self, row: int, span: int, inside: Inside | None) -> Arguments:
        """What it waited for, and what made it longer."""
        spans = self.timeline.spans
        waited, slowed = float(spans.start[span] - spans.waiting[span]), float(spans.slowed[span])
        arguments: Arguments = {"waited_us": waited * 1e6} if waited > 0 else {}
        arguments |= {"slowed_us": slowed * 1e6} if slowed > 0 else {}
        if cause := self._cause(row, span):
            arguments["after"] = cause
        between = float(spans.end[span] - spans.start[span] - (inside.end - inside.start).sum()) if inside else 0.0
        if between > _ROUNDING:
            arguments["inside"] = f"waited {format_seconds(between)} between operations"
        return arguments

    def _cause(self, row: int, span: int) -> str:
        """What had to end before this span could start, and in which stage if in another; empty if not known."""
        cause = int(self.timeline.spans.cause[span])
        if cause < 0:
            return ""
        kind = self.result.program.kind
        here = int(kind[self.result.trace.rank[row]])
        there = int(kind[self.timeline.rows[self.timeline.spans.row[cause]].rank])
        return what(self.timeline.spans, cause) + (
            "" if here == there else f" on {stage_name(self.result.scenario, there)}"
        )


def _nested(inside: Inside, since: Seconds, until: Seconds, flows: tuple[int, ...]) -> Nested:
    start, end = np.rint(np.clip((inside.start, inside.end), since, until) * 1e9).astype(np.int64)
    return Nested(inside.labels, start, end, flows)


def tracks(lanes: IntArray, start: FloatArray, end: FloatArray) -> IntArray:
    """For every span the first track of its lane that is free when it starts: [spans]."""
    track = np.zeros(len(lanes), dtype=np.int64)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    here, used = -1, 0
    for span in np.lexsort((end, start, lanes)).tolist():
        if lanes[span] != here:
            here, used, busy, free = int(lanes[span]), 0, [], []
        while busy and busy[0][0] <= start[span]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(used)
            used += 1
        track[span] = heapq.heappop(free)
        heapq.heappush(busy, (float(end[span]), int(track[span])))
    return track
