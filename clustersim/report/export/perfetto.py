"""How is a trace written for Perfetto, to be opened at ui.perfetto.dev?

Tracks are a tree in a given order: the scenario, replicas, stages, ranks with their counters, streams. Slices carry
what the page's hover text says, and flows join what is sent with what is received, and the members of collectives.
Times are whole nanoseconds, so what is shorter is drawn with no length. The protobuf comes from the `perfetto` package,
an extra: `pip install 'clustersim[trace]'`.

Counters are curves of what a rank holds and moves. Memory held is the ledger's, which follows the first step; what is
moved is payloads over time (`results.stream_bandwidth`).

Perfetto lets no trace choose colours (github.com/google/perfetto/issues/620). It gives slices with equal correlation
ids equal colours (pull/1628), so the words of the page's categories are these ids: as on the page, one category has
one colour everywhere, but not the page's.
Reference: perfetto.dev/docs/reference/synthetic-track-event
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_bytes, format_seconds
from clustersim.program.task import Stream, Task
from clustersim.report.export.flow_ids import NONE, Flows
from clustersim.report.export.rank_selection import TraceRank
from clustersim.report.export.span_descriptions import STREAM_NAMES, Arguments, Label, place_of, task_words
from clustersim.report.export.span_table import Export, Spans, nanoseconds, sent_cause
from clustersim.report.labels import stage_name
from clustersim.results.intervals import last, sums, tracks
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.stream_bandwidth import payload_rates

SUFFIXES: Final = (".pftrace", ".perfetto-trace", "")
_SEQUENCE: Final = 1
_PACKET: Final = b"\x0a"  # tag of Trace.packet, field 1, with a length
_STAMP: Final = 8  # bytes of a time: 2 years
_TIMESTAMP: Final = b"\x40"  # tag of TracePacket.timestamp, field 8, a varint
_SEQUENCE_ID: Final = b"\x50" + bytes([_SEQUENCE])  # TracePacket.trusted_packet_sequence_id, field 10
_EVENT: Final = b"\x5a"  # tag of TracePacket.track_event, field 11, with a length
_FLOW: Final = b"\xf9\x02"  # tag of TrackEvent.flow_ids, field 47, 8 bytes
_VALUE: Final = b"\xe1\x02"  # tag of TrackEvent.double_counter_value, field 44, 8 bytes
_FIXED: Final = 8
_VALUES: Final = {str: "string_value", int: "int_value", float: "double_value"}  # of DebugAnnotation
_ROUNDING: Final = 5e-10  # seconds: less than a trace can show
_RATES: Final = (
    ("data parallel collectives: payload per second", (Stream.DP,)),
    ("tokens to and from experts beside computation: payload per second", (Stream.EP,)),
    ("messages sent to other stages: bytes per second", (Stream.SEND_NEXT, Stream.SEND_PREVIOUS)),
    ("messages received from other stages: bytes per second", (Stream.RECEIVE,)),
    ("copies to the host: bytes per second", (Stream.D2H,)),
    ("copies from the host: bytes per second", (Stream.H2D,)),
)
_BYTES: Final = {"unit": "UNIT_SIZE_BYTES"}
_PER_SECOND: Final = {"unit_name": "bytes/s"}
_Curve = tuple[str, dict[str, str], IntArray, FloatArray]
"""Of a rank: its name, its unit in Perfetto's words, [n] nanoseconds, ascending, and [n] values from then on."""


def require_trace(path: str | Path) -> None:
    """Raise InputError for a name whose end is another format's, or where the extra is not installed."""
    if path in ("", "-") or Path(path).suffix not in SUFFIXES:
        raise InputError(
            f"--trace {path}: name a file that ends in .pftrace, .perfetto-trace or nothing (Perfetto); --kineto DIR "
            "writes JSON, which ui.perfetto.dev opens, too"
        )
    _library()


def write_perfetto(export: Export, file: IO[bytes]) -> None:
    """Write ranks, their spans and, but for a sample, counters; raise InputError where the extra is not installed."""
    result, trace = export.result, _Trace(file, _library(), export.result.scenario.name)
    flows = Flows(result.program, [rank.rank for rank in export.ranks])
    for rank in export.ranks:
        trace.rank(rank)
    counted = export.ranks if export.most is None else ()
    rates = {simulated: [*_rates(result, simulated)] for simulated in {rank.simulated for rank in counted}}
    for rank in counted:
        for curve in (_memory(result, rank.rank), *rates[rank.simulated]):
            trace.counter(rank.rank, *curve)
    received: list[_Line] = []
    for line in (line for rank, spans in export for line in _lines(rank.rank, spans, flows)):
        if line.stream == Stream.RECEIVE:
            received.append(line)
        else:
            trace.line(line, result)
    for line in received:
        trace.line(line, result)


def _library() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise InputError(
            "a Perfetto trace needs the extra 'trace': pip install 'clustersim[trace]'; --kineto DIR gives traces "
            "without it, which ui.perfetto.dev opens, too"
        ) from error
    return perfetto_trace_pb2


