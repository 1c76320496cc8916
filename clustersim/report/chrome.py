"""How is a trace written as Chrome's trace JSON, which chrome://tracing, Perfetto and Speedscope read?

One process for each row, one thread for each track; complete events ("ph": "X") in microseconds, nested by their
times, which are whole nanoseconds. Needs nothing beyond the standard library.

Reference: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterable, Iterator
from typing import IO

from clustersim.report.slices import Label, Slice
from clustersim.report.view import Timeline

_TRACKS = 1000  # threads of one lane: more spans than this never overlap in one lane
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_chrome(timeline: Timeline, pieces: Iterable[Slice], file: IO[bytes]) -> None:
    """Write the timeline's rows and these slices of it."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(_events(timeline, pieces)):
        file.write((b",\n" if number else b"") + event)
    file.write(b"\n]}\n")


def _events(timeline: Timeline, pieces: Iterable[Slice]) -> Iterator[bytes]:
    for number, row in enumerate(timeline.rows):
        yield _meta("process_name", number, 0, {"name": row.named})
        yield _meta("process_sort_index", number, 0, {"sort_index": number})
    named: set[tuple[int, int]] = set()
    known: dict[Label, bytes] = {}
    for piece in pieces:
        thread = piece.lane * _TRACKS + piece.track
        if (piece.row, thread) not in named:
            named.add((piece.row, thread))
            yield _meta("thread_name", piece.row, thread, {"name": timeline.lanes[piece.lane]})
            yield _meta("thread_sort_index", piece.row, thread, {"sort_index": thread})
        yield from _complete(piece, thread, known)


def _meta(name: str, process: int, thread: int, arguments: dict[str, object]) -> bytes:
    return _encode({"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}).encode()


def _complete(piece: Slice, thread: int, known: dict[Label, bytes]) -> Iterator[bytes]:
    """A slice and those inside it. known: labels of operations as they are written."""
    yield _event(piece, thread, _words(piece.label))
    for each in piece.inside:
        words = known.get(each.label)
        if words is None:
            words = known[each.label] = _words(each.label)
        yield _event(each, thread, words)


def _event(piece: Slice, thread: int, words: bytes) -> bytes:
    start, length = divmod(piece.start, 1000), divmod(piece.end - piece.start, 1000)
    place = b'{"ph":"X","pid":%d,"tid":%d,"ts":%d.%03d,"dur":%d.%03d,' % (piece.row, thread, *start, *length)
    return place + words


def _words(label: Label) -> bytes:
    """The end of an event: what does not depend on where and when it is."""
    return _encode({"name": label.name, "cat": label.category.label, "args": label.arguments})[1:].encode()
