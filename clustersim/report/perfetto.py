"""How is a trace written for Perfetto, to be opened at ui.perfetto.dev?

Tracks are a tree in a given order: the scenario, replicas, stages, ranks with their counters, streams. Slices carry
what the page's hover text says, and flows join what is sent with what is received, and the members of collectives.
Times are whole nanoseconds, so what is shorter is drawn with no length. The protobuf comes from the `perfetto` package,
an extra: `pip install 'clustersim[trace]'`.

Perfetto lets no trace choose colours (github.com/google/perfetto/issues/620). It gives slices with equal correlation
ids equal colours (pull/1628), so the words of the page's categories are these ids: as on the page, one category has
one colour everywhere, but not the page's.
Reference: perfetto.dev/docs/reference/synthetic-track-event
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from clustersim.arrays import IntArray
from clustersim.errors import InputError
from clustersim.report.operations import Arguments, Label
from clustersim.report.slices import STREAM_NAMES, Nanoseconds, Nested, Slice
from clustersim.report.trace_content import Content
from clustersim.report.trace_counters import Counter
from clustersim.report.trace_flows import NONE
from clustersim.report.trace_ranks import TraceRank

_SEQUENCE: Final = 1
_PACKET: Final = b"\x0a"  # tag of Trace.packet, field 1, with a length
_STAMP: Final = 8  # bytes of a time: 2 years
_TIMESTAMP: Final = b"\x40"  # tag of TracePacket.timestamp, field 8, a varint
_SEQUENCE_ID: Final = b"\x50" + bytes([_SEQUENCE])  # TracePacket.trusted_packet_sequence_id, field 10
_EVENT: Final = b"\x5a"  # tag of TracePacket.track_event, field 11, with a length
_FLOW: Final = b"\xf9\x02"  # tag of TrackEvent.flow_ids, field 47, 8 bytes
_VALUE: Final = b"\xe1\x02"  # tag of TrackEvent.double_counter_value, field 44, 8 bytes
_FIXED: Final = 8


def require_perfetto() -> None:
    """Raise InputError where the extra is not installed, before anyone waits for a trace."""
    _library()


def write_perfetto(content: Content, file: IO[bytes]) -> None:
    """Write ranks, their slices and counters; raise InputError where the extra is not installed."""
    writer = _Writer(file, _library())
    tree = _Tree(writer, content.title)
    for rank in content.ranks:
        tree.rank(rank)
    for rank, counters in content.counters:
        for counter in counters:
            writer.counter(tree.counter(rank, counter), counter)
    for piece in content.pieces:
        writer.slice(tree.stream(piece), piece)


def _library() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise InputError(
            "a Perfetto trace needs the extra 'trace': pip install 'clustersim[trace]'; "
            "a name that ends in .json gives a Chrome trace without it"
        ) from error
    return perfetto_trace_pb2


class _Tree:
    """Tracks, described when they are first met; each has a place among its siblings."""

    def __init__(self, writer: "_Writer", title: str) -> None:
        self._writer = writer
        self._tracks: dict[tuple[object, ...], int] = {}
        self._children: dict[int, int] = {}
        self._top = self._track((), 0, title)

    def rank(self, rank: TraceRank) -> int:
        """The track of a rank, below its stage and replica."""
        replica = self._track((rank.replica,), self._top, f"replica {rank.replica}")
        stage = self._track((rank.replica, rank.stage), replica, rank.stage)
        return self._track(("rank", rank.rank), stage, rank.name)

    def counter(self, rank: TraceRank, counter: Counter) -> int:
        """The track of a rank's counter."""
        return self._track((rank.rank, counter.name), self.rank(rank), counter.name, counter)

    def stream(self, piece: Slice) -> int:
        """The track of a slice: those of a stream have one name, and viewers draw them below each other."""
        parent = self._tracks["rank", piece.rank]
        return self._track((piece.rank, piece.stream, piece.track), parent, STREAM_NAMES[piece.stream])

    def _track(self, key: tuple[object, ...], parent: int, name: str, counter: Counter | None = None) -> int:
        number = self._tracks.get(key)
        if number is None:
            number = self._tracks[key] = len(self._tracks) + 1
            place = self._children[parent] = self._children.get(parent, 0) + 1
            self._writer.track(number, parent, place, name, counter)
        return number