class _Line(NamedTuple):
    """Spans that are drawn in one line. track: 0 ... within the rank's stream; flow: [spans] `Flows` of theirs."""

    rank: int
    stream: Stream
    track: int
    spans: Spans
    flow: IntArray


def _lines(rank: int, spans: Spans, flows: Flows) -> Iterator[_Line]:
    """The spans of a rank, stream by stream, track by track."""
    stream, flow, alone = spans.stream, flows.of(rank, spans), spans.alone
    track = tracks(stream[alone], spans.start[alone], spans.end[alone])[np.cumsum(alone) - 1]
    for item in np.unique(stream).tolist():
        for number in range(int(track[stream == item].max()) + 1):
            which = (stream == item) & (track == number)
            yield _Line(rank, Stream(item), number, spans.some(which), flow[which])


def _task(result: SimulationResult, row: int) -> tuple[int, Task]:
    """The program of a row of the trace, and its task."""
    trace, kind = result.trace, int(result.program.program_index[result.trace.rank[row]])
    return kind, result.program.programs[kind].tasks[trace.task[row]]


def _said(result: SimulationResult, label: Label, task: Task) -> Arguments:
    """Of a task, but for its waits."""
    said: Arguments = {"does": label.does} if label.does else {}
    said |= {"detail": label.detail} if label.detail and label.kind != "receive" else {}
    said |= place_of(task, result.scenario)
    return said | ({"bytes": int(label.bytes)} if label.exchange is not None and label.bytes > 0 else {})


def _waits(result: SimulationResult, row: int, cause: int, between: Seconds) -> Arguments:
    """What a task waited for, -1 for nothing, and what made it longer. between: seconds in which no operation ran."""
    trace, (here, _) = result.trace, _task(result, row)
    since = trace.queued if trace.stream[row] == Stream.COMPUTE else trace.ready
    waited, slowed = float(trace.start[row] - since[row]), float(trace.slowed[row])
    said: Arguments = {"waited_us": waited * 1e6} if waited > 0 else {}
    said |= {"slowed_us": slowed * 1e6} if slowed > 0 else {}
    if cause >= 0:
        there, before = _task(result, cause)
        where = "" if here == there else f" on {stage_name(result.scenario, there)}"
        said["after"] = task_words(before, result.scenario) + where
    if between > _ROUNDING:
        said["inside"] = f"waited {format_seconds(between)} between operations"
    return said


def _memory(result: SimulationResult, rank: int) -> _Curve:
    """What a rank holds; beyond activations it does not change, and the allocator rounds up by a part."""
    place = min(int(result.program.program_index[rank]), len(result.ledgers) - 1)
    ledger = result.ledgers[place]
    activations = np.append(0.0, ledger.activations)  # none before the step
    held = ledger.peak - (ledger.peak_activations - activations) * ledger.fragmentation
    step = "memory held in the first step" if result.scenario.steps > 1 else "memory held"
    name = f"{step}, of {format_bytes(result.memory_capacities[place])}"
    return name, _BYTES, *last(nanoseconds(np.append(0.0, ledger.times)), held)


def _rates(result: SimulationResult, rank: int) -> Iterator[_Curve]:
    """What a rank moves, as payloads over time, on those streams that move anything."""
    trace = result.trace
    for name, streams in _RATES:
        rows, rate = payload_rates(trace, result.program, rank, streams)
        if len(rows):
            yield name, _PER_SECOND, *sums(nanoseconds(trace.start[rows]), nanoseconds(trace.end[rows]), rate)


