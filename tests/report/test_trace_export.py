import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clustersim.common.errors import InputError, OutputError
from clustersim.program.task import ComputeTask
from clustersim.report.export.perfetto import require_perfetto
from clustersim.report.export.write_traces import count_spans, write_perfetto_file
from clustersim.report.theme import CATEGORY_STYLES
from clustersim.results.simulation_result import SimulationResult
from tests.report.small_trace import Slice, packets, simulated, slices

pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return simulated()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.pftrace"


def written(path: Path, result: SimulationResult, ranks: Sequence[int] | None = None) -> list[Slice]:
    write_perfetto_file(result, path, ranks)
    return slices(path)


def compute_rows(result: SimulationResult) -> Iterator[tuple[int, float, float, ComputeTask]]:
    trace, program = result.trace, result.program
    for row in range(len(trace)):
        task = program.programs[program.program_index[trace.rank[row]]].tasks[trace.task[row]]
        if isinstance(task, ComputeTask):
            yield int(trace.rank[row]), float(trace.start[row]), float(trace.end[row]), task


def test_how_many_spans_will_be_written_is_known_before(result: SimulationResult, path: Path) -> None:
    assert count_spans(result) == len(written(path, result))


def test_every_operation_of_every_simulated_rank_is_in_the_trace_with_its_time(path: Path) -> None:
    """Undisturbed, unslowed and on links of their own, operations run back to back from the start of their pass."""
    result = simulated("cost.interference=0", "cost.network=uncontended")
    assert write_perfetto_file(result, path) == 2
    inside = [item for item in slices(path) if item.depth]
    expected = [
        (start + timing.offsets[place], timing.durations[place])
        for _, start, _, task in compute_rows(result)
        for timing in [result.cost.time_segment(0, task.segment)]
        for place in range(len(task.segment.operations))
    ]
    assert len(inside) == len(expected) > 500
    assert sorted(element.start for element in inside) == pytest.approx(
        sorted(1e9 * start for start, _ in expected), abs=1
    )
    assert sum(entry.end - entry.start for entry in inside) == pytest.approx(
        1e9 * sum(seconds for _, seconds in expected)
    )
    up = next(each.arguments for each in inside if each.name == "mlp.up")
    assert up["shape"] == "NT m 4096, n 14336, k 4096"  # gate and up together, 2 · 14,336 / tp 2
    assert up["flop"] == 2 * 4096 * 14336 * 4096
    assert up["duration_from"] == "model fitted to published measurements of this hardware"
    assert any(each.arguments.get("collective") == "all_gather" and each.arguments["payload_bytes"] for each in inside)


@pytest.mark.parametrize(
    "override",
    [
        "cost.network=shared",
        "cost.interference=0.5",
        "disturbances.jitter=5%",
        "disturbances.slow={gpu: 0, speed: 0.5}",
    ],
)
def test_the_operations_of_a_disturbed_pass_last_as_long_as_the_pass_but_for_waits(override: str, path: Path) -> None:
    result = simulated(override)
    inside = sum(item.end - item.start for item in written(path, result) if item.depth)
    passes = sum(end - start for _, start, end, _ in compute_rows(result))
    waited = float(result.trace.waited.sum())
    assert inside == pytest.approx(1e9 * (passes - waited), rel=1e-4)


@pytest.mark.parametrize("overrides", [(), ("steps=2", "disturbances.jitter=5%"), ("cost.symmetry=off",)])
def test_operations_lie_inside_their_pass_and_nothing_overlaps_on_a_track(
    path: Path, overrides: tuple[str, ...]
) -> None:
    ends: dict[tuple[int, int], int] = {}
    inside: dict[int, tuple[int, int]] = {}
    for item in written(path, simulated(*overrides)):
        assert item.start >= ends.get((item.uuid, item.depth), 0)
        ends[item.uuid, item.depth] = item.end
        if item.depth:
            first, _ = inside.get(item.uuid, (item.start, 0))
            inside[item.uuid] = (first, item.end)
        elif item.uuid in inside:
            first, last = inside.pop(item.uuid)
            assert item.start <= first <= last <= item.end


