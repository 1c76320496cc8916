"""Random traces that keep the order of streams; critical predecessors are drawn at random."""

from hypothesis import strategies as st

from clustersim.cost.segment import SegmentTiming
from clustersim.program.task import CommOverlap, Operation, Segment, Stream, Task, WorkType
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    KERNEL,
    OPTIMIZER_STEP,
    SpanEvent,
    TraceCase,
    build_timing,
    collective_task,
    comm_op,
    receive_task,
    send_task,
)

TASKS: dict[Stream, list[Task]] = {
    Stream.COMPUTE: [FORWARD, BACKWARD, OPTIMIZER_STEP, collective_task("dp")],
    Stream.DP: [collective_task("dp"), collective_task("world"), collective_task("embedding")],
    Stream.SEND_NEXT: [send_task()],
    Stream.RECEIVE: [receive_task(), receive_task("pp_previous")],
}
SECONDS = st.floats(0, 10)


@st.composite
def trace_cases(draw: st.DrawFn) -> TraceCase:
    """Up to three classes of ranks, each with some events on every stream; up to two more ranks are folded."""
    ranks = draw(st.integers(1, 3))
    events = [event for rank in range(ranks) for stream in TASKS for event in draw(stream_events(rank, stream))]
    events = sorted(events, key=lambda event: event.end)
    predecessors = st.integers(-1, len(events) - 1)
    events = [
        SpanEvent(event.task, event.start, event.end, draw(predecessors), event.stream, event.rank) for event in events
    ]
    folded = draw(st.lists(st.integers(0, ranks - 1), max_size=2))
    return TraceCase(tuple(events), (*range(ranks), *folded), draw(st.booleans()), draw(timings()))


@st.composite
def stream_events(draw: st.DrawFn, rank: int, stream: Stream) -> list[SpanEvent]:
    """Events of one stream, one after the other."""
    events, now = [], 0.0
    for task in draw(st.lists(st.sampled_from(TASKS[stream]), max_size=6)):
        start = now + draw(st.just(0.0) | SECONDS)
        now = start + draw(SECONDS)
        events.append(SpanEvent(task, start, now, -1, stream, rank))
    return events


@st.composite
def timings(draw: st.DrawFn) -> dict[Segment, SegmentTiming]:
    """Timings of segments that are shorter or longer than their events."""
    segments = (FORWARD.segment, BACKWARD.segment, OPTIMIZER_STEP.segment)
    return {segment: build_timing((draw(SECONDS), 0.0)) for segment in segments}


MIXED = Segment(
    "layer",
    (
        Operation(KERNEL, WorkType.FORWARD),
        Operation(comm_op("tp"), WorkType.FORWARD),
        Operation(CommOverlap(comm_op("cp"), KERNEL, 4), WorkType.BACKWARD),
        Operation(KERNEL, WorkType.RECOMPUTE),
        Operation(comm_op("tp"), WorkType.RECOMPUTE),
        Operation(KERNEL, WorkType.OPTIMIZER),
    ),
)
MIXED_TIMING = build_timing((3.0, 0.0), (1.0, 1.0), (2.5, 0.5), (1.5, 0.0), (0.25, 0.25), (0.75, 0.0))
