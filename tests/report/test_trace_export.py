import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.errors import InputError, OutputError
from clustersim.program.task import Compute
from clustersim.report import trace as trace_module
from clustersim.report.chrome import write_chrome
from clustersim.report.perfetto import write_perfetto
from clustersim.report.slices import Inside, Label, Slice, slices, tracks
from clustersim.report.theme import Category
from clustersim.report.trace import spans_of, write_trace
from clustersim.report.view import PageView, Timeline
from clustersim.result import Result
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

View = Callable[..., PageView]
SMALL = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2, "data": "zero1"},
    "schedule": "1f1b",
    "training": {"sequence": 4096, "global_batch": 8, "microbatch": 1, "precision": "bf16", "recompute": "none"},
}


@pytest.fixture
def timeline(make_view: View) -> Timeline:
    return make_view(3, 4, 1).timeline


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(Scenario.from_mapping(SMALL, source="small"))


def nothing(_span: int) -> None:
    return None


def complete(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def compute_rows(result: Result) -> Iterator[tuple[int, float, float, Compute]]:
    trace, program = result.trace, result.program
    for row in range(len(trace)):
        task = program.programs[program.kind[trace.rank[row]]].tasks[trace.task[row]]
        if isinstance(task, Compute):
            yield int(trace.rank[row]), float(trace.start[row]), float(trace.end[row]), task


def test_perfetto_gives_back_every_span_with_its_times_and_arguments(timeline: Timeline) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    expected = list(slices(timeline, nothing))
    file = io.BytesIO()
    write_perfetto(timeline, expected, file)
    trace = protos.Trace()
    trace.ParseFromString(file.getvalue())
    event = protos.TrackEvent
    begins = [packet for packet in trace.packet if packet.track_event.type == event.TYPE_SLICE_BEGIN]
    ends = [packet for packet in trace.packet if packet.track_event.type == event.TYPE_SLICE_END]
    assert [packet.timestamp for packet in begins] == [piece.start for piece in expected]
    assert [packet.timestamp for packet in ends] == [piece.end for piece in expected]
    names = {packet.track_descriptor.uuid: packet.track_descriptor for packet in trace.packet}
    lane = names[begins[0].track_event.track_uuid]
    assert lane.name == "compute"
    assert names[lane.parent_uuid].name == "stage 0, rank 0 (for 1,024)"
    first = {note.name: note.int_value or note.string_value for note in begins[0].track_event.debug_annotations}
    assert first["does"] == timeline.spans.texts[timeline.spans.name[0]]


@pytest.mark.parametrize("time", [0, 127, 128, 7 * 10**9, 2**56 - 1])
def test_perfetto_keeps_times_of_any_size(timeline: Timeline, time: int) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    label = Label("a" * 200, Category.FORWARD, {"moved": 3, "share": 0.5})  # longer than one byte of length can say
    file = io.BytesIO()
    write_perfetto(replace(timeline, rows=()), [Slice(0, 0, 0, 0, time, label)], file)
    trace = protos.Trace()
    trace.ParseFromString(file.getvalue())
    _, begin, end = trace.packet
    assert (begin.timestamp, begin.track_event.name, end.timestamp) == (0, label.name, time)
    assert len(begin.track_event.debug_annotations) == 2


def test_how_many_spans_will_be_written_is_known_before(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "step.json")
    assert spans_of(result) == len(complete(tmp_path / "step.json"))


def test_chrome_json_gives_back_every_span(timeline: Timeline, tmp_path: Path) -> None:
    with (tmp_path / "step.json").open("wb") as file:
        write_chrome(timeline, slices(timeline, nothing), file)
    events = complete(tmp_path / "step.json")
    assert sum(event["dur"] for event in events) * 1e-6 == pytest.approx(
        (timeline.spans.end - timeline.spans.start).sum()
    )
    assert {event["pid"] for event in events} == {0, 1, 2}


def test_every_operation_of_every_simulated_rank_is_in_the_trace_with_its_time(tmp_path: Path) -> None:
    """Undisturbed and unslowed, operations run back to back from the start of their pass."""
    result = simulate(Scenario.from_mapping(SMALL, source="small", overrides=["cost.interference=0"]))
    assert write_trace(result, tmp_path / "step.json") == 2
    events = complete(tmp_path / "step.json")
    inside = [event for event in events if "work" in event["args"]]
    expected = [
        (operation.kernel or operation.exchange, start + timing.offsets[place], timing.durations[place])
        for rank, start, _, task in compute_rows(result)
        for timing in [result.cost.block(rank, task.block)]
        for place, operation in enumerate(task.block.operations)
    ]
    assert len(inside) == len(expected) > 500
    assert sorted(event["ts"] for event in inside) == pytest.approx(sorted(1e6 * start for _, start, _ in expected))
    assert sum(event["dur"] for event in inside) == pytest.approx(1e6 * sum(seconds for *_, seconds in expected))
    up = next(event["args"] for event in inside if event["name"] == "mlp.up")
    assert up["shape"] == "NT m 4096, n 14336, k 4096"  # gate and up together, 2 · 14,336 / tp 2
    assert up["flop"] == 2 * 4096 * 14336 * 4096
    assert up["duration_from"] == "model fitted to published measurements of this hardware"
    assert any(event["args"].get("collective") == "all_gather" and event["args"]["payload_bytes"] for event in inside)


@pytest.mark.parametrize(
    "override", ["cost.interference=0.5", "disturbances.jitter=5%", "disturbances.slow={gpu: 0, speed: 0.5}"]
)
def test_the_operations_of_a_disturbed_pass_last_as_long_as_the_pass_but_for_waits(
    override: str, tmp_path: Path
) -> None:
    result = simulate(Scenario.from_mapping(SMALL, source="small", overrides=[override]))
    write_trace(result, tmp_path / "step.json")
    inside = sum(event["dur"] for event in complete(tmp_path / "step.json") if "work" in event["args"])
    passes = sum(end - start for _, start, end, _ in compute_rows(result))
    waited = float(result.trace.waited.sum())
    assert inside == pytest.approx(1e6 * (passes - waited), rel=1e-4)


def test_of_many_ranks_those_are_written_that_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MOST_RANKS", 7)
    slow = ["cost.symmetry=off", "disturbances.slow={gpu: 6, speed: 0.8}"]
    assert write_trace(simulate(Scenario.from_mapping(SMALL, source="all", overrides=slow)), tmp_path / "a.json") == 3
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name for name in names if "slow" in name] == ["stage 1, slow rank 6"]


