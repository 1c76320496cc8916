"""How is a trace written for Perfetto, to be opened at ui.perfetto.dev?

One track for each row, in order, with a track below it for each lane; slices carry what the page's hover text says.
Times are whole nanoseconds, so what is shorter is drawn with no length. The protobuf comes from the `perfetto`
package, an extra: `pip install 'clustersim[trace]'`.
Reference: perfetto.dev/docs/reference/synthetic-track-event
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import IO, Any, Final

import numpy as np

from clustersim.errors import InputError
from clustersim.report.slices import Arguments, Label, Nanoseconds, Slice
from clustersim.report.view import Timeline

_SEQUENCE: Final = 1
_LANE_TRACKS: Final = 1 << 20  # track numbers of one lane
_TRACK_NUMBERS: Final = 1 << 30  # track numbers of one row
_PACKET: Final = b"\x0a"  # tag of Trace.packet, field 1, with a length
_STAMP: Final = 8  # bytes of a time: 2 years
_TIMESTAMP: Final = b"\x40"  # tag of TracePacket.timestamp, field 8, a varint


def require_perfetto() -> None:
    """Raise InputError where the extra is not installed, before anyone waits for a trace."""
    _library()


def write_perfetto(timeline: Timeline, pieces: Iterable[Slice], file: IO[bytes]) -> None:
    """Write the timeline's rows and these slices of it; raise InputError where the extra is not installed."""
    protos = _library()
    writer = _Writer(file, protos)
    for number, row in enumerate(timeline.rows):
        writer.track(_row_track(number), 0, row.named)
    described: set[int] = set()
    for piece in pieces:
        track = _lane_track(piece)
        if track not in described:
            described.add(track)
            writer.track(track, _row_track(piece.row), timeline.lanes[piece.lane])
        writer.slice(track, piece)


def _row_track(row: int) -> int:
    return (row + 1) * _TRACK_NUMBERS


def _lane_track(piece: Slice) -> int:
    return _row_track(piece.row) + piece.lane * _LANE_TRACKS + piece.track + 1


def _library() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise InputError(
            "a Perfetto trace needs the extra 'trace': pip install 'clustersim[trace]'; "
            "a name that ends in .json gives a Chrome trace without it"
        ) from error
    return perfetto_trace_pb2


class _Writer:
    """Packets, one pass at a time: a million spans never stand in memory as packets.

    A trace is its packets, each behind the tag and the length of a field. What packets of a label on a track have in
    common is encoded once; the time, whose place among a packet's fields is free, is put behind it.
    Reference: protobuf.dev/programming-guides/encoding
    """

    def __init__(self, file: IO[bytes], protos: Any) -> None:
        self._file, self._protos = file, protos
        self._known: dict[tuple[Label | None, int], bytes] = {}

    def track(self, number: int, parent: int, name: str) -> None:
        """Describe a line of the viewer; parent 0 is the top."""
        trace = self._protos.Trace()
        packet = trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        track = packet.track_descriptor
        track.uuid, track.name, track.parent_uuid = number, name, parent
        track.child_ordering = self._protos.TrackDescriptor.EXPLICIT
        track.sibling_order_rank = number % _TRACK_NUMBERS or number // _TRACK_NUMBERS
        self._file.write(trace.SerializeToString())

    def slice(self, track: int, piece: Slice) -> None:
        """A beginning, what is inside, and an end. What begins operations is used again."""
        end = self._of(None, track)
        packets, times = [self._untimed(piece.label, track)], [piece.start]
        for each in piece.inside:
            packets += (self._of(each.label, track), end)
            times += (each.start, each.end)
        packets.append(end)
        times.append(piece.end)
        self._file.write(b"".join(chain.from_iterable(zip(packets, _stamps(times), strict=True))))

    def _of(self, label: Label | None, track: int) -> bytes:
        known = self._known.get((label, track))
        if known is None:
            known = self._known[label, track] = self._untimed(label, track)
        return known

    def _untimed(self, label: Label | None, track: int) -> bytes:
        """The packet of a beginning, or without a label of an end, on a track, but for the bytes of its time."""
        packet, event = self._protos.TracePacket(), self._protos.TrackEvent
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.track_uuid = track
        packet.track_event.type = event.TYPE_SLICE_END if label is None else event.TYPE_SLICE_BEGIN
        if label is not None:
            packet.track_event.name = label.name
            packet.track_event.categories.append(label.category.label)
            _annotate(packet.track_event, label.arguments)
        encoded: bytes = packet.SerializeToString()
        return _PACKET + _varint(len(encoded) + len(_TIMESTAMP) + _STAMP) + encoded + _TIMESTAMP


def _varint(number: int) -> bytes:
    """A number in protobuf's encoding: seven bits a byte, the lowest first, all but the last byte marked.

    >>> _varint(1), _varint(300)
    (b'\\x01', b'\\xac\\x02')
    """
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _stamps(times: Sequence[Nanoseconds]) -> Iterator[bytes]:
    """Times as numbers of protobuf that are all as long, so that packets are: their highest bits may be zeros."""
    bits = np.array(times, dtype=np.int64)[:, None] >> 7 * np.arange(_STAMP) & 0x7F
    bits[:, :-1] |= 0x80
    encoded = bits.astype(np.uint8).tobytes()
    return (encoded[place : place + _STAMP] for place in range(0, len(encoded), _STAMP))


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
