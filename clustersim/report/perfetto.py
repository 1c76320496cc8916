"""How is a trace written for Perfetto, to be opened at ui.perfetto.dev?

One track for each row, in order, with a track below it for each lane; slices carry what the page's hover text says.
Times are whole nanoseconds, so what is shorter is drawn with no length. The protobuf comes from the `perfetto`
package, an extra: `pip install 'clustersim[trace]'`.
Reference: perfetto.dev/docs/reference/synthetic-track-event
"""

from collections.abc import Iterable
from typing import IO, Any, Final

from clustersim.errors import InputError
from clustersim.report.slices import Arguments, Label, Nanoseconds, Slice
from clustersim.report.view import Timeline

_SEQUENCE: Final = 1
_LANE_TRACKS: Final = 1 << 20  # track numbers of one lane
_TRACK_NUMBERS: Final = 1 << 30  # track numbers of one row


def require_perfetto() -> None:
    """Raise InputError where the extra is not installed, before anyone waits for a trace."""
    _library()


def write_perfetto(timeline: Timeline, pieces: Iterable[Slice], file: IO[bytes]) -> None:
    """Write the timeline's rows and these slices of it; raise InputError where the extra is not installed."""
    protos, builder = _library()
    writer = _Writer(builder(file), protos.TrackDescriptor, protos.TrackEvent)
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


def _library() -> tuple[Any, Any]:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise InputError(
            "a Perfetto trace needs the extra 'trace': pip install 'clustersim[trace]'; "
            "a name that ends in .json gives a Chrome trace without it"
        ) from error
    return perfetto_trace_pb2, StreamingTraceProtoBuilder


class _Writer:
    """Packets, one at a time: a million spans never stand in memory as packets."""

    def __init__(self, builder: Any, descriptor: Any, event: Any) -> None:
        self._builder, self._descriptor, self._event = builder, descriptor, event
        self._known: dict[Label, Any] = {}

    def track(self, number: int, parent: int, name: str) -> None:
        """Describe a line of the viewer; parent 0 is the top."""
        packet = self._packet()
        track = packet.track_descriptor
        track.uuid, track.name, track.parent_uuid = number, name, parent
        track.child_ordering = self._descriptor.EXPLICIT
        track.sibling_order_rank = number % _TRACK_NUMBERS or number // _TRACK_NUMBERS
        self._builder.write_packet(packet)

    def slice(self, track: int, piece: Slice) -> None:
        """A beginning, what is inside, and an end. Packets of operations' beginnings are used again."""
        end = self._packet()
        end.track_event.type = self._event.TYPE_SLICE_END
        self._write(self._begin(piece.label), track, piece.start)
        for each in piece.inside:
            begin = self._known.get(each.label)
            if begin is None:
                begin = self._known[each.label] = self._begin(each.label)
            self._write(begin, track, each.start)
            self._write(end, track, each.end)
        self._write(end, track, piece.end)

    def _begin(self, label: Label) -> Any:
        packet = self._packet()
        event = packet.track_event
        event.type, event.name = self._event.TYPE_SLICE_BEGIN, label.name
        event.categories.append(label.category.label)
        _annotate(event, label.arguments)
        return packet

    def _write(self, packet: Any, track: int, time: Nanoseconds) -> None:
        packet.track_event.track_uuid, packet.timestamp = track, time
        self._builder.write_packet(packet)

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet


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
