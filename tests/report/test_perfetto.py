"""Perfetto traces, read by the `perfetto` package's protobuf (its trace processor is downloaded when used)."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.program.task import Stream
from clustersim.report.export.perfetto import encode_timestamps
from clustersim.report.export.rank_selection import describe_trace_ranks
from clustersim.report.export.span_table import TraceExport
from clustersim.report.export.write_traces import write_perfetto_file
from clustersim.report.theme import CATEGORY_STYLES
from clustersim.results.simulation_result import SimulationResult
from tests.report.small_trace import packets as read
from tests.report.small_trace import simulated, track_names

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
BEGIN, END, COUNTER = (getattr(protos.TrackEvent, f"TYPE_{name}") for name in ("SLICE_BEGIN", "SLICE_END", "COUNTER"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.pftrace"


def write_and_read(path: Path, result: SimulationResult, ranks: Sequence[int]) -> list[Any]:
    write_perfetto_file(result, path, ranks)
    return read(path)


def events_of_type(packets: Sequence[Any], event_type: int) -> list[Any]:
    return [packet for packet in packets if packet.track_event.type == event_type]


@pytest.mark.parametrize("overrides", [(), ("steps=2", "degradations.jitter=5%")])
def test_perfetto_slices_equal_exported_spans(path: Path, overrides: tuple[str, ...]) -> None:
    """Names of passes and messages contain their microbatch."""
    result = simulated(*overrides)
    trace_packets = write_and_read(path, result, [0, 4])
    spans = [spans for _, spans in TraceExport(result, describe_trace_ranks(result, [0, 4]))]
    begins = [(packet.timestamp, packet.track_event) for packet in events_of_type(trace_packets, BEGIN)]
    for name, times in (
        ("start", [time for time, _ in begins]),
        ("end", [packet.timestamp for packet in events_of_type(trace_packets, END)]),
    ):
        expected = np.sort(np.concatenate([getattr(rank_spans, name) for rank_spans in spans])) * 1e9
        assert np.abs(np.sort(times) - expected).max() <= 1
    operations = [(event.name, *event.categories) for _, event in begins if "work" in event_arguments(event)]
    labels = [
        rank_spans.descriptions[label_index]
        for rank_spans in spans
        for label_index in rank_spans.description[~rank_spans.is_task]
    ]
    assert sorted(operations) == sorted((label.name, label.category.label) for label in labels)
    for key, attribute in (("flop", "flop"), ("memory_bytes", "memory_bytes"), ("payload_bytes", "bytes")):
        slice_values = [event_arguments(event)[key] for _, event in begins if key in event_arguments(event)]
        values = np.array([getattr(label, attribute) for label in labels])
        assert sum(slice_values) == pytest.approx(np.nansum(values), rel=1e-9)


def event_arguments(event: Any) -> dict[str, Any]:
    return {note.name: getattr(note, note.WhichOneof("value")) for note in event.debug_annotations}


@pytest.mark.parametrize("time", [0, 127, 128, 7 * 10**9, 2**56 - 1])
def test_timestamps_of_any_size_round_trip(time: int) -> None:
    packet = protos.TracePacket()
    [stamp] = encode_timestamps(np.array([time]))
    packet.ParseFromString(stamp)
    assert packet.timestamp == time


def test_operations_are_nested_in_their_pass_on_the_same_track(path: Path) -> None:
    packets = write_and_read(path, simulated(), [0])
    depth: dict[int, int] = defaultdict(int)
    max_depth = 0
    for packet in packets:
        if packet.track_event.type in (BEGIN, END):
            track = packet.track_event.track_uuid
            depth[track] += 1 if packet.track_event.type == BEGIN else -1
            assert depth[track] >= 0
            max_depth = max(max_depth, depth[track])
    assert (max_depth, set(depth.values())) == (2, {0})


def test_track_hierarchy_and_order(path: Path) -> None:
    packets = write_and_read(path, simulated(), range(8))
    names_by_track = track_names(packets)
    streams = {names_by_track[packet.track_event.track_uuid] for packet in events_of_type(packets, BEGIN)}
    assert {len(path) for path in streams} == {5}
    assert {path[:4] for path in streams} == {
        ("small", f"replica {dp}", f"stage {pp}", f"rank {4 * pp + 2 * dp + tp} (tp {tp})")
        for dp in range(2) for pp in range(2) for tp in range(2)
    }  # fmt: skip
    assert {path[4] for path in streams if path[2] == "stage 0"} == {
        "compute", "data parallel", "send to the next stage", "receive",
    }  # fmt: skip
    sibling_ranks: dict[int, list[int]] = defaultdict(list)
    for packet in packets:
        track = packet.track_descriptor
        if track.uuid:
            assert track.child_ordering == protos.TrackDescriptor.EXPLICIT
            sibling_ranks[track.parent_uuid].append(track.sibling_order_rank)
    assert all(ranks == list(range(1, len(ranks) + 1)) for ranks in sibling_ranks.values())


def flow_endpoints(packets: Sequence[Any]) -> dict[int, list[tuple[tuple[str, ...], int]]]:
    """Track and time of the slices of each flow, in written order."""
    names_by_track, endpoints = track_names(packets), defaultdict(list)
    for packet in events_of_type(packets, BEGIN):
        for flow in packet.track_event.flow_ids:
            endpoints[flow].append((names_by_track[packet.track_event.track_uuid], packet.timestamp))
    return endpoints


def test_messages_are_flows_from_sender_to_receiver(path: Path) -> None:
    messages = [
        ends for ends in flow_endpoints(write_and_read(path, simulated(), range(8))).values() if "send" in ends[0][0][4]
    ]
    assert len(messages) == 4 * 2 * 4  # microbatches, directions, pipelines
    for (sender, sent), (receiver, received) in messages:
        assert (receiver[4], sent) == ("receive", received)
        assert (sender[1], sender[3][-6:]) == (receiver[1], receiver[3][-6:])  # one replica, one tp coordinate
        assert sender[2] != receiver[2]


def test_collectives_are_flows_among_members(path: Path) -> None:
    result = simulated()
    groups = defaultdict(list)
    for ends in flow_endpoints(write_and_read(path, result, range(8))).values():
        if "send" not in ends[0][0][4]:
            assert len({time for _, time in ends}) == 1
            members = tuple(sorted(int(path[3].split()[1]) for path, _ in ends))
            groups[members].append(ends[0][0][4])
    tasks = result.program.programs[0].tasks
    dp = sum(1 for task in tasks if getattr(getattr(task, "comm_op", None), "comm_group", "") == "dp")
    assert groups[0, 2].count("data parallel") == groups[1, 3].count("data parallel") == dp > 0
    assert groups[tuple(range(8))] == ["data parallel"]  # the gradient norm all-reduce
    operations = [operation for task in tasks if hasattr(task, "segment") for operation in task.segment.operations]
    assert len(groups[0, 1]) == len(groups[2, 3]) == sum(1 for operation in operations if operation.comm_op is not None)


def test_messages_with_one_endpoint_have_no_flow(path: Path) -> None:
    assert [len(ends) for ends in flow_endpoints(write_and_read(path, simulated(), [0, 3])).values()] == [
        2
    ]  # the norm of gradients alone
    assert {len(ends) for ends in flow_endpoints(write_and_read(path, simulated(), [0, 4])).values()} == {2}


def test_flow_ids_are_unique_across_steps(path: Path) -> None:
    messages = [
        ends for ends in flow_endpoints(write_and_read(path, simulated("steps=3"), [0, 4])).values() if len(ends) == 2
    ]
    assert len([ends for ends in messages if "send" in ends[0][0][4]]) == 3 * 4 * 2


def counter_track(packets: Sequence[Any], rank: int, label: str) -> tuple[str, np.ndarray, np.ndarray]:
    names_by_track = track_names(packets)
    [track] = [
        track_id
        for track_id, path in names_by_track.items()
        if len(path) == 5 and f"rank {rank} " in path[3] and label in path[4]
    ]
    values = [packet for packet in events_of_type(packets, COUNTER) if packet.track_event.track_uuid == track]
    times = np.array([packet.timestamp for packet in values])
    return names_by_track[track][4], times, np.array([packet.track_event.double_counter_value for packet in values])


@pytest.mark.parametrize(("rank", "stage"), [(1, 0), (6, 1)])
def test_memory_counter_equals_ledger(path: Path, rank: int, stage: int) -> None:
    result = simulated()
    name, times, held = counter_track(write_and_read(path, result, range(8)), rank, "memory")
    ledger = result.ledgers[stage]
    assert name == "memory held, of 79.65 GiB"
    assert held.max() == pytest.approx(ledger.peak, rel=1e-12)
    assert (np.diff(times) > 0).all()
    assert times[0] == 0
    at_rest = ledger.peak - ledger.peak_activations * ledger.fragmentation
    assert held[-1] == pytest.approx(at_rest, rel=1e-9)  # activations are freed at the end


@pytest.mark.parametrize(
    ("word", "streams"),
    [
        ("collectives", [Stream.DP]),
        ("sent", [Stream.SEND_NEXT, Stream.SEND_PREVIOUS]),
        ("received", [Stream.RECEIVE]),
    ],
)
def test_integral_of_bandwidth_counter_is_the_bytes_moved(path: Path, word: str, streams: list[Stream]) -> None:
    result = simulated()
    _, times, rate = counter_track(write_and_read(path, result, [0, 4]), 0, word)
    payloads = [
        task.comm_op.payload
        for task, stream in zip(result.program.programs[0].tasks, result.program.programs[0].streams, strict=True)
        if stream in streams
    ]
    assert (rate[:-1] * np.diff(times)).sum() * 1e-9 == pytest.approx(sum(payloads), rel=1e-4)
    assert rate[-1] == 0


def test_slices_of_one_category_share_a_colour(path: Path) -> None:
    events = [packet.track_event for packet in events_of_type(write_and_read(path, simulated(), [0, 4]), BEGIN)]
    labels = {category.label for category in CATEGORY_STYLES}
    assert {event.correlation_id_str for event in events} <= labels
    assert all(list(event.categories) == [event.correlation_id_str] for event in events)
