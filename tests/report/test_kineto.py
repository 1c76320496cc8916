"""Kineto trace export, verified against the readers of PyTorch profiler traces."""

import json
import logging
import math
import os
import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.common.dtypes import COMPUTE_DTYPES, LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import OutputError
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.parallel.mesh import DENSE_AXIS_NAMES
from clustersim.report.export import write_traces
from clustersim.report.export.kineto_kernels import to_kineto_kernel
from clustersim.report.export.write_traces import require_kineto_directory, write_kineto_files
from clustersim.results.comm_overlap import compute_overlap
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TimeCategory
from tests.report.small_trace import simulated

GPU_CATEGORIES = (
    TimeCategory.COMPUTE,
    TimeCategory.RECOMPUTE,
    TimeCategory.OPTIMIZER,
    TimeCategory.SLOWED,
)
EXPOSED_CATEGORIES = (
    TimeCategory.EXPOSED_TP,
    TimeCategory.EXPOSED_CP,
    TimeCategory.EXPOSED_DP,
    TimeCategory.EXPOSED_PP,
)
ONE_STAGE = ("layout.pp=1", "layout.dp=4")
NO_INTERFERENCE = ("cost.interference=0", "cost.network=uncontended")
NO_HOST = (
    "framework=ideal"  # communication beside a wait for launches is exposed in a profile, a launch in the breakdown
)
OVERLAPPED = (*ONE_STAGE, "layout.sequence_parallel=true", "layout.tp_comm_overlap=true", NO_HOST)

Event = dict[str, Any]
Intervals = list[tuple[float, float]]


def exported_trace(folder: Path, result: SimulationResult, rank: int) -> dict[str, Any]:
    write_kineto_files(result, folder, [rank])
    content: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    return content


def kernel_events(content: dict[str, Any]) -> list[Event]:
    return [event for event in content["traceEvents"] if event.get("cat") == "kernel"]


def is_communication(event: Event) -> bool:
    return bool(event["name"].startswith("nccl"))


def merge_intervals(events: list[Event]) -> Intervals:
    """Times of events in nanoseconds, merged where they touch."""
    intervals: Intervals = []
    for event in sorted(events, key=lambda event: event["ts"]):
        start = round(event["ts"] * 1e3)
        end = start + round(event["dur"] * 1e3)
        if intervals and start <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
        else:
            intervals.append((start, end))
    return intervals


def total_seconds(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals) * 1e-9


def overlap_seconds(first: Intervals, second: Intervals) -> float:
    """Seconds covered by both interval lists."""
    return 1e-9 * sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


@pytest.mark.parametrize("overrides", [(), ONE_STAGE, OVERLAPPED, ("degradations.slow={gpu: 1, speed: 0.5}",)])
@pytest.mark.parametrize("rank", [0, 7])
def test_kernel_time_equals_breakdown(tmp_path: Path, overrides: tuple[str, ...], rank: int) -> None:
    result = simulated(*overrides)
    computing = merge_intervals(
        [event for event in kernel_events(exported_trace(tmp_path, result, rank)) if not is_communication(event)]
    )
    breakdown = result.breakdown.rank_seconds(rank)
    assert total_seconds(computing) == pytest.approx(
        sum(breakdown[category.value] for category in GPU_CATEGORIES), rel=1e-5
    )