class _Trace:
    """Packets, one track of a rank at a time: a million spans never stand in memory as packets.

    A track is described when it is first met, and has a place among its siblings. A trace is its packets, each behind
    the tag and the length of a field. What packets of a label have in common is encoded once for each track, with what
    differs behind it: a flow or a value as the last field of the event, and the time as the last one of the packet, all
    of fixed lengths.
    Reference: protobuf.dev/programming-guides/encoding
    """

    def __init__(self, file: IO[bytes], protos: Any, title: str) -> None:
        self._file, self._protos = file, protos
        self._tracks: dict[tuple[object, ...], int] = {}
        self._children: dict[int, int] = defaultdict(int)
        self._top = self._track((), 0, title)

    def rank(self, rank: TraceRank) -> None:
        """The track of a rank, below its stage and replica."""
        replica = self._track((rank.replica,), self._top, f"replica {rank.replica}")
        stage = self._track((rank.replica, rank.stage), replica, rank.stage)
        self._track(("rank", rank.rank), stage, rank.name)

    def counter(self, rank: int, name: str, unit: dict[str, str], times: IntArray, values: FloatArray) -> None:
        """A curve of a rank."""
        track = self._track((rank, name), self._tracks["rank", rank], name, counter=unit)
        head = _head(self._event("COUNTER", track), _VALUE)
        for stamp, value in zip(stamps(times), values.tolist(), strict=True):
            self._file.write(head + struct.pack("<d", value) + stamp)

    def line(self, line: _Line, result: SimulationResult) -> None:
        """Spans of a track: each begins, what is inside it begins and ends, it ends.

        The tracks of a stream have one name, and viewers draw them below each other.
        """
        track = self._track(line[:3], self._tracks["rank", line.rank], STREAM_NAMES[line.stream])
        spans, alone = line.spans, line.spans.alone
        own, end = np.flatnonzero(alone), _head(self._event("SLICE_END", track))
        counts = np.diff(np.append(own, len(spans))) - 1
        lasting = spans.end - spans.start
        inside = zip(self._heads(track, line), *_parts(line, ~alone, end), strict=True)
        tasks = zip(own.tolist(), counts.tolist(), sent_cause(spans.trace, spans.row[own]).tolist(), strict=True)
        for (row, count, cause), *parts in zip(tasks, *_parts(line, alone, end), strict=True):
            between = float(lasting[row] - lasting[row + 1 : row + 1 + count].sum()) if count else 0.0
            label, number = spans.labels[spans.label[row]], int(spans.row[row])
            _, task = _task(result, number)
            said = _said(result, label, task)
            said |= _waits(result, number, cause, between) if label.kind != "receive" else {}
            event = self._begin(track, task_words(task, result.scenario), label.category.label, said)
            head = _head(event, _FLOW if line.flow[row] != NONE else b"")
            operations = chain.from_iterable(islice(inside, count))
            self._file.write(b"".join((head, *parts[:2], *operations, *parts[2:])))

    def _heads(self, track: int, line: _Line) -> list[bytes]:
        """The packets of operations up to their flows: the same wherever one is run."""
        spans, inside = line.spans, ~line.spans.alone
        key, which = np.unique(2 * spans.label[inside] + (line.flow[inside] != NONE), return_inverse=True)
        labels = [spans.labels[item // 2] for item in key.tolist()]
        events = [self._begin(track, label.name, label.category.label, label.arguments) for label in labels]
        heads = [_head(event, _FLOW * (element % 2)) for event, element in zip(events, key.tolist(), strict=True)]
        return [heads[entry] for entry in which.tolist()]

    def _track(self, key: tuple[object, ...], parent: int, name: str, **more: Any) -> int:
        """The number of a line of the viewer; parent 0 is the top."""
        if key not in self._tracks:
            self._tracks[key] = len(self._tracks) + 1
            self._children[parent] += 1
            more |= {"parent_uuid": parent} if parent else {}
            more |= {"sibling_order_rank": self._children[parent], "child_ordering": "EXPLICIT"}
            described = {"uuid": self._tracks[key], "name": name, **more}
            packet = {"trusted_packet_sequence_id": _SEQUENCE, "track_descriptor": described}
            self._file.write(self._protos.Trace(packet=[packet]).SerializeToString())
        return self._tracks[key]

    def _begin(self, track: int, name: str, category: str, arguments: Arguments) -> bytes:
        notes = [{"name": key, _VALUES[type(value)]: value} for key, value in arguments.items()]
        words = {"name": name, "categories": [category], "correlation_id_str": category, "debug_annotations": notes}
        return self._event("SLICE_BEGIN", track, **words)

    def _event(self, kind: str, track: int, **words: Any) -> bytes:
        event: bytes = self._protos.TrackEvent(type=f"TYPE_{kind}", track_uuid=track, **words).SerializeToString()
        return event


def _parts(line: _Line, which: BoolArray, end: bytes) -> tuple[Iterable[bytes], ...]:
    """What follows the heads of some spans: the flow, when they begin, and the packet of their end, with its time."""
    trace, row = line.spans.trace, line.spans.row[which]
    since, until = trace.start[row], trace.end[row]
    begins, ends = (
        stamps(nanoseconds(np.clip(array[which], since, until))) for array in (line.spans.start, line.spans.end)
    )
    flows = [b"" if item == NONE else item.to_bytes(_FIXED, "little") for item in line.flow[which].tolist()]
    return flows, begins, [end] * len(row), ends


def _head(event: bytes, last: bytes = b"") -> bytes:
    """A packet up to what differs. event: as encoded; last: the tag of the event's last field, if that differs."""
    fixed = _FIXED if last else 0
    inner = _SEQUENCE_ID + _EVENT + _varint(len(event + last) + fixed) + event + last
    return _PACKET + _varint(len(inner) + fixed + len(_TIMESTAMP) + _STAMP) + inner


def _varint(number: int) -> bytes:
    """A number in protobuf's encoding: seven bits a byte, the lowest first, all but the last byte marked.

    >>> _varint(1), _varint(300)
    (b'\\x01', b'\\xac\\x02')
    """
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def stamps(times: IntArray) -> list[bytes]:
    """Times, with their tag, as numbers of protobuf that are all as long: their highest bits may be zeros."""
    bits = times[:, None] >> 7 * np.arange(_STAMP) & 0x7F
    bits[:, :-1] |= 0x80
    encoded = bits.astype(np.uint8).tobytes()
    return [_TIMESTAMP + encoded[place : place + _STAMP] for place in range(0, len(encoded), _STAMP)]