class _Writer:
    """Packets, one pass at a time: a million spans never stand in memory as packets.

    A trace is its packets, each behind the tag and the length of a field. What packets of a label on a track have in
    common is encoded once, with what differs behind it: a flow or a value as the last field of the event, and the time
    as the last one of the packet, all of fixed lengths.
    Reference: protobuf.dev/programming-guides/encoding
    """

    def __init__(self, file: IO[bytes], protos: Any) -> None:
        self._file, self._protos = file, protos
        self._known: dict[tuple[tuple[Label, ...], int, tuple[bool, ...]], _Template] = {}

    def track(self, number: int, parent: int, place: int, name: str, counter: Counter | None) -> None:
        """Describe a line of the viewer; parent 0 is the top; place: among its siblings."""
        trace = self._protos.Trace()
        packet = trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        track = packet.track_descriptor
        track.uuid, track.name, track.sibling_order_rank = number, name, place
        track.child_ordering = self._protos.TrackDescriptor.EXPLICIT
        if parent:
            track.parent_uuid = parent
        if counter is not None and counter.per_second:
            track.counter.unit_name = "bytes/s"
        elif counter is not None:
            track.counter.unit = self._protos.CounterDescriptor.UNIT_SIZE_BYTES
        self._file.write(trace.SerializeToString())

    def counter(self, track: int, counter: Counter) -> None:
        """The values of a counter."""
        event = self._event(track, self._protos.TrackEvent.TYPE_COUNTER)
        head = _head(event.SerializeToString(), _VALUE)
        for stamp, value in zip(_stamps(counter.times.tolist()), counter.values.tolist(), strict=True):
            self._file.write(head + struct.pack("<d", value) + _TIMESTAMP + stamp)

    def slice(self, track: int, piece: Slice) -> None:
        """A beginning, what is inside, and an end."""
        start, stop = _stamps([piece.start, piece.end])
        begin = self._untimed(piece.label, track, flows=piece.flow != NONE)
        flow = b"" if piece.flow == NONE else piece.flow.to_bytes(_FIXED, "little")
        inside = b"" if piece.inside is None else self._inside(track, piece.inside)
        end = self._untimed(None, track, flows=False)
        self._file.write(b"".join((begin, flow, _TIMESTAMP, start, inside, end, _TIMESTAMP, stop)))

    def _inside(self, track: int, inside: Nested) -> bytes:
        """Packets of what is inside: the same but for times and flows wherever a block is run."""
        flows = tuple(flow != NONE for flow in inside.flows)
        key = (inside.labels, track, flows)
        if key not in self._known:
            self._known[key] = self._template(inside.labels, track, flows or (False,) * len(inside))
        times = _digits(np.stack((inside.start, inside.end), axis=1).ravel())
        return self._known[key].filled(times, [flow for flow in inside.flows if flow != NONE])

    def _template(self, labels: Sequence[Label], track: int, flows: Sequence[bool]) -> "_Template":
        packets, times, numbers = bytearray(), [], []
        end = self._untimed(None, track, flows=False)
        for label, flow in zip(labels, flows, strict=True):
            packets += self._untimed(label, track, flows=flow)
            if flow:
                numbers.append(len(packets))
                packets += bytes(_FIXED)
            for more in (b"", end):
                packets += more + _TIMESTAMP
                times.append(len(packets))
                packets += bytes(_STAMP)
        return _Template.of(packets, times, numbers)

    def _untimed(self, label: Label | None, track: int, *, flows: bool) -> bytes:
        """The packet of a beginning, or without a label of an end, on a track, up to its flow or its time."""
        types = self._protos.TrackEvent
        event = self._event(track, types.TYPE_SLICE_END if label is None else types.TYPE_SLICE_BEGIN)
        if label is not None:
            event.name = label.name
            event.categories.append(label.category.label)
            event.correlation_id_str = label.category.label
            _annotate(event, label.arguments)
        return _head(event.SerializeToString(), _FLOW if flows else b"")

    def _event(self, track: int, kind: int) -> Any:
        event = self._protos.TrackEvent()
        event.track_uuid, event.type = track, kind
        return event


@dataclass(frozen=True, slots=True)
class _Template:
    """Packets with places for times and flows. times: [times, bytes] places of theirs; flows: [flows, bytes]."""

    packets: NDArray[np.uint8]
    times: IntArray
    flows: IntArray

    @classmethod
    def of(cls, packets: bytearray, times: Sequence[int], flows: Sequence[int]) -> Self:
        """times, flows: where each begins."""
        places = [np.array(each, dtype=np.int64)[:, None] + np.arange(_STAMP) for each in (times, flows)]
        return cls(np.frombuffer(bytes(packets), dtype=np.uint8), *places)

    def filled(self, times: NDArray[np.uint8], flows: Sequence[int]) -> bytes:
        """The packets with times as encoded, and flows."""
        packets = self.packets.copy()
        packets[self.times] = times
        packets[self.flows] = np.array(flows, dtype="<u8").view(np.uint8).reshape(-1, _FIXED)
        return packets.tobytes()


def _head(event: bytes, last: bytes) -> bytes:
    """A packet up to what differs. event: as encoded; last: the tag of the event's last field, if that differs."""
    length = len(event) + len(last) + (_FIXED if last else 0)
    inner = _SEQUENCE_ID + _EVENT + _varint(length) + event + last
    return _PACKET + _varint(len(inner) + (_FIXED if last else 0) + len(_TIMESTAMP) + _STAMP) + inner


def _varint(number: int) -> bytes:
    """A number in protobuf's encoding: seven bits a byte, the lowest first, all but the last byte marked.

    >>> _varint(1), _varint(300)
    (b'\\x01', b'\\xac\\x02')
    """
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _stamps(times: Sequence[Nanoseconds]) -> Iterator[bytes]:
    """Times as numbers of protobuf."""
    encoded = _digits(np.array(times, dtype=np.int64)).tobytes()
    return (encoded[place : place + _STAMP] for place in range(0, len(encoded), _STAMP))


def _digits(times: IntArray) -> NDArray[np.uint8]:
    """Times as numbers of protobuf that are all as long: their highest bits may be zeros. [times, bytes]."""
    bits = times[:, None] >> 7 * np.arange(_STAMP) & 0x7F
    bits[:, :-1] |= 0x80
    return bits.astype(np.uint8)


def _annotate(event: Any, arguments: Arguments) -> None:
    for name, value in arguments.items():
        annotation = event.debug_annotations.add()
        annotation.name = name
        if isinstance(value, str):
            annotation.string_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.double_value = value