@pytest.mark.parametrize("overrides", [ONE_STAGE, OVERLAPPED])
def test_non_overlapped_communication_equals_exposed_time(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = simulated(*overrides)
    events = kernel_events(exported_trace(tmp_path, result, 3))
    computing = merge_intervals([event for event in events if not is_communication(event)])
    communicating = merge_intervals([item for item in events if is_communication(item)])
    exposed = sum(result.breakdown.rank_seconds(3)[category.value] for category in EXPOSED_CATEGORIES)
    assert total_seconds(communicating) - overlap_seconds(computing, communicating) == pytest.approx(exposed, rel=1e-4)
    assert exposed > 0


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_hidden_and_exposed_time_per_axis_equal_the_page(tmp_path: Path, axis: str, overlapped: bool) -> None:
    """For each axis, while another axis's traffic contends for the same links."""
    result = simulated("layout.pp=1", "layout.cp=2", *(OVERLAPPED[len(ONE_STAGE) :] if overlapped else ()))
    events, axis_overlap = (
        kernel_events(exported_trace(tmp_path, result, 3)),
        compute_overlap(result.trace_table, result.cost.time_segment, result.breakdown),
    )
    computing = merge_intervals([event for event in events if not is_communication(event)])
    comm_events = [event for event in events if is_communication(event)]
    communicating = merge_intervals(
        [event for event in comm_events if event["args"]["Process Group Description"] == axis]
    )
    axis_index, hidden_seconds = DENSE_AXIS_NAMES.index(axis), overlap_seconds(computing, communicating)
    assert len(result.trace.contention.event) > 0
    assert hidden_seconds == pytest.approx(axis_overlap.hidden[0, axis_index], rel=1e-5)
    assert total_seconds(communicating) - hidden_seconds == pytest.approx(
        axis_overlap.exposed[0, axis_index], rel=1e-5, abs=1e-9
    )


def test_host_launches_precede_kernels_sequentially(tmp_path: Path) -> None:
    content = exported_trace(tmp_path, simulated(), 4)
    by_correlation = {event["args"]["correlation"]: event for event in kernel_events(content)}
    hosts = [event for event in content["traceEvents"] if event.get("cat") == "cpu_op"]
    launches = [event for event in content["traceEvents"] if event.get("cat") == "cuda_runtime"]
    assert len(hosts) == len(launches) == len(by_correlation) == len(kernel_events(content))
    for host, launch in zip(hosts, launches, strict=True):
        kernel = by_correlation[launch["args"]["correlation"]]
        assert (
            host["ts"] < launch["ts"] < launch["ts"] + launch["dur"] < host["ts"] + host["dur"] <= kernel["ts"] + 1e-6
        )
        assert host["args"]["External id"] == launch["args"]["External id"] == kernel["args"]["External id"]
    ends = np.array([event["ts"] + event["dur"] for event in hosts])
    assert (np.array([event["ts"] for event in hosts])[1:] >= ends[:-1] - 1e-6).all()
    flow_ids = {ph: {event["id"] for event in content["traceEvents"] if event["ph"] == ph} for ph in "sf"}
    assert flow_ids["s"] == flow_ids["f"] == set(by_correlation)


def test_collectives_have_nccls_names_and_pytorchs_arguments(tmp_path: Path) -> None:
    content = exported_trace(tmp_path, simulated(), 5)
    args_by_kernel = {
        event["name"].partition("(")[0]: event["args"] for event in kernel_events(content) if is_communication(event)
    }
    assert {
        "ncclDevKernel_AllReduce_Sum_bf16_RING_SIMPLE", "ncclDevKernel_AllGather_RING_SIMPLE",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE", "ncclDevKernel_SendRecv",
    } <= set(args_by_kernel)  # fmt: skip
    gather = args_by_kernel["ncclDevKernel_AllGather_RING_SIMPLE"]
    assert gather["Out msg nelems"] == gather["Group size"] * gather["In msg nelems"]
    assert args_by_kernel["ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE"]["Process Group Ranks"] == "[5, 7]"
    info = content["distributedInfo"]
    assert (info["rank"], info["world_size"], info["backend"]) == (5, 8, "nccl")
    groups = {group["pg_desc"]: group["ranks"] for group in info["pg_config"]}
    assert groups["tp"] == [4, 5]
    assert groups["pp_previous"] == [5, 1]
    assert {event["args"]["Process Group Name"] for event in kernel_events(content) if is_communication(event)} == {
        group["pg_name"] for group in info["pg_config"]
    }


def test_matmul_events_have_shapes_for_flop_counting(tmp_path: Path) -> None:
    content = exported_trace(tmp_path, simulated(), 0)
    flop = {event["args"]["External id"]: event["args"].get("flop") for event in kernel_events(content)}
    matmuls = [event for event in content["traceEvents"] if event["name"] == "aten::mm"]
    assert len(matmuls) > 50
    for event in matmuls:
        (m, k), (k_of_b, n) = event["args"]["Input Dims"]
        assert k == k_of_b
        assert flop[event["args"]["External id"]] == 2 * m * n * k


@pytest.mark.parametrize(
    ("cluster", "precision", "elements"),
    [
        ("dgx-h100", "fp8", math.inf), ("dgx-h100", "fp8-rowwise", 1), ("hgx-b200", "mxfp8", 32),
        ("hgx-b200", "nvfp4", 16),
    ],
)  # fmt: skip
def test_scaled_matmuls_have_scales_and_cast_times(
    tmp_path: Path, cluster: str, precision: str, elements: float
) -> None:
    """A scale of A covers `elements` elements of a row; 1 means the full row, of any length.

    Rowwise scales are those of forward's matmuls only, a third of all: torchao scales gradients behind plain ones.
    """
    result = simulated(*ONE_STAGE, *NO_INTERFERENCE, f"cluster.name={cluster}", f"training.precision={precision}")
    content = exported_trace(tmp_path, result, 0)
    flop = {event["args"]["External id"]: event["args"].get("flop") for event in kernel_events(content)}
    matmuls = [event["args"] for event in content["traceEvents"] if event["name"] == "aten::_scaled_mm"]
    assert len(matmuls) > 50
    for matmul in matmuls:
        (m, k), (k_of_b, n), first, second = matmul["Input Dims"][:4]
        assert k == k_of_b
        assert flop[matmul["External id"]] == 2 * m * n * k
        scales_per_row = [] if math.isinf(elements) else [k // elements if elements > 1 else 1]
        is_scaled_behind = precision == "fp8-rowwise" and not first
        assert (first, second) == (
            [m, *scales_per_row] if scales_per_row and not is_scaled_behind else [],
            [*scales_per_row, n] if scales_per_row and not is_scaled_behind else [],
        )
    if precision == "fp8-rowwise":
        assert 3 * sum(bool(matmul["Input Dims"][2]) for matmul in matmuls) == len(matmuls)
    casts = [event for event in kernel_events(content) if event["name"].startswith("cast_")]
    assert {event["args"]["casts"].rpartition(" ")[2] for event in casts} == {precision}
    assert total_seconds(merge_intervals(casts)) == pytest.approx(
        result.format_usage.quantization_seconds, rel=1e-5
    )  # all ranks are equivalent


@pytest.mark.parametrize("operands", list(MatmulLayout))
def test_blockwise_scales_cover_128_rows_of_weights_only(operands: MatmulLayout) -> None:
    """B is a weight matrix except in the weight gradient, where both operands are quantized per row."""
    shape = MatmulShape(512, 300, 1024, operands=operands)
    call = to_kineto_kernel(Kernel("x", KernelKind.MATMUL, DType.FP8_BLOCKWISE, 0.0, 0.0, shape))
    rows = 300 if operands is MatmulLayout.TN else 3
    assert call.arguments["Input Dims"][2:4] == [[512, 8], [8, rows]]
    assert call.arguments["Input type"][:4] == ["c10::Float8_e4m3fn"] * 2 + ["float"] * 2


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_all_compute_dtypes_have_a_pytorch_operator(dtype: DType) -> None:
    call = to_kineto_kernel(Kernel("x", KernelKind.MATMUL, dtype, 0.0, 0.0, MatmulShape(512, 256, 1024)))
    assert call.operator == ("aten::_scaled_mm" if dtype in LOW_PRECISION_DTYPES else "aten::mm")
    assert call.arguments["Input Dims"][:2] == [[512, 1024], [1024, 256]]


def test_scaled_expert_matmuls_are_grouped() -> None:
    shape = MatmulShape(512, 256, 1024, batch=4)
    call = to_kineto_kernel(Kernel("x", KernelKind.GROUPED_MATMUL, DType.MXFP8, 0.0, 0.0, shape))
    assert call.operator == "aten::_scaled_grouped_mm"
    assert call.arguments["Input Dims"][:4] == [[4, 512, 1024], [4, 1024, 256], [4, 512, 32], [4, 32, 256]]
    assert {
        len(argument) for argument in call.arguments.values() if argument is not call.arguments["Input Strides"]
    } == {9}


def test_profiler_step_marks_are_contiguous(tmp_path: Path) -> None:
    content = exported_trace(tmp_path, simulated("steps=3"), 0)
    marks = [event for event in content["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    assert [event["name"] for event in marks] == [f"ProfilerStep#{step}" for step in range(3)]
    for before, after in pairwise(marks):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])


def test_trace_files_have_the_rank_where_hta_reads_it(tmp_path: Path) -> None:
    write_kineto_files(simulated(), tmp_path / "new", [0, 5])
    for rank in (0, 5):
        lines = (tmp_path / "new" / f"rank-{rank}.json").read_text().splitlines()
        assert [int(match[1]) for line in lines if (match := re.search(r'"rank":\s+(\d+)', line))] == [rank]


def test_clustersim_trace_directory_is_replaced_others_rejected(tmp_path: Path) -> None:
    result, folder = simulated(), tmp_path / "traces"
    assert write_kineto_files(result, folder, [0, 1]) == 2
    assert write_kineto_files(result, folder, [1, 4]) == 2
    assert sorted(file.name for file in folder.iterdir()) == ["rank-1.json", "rank-4.json"]
    (folder / "rank-0.json").write_text('{"traceEvents": []}')  # not written by clustersim
    with pytest.raises(OutputError, match=r"holds rank-0\.json, which is no trace that clustersim wrote"):
        write_kineto_files(result, folder, [1])
    assert (folder / "rank-4.json").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("file", "is a file"), ("no/where", "there is no directory"), ("x" * 300, "too long")]
)
def test_invalid_trace_directory_has_a_one_line_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=message):
        require_kineto_directory(tmp_path / name)


