"""The protobuf of the `perfetto` package reads back what is written (its trace processor is downloaded when used)."""

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from clustersim.parallel.mesh import NAMES
from clustersim.program.task import Stream
from clustersim.report.operations import Label
from clustersim.report.perfetto import write_perfetto
from clustersim.report.slices import Slice, slices
from clustersim.report.theme import CATEGORIES, Category
from clustersim.report.trace_content import Content, content_of
from clustersim.report.trace_ranks import TraceRank, trace_ranks
from clustersim.result import Result
from tests.report.traced import simulated

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
BEGIN, END, COUNTER = (getattr(protos.TrackEvent, f"TYPE_{name}") for name in ("SLICE_BEGIN", "SLICE_END", "COUNTER"))


def read(content: Content) -> list[Any]:
    file = io.BytesIO()
    write_perfetto(content, file)
    trace = protos.Trace()
    trace.ParseFromString(file.getvalue())
    return list(trace.packet)


def written(result: Result, ranks: Sequence[int]) -> list[Any]:
    return read(content_of(result, trace_ranks(result, ranks)))


def paths(packets: Sequence[Any]) -> dict[int, tuple[str, ...]]:
    """The names of every track, from the top."""
    tracks = {packet.track_descriptor.uuid: packet.track_descriptor for packet in packets}

    def path(number: int) -> tuple[str, ...]:
        track = tracks.get(number)
        return () if track is None or not track.uuid else (*path(track.parent_uuid), track.name)

    return {number: path(number) for number in tracks if number}


def of_type(packets: Sequence[Any], kind: int) -> list[Any]:
    return [packet for packet in packets if packet.track_event.type == kind]


def flat(pieces: Sequence[Slice]) -> list[tuple[int, int, Label]]:
    """Start, end and label of slices and of those inside them."""
    found = []
    for piece in pieces:
        found.append((piece.start, piece.end, piece.label))
        if piece.inside:
            inside = piece.inside
            found += zip(inside.start.tolist(), inside.end.tolist(), inside.labels, strict=True)
    return found


@pytest.mark.parametrize("overrides", [(), ("steps=2", "disturbances.jitter=5%")])
def test_every_slice_is_given_back_with_its_times_words_and_arguments(overrides: tuple[str, ...]) -> None:
    result = simulated(*overrides)
    packets = written(result, [0, 4])
    pieces = flat(list(slices(result, trace_ranks(result, [0, 4]))))
    begins = of_type(packets, BEGIN)
    assert [packet.timestamp for packet in begins] == [start for start, _, _ in pieces]
    assert sorted(packet.timestamp for packet in of_type(packets, END)) == sorted(end for _, end, _ in pieces)
    assert [packet.track_event.name for packet in begins] == [label.name for _, _, label in pieces]
    for packet, (_, _, label) in zip(begins, pieces, strict=True):
        notes = packet.track_event.debug_annotations
        assert {note.name: getattr(note, note.WhichOneof("value")) for note in notes} == label.arguments


@pytest.mark.parametrize("time", [0, 127, 128, 7 * 10**9, 2**56 - 1])
@pytest.mark.parametrize("flow", [0, 1, 2**63])
def test_times_and_flows_of_any_size_are_kept(time: int, flow: int) -> None:
    label = Label("a" * 200, Category.FORWARD, {"moved": 3, "share": 0.5})  # longer than one byte of length can say
    rank = TraceRank(3, 3, "stage 0", dict.fromkeys(NAMES, 0), 1, slow=False, axes=())
    packets = read(Content("step", (rank,), [Slice(3, Stream.DATA, 0, 0, time, label, flow)]))
    begin, end = packets[-2:]
    assert (begin.timestamp, begin.track_event.name, end.timestamp) == (0, label.name, time)
    assert list(begin.track_event.flow_ids) == ([flow] if flow else [])
    assert len(begin.track_event.debug_annotations) == 2


def test_operations_are_nested_in_their_pass_on_the_same_track() -> None:
    packets = written(simulated(), [0])
    depth: dict[int, int] = defaultdict(int)
    deepest = 0
    for packet in packets:
        if packet.track_event.type in (BEGIN, END):
            track = packet.track_event.track_uuid
            depth[track] += 1 if packet.track_event.type == BEGIN else -1
            assert depth[track] >= 0
            deepest = max(deepest, depth[track])
    assert (deepest, set(depth.values())) == (2, {0})


def test_tracks_are_a_tree_of_replicas_stages_ranks_and_streams_in_order() -> None:
    packets = written(simulated(), range(8))
    found = paths(packets)
    streams = {found[packet.track_event.track_uuid] for packet in of_type(packets, BEGIN)}
    assert {len(path) for path in streams} == {5}
    assert {path[:4] for path in streams} == {
        ("small", f"replica {dp}", f"stage {pp}", f"rank {4 * pp + 2 * dp + tp} (tp {tp})")
        for dp in range(2) for pp in range(2) for tp in range(2)
    }  # fmt: skip
    assert {path[4] for path in streams if path[2] == "stage 0"} == {
        "compute", "data parallel", "send to the next stage", "receive",
    }  # fmt: skip
    places: dict[int, list[int]] = defaultdict(list)
    for packet in packets:
        track = packet.track_descriptor
        if track.uuid:
            assert track.child_ordering == protos.TrackDescriptor.EXPLICIT
            places[track.parent_uuid].append(track.sibling_order_rank)
    assert all(ranks == list(range(1, len(ranks) + 1)) for ranks in places.values())


