import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clustersim.errors import InputError, OutputError
from clustersim.report.perfetto import write_trace
from clustersim.report.slices import slices, tracks
from clustersim.report.view import PageView, Timeline

View = Callable[..., PageView]


@pytest.fixture
def timeline(make_view: View) -> Timeline:
    return make_view(3, 4, 1).timeline


def test_perfetto_gives_back_every_span_with_its_times_and_arguments(timeline: Timeline, tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    write_trace(timeline, tmp_path / "step.pftrace")
    trace = protos.Trace()
    trace.ParseFromString((tmp_path / "step.pftrace").read_bytes())
    event = protos.TrackEvent
    begins = [packet for packet in trace.packet if packet.track_event.type == event.TYPE_SLICE_BEGIN]
    ends = [packet for packet in trace.packet if packet.track_event.type == event.TYPE_SLICE_END]
    expected = list(slices(timeline))
    assert [packet.timestamp for packet in begins] == [round(piece.start * 1e9) for piece in expected]
    assert [packet.timestamp for packet in ends] == [round(piece.end * 1e9) for piece in expected]
    names = {packet.track_descriptor.uuid: packet.track_descriptor for packet in trace.packet}
    lane = names[begins[0].track_event.track_uuid]
    assert lane.name == "compute"
    assert names[lane.parent_uuid].name == "stage 0, rank 0"
    first = {note.name: note.int_value or note.string_value for note in begins[0].track_event.debug_annotations}
    assert first["does"] == timeline.spans.texts[timeline.spans.name[0]]


def test_chrome_json_gives_back_every_span(timeline: Timeline, tmp_path: Path) -> None:
    write_trace(timeline, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(span["dur"] for span in spans) * 1e-6 == pytest.approx((timeline.spans.end - timeline.spans.start).sum())
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"stage {stage}, rank {8 * stage}" for stage in range(3)
    }


def test_nothing_overlaps_on_a_track(timeline: Timeline) -> None:
    spans = timeline.spans
    both = np.concatenate
    doubled = replace(
        timeline,
        spans=replace(
            spans,
            **{name: both([getattr(spans, name)] * 2) for name in spans.__slots__ if name != "texts"},
        ),
    )
    last: dict[tuple[int, int, int], float] = {}
    for piece in slices(doubled):
        key = (piece.row, piece.lane, piece.track)
        assert piece.start >= last.get(key, 0.0)
        last[key] = piece.end
    assert tracks(doubled).max() == tracks(timeline).max() * 2 + 1


def test_without_the_extra_one_sentence_says_what_to_install(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(InputError, match=r"pip install .clustersim"):
        write_trace(timeline, tmp_path / "step.pftrace")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["step.json", "step.pftrace"])
def test_an_unwritable_trace_is_one_sentence(timeline: Timeline, tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="there is no directory"):
        write_trace(timeline, tmp_path / "nowhere" / name)
