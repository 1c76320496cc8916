import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.errors import InputError, OutputError
from clustersim.program.task import Compute, Stream
from clustersim.report.slices import slices, tracks
from clustersim.report.theme import CATEGORIES
from clustersim.report.trace import spans_of, write_trace
from clustersim.report.trace_ranks import trace_ranks
from clustersim.result import Result
from tests.report.traced import simulated


@pytest.fixture(scope="module")
def result() -> Result:
    return simulated()


def complete(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def compute_rows(result: Result) -> Iterator[tuple[int, float, float, Compute]]:
    trace, program = result.trace, result.program
    for row in range(len(trace)):
        task = program.programs[program.kind[trace.rank[row]]].tasks[trace.task[row]]
        if isinstance(task, Compute):
            yield int(trace.rank[row]), float(trace.start[row]), float(trace.end[row]), task


def test_how_many_spans_will_be_written_is_known_before(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "step.json")
    assert spans_of(result) == len(complete(tmp_path / "step.json"))


def test_every_operation_of_every_simulated_rank_is_in_the_trace_with_its_time(tmp_path: Path) -> None:
    """Undisturbed, unslowed and on links of their own, operations run back to back from the start of their pass."""
    result = simulated("cost.interference=0", "cost.network=uncontended")
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
    "override",
    [
        "cost.network=shared",
        "cost.interference=0.5",
        "disturbances.jitter=5%",
        "disturbances.slow={gpu: 0, speed: 0.5}",
    ],
)
def test_the_operations_of_a_disturbed_pass_last_as_long_as_the_pass_but_for_waits(
    override: str, tmp_path: Path
) -> None:
    result = simulated(override)
    write_trace(result, tmp_path / "step.json")
    inside = sum(event["dur"] for event in complete(tmp_path / "step.json") if "work" in event["args"])
    passes = sum(end - start for _, start, end, _ in compute_rows(result))
    waited = float(result.trace.waited.sum())
    assert inside == pytest.approx(1e6 * (passes - waited), rel=1e-4)


@pytest.mark.parametrize("overrides", [(), ("steps=2", "disturbances.jitter=5%")])
def test_operations_lie_inside_their_pass_and_do_not_overlap(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    write_trace(simulated(*overrides), tmp_path / "step.json")
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


def test_a_trace_that_would_fill_the_disk_is_refused_with_its_size(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "step.json")
    size = (tmp_path / "step.json").stat().st_size
    with pytest.raises(OutputError, match=r"operations on 2 ranks would be .* above .*--ranks.*--force") as refused:
        write_trace(result, tmp_path / "other.json", most=size // 2)
    said = float(str(refused.value).partition("about ")[2].partition(" KiB")[0]) * 2**10
    assert said == pytest.approx(size, rel=0.3)
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_every_rank_has_a_row_when_every_rank_is_simulated(tmp_path: Path) -> None:
    write_trace(simulated("cost.symmetry=off"), tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"stage {rank // 4}, rank {rank} (tp {rank % 2})" for rank in (0, 1, 4, 5, 2, 3, 6, 7)]


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


def test_nothing_overlaps_on_a_track() -> None:
    result = simulated("cost.symmetry=off")
    last: dict[tuple[int, int, int], int] = {}
    for piece in slices(result, trace_ranks(result, range(8))):
        key = (piece.rank, piece.stream, piece.track)
        assert piece.start >= last.get(key, 0)
        last[key] = piece.end


def test_a_lane_has_as_many_tracks_as_spans_at_once() -> None:
    start, end = np.array([0.0, 0.0, 1.0, 2.0, 2.5]), np.array([2.0, 3.0, 2.0, 4.0, 3.0])
    assert tracks(np.array([1, 1, 1, 1, 1]), start, end).tolist() == [0, 1, 2, 0, 2]
    assert tracks(np.array([0, 1, 2, 3, 4]), start, end).tolist() == [0] * 5


def test_a_rank_that_was_not_simulated_has_the_times_of_the_one_that_stands_for_it(result: Result) -> None:
    mine, other = (list(slices(result, trace_ranks(result, [rank]))) for rank in (4, 7))
    assert {piece.rank for piece in other} == {7}
    assert [(piece.start, piece.end, piece.label.name) for piece in mine] == [
        (piece.start, piece.end, piece.label.name) for piece in other
    ]


def test_what_is_received_is_there_and_comes_last(result: Result) -> None:
    pieces = list(slices(result, trace_ranks(result, range(8))))
    received = [piece for piece in pieces if piece.stream == Stream.RECEIVE]
    assert pieces[-len(received) :] == received
    sent = [piece for piece in pieces if piece.stream in (Stream.SEND_NEXT, Stream.SEND_PREVIOUS)]
    assert len(received) == len(sent) == 4 * 2 * 4  # microbatches, directions, pipelines
    assert sorted((piece.start, piece.end) for piece in received) == sorted((piece.start, piece.end) for piece in sent)


@pytest.mark.parametrize("jitter", ["0%", "5%"])
def test_microbatches_are_counted_in_their_step_in_names_and_arguments(jitter: str, tmp_path: Path) -> None:
    result = simulated("steps=2", f"disturbances.jitter={jitter}")
    pieces = list(slices(result, trace_ranks(result, [0, 4])))
    counted = [piece for piece in pieces if "microbatch" in piece.label.arguments]
    places = {(piece.label.arguments["step"], piece.label.arguments["microbatch"]) for piece in counted}
    assert places == {(step, microbatch) for step in (1, 2) for microbatch in range(4)}
    for piece in counted:
        number, step = piece.label.arguments["microbatch"], piece.label.arguments["step"]
        assert f"microbatch {number}" in piece.label.name
        assert piece.label.name.endswith(f", step {step}")
    assert not any("step" in piece.label.arguments for piece in slices(simulated(), trace_ranks(simulated(), [0])))
    write_trace(result, tmp_path / "steps.json", [0, 4])
    read = [event["name"] for event in complete(tmp_path / "steps.json") if "microbatch" in event["args"]]
    assert sorted(read) == sorted(piece.label.name for piece in counted)


def test_waits_inside_a_pass_are_said_and_not_drawn() -> None:
    """A tensor-parallel group of which one member is slow: the other waits at every exchange."""
    result = simulated("disturbances.slow={gpu: 0, speed: 0.5}")
    passes = [piece for piece in slices(result, trace_ranks(result, [1])) if piece.inside]
    waited = sum(piece.end - piece.start - (piece.inside.end - piece.inside.start).sum() for piece in passes)
    trace = result.trace
    assert waited == pytest.approx(1e9 * trace.waited[trace.rank == trace.representative[1]].sum(), rel=1e-4)
    assert any("between operations" in str(piece.label.arguments.get("inside")) for piece in passes)


def test_categories_are_the_words_of_the_page(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "step.json")
    words = {category.label for category in CATEGORIES}
    assert {event["cat"] for event in complete(tmp_path / "step.json")} <= words


def test_chrome_counters_are_those_of_the_ledger(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    held = [
        event["args"]["bytes"]
        for event in events
        if event["ph"] == "C" and event["pid"] == 4 and "memory" in event["name"]
    ]
    assert max(held) == pytest.approx(result.ledgers[1].peak, abs=1)