def flows(packets: Sequence[Any]) -> dict[int, list[tuple[tuple[str, ...], int]]]:
    """Track and time of the slices of each flow, as they are written."""
    found, ends = paths(packets), defaultdict(list)
    for packet in of_type(packets, BEGIN):
        for flow in packet.track_event.flow_ids:
            ends[flow].append((found[packet.track_event.track_uuid], packet.timestamp))
    return ends


def test_every_message_is_a_flow_from_its_sender_to_its_receiver() -> None:
    messages = [ends for ends in flows(written(simulated(), range(8))).values() if "send" in ends[0][0][4]]
    assert len(messages) == 4 * 2 * 4  # microbatches, directions, pipelines
    for (sender, sent), (receiver, received) in messages:
        assert (receiver[4], sent) == ("receive", received)
        assert (sender[1], sender[3][-6:]) == (receiver[1], receiver[3][-6:])  # one replica, one tp coordinate
        assert sender[2] != receiver[2]


def test_every_collective_is_a_flow_among_its_members() -> None:
    result = simulated()
    groups = defaultdict(list)
    for ends in flows(written(result, range(8))).values():
        if "send" not in ends[0][0][4]:
            assert len({time for _, time in ends}) == 1
            members = tuple(sorted(int(path[3].split()[1]) for path, _ in ends))
            groups[members].append(ends[0][0][4])
    tasks = result.program.programs[0].tasks
    dp = sum(1 for task in tasks if getattr(getattr(task, "exchange", None), "group", "") == "dp")
    assert groups[0, 2].count("data parallel") == groups[1, 3].count("data parallel") == dp > 0
    assert groups[tuple(range(8))] == ["data parallel"]  # the norm of gradients
    operations = [operation for task in tasks if hasattr(task, "block") for operation in task.block.operations]
    assert len(groups[0, 1]) == len(groups[2, 3]) == sum(1 for each in operations if each.exchange is not None)


def test_what_has_one_end_among_the_ranks_is_no_flow() -> None:
    assert [len(ends) for ends in flows(written(simulated(), [0, 3])).values()] == [2]  # the norm of gradients alone
    assert {len(ends) for ends in flows(written(simulated(), [0, 4])).values()} == {2}


def test_of_several_steps_no_two_messages_are_one_flow() -> None:
    messages = [ends for ends in flows(written(simulated("steps=3"), [0, 4])).values() if len(ends) == 2]
    assert len([ends for ends in messages if "send" in ends[0][0][4]]) == 3 * 4 * 2


def counter(packets: Sequence[Any], rank: int, word: str) -> tuple[str, np.ndarray, np.ndarray]:
    found = paths(packets)
    [track] = [
        number for number, path in found.items() if len(path) == 5 and f"rank {rank} " in path[3] and word in path[4]
    ]
    values = [packet for packet in of_type(packets, COUNTER) if packet.track_event.track_uuid == track]
    times = np.array([packet.timestamp for packet in values])
    return found[track][4], times, np.array([packet.track_event.double_counter_value for packet in values])


@pytest.mark.parametrize(("rank", "stage"), [(1, 0), (6, 1)])
def test_memory_held_is_the_ledgers_curve_with_the_capacity_in_its_name(rank: int, stage: int) -> None:
    result = simulated()
    name, times, held = counter(written(result, range(8)), rank, "memory")
    ledger = result.ledgers[stage]
    assert name == "memory held, of 79.65 GiB"
    assert held.max() == pytest.approx(ledger.peak, rel=1e-12)
    assert (np.diff(times) > 0).all()
    assert times[0] == 0
    at_rest = ledger.peak - ledger.peak_activations * ledger.fragmentation
    assert held[-1] == pytest.approx(at_rest, rel=1e-9)  # all activations are freed at the end


@pytest.mark.parametrize(
    ("word", "streams"),
    [
        ("collectives", [Stream.DATA]),
        ("sent", [Stream.SEND_NEXT, Stream.SEND_PREVIOUS]),
        ("received", [Stream.RECEIVE]),
    ],
)
def test_the_area_below_what_a_rank_moves_per_second_is_what_it_moves(word: str, streams: list[Stream]) -> None:
    result = simulated()
    _, times, rate = counter(written(result, [0, 4]), 0, word)
    tasks = [
        task.exchange.payload
        for task, stream in zip(result.program.programs[0].tasks, result.program.programs[0].streams, strict=True)
        if stream in streams
    ]
    assert (rate[:-1] * np.diff(times)).sum() * 1e-9 == pytest.approx(sum(tasks), rel=1e-4)
    assert rate[-1] == 0


def test_slices_of_one_category_are_asked_to_have_one_colour() -> None:
    events = [packet.track_event for packet in of_type(written(simulated(), [0, 4]), BEGIN)]
    words = {category.label for category in CATEGORIES}
    assert {event.correlation_id_str for event in events} <= words
    assert all(list(event.categories) == [event.correlation_id_str] for event in events)
