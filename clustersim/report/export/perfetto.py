"""How is a trace exported for Perfetto (ui.perfetto.dev)?

Tracks are an ordered tree: the scenario, replicas, stages, ranks with their counters, streams. Slices carry
the page's hover text as annotations; flows join sends with receives, and the members of collectives.
Times are integer nanoseconds, so shorter slices have zero length. The protobuf schema is that of the
`perfetto` package, an extra: `pip install 'clustersim[trace]'`.

Counters are memory and bandwidth of a rank over time. Memory held is the memory ledger's, which covers the
first step; bandwidth is payload per second (`algorithm_bandwidth`).

Perfetto does not let a trace choose colours (github.com/google/perfetto/issues/620). Slices with equal
correlation ids have equal colours (pull/1628), so the labels of the page's categories are these ids: one
category has one colour everywhere, but not that of the page.
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
from clustersim.report.export.flow_ids import NO_FLOW, FlowIds
from clustersim.report.export.rank_selection import TraceRank
from clustersim.report.export.span_descriptions import (
    STREAM_LABELS,
    Arguments,
    SpanDescription,
    action_arguments,
    task_title,
)
from clustersim.report.export.span_table import SpanTable, TraceExport, resolve_message_cause, to_nanoseconds
from clustersim.report.labels import stage_name
from clustersim.results.intervals import assign_tracks, last_per_time, sum_over_time
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.stream_bandwidth import algorithm_bandwidth

SUFFIXES: Final = (".pftrace", ".perfetto-trace", "")
_SEQUENCE: Final = 1
_PACKET_TAG: Final = b"\x0a"  # tag of Trace.packet, field 1, with a length
_TIMESTAMP_BYTES: Final = 8  # bytes of a padded timestamp: 2 years
_TIMESTAMP_TAG: Final = b"\x40"  # tag of TracePacket.timestamp, field 8, a varint
_SEQUENCE_ID_FIELD: Final = b"\x50" + bytes([_SEQUENCE])  # TracePacket.trusted_packet_sequence_id, field 10
_EVENT_TAG: Final = b"\x5a"  # tag of TracePacket.track_event, field 11, with a length
_FLOW_TAG: Final = b"\xf9\x02"  # tag of TrackEvent.flow_ids, field 47, 8 bytes
_VALUE_TAG: Final = b"\xe1\x02"  # tag of TrackEvent.double_counter_value, field 44, 8 bytes
_FIXED64_BYTES: Final = 8
_ANNOTATION_FIELDS: Final = {str: "string_value", int: "int_value", float: "double_value"}  # of DebugAnnotation
_TIME_RESOLUTION: Final = 5e-10  # seconds: below the resolution of a trace
_RATE_COUNTERS: Final = (
    ("data parallel collectives: payload per second", (Stream.DP,)),
    ("tokens to and from experts, overlapped: payload per second", (Stream.EP,)),
    ("messages sent to other stages: bytes per second", (Stream.SEND_NEXT, Stream.SEND_PREVIOUS)),
    ("messages received from other stages: bytes per second", (Stream.RECEIVE,)),
    ("images to the model: payload per second", (Stream.IMAGES,)),
    ("copies to the host: bytes per second", (Stream.D2H,)),
    ("copies from the host: bytes per second", (Stream.H2D,)),
)
_BYTES_UNIT: Final = {"unit": "UNIT_SIZE_BYTES"}
_BYTES_PER_SECOND_UNIT: Final = {"unit_name": "bytes/s"}
_CounterSeries = tuple[str, dict[str, str], IntArray, FloatArray]
"""A counter of a rank: name, unit fields of Perfetto, [n] nanoseconds, ascending, and [n] values from then on."""


def require_perfetto(path: str | Path) -> None:
    """Raise InputError for a file suffix of another format, or if the extra is not installed."""
    if path in ("", "-") or Path(path).suffix not in SUFFIXES:
        raise InputError(
            f"--trace {path}: name a file that ends in .pftrace, .perfetto-trace or nothing (Perfetto); --kineto DIR "
            "writes JSON, which ui.perfetto.dev opens, too"
        )
    _load_protobuf()


def write_perfetto(export: TraceExport, file: IO[bytes]) -> None:
    """Write ranks, their spans and, except for a sample, counters; raises InputError if the extra is not installed."""
    result, writer = export.result, _PacketWriter(file, _load_protobuf(), export.result.scenario.name)
    flow_ids = FlowIds(result.program, [rank.rank for rank in export.ranks])
    for rank in export.ranks:
        writer.add_rank(rank)
    counter_ranks = export.ranks if export.max_tasks is None else ()
    rates = {
        representative: [*_payload_counters(result, representative)]
        for representative in {rank.representative for rank in counter_ranks}
    }
    for rank in counter_ranks:
        for series in (_memory_counter(result, rank.rank), *rates[rank.representative]):
            writer.add_counter(rank.rank, *series)
    receive_tracks: list[_TrackSpans] = []
    for track in (track for rank, spans in export for track in _tracks(rank.rank, spans, flow_ids)):
        if track.stream == Stream.RECEIVE:
            receive_tracks.append(track)
        else:
            writer.add_spans(track, result)
    for track in receive_tracks:
        writer.add_spans(track, result)


def _load_protobuf() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise InputError(
            "a Perfetto trace needs the extra 'trace': pip install 'clustersim[trace]'; --kineto DIR gives traces "
            "without it, which ui.perfetto.dev opens, too"
        ) from error
    return perfetto_trace_pb2


class _TrackSpans(NamedTuple):
    """Spans of one track. track: index within the rank's stream; flow_ids: [spans] as in `FlowIds`.

    waited: [spans] seconds that a task waited before its start, of passes also for own tasks; NaN for operations.
    """

    rank: int
    stream: Stream
    track: int
    spans: SpanTable
    flow_ids: IntArray
    waited: FloatArray


def _tracks(rank: int, spans: SpanTable, flow_id_source: FlowIds) -> Iterator[_TrackSpans]:
    """The spans of a rank, stream by stream, track by track."""
    stream, flow_ids, is_task = spans.stream, flow_id_source.flow_ids(rank, spans), spans.is_task
    waited = spans.start - np.where(
        stream == Stream.COMPUTE, spans.queued, spans.task_column(spans.trace.ready, np.nan)
    )
    track = assign_tracks(stream[is_task], spans.start[is_task], spans.end[is_task])[np.cumsum(is_task) - 1]
    for stream_id in np.unique(stream).tolist():
        for track_index in range(int(track[stream == stream_id].max()) + 1):
            selection = (stream == stream_id) & (track == track_index)
            yield _TrackSpans(
                rank, Stream(stream_id), track_index, spans.select(selection), flow_ids[selection], waited[selection]
            )


def _task_of_event(result: SimulationResult, event: int) -> tuple[int, Task]:
    """Program index and task of a trace event."""
    trace, program_index = result.trace, int(result.program.program_index[result.trace.rank[event]])
    return program_index, result.program.programs[program_index].tasks[trace.task[event]]


def _task_arguments(result: SimulationResult, description: SpanDescription, task: Task) -> Arguments:
    """Arguments of a task, without its waits."""
    arguments: Arguments = {"does": description.title} if description.title else {}
    arguments |= {"detail": description.detail} if description.detail and description.kind != "receive" else {}
    arguments |= action_arguments(task, result.scenario)
    return arguments | (
        {"bytes": int(description.bytes)} if description.comm_op is not None and description.bytes > 0 else {}
    )


def _slowdown_arguments(waited: Seconds, slowed: Seconds) -> Arguments:
    """Seconds that a task waited before its start, and that others slowed it."""
    arguments: Arguments = {"waited_us": waited * 1e6} if waited > 0 else {}
    return arguments | ({"slowed_us": slowed * 1e6} if slowed > 0 else {})


def _cause_arguments(result: SimulationResult, event: int, cause: int, gap_seconds: Seconds) -> Arguments:
    """Cause of a task's start, -1 for none. gap_seconds: seconds between its operations."""
    program_index, _ = _task_of_event(result, event)
    arguments: Arguments = {}
    if cause >= 0:
        cause_program, cause_task = _task_of_event(result, cause)
        location = "" if program_index == cause_program else f" on {stage_name(result.scenario, cause_program)}"
        arguments["after"] = task_title(cause_task, result.scenario) + location
    if gap_seconds > _TIME_RESOLUTION:
        arguments["inside"] = f"waited {format_seconds(gap_seconds)} between operations"
    return arguments


