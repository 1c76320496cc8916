"""How is a trace written as Chrome's trace JSON, which chrome://tracing, Perfetto and Speedscope read?

One process for each rank, with its number, one thread for each track; complete events ("ph": "X") in microseconds,
nested by their times, which are whole nanoseconds; counters ("ph": "C"). Needs nothing beyond the standard library.
Flows are left to Perfetto's own format, which binds them to slices.

Reference: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator
from typing import IO

import numpy as np

from clustersim.report.operations import Label
from clustersim.report.slices import STREAM_NAMES, Slice
from clustersim.report.trace_content import Content
from clustersim.report.trace_counters import Counter

_TRACKS = 1000  # threads of one stream: more spans than this never overlap in one stream
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_chrome(content: Content, file: IO[bytes]) -> None:
    """Write ranks, their slices and counters."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(_events(content)):
        file.write((b",\n" if number else b"") + event)
    file.write(b"\n]}\n")


def _events(content: Content) -> Iterator[bytes]:
    for number, rank in enumerate(content.ranks):
        yield _meta("process_name", rank.rank, 0, {"name": f"{rank.stage}, {rank.name}"})
        yield _meta("process_sort_index", rank.rank, 0, {"sort_index": number})
    for rank, counters in content.counters:
        for counter in counters:
            yield from _counted(rank.rank, counter)
    named: set[tuple[int, int]] = set()
    known: dict[tuple[tuple[Label, ...], int, int], bytes] = {}
    for piece in content.pieces:
        thread = piece.stream * _TRACKS + piece.track
        if (piece.rank, thread) not in named:
            named.add((piece.rank, thread))
            yield _meta("thread_name", piece.rank, thread, {"name": STREAM_NAMES[piece.stream]})
            yield _meta("thread_sort_index", piece.rank, thread, {"sort_index": thread})
        yield from _complete(piece, thread, known)


def _meta(name: str, process: int, thread: int, arguments: dict[str, object]) -> bytes:
    return _encode({"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}).encode()


def _counted(process: int, counter: Counter) -> Iterator[bytes]:
    name = _encode(counter.name).encode()
    unit = b"bytes/s" if counter.per_second else b"bytes"
    for time, value in zip(counter.times.tolist(), counter.values.tolist(), strict=True):
        at = divmod(time, 1000)
        yield b'{"ph":"C","name":%s,"pid":%d,"ts":%d.%03d,"args":{"%s":%.0f}}' % (name, process, *at, unit, value)


def _complete(piece: Slice, thread: int, known: dict[tuple[tuple[Label, ...], int, int], bytes]) -> Iterator[bytes]:
    """A slice, and those inside it as one text. known: such texts without times, by their labels and track."""
    times = (*divmod(piece.start, 1000), *divmod(piece.end - piece.start, 1000))
    yield _untimed(piece.label, piece.rank, thread) % times
    inside = piece.inside
    if inside is None or not len(inside):
        return
    key = (inside.labels, piece.rank, thread)
    if key not in known:
        known[key] = b",\n".join(_untimed(label, piece.rank, thread) for label in inside.labels)
    each = (*np.divmod(inside.start, 1000), *np.divmod(inside.end - inside.start, 1000))
    yield known[key] % tuple(np.stack(each, axis=1).ravel().tolist())


def _untimed(label: Label, process: int, thread: int) -> bytes:
    """An event with places for its start and its length, each in microseconds and nanoseconds."""
    place = b'{"ph":"X","pid":%d,"tid":%d,' % (process, thread)
    return place + b'"ts":%d.%03d,"dur":%d.%03d,' + _words(label).replace(b"%", b"%%")


def _words(label: Label) -> bytes:
    """The end of an event: what does not depend on where and when it is."""
    return _encode({"name": label.name, "cat": label.category.label, "args": label.arguments})[1:].encode()
