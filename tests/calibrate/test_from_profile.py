"""Records of profiled steps: a step's own record reproduces it, and says what it left out."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.command import main
from calibrate.profile.record import ProfileRecord, record_from_profile
from clustersim.build import build_simulation
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.interop.kineto import read_traces
from clustersim.program.task import ComputeTask
from clustersim.report.export.write_traces import write_kineto_files
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.calibrate.profiled_steps import CHANGES, LLAMA, TRACES, llama, profile_of, scenario_of
from tests.interop.synthetic_profiles import GEMM, SyntheticProfile, three_steps
from tests.report.small_trace import simulated

ONE_STAGE = ("layout.pp=1", "layout.dp=4")
HOST_BOUND = ("framework={name: pytorch}", "cost.launch=200us", "training.sequence=1024")


def simulate_with(scenario: Scenario, record: CalibrationRecord | None) -> SimulationResult:
    return simulate(replace(scenario, cost=replace(scenario.cost, record=record)))


def record_of_export(result: SimulationResult, folder: Path, ranks: Sequence[int] | None = None) -> ProfileRecord:
    write_kineto_files(result, folder / "own", range(result.rank_count) if ranks is None else ranks)
    return record_from_profile(read_traces(folder / "own"), result.scenario)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ONE_STAGE,
        (*ONE_STAGE, "layout.sequence_parallel=true", "cost.interference=0"),
        (*ONE_STAGE, "layout.data=zero3"),
        (*ONE_STAGE, "layout.data=zero3", "cost.interference=0.3"),
        ("training.recompute=full",),
        ("cluster.gpus=1", "layout.pp=1", "layout.tp=1", "layout.dp=1"),
        ("model={preset: mixtral-8x7b, layers: 2}", *ONE_STAGE, "layout.tp=1", "layout.dp=8", "layout.ep=8"),
        ("framework={name: pytorch}", *ONE_STAGE, "training.sequence=512", "cost.interference=0"),
    ],
)
def test_a_record_of_an_exported_trace_reproduces_its_step(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """To what traces resolve, nanoseconds; nothing is left over, and no collective is measured."""
    result = simulated(*overrides)
    profile = record_of_export(result, tmp_path)
    assert simulate_with(result.scenario, profile.record).step_time == pytest.approx(result.step_time, rel=1e-6)
    assert profile.anchor.unmatched == ()
    assert profile.anchor.matched == pytest.approx(profile.anchor.busy, rel=1e-9)
    assert profile.record.collectives == ()


@pytest.mark.parametrize(
    "overrides",
    [
        (*ONE_STAGE, "layout.sequence_parallel=true"),
        (*ONE_STAGE, "layout.sequence_parallel=true", "layout.tp_comm_overlap=true"),
        ("framework={name: pytorch}", *ONE_STAGE, "training.sequence=512"),
    ],
)
def test_what_a_trace_does_not_separate_is_reproduced_nearly(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Which chunk of a kernel ran beside which chunk of its collective; waiting for the host beside a collective."""
    result = simulated(*overrides)
    record = record_of_export(result, tmp_path).record
    assert simulate_with(result.scenario, record).step_time == pytest.approx(result.step_time, rel=0.005)


def test_one_rank_of_a_job_is_enough(tmp_path: Path) -> None:
    """It is taken for an average one, so that the slowest of the job takes longer."""
    result = simulated(*ONE_STAGE)
    record = record_of_export(result, tmp_path, [0]).record
    assert record.profile is not None
    assert record.profile.ranks == 1
    step_time = simulate_with(result.scenario, record).step_time
    assert result.step_time <= step_time == pytest.approx(result.step_time, rel=0.03)