def test_a_trace_that_would_fill_the_disk_is_refused_with_its_size(result: SimulationResult, path: Path) -> None:
    write_perfetto_file(result, path)
    size = path.stat().st_size
    with pytest.raises(OutputError, match=r"operations on 2 ranks would be .* above .*--ranks.*--force") as refused:
        write_perfetto_file(result, path.with_name("other"), max_bytes=size // 2)
    said = float(str(refused.value).partition("about ")[2].partition(" KiB")[0]) * 2**10
    assert said == pytest.approx(size, rel=0.3)
    assert [item.name for item in path.parent.iterdir()] == ["step.pftrace"]


def test_every_rank_has_a_row_when_every_rank_is_simulated(path: Path) -> None:
    write_perfetto_file(simulated("cost.symmetry=off"), path)
    found = [packet.track_descriptor.name for packet in packets(path)]
    names = [f"rank {rank} (tp {rank % 2})" for rank in (0, 1, 4, 5, 2, 3, 6, 7)]
    assert [name for name in found if name.startswith("rank")] == names


def test_without_the_extra_one_sentence_says_what_to_install(
    result: SimulationResult, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(InputError, match=r"pip install .clustersim.*--kineto"):
        write_perfetto_file(result, path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["step.json", "-", "", "step.gz"])
def test_a_name_of_another_format_is_refused_with_what_writes_json(name: str) -> None:
    with pytest.raises(InputError, match=r"--trace .*ends in \.pftrace.*--kineto DIR"):
        require_perfetto(name)


def test_an_unwritable_trace_is_one_sentence(result: SimulationResult, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no directory"):
        write_perfetto_file(result, tmp_path / "nowhere" / "step.pftrace")


def test_a_rank_that_was_not_simulated_has_the_times_of_the_one_that_stands_for_it(
    result: SimulationResult, path: Path
) -> None:
    mine, other = (written(path, result, [rank]) for rank in (4, 7))
    assert {item.rank for item in other} == {7}
    assert [(element.start, element.end, element.name, element.arguments) for element in mine] == [
        (entry.start, entry.end, entry.name, entry.arguments) for entry in other
    ]


def test_what_is_received_is_there_and_comes_last(result: SimulationResult, path: Path) -> None:
    every = written(path, result, range(8))
    received = [item for item in every if item.track[-1] == "receive"]
    assert every[-len(received) :] == received
    sent = [element for element in every if element.track[-1].startswith("send")]
    assert len(received) == len(sent) == 4 * 2 * 4  # microbatches, directions, pipelines
    assert sorted((entry.start, entry.end) for entry in received) == sorted((each.start, each.end) for each in sent)
    assert {each.name for each in received} == {f"receive for microbatch {number}" for number in range(4)}


@pytest.mark.parametrize("jitter", ["0%", "5%"])
def test_microbatches_are_counted_in_their_step_in_names_and_arguments(jitter: str, path: Path) -> None:
    result = simulated("steps=2", f"disturbances.jitter={jitter}")
    counted = [item for item in written(path, result, [0, 4]) if "microbatch" in item.arguments]
    places = {(element.arguments["step"], element.arguments["microbatch"]) for element in counted}
    assert places == {(step, microbatch) for step in (1, 2) for microbatch in range(4)}
    for entry in counted:
        assert f"microbatch {entry.arguments['microbatch']}" in entry.name
        assert entry.name.endswith(f", step {entry.arguments['step']}")
    assert not any("step" in each.arguments for each in written(path, simulated(), [0]))


def test_chunks_are_said_in_names_from_the_second_on(path: Path) -> None:
    result = simulated("schedule={interleaved: {chunks: 2}}")
    counted = [item for item in written(path, result, [0]) if "chunk" in item.arguments]
    assert {element.arguments["chunk"] for element in counted} == {0, 1}
    for entry in counted:
        assert (", chunk 1" in entry.name) is (entry.arguments["chunk"] == 1)


def test_waits_inside_a_pass_are_said_and_not_drawn(path: Path) -> None:
    """A tensor-parallel group of which one member is slow: the other waits at every exchange."""
    result = simulated("disturbances.slow={gpu: 0, speed: 0.5}")
    every = written(path, result, [1])
    compute = {item.uuid for item in every if item.depth}
    drawn = [(element.depth, element.end - element.start) for element in every if element.uuid in compute]
    waited = sum(lasts if depth == 0 else -lasts for depth, lasts in drawn)
    trace = result.trace
    assert waited == pytest.approx(1e9 * trace.waited[trace.rank == trace.representative[1]].sum(), rel=1e-4)
    assert any("between operations" in str(entry.arguments.get("inside")) for entry in every)


def test_what_a_span_waited_for_is_named_whichever_ranks_are_written(path: Path) -> None:
    """A stage waits for the one before it, in a trace of its own ranks as in one of both."""
    result = simulated()
    alone = [item.arguments.get("after") for item in written(path, result, [4]) if not item.depth]
    both = [
        element.arguments.get("after")
        for element in written(path, result, [0, 4])
        if not element.depth and element.rank == 4
    ]
    assert sorted(map(str, alone)) == sorted(map(str, both))
    assert "forward of microbatch 0 on stage 0" in alone


def test_categories_are_the_words_of_the_page(result: SimulationResult, path: Path) -> None:
    words = {category.label for category in CATEGORY_STYLES}
    assert {item.category for item in written(path, result)} <= words


@pytest.mark.slow
def test_every_format_is_the_same_however_words_are_hashed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.report.small_trace import simulated as made\n"
        "from clustersim.report.export import write\n"
        "folder, result = Path(sys.argv[1]), made('steps=2', 'disturbances.jitter=5%', 'layout.tensor_overlap=true')\n"
        "for name in ('a.pftrace', 'a.csv', 'a.arrow', 'kineto'):\n"
        "    form = {'a.pftrace': write.write_trace, 'kineto': write.write_kineto_files}.get(name, write.write_spans)\n"
        "    form(result, folder / name, range(8))\n"
    )
    written = []
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
        files = sorted(item for item in folder.rglob("*") if item.is_file())
        written.append({str(file.relative_to(folder)): file.read_bytes() for file in files})
    assert len(written[0]) == 3 + 8
    assert written[0] == written[1]