@pytest.mark.parametrize("before", [[], [0, 1, 5]])
def test_full_disk_leaves_the_directory_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[int]
) -> None:
    original_write, folder = write_traces.write_kineto, tmp_path / "traces"
    if before:
        write_kineto_files(simulated("steps=2"), folder, before)
    earlier = {path.name: path.read_bytes() for path in folder.glob("*")}

    def failing_write(result: SimulationResult, rank: Any, spans: Any, file: Any) -> None:
        original_write(result, rank, spans, file)
        if rank.rank == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_traces, "write_kineto", failing_write)
    with pytest.raises(OutputError, match="No space left on device"):
        write_kineto_files(simulated(), folder, [0, 5])
    assert folder.exists() == bool(before)
    assert {path.name: path.read_bytes() for path in folder.glob("*")} == earlier
    monkeypatch.setattr(write_traces, "write_kineto", original_write)
    write_kineto_files(simulated(), folder, [0, 5])
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-5.json"]


def test_partial_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    write_kineto_files(simulated(), tmp_path, [0])
    (tmp_path / "rank-0.json").rename(tmp_path / ".rank-3.json.1.part")
    write_kineto_files(simulated(), tmp_path, [0])
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


def test_too_large_traces_are_rejected_with_their_size(tmp_path: Path) -> None:
    result, folder = simulated(), tmp_path / "traces"
    write_kineto_files(result, folder, [0, 4])
    size = sum(path.stat().st_size for path in folder.iterdir())
    write_kineto_files(result, folder, [0, 4], max_bytes=1.3 * size)
    with pytest.raises(OutputError, match="on 2 ranks would be about"):
        write_kineto_files(result, folder, [0, 4], max_bytes=0.7 * size)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ONE_STAGE, OVERLAPPED])
