"""Perfetto trace export: spans, nesting, ranks, sizes and labels."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clustersim.common.errors import InputError, OutputError
from clustersim.program.task import ComputeTask
from clustersim.report.export.perfetto import require_perfetto
from clustersim.report.export.rank_selection import count_spans
from clustersim.report.export.write_traces import write_perfetto_file
from clustersim.report.theme import CATEGORY_STYLES
from clustersim.results.simulation_result import SimulationResult
from tests.report.small_trace import TraceSlice, packets, simulated, slices

pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return simulated()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.pftrace"


def write_and_read(path: Path, result: SimulationResult, ranks: Sequence[int] | None = None) -> list[TraceSlice]:
    write_perfetto_file(result, path, ranks)
    return slices(path)


def compute_events(result: SimulationResult) -> Iterator[tuple[int, float, float, ComputeTask]]:
    trace, program = result.trace, result.program
    for event in range(len(trace)):
        task = program.programs[program.program_index[trace.rank[event]]].tasks[trace.task[event]]
        if isinstance(task, ComputeTask):
            yield int(trace.rank[event]), float(trace.start[event]), float(trace.end[event]), task


def test_span_count_is_predicted(result: SimulationResult, path: Path) -> None:
    assert count_spans(result) == len(write_and_read(path, result))


def test_all_operations_are_traced_with_their_times(path: Path) -> None:
    """Without degradation, interference and contention, operations run back to back from the start of their pass."""
    result = simulated("cost.interference=0", "cost.network=uncontended")
    assert write_perfetto_file(result, path) == 2
    operation_slices = [trace_slice for trace_slice in slices(path) if trace_slice.depth]
    expected = [
        (start + timing.offsets[operation_index], timing.durations[operation_index])
        for _, start, _, task in compute_events(result)
        for timing in [result.cost.time_segment(0, task.segment)]
        for operation_index in range(len(task.segment.operations))
    ]
    assert len(operation_slices) == len(expected) > 500
    assert sorted(operation_slice.start for operation_slice in operation_slices) == pytest.approx(
        sorted(1e9 * start for start, _ in expected), abs=1
    )
    assert sum(item.end - item.start for item in operation_slices) == pytest.approx(
        1e9 * sum(seconds for _, seconds in expected)
    )
    up_projection = next(element.arguments for element in operation_slices if element.name == "mlp.up")
    assert up_projection["shape"] == "NT m 4096, n 14336, k 4096"  # gate and up fused, 2 · 14,336 / tp 2
    assert up_projection["flop"] == 2 * 4096 * 14336 * 4096
    assert up_projection["duration_from"] == "model fitted to published measurements of this hardware"
    assert any(
        entry.arguments.get("collective") == "all_gather" and entry.arguments["payload_bytes"]
        for entry in operation_slices
    )


@pytest.mark.parametrize(
    "override",
    [
        "cost.network=shared",
        "cost.interference=0.5",
        "degradations.jitter=5%",
        "degradations.slow={gpu: 0, speed: 0.5}",
    ],
)
def test_operations_fill_degraded_passes_except_waits(override: str, path: Path) -> None:
    result = simulated(override)
    operation_ns = sum(
        trace_slice.end - trace_slice.start for trace_slice in write_and_read(path, result) if trace_slice.depth
    )
    passes = sum(end - start for _, start, end, _ in compute_events(result))
    waited = float(result.trace.waited.sum())
    assert operation_ns == pytest.approx(1e9 * (passes - waited), rel=1e-4)


@pytest.mark.parametrize("overrides", [(), ("steps=2", "degradations.jitter=5%"), ("cost.symmetry=off",)])
def test_operations_nest_without_overlap_on_a_track(path: Path, overrides: tuple[str, ...]) -> None:
    ends: dict[tuple[int, int], int] = {}
    operation_range: dict[int, tuple[int, int]] = {}
    for trace_slice in write_and_read(path, simulated(*overrides)):
        assert trace_slice.start >= ends.get((trace_slice.uuid, trace_slice.depth), 0)
        ends[trace_slice.uuid, trace_slice.depth] = trace_slice.end
        if trace_slice.depth:
            first, _ = operation_range.get(trace_slice.uuid, (trace_slice.start, 0))
            operation_range[trace_slice.uuid] = (first, trace_slice.end)
        elif trace_slice.uuid in operation_range:
            first, last = operation_range.pop(trace_slice.uuid)
            assert trace_slice.start <= first <= last <= trace_slice.end


def test_too_large_trace_is_rejected_with_its_size(result: SimulationResult, path: Path) -> None:
    write_perfetto_file(result, path)
    size = path.stat().st_size
    with pytest.raises(OutputError, match=r"operations on 2 ranks would be .* above .*--ranks.*--force") as refused:
        write_perfetto_file(result, path.with_name("other"), max_bytes=size // 2)
    estimated_size = float(str(refused.value).partition("about ")[2].partition(" KiB")[0]) * 2**10
    assert estimated_size == pytest.approx(size, rel=0.3)
    assert [file.name for file in path.parent.iterdir()] == ["step.pftrace"]


def test_all_simulated_ranks_have_a_track(path: Path) -> None:
    write_perfetto_file(simulated("cost.symmetry=off"), path)
    track_labels = [packet.track_descriptor.name for packet in packets(path)]
    names = [f"rank {rank} (tp {rank % 2})" for rank in (0, 1, 4, 5, 2, 3, 6, 7)]
    assert [name for name in track_labels if name.startswith("rank")] == names


def test_missing_perfetto_names_the_extra(
    result: SimulationResult, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(InputError, match=r"pip install .clustersim.*--kineto"):
        write_perfetto_file(result, path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["step.json", "-", "", "step.gz"])
def test_unsupported_trace_suffix_is_rejected(name: str) -> None:
    with pytest.raises(InputError, match=r"--trace .*ends in \.pftrace.*--kineto DIR"):
        require_perfetto(name)


def test_unwritable_trace_has_a_one_line_error(result: SimulationResult, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no directory"):
        write_perfetto_file(result, tmp_path / "nowhere" / "step.pftrace")


def test_equivalent_rank_has_the_representatives_times(result: SimulationResult, path: Path) -> None:
    representative, equivalent = (write_and_read(path, result, [rank]) for rank in (4, 7))
    assert {trace_slice.rank for trace_slice in equivalent} == {7}
    assert [
        (trace_slice.start, trace_slice.end, trace_slice.name, trace_slice.arguments) for trace_slice in representative
    ] == [(trace_slice.start, trace_slice.end, trace_slice.name, trace_slice.arguments) for trace_slice in equivalent]


def test_receives_are_written_last(result: SimulationResult, path: Path) -> None:
    all_slices = write_and_read(path, result, range(8))
    received = [trace_slice for trace_slice in all_slices if trace_slice.track[-1] == "receive"]
    assert all_slices[-len(received) :] == received
    sent = [trace_slice for trace_slice in all_slices if trace_slice.track[-1].startswith("send")]
    assert len(received) == len(sent) == 4 * 2 * 4  # microbatches, directions, pipelines
    assert sorted((trace_slice.start, trace_slice.end) for trace_slice in received) == sorted(
        (slice_.start, slice_.end) for slice_ in sent
    )
    assert {slice_.name for slice_ in received} == {f"receive for microbatch {microbatch}" for microbatch in range(4)}


@pytest.mark.parametrize("jitter", ["0%", "5%"])
def test_microbatches_are_numbered_within_their_step(jitter: str, path: Path) -> None:
    result = simulated("steps=2", f"degradations.jitter={jitter}")
    pass_slices = [
        trace_slice for trace_slice in write_and_read(path, result, [0, 4]) if "microbatch" in trace_slice.arguments
    ]
    step_microbatches = {
        (trace_slice.arguments["step"], trace_slice.arguments["microbatch"]) for trace_slice in pass_slices
    }
    assert step_microbatches == {(step, microbatch) for step in (1, 2) for microbatch in range(4)}
    for slice_ in pass_slices:
        assert f"microbatch {slice_.arguments['microbatch']}" in slice_.name
        assert slice_.name.endswith(f", step {slice_.arguments['step']}")
    assert not any("step" in trace_slice.arguments for trace_slice in write_and_read(path, simulated(), [0]))


def test_slice_names_have_nonzero_chunks(path: Path) -> None:
    result = simulated("schedule={interleaved: {chunks: 2}}")
    pass_slices = [trace_slice for trace_slice in write_and_read(path, result, [0]) if "chunk" in trace_slice.arguments]
    assert {trace_slice.arguments["chunk"] for trace_slice in pass_slices} == {0, 1}
    for slice_ in pass_slices:
        assert (", chunk 1" in slice_.name) is (slice_.arguments["chunk"] == 1)


def test_waits_within_a_pass_are_arguments_not_slices(path: Path) -> None:
    """A TP group with one slow member: the other waits at each collective."""
    result = simulated("degradations.slow={gpu: 0, speed: 0.5}")
    all_slices = write_and_read(path, result, [1])
    compute = {trace_slice.uuid for trace_slice in all_slices if trace_slice.depth}
    drawn = [
        (trace_slice.depth, trace_slice.end - trace_slice.start)
        for trace_slice in all_slices
        if trace_slice.uuid in compute
    ]
    waited = sum(duration if depth == 0 else -duration for depth, duration in drawn)
    trace = result.trace
    assert waited == pytest.approx(1e9 * trace.waited[trace.rank == trace.representative[1]].sum(), rel=1e-4)
    assert any("between operations" in str(trace_slice.arguments.get("inside")) for trace_slice in all_slices)


def test_causes_are_named_for_any_selection_of_ranks(path: Path) -> None:
    """A stage waits for the previous one, in a trace of its own ranks as in one of both stages."""
    result = simulated()
    one_stage = [
        trace_slice.arguments.get("after") for trace_slice in write_and_read(path, result, [4]) if not trace_slice.depth
    ]
    two_stages = [
        trace_slice.arguments.get("after")
        for trace_slice in write_and_read(path, result, [0, 4])
        if not trace_slice.depth and trace_slice.rank == 4
    ]
    assert sorted(map(str, one_stage)) == sorted(map(str, two_stages))
    assert "forward of microbatch 0 on stage 0" in one_stage


def test_slice_categories_are_the_page_labels(result: SimulationResult, path: Path) -> None:
    labels = {category.label for category in CATEGORY_STYLES}
    assert {trace_slice.category for trace_slice in write_and_read(path, result)} <= labels


@pytest.mark.slow
def test_trace_files_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.report.small_trace import simulated as made\n"
        "from clustersim.report.export import write_traces as write\n"
        "folder, result = Path(sys.argv[1]), made('steps=2', 'degradations.jitter=5%', 'layout.tp_comm_overlap=true')\n"
        "for name in ('a.pftrace', 'a.csv', 'a.arrow', 'kineto'):\n"
        "    writers = {'a.pftrace': write.write_perfetto_file, 'kineto': write.write_kineto_files}\n"
        "    writers.get(name, write.write_table_file)(result, folder / name, range(8))\n"
    )
    file_contents = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            check=True,
            cwd=Path(__file__).parents[2],
            timeout=300,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        file_contents.append({str(file.relative_to(folder)): file.read_bytes() for file in files})
    assert len(file_contents[0]) == 3 + 8
    assert file_contents[0] == file_contents[1]
