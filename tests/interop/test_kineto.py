"""Kineto traces: exported ones give back their scenario, synthetic ones their contents."""

import gzip
import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clustersim.common.errors import InputError
from clustersim.interop.kineto import ProfilerTraces, is_trace_path, read_traces
from clustersim.model.kernels import TENSOR_CORE_KINDS, KernelKind
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask, ReceiveTask, SendTask
from clustersim.report.export.write_traces import write_kineto_files
from clustersim.results.intervals import Intervals
from clustersim.results.profiled_step import (
    GPU_SPAN_KINDS,
    STEP_CATEGORIES,
    GpuSpanKind,
    ProfiledStep,
    RankSpans,
    StepCategory,
    median_step,
)
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TimeCategory
from tests.interop.synthetic_profiles import GEMM, SyntheticProfile, three_steps
from tests.report.small_trace import simulated

GPU_CATEGORIES = (
    TimeCategory.COMPUTE,
    TimeCategory.RECOMPUTE,
    TimeCategory.OPTIMIZER,
    TimeCategory.SLOWED,
)
ONE_STAGE = ("layout.pp=1", "layout.dp=4")
OVERLAPPED = (*ONE_STAGE, "layout.sequence_parallel=true", "layout.tp_comm_overlap=true")
SHARDED = (*ONE_STAGE, "layout.data=zero3")
CASES = [(), ONE_STAGE, OVERLAPPED, SHARDED, ("degradations.slow={gpu: 1, speed: 0.5}",)]
ATTENTION = frozenset({KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD})
NANOSECOND = 1e-9


def export_and_read(folder: Path, result: SimulationResult, ranks: range = range(8)) -> ProfilerTraces:
    write_kineto_files(result, folder / "own", ranks)
    return read_traces(folder / "own")


def read_median_step(folder: Path, result: SimulationResult) -> ProfiledStep:
    return median_step(export_and_read(folder, result).ranks)


