"""How is a timeline written as Chrome's trace JSON, which chrome://tracing, Perfetto and Speedscope read?

One process for each row, one thread for each track; complete events ("ph": "X") in microseconds. Needs nothing beyond
the standard library.

Reference: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator
from typing import IO

from clustersim.report.slices import Slice, slices
from clustersim.report.view import Timeline

_TRACKS = 1000  # threads of one lane: more spans than this never overlap in one lane


def write_chrome(timeline: Timeline, file: IO[bytes]) -> None:
    """Write the whole timeline."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(_events(timeline)):
        file.write((b",\n" if number else b"") + json.dumps(event, separators=(",", ":")).encode())
    file.write(b"\n]}\n")


def _events(timeline: Timeline) -> Iterator[dict[str, object]]:
    for number, row in enumerate(timeline.rows):
        yield _meta("process_name", number, 0, {"name": f"{row.label}, rank {row.rank}"})
        yield _meta("process_sort_index", number, 0, {"sort_index": number})
    named: set[tuple[int, int]] = set()
    for piece in slices(timeline):
        thread = piece.lane * _TRACKS + piece.track
        if (piece.row, thread) not in named:
            named.add((piece.row, thread))
            yield _meta("thread_name", piece.row, thread, {"name": timeline.lanes[piece.lane]})
            yield _meta("thread_sort_index", piece.row, thread, {"sort_index": thread})
        yield _complete(piece, thread)


def _meta(name: str, process: int, thread: int, arguments: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _complete(piece: Slice, thread: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": piece.name,
        "cat": piece.category.label,
        "pid": piece.row,
        "tid": thread,
        "ts": piece.start * 1e6,
        "dur": (piece.end - piece.start) * 1e6,
        "args": piece.arguments,
    }