@pytest.mark.parametrize("trace", CHANGES)
def test_a_record_of_a_real_trace_reproduces_its_step(trace: str, tmp_path: Path) -> None:
    """The step within 1 %; under a fake process group, which moves nothing, without its collectives.

    Seconds of kernels to 0.1 %: those of the plan and of no operator are those of the trace.
    """
    profile, scenario = profile_of(trace), scenario_of(trace)
    write_record(profile.record, tmp_path / "record.json")
    record = read_record(tmp_path / "record.json")
    assert record == profile.record
    result = simulate_with(scenario, record)
    seconds = result.breakdown.rank_seconds(0)
    collectives = sum(seconds[f"exposed {axis}"] for axis in ("tp", "dp", "pp")) + seconds["slowed by communication"]
    slowest_gpu = 0.02 if result.rank_count > 1 else 0.0
    expected = pytest.approx(profile.anchor.step_time, rel=0.01 + slowest_gpu)
    assert result.step_time - collectives == expected
    unmatched = sum(call.seconds for call in profile.anchor.unmatched)
    assert profile.anchor.matched + unmatched == pytest.approx(profile.anchor.busy, rel=1e-6)
    assert profile.anchor.matched > 0.995 * profile.anchor.busy
    assert kernel_seconds(result) == pytest.approx(profile.anchor.matched, rel=1e-3 + slowest_gpu)


def kernel_seconds(result: SimulationResult) -> float:
    """Seconds of the plan's kernels on rank 0, without collectives, waiting and what no operator does."""
    total = 0.0
    for task in result.program.programs[int(result.program.program_index[0])].tasks:
        if isinstance(task, ComputeTask) and task.segment.name != "unattributed":
            timing = result.cost.time_segment(0, task.segment)
            is_kernel = [operation.kernel is not None for operation in task.segment.operations]
            total += float((timing.kernel_seconds - timing.launch_stalls)[is_kernel].sum())
    return total


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        (("model.layers=2",), 0.06452),
        (("model.layers=8", "training.microbatch=1", "training.global_batch=1"), 0.11352),
        (("training.microbatch=1", "training.global_batch=1"), 0.06201),
        (("training.sequence=2048", "training.microbatch=4", "training.global_batch=4"), 0.10853),
        (
            (
                "model.max_positions=8192", "training.sequence=8192", "training.microbatch=1",
                "training.global_batch=1",
            ),
            0.11980,
        ),
        (("training.recompute=full",), 0.13881),
    ],
)  # fmt: skip
def test_unseen_depth_batch_and_sequence_are_within_six_percent(changes: tuple[str, ...], measured: float) -> None:
    """Steps measured on such a GPU, in another session than the trace; the interval has them."""
    result = simulate_with(llama(*changes), profile_of("h200_llama2_7b_4_layers").record)
    assert result.step_time == pytest.approx(measured, rel=0.06)
    low, high = result.step_time_interval
    assert low < measured < high


def test_what_is_extrapolated_is_said_and_widens_the_interval() -> None:
    record = profile_of("h200_llama2_7b_4_layers").record
    own, other = (simulate_with(llama(*changes), record) for changes in ((), ("training.sequence=2048",)))
    measured, extrapolated = (result.provenance_shares for result in (own, other))
    assert measured["measured"] == pytest.approx(1.0, abs=1e-3)
    assert extrapolated["fitted"] > 0.5
    assert sum(extrapolated.values()) == pytest.approx(1.0)
    widths = [(high - low) / result.step_time for result in (own, other) for low, high in [result.step_time_interval]]
    assert widths[0] < widths[1]


def test_an_operator_that_runs_no_kernel_is_absent_at_other_sizes_too() -> None:
    """PyTorch's only backward sets gradients, to which this scenario says that it adds."""
    zeroed = "training.overheads.zero_grad=true"
    traces = read_traces(TRACES / "h200_llama2_7b_4_layers.json.gz")
    record = record_from_profile(traces, llama(zeroed)).record
    absent = [sample for sample in record.kernels if sample.outcome is MeasurementOutcome.ABSENT]
    assert {sample.name.rpartition(".")[2] for sample in absent} == {"accumulate"}
    scenario = llama(zeroed, "model.hidden=2048", "model.heads=16", "model.kv_heads=16")
    prepared = build_simulation(replace(scenario, cost=replace(scenario.cost, record=record)))
    kernels = prepared.cost.device_models.models[0].kernels
    (head,) = (
        operation.kernel
        for task in prepared.program.programs[0].tasks
        if isinstance(task, ComputeTask)
        for operation in task.segment.operations
        if operation.kernel is not None and operation.kernel.name == "head.logits.accumulate"
    )
    assert kernels.time_kernel(head).seconds == 0.0