def test_operations_lie_inside_their_pass_and_do_not_overlap(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "step.json")
    last: dict[tuple[int, int], tuple[int, int]] = {}
    for event in complete(tmp_path / "step.json"):
        start = round(event["ts"] * 1e3)
        end = start + round(event["dur"] * 1e3)
        at, until = last.get((event["pid"], event["tid"]), (0, 0))
        if "work" in event["args"]:
            assert at <= start <= end <= until
            last[event["pid"], event["tid"]] = (end, until)
        else:
            assert start >= until
            last[event["pid"], event["tid"]] = (start, end)


def test_perfetto_nests_operations_in_their_pass(result: Result, tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    write_trace(result, tmp_path / "step.pftrace")
    trace = protos.Trace()
    trace.ParseFromString((tmp_path / "step.pftrace").read_bytes())
    event = protos.TrackEvent
    depth: dict[int, int] = {}
    deepest = begins = 0
    for packet in sorted((each for each in trace.packet if each.HasField("track_event")), key=lambda p: p.timestamp):
        track = packet.track_event.track_uuid
        begin = packet.track_event.type == event.TYPE_SLICE_BEGIN
        begins += begin
        depth[track] = depth.get(track, 0) + (1 if begin else -1)
        assert depth[track] >= 0
        deepest = max(deepest, depth[track])
    assert deepest == 2
    assert set(depth.values()) == {0}
    assert begins > result.spans


def test_waits_inside_a_pass_are_said_and_not_drawn(timeline: Timeline) -> None:
    spans = timeline.spans
    length = float(spans.end[0] - spans.start[0])
    label = Label("matmul", Category.FORWARD, {})
    start = float(spans.start[0])
    inside = Inside(np.array([start]), np.array([start + length / 2]), (label,))
    first = next(piece for piece in slices(timeline, lambda span: inside if span == 0 else None) if piece.inside)
    assert "waited 5 ms between operations" in str(first.label.arguments["inside"])
    assert first.inside[0].end - first.inside[0].start == round(length / 2 * 1e9)


def test_a_trace_that_would_fill_the_disk_is_refused_with_its_size(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(result, tmp_path / "step.json")
    size = (tmp_path / "step.json").stat().st_size
    monkeypatch.setattr(trace_module, "MOST_BYTES", size // 2)
    with pytest.raises(OutputError, match=r"operations on 2 simulated ranks would be about .* KiB, above") as refused:
        write_trace(result, tmp_path / "other.json")
    said = float(str(refused.value).partition("about ")[2].partition(" KiB")[0]) * 2**10
    assert said == pytest.approx(size, rel=0.3)
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_every_rank_has_a_row_when_every_rank_is_simulated(tmp_path: Path) -> None:
    write_trace(
        simulate(Scenario.from_mapping(SMALL, source="all", overrides=["cost.symmetry=off"])), tmp_path / "a.json"
    )
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"stage {rank // 4}, rank {rank}" for rank in range(8)]


def test_nothing_overlaps_on_a_track(timeline: Timeline) -> None:
    spans = timeline.spans
    both = np.concatenate
    doubled = replace(
        timeline,
        spans=replace(
            spans,
            **{name: both([getattr(spans, name)] * 2) for name in spans.__slots__ if name not in ("texts", "per_step")},
        ),
    )
    last: dict[tuple[int, int, int], int] = {}
    for piece in slices(doubled, nothing):
        key = (piece.row, piece.lane, piece.track)
        assert piece.start >= last.get(key, 0)
        last[key] = piece.end
    assert tracks(doubled).max() == tracks(timeline).max() * 2 + 1


def test_without_the_extra_one_sentence_says_what_to_install(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(InputError, match=r"pip install .clustersim"):
        write_trace(result, tmp_path / "step.pftrace")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["step.json", "step.pftrace"])
def test_an_unwritable_trace_is_one_sentence(result: Result, tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="there is no directory"):
        write_trace(result, tmp_path / "nowhere" / name)
