"""A small two-stage step, simulated for the tests of the trace exports; readers of Perfetto traces."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

SMALL_MAPPING = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2, "data": "zero1"},
    "schedule": "1f1b",
    "training": {"sequence": 4096, "global_batch": 8, "microbatch": 1, "precision": "bf16", "recompute": "none"},
}


@cache
def simulated(*overrides: str) -> SimulationResult:
    """A result of 8 GPUs, 2 of which are simulated."""
    return simulate(Scenario.from_mapping(SMALL_MAPPING, default_name="small", overrides=list(overrides)))


@dataclass(frozen=True)
class TraceSlice:
    """A slice of a Perfetto trace as read back; track: names from the top; times in ns."""

    track: tuple[str, ...]
    uuid: int
    depth: int
    start: int
    end: int
    name: str
    category: str
    arguments: dict[str, Any]

    @property
    def rank(self) -> int:
        return int(self.track[3].removeprefix("slow ").split()[1])


def packets(path: Path) -> list[Any]:
    """All packets of a trace; the protobuf is that of the `perfetto` package."""
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = protos.Trace()
    trace.ParseFromString(path.read_bytes())
    return list(trace.packet)


def track_names(trace_packets: Sequence[Any]) -> dict[int, tuple[str, ...]]:
    """Names of each track from the root down, by track id."""
    tracks = {packet.track_descriptor.uuid: packet.track_descriptor for packet in trace_packets}

    def path_of_track(track_id: int) -> tuple[str, ...]:
        track = tracks.get(track_id)
        return () if track is None or not track.uuid else (*path_of_track(track.parent_uuid), track.name)

    return {track_id: path_of_track(track_id) for track_id in tracks if track_id}


def slices(path: Path) -> list[TraceSlice]:
    """All slices of a trace by end: a slice follows those nested in it."""
    return [*_iter_slices(packets(path))]


def _iter_slices(trace_packets: Sequence[Any]) -> Iterator[TraceSlice]:
    names, open_slices = track_names(trace_packets), defaultdict[int, list[Any]](list)
    for packet in trace_packets:
        event, open_stack = packet.track_event, open_slices[packet.track_event.track_uuid]
        if event.type == event.TYPE_SLICE_BEGIN:
            open_stack.append(packet)
        elif event.type == event.TYPE_SLICE_END:
            begin = open_stack.pop()
            notes = begin.track_event.debug_annotations
            yield TraceSlice(
                names[event.track_uuid], event.track_uuid, len(open_stack), begin.timestamp, packet.timestamp,
                begin.track_event.name, *begin.track_event.categories,
                {note.name: getattr(note, note.WhichOneof("value")) for note in notes},
            )  # fmt: skip
    assert not any(open_slices.values())