def run(*arguments: str | Path) -> int:
    return main(["from-profile", *map(str, arguments)])


def write_scenario(folder: Path, mapping: dict[str, Any] = LLAMA) -> Path:
    path = folder / "plan.yaml"
    path.write_text(json.dumps(mapping))
    return path


def test_the_command_says_how_far_both_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    memory = TRACES / "h200_llama2_7b_4_layers_memory.pickle.gz"
    trace = TRACES / "h200_llama2_7b_4_layers.json.gz"
    scenario = write_scenario(tmp_path, LLAMA | {"training": LLAMA["training"] | {"overheads": {"zero_grad": True}}})
    assert run(trace, "--snapshot", memory, "--for", scenario, "-o", record) == 0
    printed = capsys.readouterr().out
    for text in ("2 steps of 1 rank", "of the busy time", "aten::cos", "head.logits.accumulate", "with it", "memory:"):
        assert text in printed
    written = read_record(record)
    assert written.profile is not None
    assert written.profile.memory is not None


def cpu_only() -> SyntheticProfile:
    profile = three_steps()
    profile.events[:] = [event for event in profile.events if event["cat"] not in ("kernel", "gpu_memcpy")]
    return profile


def without_correlation() -> SyntheticProfile:
    profile = three_steps()
    profile.content["deviceProperties"] = []
    for event in profile.events:
        event.get("args", {}).pop("correlation", None)
    return profile