def test_holistic_trace_analysis_reproduces_the_breakdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """HTA's temporal breakdown and overlap of communication and computation, of every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setitem(os.environ, "HTA_DISABLE_NS_ROUNDING", "1")
        analysis = pytest.importorskip("hta.trace_analysis", reason="HTA is not installed: pip install traceinsight")
        result = simulated(*overrides)
        write_kineto_files(result, tmp_path, range(8))
        logging.disable(logging.WARNING)
        trace_analysis = analysis.TraceAnalysis(trace_dir=str(tmp_path))
        times = trace_analysis.get_temporal_breakdown(visualize=False).set_index("rank")
        overlaps = trace_analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
        logging.disable(logging.NOTSET)
    for rank in range(8):
        breakdown = result.breakdown.rank_seconds(rank)
        computing = sum(breakdown[category.value] for category in GPU_CATEGORIES)
        assert times.loc[rank, "compute_time(us)"] == pytest.approx(1e6 * computing, rel=1e-4)
        if overrides:  # one stage: it never waits for messages, so it is never idle while communication runs
            exposed = sum(breakdown[category.value] for category in EXPOSED_CATEGORIES)
            assert times.loc[rank, "non_compute_time(us)"] == pytest.approx(1e6 * exposed, rel=1e-3)
        events = kernel_events(json.loads((tmp_path / f"rank-{rank}.json").read_text()))
        communicating = merge_intervals([event for event in events if is_communication(event)])
        hidden_seconds = overlap_seconds(
            communicating, merge_intervals([event for event in events if not is_communication(event)])
        )
        expected = 100 * hidden_seconds / total_seconds(communicating)
        assert overlaps.loc[rank, "comp_comm_overlap_pctg"] == pytest.approx(expected, abs=0.02)


def test_sliding_window_arguments_follow_flash_attention() -> None:
    """It counts the keys to the left of the query's own: a window of 128 tokens is 127 of them."""
    shape = AttentionShape(2, 1024, 1024, heads=8, kv_heads=2, head_dim=64, causal=True, window=128)
    (core,) = AttentionCore(shape, DType.BF16, dropout=False, fused=True).flash_operators()
    call = to_kineto_kernel(core.forward[0])
    assert call.operator == "flash_attn::_flash_attn_forward"
    assert call.arguments["Input Dims"][:3] == [[2, 1024, 8, 64], [2, 1024, 2, 64], [2, 1024, 2, 64]]
    assert call.arguments["Concrete Inputs"][5:8] == ["True", "127", "0"]
