"""Host offload on the page, in the table and in all trace formats."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clustersim import Scenario, simulate
from clustersim.model.offload import NO_OFFLOAD
from clustersim.planning.explorer import explorer_data
from clustersim.planning.what_if import run_what_ifs
from clustersim.program.task import CollectiveTask, HostOp, HostOpKind, Stream
from clustersim.report.export.span_descriptions import STREAM_LABELS
from clustersim.report.export.write_traces import write_kineto_files, write_perfetto_file, write_table_file
from clustersim.report.labels import describe_layout
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import select_ranks
from clustersim.report.run_page import run_page
from clustersim.report.terminal.run import render_run
from clustersim.results.simulation_result import SimulationResult
from tests.report.small_trace import packets, track_names


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    mapping = {
        "name": "small",
        "model": {"preset": "llama3-8b", "layers": 4},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"pp": 2, "dp": 4, "data": "zero1"},
        "training": {
            "sequence": 1024,
            "global_batch": 16,
            "offload": {"activations": {"layers": 1}, "optimizer": "50 %"},
        },
    }
    return simulate(Scenario.from_mapping(mapping))


def host_ops(result: SimulationResult, program_index: int = 0) -> list[tuple[HostOpKind, float]]:
    """Kinds and bytes of a rank's host operations."""
    tasks = result.program.programs[program_index].tasks
    comm_ops = [task.comm_op for task in tasks if isinstance(task, CollectiveTask)]
    return [(comm_op.kind, comm_op.payload) for comm_op in comm_ops if isinstance(comm_op, HostOp)]


@pytest.mark.parametrize(
    ("offload", "description"),
    [
        ("none", "no recompute · bf16"),
        ("{activations: all}", "activations of all layers on the host"),
        ("{activations: 1}", "activations of 1 layer a stage on the host"),
        ("{activations: 50 %, optimizer: true}", "activations of 50 % of layers and optimizer on the host"),
        ("{optimizer: 25 %}", "25 % of the optimizer on the host"),
        ("{optimizer: true, gradients: true}", "gradients and optimizer on the host"),
        ("{parameters: true}", "parameters and optimizer on the host"),
    ],
)
def test_layout_line_describes_offload(result: SimulationResult, offload: str, description: str) -> None:
    changed = result.scenario.with_overrides("layout={dp: 8, data: fsdp}", f"training.offload={offload}")
    assert description in describe_layout(changed)


def test_page_shows_host_memory_lanes_and_no_offload_case(result: SimulationResult) -> None:
    timeline, text = build_timeline(result, select_ranks(result)), run_page(result, run_what_ifs(result))
    assert "on the peak-memory host" in text
    assert timeline.lanes[3:] == ("to the host", "host", "from the host")
    assert {3, 4, 5} <= set(timeline.spans.lane.tolist())
    assert "host: copies and optimizer" in text
    assert "Copies to and from hosts share none of these links" in text
    (without,) = (case for case in run_what_ifs(result).cases if case.name == "no_offload")
    assert without.outcome is not None
    assert without.outcome.step_time == simulate(result.scenario.with_overrides("training.offload=none")).step_time
    plain = simulate(result.scenario.with_overrides("training.offload=none"))
    assert len(build_timeline(plain, select_ranks(plain)).lanes) == 3


def test_terminal_output_has_host_lines(result: SimulationResult) -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(render_run(result))
    assert "host memory" in captured.get()
    assert "exposed host" in captured.get()


def test_kineto_names_host_copies_as_the_profiler(result: SimulationResult, tmp_path: Path) -> None:
    write_kineto_files(result, tmp_path, [0])
    content: dict[str, Any] = json.loads((tmp_path / "rank-0.json").read_text())
    events = content["traceEvents"]
    for op_kind, name in (
        (HostOpKind.D2H, "Memcpy DtoH (Device -> Pinned)"),
        (HostOpKind.H2D, "Memcpy HtoD (Pinned -> Device)"),
    ):
        copies = [event for event in events if event["name"] == name]
        assert {event["cat"] for event in copies} == {"gpu_memcpy"}
        assert len({event["tid"] for event in copies}) == 1
        moved = sorted(event["args"]["bytes"] for event in copies)
        assert moved == sorted(int(size) for kind, size in host_ops(result) if kind is op_kind)
    updates = [event for event in events if event["name"] == "optimizer on the host"]
    assert {(event["cat"], event["pid"]) for event in updates} == {("cpu_op", 1000)}
    calls = [event for event in events if event["name"] == "cudaMemcpyAsync"]
    assert len(calls) == sum(kind is not HostOpKind.ON_HOST for kind, _ in host_ops(result))
    assert all(group["pg_desc"] != "host" for group in content["distributedInfo"]["pg_config"])


def test_other_trace_formats_have_host_streams(result: SimulationResult, tmp_path: Path) -> None:
    write_table_file(result, tmp_path / "spans.csv", [0])
    with (tmp_path / "spans.csv").open(encoding="utf-8", newline="") as file:
        streams = [row["stream"] for row in csv.DictReader(file)]
    write_perfetto_file(result, tmp_path / "step.pftrace", [0])
    tracks = {names[-1] for names in track_names(packets(tmp_path / "step.pftrace")).values()}
    for stream in (Stream.D2H, Stream.HOST, Stream.H2D):
        assert STREAM_LABELS[stream] in streams
        assert STREAM_LABELS[stream] in tracks
    assert "copies to the host: bytes per second" in tracks


def test_explorer_notes_that_offload_is_ignored(result: SimulationResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer_data, "_setting_tables", lambda space: space.scenario)
    with_offload, without = (
        explorer_data.build_exploration_tables(scenario)
        for scenario in (result.scenario, result.scenario.with_overrides("training.offload=none"))
    )
    (note,) = [note for note in with_offload.notes if note not in without.notes]
    assert note.startswith("Offload is left out of memory")
    drawn_scenario: Any = with_offload.tables
    assert drawn_scenario.training.offload == NO_OFFLOAD
