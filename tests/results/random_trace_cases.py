"""Any trace that keeps the streams' order, with causes drawn at random."""

from hypothesis import strategies as st

from clustersim.cost.segment import SegmentTiming
from clustersim.program.task import CommOverlap, Operation, Segment, Stream, Task, WorkType
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    KERNEL,
    STEP,
    Case,
    Row,
    collective,
    exchange,
    receive,
    send,
    timing,
)

TASKS: dict[Stream, list[Task]] = {
    Stream.COMPUTE: [FORWARD, BACKWARD, STEP, collective("dp")],
    Stream.DP: [collective("dp"), collective("world"), collective("embedding")],
    Stream.SEND_NEXT: [send()],
    Stream.RECEIVE: [receive(), receive("pp_previous")],
}
SECONDS = st.floats(0, 10)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three classes of ranks, each with some rows on every stream; up to two more ranks are folded."""
    ranks = draw(st.integers(1, 3))
    rows = [row for rank in range(ranks) for stream in TASKS for row in draw(streams(rank, stream))]
    rows = sorted(rows, key=lambda row: row.end)
    causes = st.integers(-1, len(rows) - 1)
    rows = [Row(row.task, row.start, row.end, draw(causes), row.stream, row.rank) for row in rows]
    folded = draw(st.lists(st.integers(0, ranks - 1), max_size=2))
    return Case(tuple(rows), (*range(ranks), *folded), draw(st.booleans()), draw(timings()))


@st.composite
def streams(draw: st.DrawFn, rank: int, stream: Stream) -> list[Row]:
    """Rows of one stream, one after the other."""
    rows, now = [], 0.0
    for task in draw(st.lists(st.sampled_from(TASKS[stream]), max_size=6)):
        start = now + draw(st.just(0.0) | SECONDS)
        now = start + draw(SECONDS)
        rows.append(Row(task, start, now, -1, stream, rank))
    return rows


@st.composite
def timings(draw: st.DrawFn) -> dict[Segment, SegmentTiming]:
    """Blocks that are shorter or longer than their rows."""
    blocks = (FORWARD.segment, BACKWARD.segment, STEP.segment)
    return {block: timing((draw(SECONDS), 0.0)) for block in blocks}


MIXED = Segment(
    "layer",
    (
        Operation(KERNEL, WorkType.FORWARD),
        Operation(exchange("tp"), WorkType.FORWARD),
        Operation(CommOverlap(exchange("cp"), KERNEL, 4), WorkType.BACKWARD),
        Operation(KERNEL, WorkType.RECOMPUTE),
        Operation(exchange("tp"), WorkType.RECOMPUTE),
        Operation(KERNEL, WorkType.OPTIMIZER),
    ),
)
MIXED_TIMING = timing((3.0, 0.0), (1.0, 1.0), (2.5, 0.5), (1.5, 0.0), (0.25, 0.25), (0.75, 0.0))