def _memory_counter(result: SimulationResult, rank: int) -> _CounterSeries:
    """Memory of a rank over time."""
    pipeline_rank = min(int(result.program.program_index[rank]), len(result.ledgers) - 1)
    ledger = result.ledgers[pipeline_rank]
    times, bytes_by_category = ledger.over_time()
    label = "memory held in the first step" if result.scenario.steps > 1 else "memory held"
    name = f"{label}, of {format_bytes(result.memory.capacities[pipeline_rank])}"
    return name, _BYTES_UNIT, *last_per_time(to_nanoseconds(times), bytes_by_category.sum(axis=0))


def _payload_counters(result: SimulationResult, rank: int) -> Iterator[_CounterSeries]:
    """Payload bandwidth of a rank over time, on each kind of stream with traffic."""
    trace = result.trace
    for name, streams in _RATE_COUNTERS:
        events, rate = algorithm_bandwidth(trace, result.program, rank, streams)
        if len(events):
            yield (
                name,
                _BYTES_PER_SECOND_UNIT,
                *sum_over_time(to_nanoseconds(trace.start[events]), to_nanoseconds(trace.end[events]), rate),
            )


class _PacketWriter:
    """Streaming writer of packets, one track at a time, so that a million spans never are in memory as packets.

    A track is described on first use, with an order among its siblings. A trace is a sequence of packets, each
    preceded by a field's tag and length. What packets of one description share is encoded once for each track;
    the variable fields follow it: a flow id or counter value as the last field of the event, and the timestamp
    as the last field of the packet, all of fixed length.
    Reference: protobuf.dev/programming-guides/encoding
    """

    def __init__(self, file: IO[bytes], protos: Any, title: str) -> None:
        self._file, self._protos = file, protos
        self._tracks: dict[tuple[object, ...], int] = {}
        self._children: dict[int, int] = defaultdict(int)
        self._root = self._track_id((), 0, title)

    def add_rank(self, rank: TraceRank) -> None:
        """Add the track of a rank, below its stage and replica."""
        replica = self._track_id((rank.replica_index,), self._root, f"replica {rank.replica_index}")
        stage = self._track_id((rank.replica_index, rank.stage), replica, rank.stage)
        self._track_id(("rank", rank.rank), stage, rank.name)

    def add_counter(self, rank: int, name: str, unit: dict[str, str], times: IntArray, values: FloatArray) -> None:
        """Write a counter series of a rank."""
        track = self._track_id((rank, name), self._tracks["rank", rank], name, counter=unit)
        prefix = _packet_prefix(self._event("COUNTER", track), _VALUE_TAG)
        for stamp, value in zip(encode_timestamps(times), values.tolist(), strict=True):
            self._file.write(prefix + struct.pack("<d", value) + stamp)

    def add_spans(self, track_spans: _TrackSpans, result: SimulationResult) -> None:
        """Write spans of a track: each begins, its operations begin and end, it ends.

        The tracks of a stream share one name, and viewers draw them below each other.
        """
        track = self._track_id(
            track_spans[:3], self._tracks["rank", track_spans.rank], STREAM_LABELS[track_spans.stream]
        )
        spans, is_task = track_spans.spans, track_spans.spans.is_task
        task_rows, end_packet = np.flatnonzero(is_task), _packet_prefix(self._event("SLICE_END", track))
        counts = np.diff(np.append(task_rows, len(spans))) - 1
        durations = spans.end - spans.start
        operation_bytes = zip(
            self._operation_prefixes(track, track_spans),
            *_variable_bytes(track_spans, ~is_task, end_packet),
            strict=True,
        )
        tasks = zip(
            task_rows.tolist(),
            counts.tolist(),
            resolve_message_cause(spans.trace, spans.event[task_rows]).tolist(),
            strict=True,
        )
        for (row, count, cause), *task_bytes in zip(
            tasks, *_variable_bytes(track_spans, is_task, end_packet), strict=True
        ):
            gap_seconds = float(durations[row] - durations[row + 1 : row + 1 + count].sum()) if count else 0.0
            description, trace_event = spans.descriptions[spans.description[row]], int(spans.event[row])
            _, task = _task_of_event(result, trace_event)
            arguments = _task_arguments(result, description, task)
            if description.kind != "receive":
                arguments |= _slowdown_arguments(float(track_spans.waited[row]), float(spans.trace.slowed[trace_event]))
                arguments |= _cause_arguments(result, trace_event, cause, gap_seconds)
            event = self._begin_event(track, task_title(task, result.scenario), description.category.label, arguments)
            prefix = _packet_prefix(event, _FLOW_TAG if track_spans.flow_ids[row] != NO_FLOW else b"")
            operations = chain.from_iterable(islice(operation_bytes, count))
            self._file.write(b"".join((prefix, *task_bytes[:2], *operations, *task_bytes[2:])))

    def _operation_prefixes(self, track: int, track_spans: _TrackSpans) -> list[bytes]:
        """Packet prefixes of operations up to their flow ids: the same for all runs."""
        spans, is_operation = track_spans.spans, ~track_spans.spans.is_task
        key, prefix_index = np.unique(
            2 * spans.description[is_operation] + (track_spans.flow_ids[is_operation] != NO_FLOW), return_inverse=True
        )
        descriptions = [spans.descriptions[index // 2] for index in key.tolist()]
        events = [
            self._begin_event(track, description.name, description.category.label, description.arguments)
            for description in descriptions
        ]
        prefixes = [
            _packet_prefix(event, _FLOW_TAG * (index % 2)) for event, index in zip(events, key.tolist(), strict=True)
        ]
        return [prefixes[index] for index in prefix_index.tolist()]

    def _track_id(self, key: tuple[object, ...], parent: int, name: str, **extra: Any) -> int:
        """Id of a track, which is described on first use; parent 0 is the root."""
        if key not in self._tracks:
            self._tracks[key] = len(self._tracks) + 1
            self._children[parent] += 1
            extra |= {"parent_uuid": parent} if parent else {}
            extra |= {"sibling_order_rank": self._children[parent], "child_ordering": "EXPLICIT"}
            descriptor = {"uuid": self._tracks[key], "name": name, **extra}
            packet = {"trusted_packet_sequence_id": _SEQUENCE, "track_descriptor": descriptor}
            self._file.write(self._protos.Trace(packet=[packet]).SerializeToString())
        return self._tracks[key]

    def _begin_event(self, track: int, name: str, category: str, arguments: Arguments) -> bytes:
        annotations = [{"name": key, _ANNOTATION_FIELDS[type(value)]: value} for key, value in arguments.items()]
        fields = {
            "name": name,
            "categories": [category],
            "correlation_id_str": category,
            "debug_annotations": annotations,
        }
        return self._event("SLICE_BEGIN", track, **fields)

    def _event(self, kind: str, track: int, **fields: Any) -> bytes:
        event: bytes = self._protos.TrackEvent(type=f"TYPE_{kind}", track_uuid=track, **fields).SerializeToString()
        return event


def _variable_bytes(track_spans: _TrackSpans, selection: BoolArray, end_packet: bytes) -> tuple[Iterable[bytes], ...]:
    """Bytes after the prefixes of some spans: flow id, start timestamp, and the end packet with its timestamp."""
    trace, events = track_spans.spans.trace, track_spans.spans.event[selection]
    task_start, task_end = trace.start[events], trace.end[events]
    start_stamps, end_stamps = (
        encode_timestamps(to_nanoseconds(np.clip(times[selection], task_start, task_end)))
        for times in (track_spans.spans.start, track_spans.spans.end)
    )
    flows = [
        b"" if times == NO_FLOW else times.to_bytes(_FIXED64_BYTES, "little")
        for times in track_spans.flow_ids[selection].tolist()
    ]
    return flows, start_stamps, [end_packet] * len(events), end_stamps


def _packet_prefix(event: bytes, last_tag: bytes = b"") -> bytes:
    """Packet up to its variable fields.

    event: encoded; last_tag: tag of the event's last field, if that is variable.
    """
    fixed_bytes = _FIXED64_BYTES if last_tag else 0
    inner = _SEQUENCE_ID_FIELD + _EVENT_TAG + _varint(len(event + last_tag) + fixed_bytes) + event + last_tag
    return _PACKET_TAG + _varint(len(inner) + fixed_bytes + len(_TIMESTAMP_TAG) + _TIMESTAMP_BYTES) + inner


def _varint(value: int) -> bytes:
    r"""Protobuf varint: seven bits a byte, lowest first, continuation bit in all but the last byte.

    >>> _varint(1), _varint(300)
    (b'\x01', b'\xac\x02')
    """
    low, remaining = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(remaining) if remaining else bytes([low])


def encode_timestamps(times: IntArray) -> list[bytes]:
    """Timestamps with their tag as varints of equal length, padded with zero bits."""
    bits = times[:, None] >> 7 * np.arange(_TIMESTAMP_BYTES) & 0x7F
    bits[:, :-1] |= 0x80
    encoded = bits.astype(np.uint8).tobytes()
    return [
        _TIMESTAMP_TAG + encoded[offset : offset + _TIMESTAMP_BYTES]
        for offset in range(0, len(encoded), _TIMESTAMP_BYTES)
    ]