@pytest.mark.parametrize("overrides", CASES)
def test_a_trace_has_the_time_breakdown_of_its_scenario(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = simulated(*overrides)
    step = read_median_step(tmp_path, result)
    assert step.step_time == pytest.approx(result.step_time, abs=2 * NANOSECOND)
    for rank in step.ranks:
        categories = result.breakdown.rank_seconds(rank.rank)
        expected = sum(categories[category.value] for category in GPU_CATEGORIES)
        waiting = categories[TimeCategory.LAUNCH.value]  # it is slowed by collectives as kernels are, and idle here
        compute = rank.category_seconds[STEP_CATEGORIES.index(StepCategory.COMPUTE)]
        assert compute == pytest.approx(expected, abs=1e-5 * expected + 0.2 * waiting)
        assert rank.category_seconds.sum() == pytest.approx(result.step_time, abs=2 * NANOSECOND)
        exposed = rank.category_seconds[STEP_CATEGORIES.index(StepCategory.EXPOSED)]
        assert exposed == pytest.approx(rank.comm_seconds - rank.hidden_seconds, abs=NANOSECOND)


@pytest.mark.parametrize("overrides", [(), SHARDED])
def test_a_trace_equals_its_scenario_span_by_span(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Each kernel and each communication operation, at its own time to the nanosecond, and no others.

    Where they are one operation, the kernel begins with it and the communication ends with it.
    """
    result = simulated(*overrides)
    for rank in export_and_read(tmp_path, result).ranks:
        spans = expected_spans(result, rank.rank)
        is_comm = rank.kind == GPU_SPAN_KINDS.index(GpuSpanKind.COMMUNICATION)
        start, end = rank.start - 1e-3, rank.end - 1e-3  # the host launches 1 ms ahead
        kernels, comm_ops = [span for span in spans if span[2]], [item for item in spans if item[3]]
        assert np.sort(start[~is_comm]) == pytest.approx(sorted(kernel[0] for kernel in kernels), abs=NANOSECOND)
        assert np.sort(end[is_comm]) == pytest.approx(sorted(comm_op[1] for comm_op in comm_ops), abs=NANOSECOND)
        pairs = np.stack([start, end], axis=1)
        for begin, stop, is_kernel, is_comm_op in spans:
            if is_kernel != is_comm_op:
                assert np.abs(pairs - [begin, stop]).max(axis=1).min() <= 1.01 * NANOSECOND


def expected_spans(result: SimulationResult, rank: int) -> list[tuple[float, float, bool, bool]]:
    """Begin and end of all that a rank's GPU does, and whether it is a kernel, communication or both."""
    simulated_rank = int(result.trace.representative[rank])
    operations, trace = result.operation_spans(simulated_rank), result.trace
    tasks = result.program.programs[int(result.program.program_index[rank])].tasks
    segment_spans = []
    for task_id, index, start, end in zip(
        *(column.tolist() for column in (operations.task, operations.operation, operations.start, operations.end)),
        strict=True,
    ):
        task = tasks[task_id]
        assert isinstance(task, ComputeTask)
        operation = task.segment.operations[index]
        segment_spans.append((start, end, operation.kernel is not None, operation.comm_op is not None))
    events = trace.rank_events(simulated_rank)
    comm_events = events[[not isinstance(tasks[task_id], ComputeTask) for task_id in trace.task[events].tolist()]]
    return segment_spans + [(float(trace.start[event]), float(trace.end[event]), False, True) for event in comm_events]


@pytest.mark.parametrize("overrides", CASES[:2])
def test_kinds_of_kernels_are_those_of_the_scenario(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = simulated(*overrides)
    for rank in read_median_step(tmp_path, result).ranks:
        expected: Counter[str] = Counter()
        operations = result.operation_spans(int(result.trace.representative[rank.rank]))
        tasks = result.program.programs[int(result.program.program_index[rank.rank])].tasks
        for task_id, index, duration in zip(
            operations.task.tolist(),
            operations.operation.tolist(),
            (operations.end - operations.start).tolist(),
            strict=True,
        ):
            task = tasks[task_id]
            assert isinstance(task, ComputeTask)
            kernel = task.segment.operations[index].kernel
            label = (
                ""
                if kernel is None
                else "A"
                if kernel.kind in ATTENTION
                else "P"
                if kernel.kind in TENSOR_CORE_KINDS
                else "O"
            )
            expected[label] += duration
        seconds = dict(zip(GPU_SPAN_KINDS, rank.kind_totals()[1].tolist(), strict=True))
        assert seconds[GpuSpanKind.ATTENTION] == pytest.approx(expected["A"], rel=1e-5)
        assert seconds[GpuSpanKind.MATMUL] == pytest.approx(expected["P"], rel=1e-5)
        other_seconds = sum(seconds[kind] for kind in GPU_SPAN_KINDS[2:9])
        assert other_seconds == pytest.approx(expected["O"], rel=1e-4)
        assert seconds[GpuSpanKind.OTHER] == 0.0


@pytest.mark.parametrize("overrides", [(), SHARDED])
def test_collectives_are_those_of_the_program(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """By name, ranks and payload; messages are one kind, sent or received."""
    result = simulated(*overrides)
    for rank in read_median_step(tmp_path, result).ranks:
        program = result.program.programs[int(result.program.program_index[rank.rank])]
        expected: Counter[tuple[str, int, float]] = Counter()
        for task in program.tasks:
            comm_ops = task.segment.comm_ops if isinstance(task, ComputeTask) else (task.comm_op,)
            for comm_op in comm_ops:
                size = result.program.groups[comm_op.comm_group].members.shape[1]
                assert isinstance(task, (ComputeTask, CollectiveTask, SendTask, ReceiveTask))
                expected[comm_op.collective.value, size, round(comm_op.payload / 2 / size)] += 1
        sums = rank.label_totals()[0]
        counts: Counter[tuple[str, int, float]] = Counter()
        for label, count in zip(rank.spans.labels, sums.tolist(), strict=True):
            if label.collective is not None:
                counts[
                    label.collective.name,
                    label.collective.group_size,
                    round(label.collective.payload / 2 / label.collective.group_size),
                ] += count
                assert rank.rank in label.collective.members
        assert counts == expected
        assert CollectiveType.ALL_REDUCE.value in {name for name, _, _ in counts}


def test_the_median_of_several_steps_is_selected(tmp_path: Path) -> None:
    result = simulated("steps=4")
    traces = export_and_read(tmp_path, result)
    step = median_step(traces.ranks)
    assert traces.ranks[0].step_numbers == (0, 1, 2, 3)
    assert len(step.step_times) == 3
    assert step.step_time == pytest.approx(float(np.median(result.step_times)), rel=1e-6)


def test_a_synthetic_profile_is_read_back(tmp_path: Path) -> None:
    """Kernels run after the host's mark of their step has ended, and belong to it all the same."""
    traces = read_traces(three_steps().write(tmp_path / "trace.json"))
    (spans,) = traces.ranks
    assert (traces.world_size, traces.device_name, traces.has_shapes) == (1, "NVIDIA H100 80GB HBM3", True)
    assert spans.step_numbers == (5, 6, 7, 8)
    assert spans.step_index.tolist() == [step for step in range(4) for _ in range(3)]
    step = median_step(traces.ranks)
    assert step.step_number == 7
    assert step.step_times == pytest.approx([100e-6, 140e-6, 120e-6])
    assert step.category_seconds == pytest.approx([60e-6, 20e-6, 5e-6, 35e-6])
    assert (step.comm_seconds, step.hidden_seconds) == pytest.approx((40e-6, 20e-6))
    assert step.stream_seconds()[20] == pytest.approx([0.0, 40e-6, 0.0, 80e-6])
    ((collective, totals),) = step.collective_totals().items()
    assert (collective.name, collective.group_size, collective.payload) == ("all_reduce", 2, 2048.0)
    assert totals == pytest.approx([1.0, 40e-6])
    assert list(step.matmul_totals()) == [(64, 16, 32, 1)]


def test_kernels_crossing_a_step_boundary_count_in_part(tmp_path: Path) -> None:
    profile = SyntheticProfile().add_step(0, 0.0, 100.0).add_step(1, 100.0, 100.0).add_step(2, 200.0, 100.0)
    for begin in (0.0, 100.0, 200.0):
        profile.add_kernel(GEMM, begin, begin + 10.0, 30.0)
    profile.add_kernel("void at::native::vectorized_elementwise_kernel<4>", 60.0, 90.0, 50.0, stream=9)
    step = median_step(read_traces(profile.write(tmp_path / "trace.json")).ranks)
    assert step.step_number == 0
    assert step.category_seconds == pytest.approx([50e-6, 0.0, 0.0, 50e-6])
    next_step = median_step([without_first_step(read_traces(tmp_path / "trace.json").ranks[0])])
    assert next_step.kind_totals[1][GPU_SPAN_KINDS.index(GpuSpanKind.POINTWISE)] == pytest.approx(30e-6)
    assert next_step.kind_totals[0][GPU_SPAN_KINDS.index(GpuSpanKind.POINTWISE)] == 0.0


def without_first_step(spans: RankSpans) -> RankSpans:
    """The spans without the first step."""
    return replace(spans, step_numbers=spans.step_numbers[1:], step_index=np.maximum(spans.step_index - 1, -1))


def test_clocks_of_several_ranks_have_one_origin(tmp_path: Path) -> None:
    """One file counts from 1970, the other from 2 s later."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank, base in ((0, 0), (1, 2_000_000_000)):
        profile = SyntheticProfile(rank, 2, base).add_step(0, 5e6 - base / 1000, 90.0)
        profile.add_kernel(GEMM, 5e6 - base / 1000, 5e6 + 10.0 + 20.0 * rank - base / 1000, 50.0)
        profile.write(folder / f"{rank}.json")
    step = median_step(read_traces(folder).ranks)
    assert step.step_time == pytest.approx(70e-6, abs=2e-9)


def test_a_compressed_trace_is_the_same(tmp_path: Path) -> None:
    plain = three_steps().write(tmp_path / "trace.json")
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain_spans, packed_spans = (read_traces(path).ranks[0] for path in (plain, packed))
    assert plain_spans.start.tolist() == packed_spans.start.tolist()
    assert is_trace_path(packed)
    assert is_trace_path(plain)
    assert is_trace_path(tmp_path)
    assert not is_trace_path(tmp_path / "plan.yaml")


def test_intervals_of_all_kernels_are_never_more_than_the_step(tmp_path: Path) -> None:
    for rank in read_median_step(tmp_path, simulated()).ranks:
        zeros = np.zeros(len(rank.spans.start), dtype=np.int64)
        busy = Intervals(zeros, rank.spans.start, rank.spans.end).merge_overlapping().seconds.sum()
        assert busy == pytest.approx(rank.category_seconds[:3].sum(), rel=1e-9)
        assert busy <= rank.step_time


def changed_content(**changes: object) -> dict[str, object]:
    return {**three_steps().content, **changes}


def without_events(*names: str) -> dict[str, object]:
    events = [event for event in three_steps().events if not event["name"].startswith(names)]
    return changed_content(traceEvents=events)


BAD = {
    "not JSON": ("{", "is not valid JSON, or truncated"),
    "no trace": ({"colour": "red"}, "is no trace of PyTorch's profiler: traceEvents is missing"),
    "a list": ([1], "traceEvents is missing"),
    "another tool": ({"traceEvents": []}, "schemaVersion: nothing is not 1"),
    "another version": (changed_content(schemaVersion=2), "schemaVersion: 2 is not 1"),
    "no steps": (
        without_events("ProfilerStep"),
        "marks no steps (ProfilerStep#N), and has no Optimizer.step#; call profiler.step()",
    ),
    "no GPU": (
        without_events(GEMM, "nccl", "Memcpy"),
        "nothing ran on a GPU in it; profile with ProfilerActivity.CUDA, or name the cluster of CPUs that it ran on",
    ),
    "a time": (
        changed_content(traceEvents=[*three_steps().add_step(9, float("inf"), 1.0).events]),
        "ts of 'ProfilerStep#9'",
    ),
    "a duration": (
        changed_content(traceEvents=[*three_steps().add_step(9, 0.0, -1.0).events]),
        "dur of 'ProfilerStep#9': -1.0 is",
    ),
    "a rank": (changed_content(distributedInfo={"rank": "zero"}), "rank: 'zero' is not a whole number"),
    "no such rank": (changed_content(distributedInfo={"rank": 4, "world_size": 4}), "rank: 4 is not below world_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_traces_are_rejected_in_one_sentence(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    file = tmp_path / "trace.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError) as refused:
        read_traces(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert message in str(refused.value)


@pytest.mark.parametrize("key", ["correlation", "External id"])
def test_traces_without_event_correlation(tmp_path: Path, key: str) -> None:
    """Kernels then belong to the step in which they run, and matmuls have no sizes."""
    profile = three_steps()
    for event in profile.events:
        event["args"] = {**event.get("args", {}), key: [1, 2]}
    traces = read_traces(profile.write(tmp_path / "trace.json"))
    assert len(traces.ranks[0].step_numbers) > 1
    assert traces.has_shapes is (key == "correlation")


def test_traces_of_different_runs_are_rejected(tmp_path: Path) -> None:
    three_steps(0, 2).write(tmp_path / "a.json")
    three_steps(0, 2).write(tmp_path / "b.json")
    with pytest.raises(InputError, match=r"b\.json: is of rank 0, as .*a\.json is"):
        read_traces(tmp_path)
    three_steps(1, 4).write(tmp_path / "b.json")
    with pytest.raises(InputError, match=r"b\.json: is of 4 ranks, .*a\.json of 2"):
        read_traces(tmp_path)
    other = SyntheticProfile(1, 2).add_step(40, 0.0, 10.0).add_kernel(GEMM, 1.0, 2.0, 3.0)
    other.write(tmp_path / "b.json")
    with pytest.raises(InputError, match="no ProfilerStep# with kernels is in the traces of all ranks"):
        read_traces(tmp_path)
    with pytest.raises(InputError, match="has no trace"):
        (tmp_path / "empty").mkdir()
        read_traces(tmp_path / "empty")


def test_a_step_without_kernels_is_ignored(tmp_path: Path) -> None:
    profile = three_steps().add_step(9, 5000.0, 10.0)
    assert read_traces(profile.write(tmp_path / "trace.json")).ranks[0].step_numbers == (5, 6, 7, 8)


def test_a_real_trace_without_marks_has_steps_that_end_with_the_optimizer() -> None:
    """Two steps of Llama 2 7B, 4 layers, on an H200: launched alike, as long as they were measured (109.6 ms).

    Of the optimizer are 52 launches of its update, and of clipping 52 norms, 52 products and what makes their sum.
    """
    (rank,) = read_traces(Path(__file__).parent / "traces" / "h200_llama2_7b_4_layers.json.gz").ranks
    assert rank.step_numbers == (0, 1)
    first, second = (rank.step_index == step for step in (0, 1))
    assert first.sum() == pytest.approx(second.sum(), rel=0.01)
    assert rank.end[second].max() - rank.end[first].max() == pytest.approx(0.1096, rel=0.02)
    kinds = Counter(rank.labels[label].kind for label in rank.label_index[second])
    assert kinds[GpuSpanKind.MATMUL] == 3 * (7 * 4 + 1) + 1  # three of each linear layer, and rotary's angles
    assert kinds[GpuSpanKind.ATTENTION] == pytest.approx(5 * 4, abs=4)  # three more kernels in each backward
    assert 3 * 52 <= kinds[GpuSpanKind.OPTIMIZER] < 3 * 52 + 10


def test_reading_needs_a_small_part_of_a_trace(tmp_path: Path) -> None:
    """Python's frames and counters are passed over; what is kept is numbers."""
    profile = three_steps()
    frame = {"ph": "X", "cat": "python_function", "name": "torch/nn/modules/module.py(1773): _wrapped_call_impl",
             "pid": 7, "tid": 7, "ts": 1.0, "dur": 2.0, "args": {"Python id": 1, "Python parent id": 2}}  # fmt: skip
    profile.events += [frame] * 40_000
    file = profile.write(tmp_path / "trace.json")
    tracemalloc.start()
    try:
        traces = read_traces(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert traces.ranks[0].step_numbers == (5, 6, 7, 8)
    assert file.stat().st_size > 7_500_000
    assert peak < 6_000_000


@pytest.mark.parametrize("value", [2**64 - 1, -(2**70), "text", None, [1], {"a": 1}, 1.5, True])
@pytest.mark.parametrize(
    "key", ["stream", "correlation", "External id", "Sequence number", "Fwd thread id", "Input Dims"]
)
def test_strange_arguments_are_none(tmp_path: Path, key: str, value: object) -> None:
    profile = three_steps()
    for event in profile.events:
        event["args"] = {**event.get("args", {}), key: value}
    assert read_traces(profile.write(tmp_path / "trace.json")).ranks[0].step_numbers


@pytest.mark.parametrize("value", [10**400, float("nan"), "1.0", None, True])
def test_strange_times_of_operators_are_passed_over(tmp_path: Path, value: object) -> None:
    profile = three_steps()
    for event in profile.events:
        if event["cat"] == "cpu_op":
            event["ts"] = value
    traces = read_traces(profile.write(tmp_path / "trace.json"))
    assert not traces.has_shapes
    kernel = next(event for event in profile.events if event["cat"] == "kernel")
    kernel["ts"] = value
    with pytest.raises(InputError, match="is no number of microseconds"):
        read_traces(profile.write(tmp_path / "trace.json"))