BAD: dict[str, tuple[str | bytes | dict[str, Any], str]] = {
    "truncated gzip": (gzip.compress(b'{"traceEvents": [' + b"{}," * 5000)[:30], "is not valid gzip, or truncated"),
    "no marks": (SyntheticProfile().add_kernel(GEMM, 1.0, 2.0, 3.0).content, "marks no steps"),
    "CPU only": (cpu_only().content, "nothing ran on a GPU in it"),
    "no correlation ids": (without_correlation().content, "has no correlation ids"),
    "another model": (
        three_steps().content | {"deviceProperties": [{"name": "NVIDIA H200"}]},
        "is of another model or",
    ),
    "another GPU": (three_steps().content, "ran on NVIDIA H100 80GB HBM3, but hgx-h200 has h200-sxm-141gb"),
    "other ranks": (three_steps(3, 4).content | {"deviceProperties": []}, "is of 4 ranks, and plan has 1 GPUs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_traces_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    content, message = BAD[case]
    trace = tmp_path / ("trace.json.gz" if isinstance(content, bytes) else "trace.json")
    trace.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert run(trace, "--for", write_scenario(tmp_path), "-o", tmp_path / "record.json") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error: ") == 1
    assert not (tmp_path / "record.json").exists()


def test_a_record_is_not_written_over_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_scenario(tmp_path)
    assert run(TRACES / "h200_llama2_7b_4_layers.json.gz", "--for", plan, "-o", plan) == 2
    assert "is one of the files that are read" in capsys.readouterr().err


def test_a_trace_of_another_model_names_the_sizes() -> None:
    traces = read_traces(TRACES / "h200_llama2_7b_4_layers.json.gz")
    with pytest.raises(InputError, match=r"is of another model or layout: .* it has .* x 4096 x .*, the plan .* 2560"):
        record_from_profile(traces, llama("model.hidden=2560", "model.ffn=6912", "model.heads=20", "model.kv_heads=20"))


def load(trace: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress((TRACES / f"{trace}.json.gz").read_bytes()))
    return content


AMD_NAMES = {
    "nvjet": "Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x1",
    "cudnn_generated": "attn_fwd",
    "cudaLaunch": "hipLaunch",
}


@pytest.mark.parametrize("change", ["Sequence number", "Input Dims", "amd", "warm-up"])
def test_traces_with_less_reproduce_their_step_as_well(tmp_path: Path, change: str) -> None:
    """Without autograd nodes or shapes matching goes by order and name; AMD's kernels have other names.

    A first step with extra kernels, such as those of autotuning, is left out.
    """
    trace = "h200_llama2_7b_4_layers"
    content = load(trace)
    if change == "amd":
        content["deviceProperties"] = []
        for event in content["traceEvents"]:
            for old, new in AMD_NAMES.items():
                if old in event.get("name", ""):
                    event["name"] = new
    elif change == "warm-up":
        content["traceEvents"] += warm_up_kernels(content["traceEvents"])
    else:
        for event in content["traceEvents"]:
            event.get("args", {}).pop(change, None)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(content))
    profile = record_from_profile(read_traces(file), scenario_of(trace))
    result = simulate_with(scenario_of(trace), profile.record)
    assert result.step_time == pytest.approx(profile.anchor.step_time, rel=0.02)
    assert profile.anchor.matched > 0.9 * profile.anchor.busy
    assert bool(profile.notes) is (change == "warm-up")


def warm_up_kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Many kernels in the first step."""
    first = min((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    launch = next(
        event for event in events
        if event.get("cat") == "cuda_runtime" and event["args"].get("correlation") == first["args"]["correlation"]
    )  # fmt: skip
    extra = []
    for index in range(100):
        for event in (first, launch):
            copied = {**event, "args": {**event["args"], "correlation": 10**7 + index}}
            extra.append(copied | {"ts": launch["ts"] - 50_000.0 - index, "dur": 0.05})
    return extra


def test_the_time_without_a_profiler_scales_the_host() -> None:
    """A step that its host bounds; kernels stay as they are, and a slower time changes nothing."""
    trace = "h200_llama2_7b_4_layers"
    scenario, traces = scenario_of(trace), read_traces(TRACES / f"{trace}.json.gz")
    traced = profile_of(trace)
    faster = traced.anchor.step_time - 0.6e-3
    record = record_from_profile(traces, scenario, faster).record
    assert record.profile is not None
    assert 0.0 < record.profile.host_scale < 1.0
    assert simulate_with(scenario, record).step_time == pytest.approx(faster, rel=1e-4)
    assert record_from_profile(traces, scenario, 1.0).record.kernels == traced.record.kernels


def test_a_report_has_the_profiled_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = profile_of("h200_llama2_7b_4_layers").record
    write_record(record, tmp_path / "record.json")
    assert main(["report", str(tmp_path / "record.json"), "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert record.profile is not None
    assert content["profile"]["step_time"] == record.profile.step_time
    assert {call["name"] for call in content["profile"]["unmatched"]} >= {"aten::cos", "aten::sin"}


def test_everything_works_on_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs, searches, what-if and the comparison with the trace, from the command line."""
    from typer.testing import CliRunner

    from clustersim.cli.app import app

    plan, record = write_scenario(tmp_path), tmp_path / "record.json"
    trace = TRACES / "h200_llama2_7b_4_layers_compiled.json.gz"
    compiled = ["--set", "framework={name: transformers, torch_compile: true}"]
    assert run(trace, "--for", plan, *compiled, "-o", record) == 0
    capsys.readouterr()
    recorded = [*compiled, "--set", f"cost.record={record}"]
    larger = ["--set", "cluster.gpus=8", "--set", "training.global_batch=16"]
    commands = (
        ["run", plan, *recorded, "--what-if"],
        [
            "search",
            plan,
            *recorded,
            *larger,
            "--fix",
            "training.recompute=none",
            "--fix",
            "layout.pp=1",
            "--workers",
            "1",
        ],
        ["coverage", plan, *recorded, *larger, "--set", "layout.dp=8"],
    )
    for command in commands:
        done = CliRunner().invoke(app, [str(word) for word in command])
        assert done.exit_code == 0, done.output
    differences = []
    for options in (compiled, recorded):
        target = tmp_path / "difference.json"
        done = CliRunner().invoke(app, ["diff", str(trace), str(plan), *options, "--json", str(target)])
        assert done.exit_code == 0, done.output
        content = json.loads(target.read_text())
        differences.append(abs(content["delta"]["step_time_s"]) / content["first"]["step_time_s"])
        target.unlink()
    assert differences[1] < 0.01 < differences[0]
