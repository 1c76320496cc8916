"""Predicted phases of a step add up, and a comparison reports what it was given."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clustersim.common.errors import InputError
from clustersim.common.units import format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo, MeasurementConditions
from clustersim.cost.record_file import write_record
from clustersim.model.kernels import KernelKind
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from clustersim.simulation import simulate
from tests.calibrate.check_scenarios import LLAMA, single_thread, small_scenario

torch = pytest.importorskip("torch")

from calibrate.check.check_session import read_matching_record  # noqa: E402
from calibrate.check.measurement import median_step, merge_rank_times, pool_kernels  # noqa: E402
from calibrate.check.phase_timer import StepPhase, StepTime  # noqa: E402
from calibrate.check.prediction import adapt_scenario, peak_allocated, predict_step  # noqa: E402
from calibrate.check.step_comparison import StepComparison, TimeComparison  # noqa: E402 - torch first
from calibrate.check.step_profile import profile_step  # noqa: E402
from calibrate.check.supported import build_plan, build_trainer  # noqa: E402
from calibrate.check.trainer import random_batch  # noqa: E402

CPU_DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    with single_thread():
        yield


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2"])
def test_phases_sum_to_the_step_time(layout: str) -> None:
    scenario = small_scenario(LLAMA, "cluster.gpus=2", f"layout.{layout}")
    prediction = predict_step(scenario, None)
    assert sum(prediction.phases.values()) == pytest.approx(prediction.seconds)
    assert min(prediction.phases.values()) > -1e-12


NO_HOST = "framework.launch=0 us"


def test_kernel_kinds_of_one_process_sum_to_the_step_time() -> None:
    prediction = predict_step(small_scenario(LLAMA, NO_HOST), None)
    assert sum(prediction.kernel_kinds.values()) == pytest.approx(prediction.seconds)


def test_profile_contains_every_simulated_kernel_kind() -> None:
    scenario = small_scenario(LLAMA)
    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)
    profile_step(trainer, batch, CPU_DEVICE)  # optimizer states are allocated in the first step
    profile = profile_step(trainer, batch, CPU_DEVICE)
    assert set(profile.kernel_kinds) == set(predict_step(scenario, None).kernel_kinds)
    assert KernelKind.ATTENTION_BACKWARD in profile.kernel_kinds


@pytest.mark.parametrize("changes", [(), ("model.heads=2", "model.kv_heads=2", "model.head_dim=64", "model.ffn=16")])
def test_measured_peak_memory_matches_the_ledger(changes: tuple[str, ...]) -> None:
    """Within 3 %: norm statistics, masks and temporary optimizer buffers are not counted.

    Where layers are mostly attention, queries and keys that values keep alive are an eighth of the total.
    """
    shapes = "model.layers=4", "model.vocab=256", "model.max_positions=256", "training.sequence=256"
    scenario = small_scenario(LLAMA, *shapes, *changes)
    trainer, batch = build_trainer(scenario, CPU_DEVICE), random_batch(build_plan(scenario), CPU_DEVICE)
    profile_step(trainer, batch, CPU_DEVICE)
    assert profile_step(trainer, batch, CPU_DEVICE).peak_bytes == pytest.approx(peak_allocated(scenario), rel=0.03)


def test_zeroing_gradients_is_counted_outside_forward_and_backward() -> None:
    adapted, unadapted = (
        predict_step(adapt_scenario(small_scenario(LLAMA, NO_HOST), on_cpu=True), None),
        predict_step(small_scenario(LLAMA, NO_HOST), None),
    )
    zeroing = sum(seconds for kernel, seconds in adapted.kernel_seconds.items() if kernel.name == "gradients.zero")
    assert zeroing > 0.0
    assert adapted.phases[StepPhase.OTHER] - unadapted.phases[StepPhase.OTHER] == pytest.approx(zeroing)
    for phase in (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER):
        assert adapted.phases[phase] == pytest.approx(unadapted.phases[phase])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_fsdp_reductions_do_not_overlap_compute_on_a_cpu(on_cpu: bool) -> None:
    """A unit's reduce-scatter starts at the end of its backward.

    The next unit's backward waits for it on a CPU only.
    """
    scenario = adapt_scenario(small_scenario(LLAMA, "cluster.gpus=2", "layout.data=fsdp"), on_cpu=on_cpu)
    trace, tasks = (result := simulate(scenario)).trace, result.program.programs[0].tasks
    compute_spans, reduction_spans = [], []
    for event in trace.rank_events(0).tolist():
        task, span = tasks[int(trace.task[event])], (float(trace.start[event]), float(trace.end[event]))
        if isinstance(task, ComputeTask):
            compute_spans.append(span)
        elif isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.REDUCE_SCATTER:
            reduction_spans.append(span)
    assert len(reduction_spans) == scenario.model.layer_count + 2  # one microbatch; layers, embedding and LM head
    overlapping = [
        span for span in compute_spans for start, end in reduction_spans if span[0] < end and start < span[1]
    ]
    assert bool(overlapping) is not on_cpu


def _step_time(seconds: float, forward: float) -> StepTime:
    return StepTime(
        seconds, {StepPhase.FORWARD: forward, StepPhase.BACKWARD: 2.0, StepPhase.OPTIMIZER: 1.0, StepPhase.OTHER: 0.0}
    )


def test_step_of_several_ranks_is_the_slowest_one() -> None:
    step = merge_rank_times([_step_time(5.0, 2.0), _step_time(6.0, 1.0)])
    assert step.seconds == 6.0
    assert step.phases[StepPhase.FORWARD] == 1.5
    assert step.phases[StepPhase.OTHER] == 6.0 - 1.5 - 2.0 - 1.0


def test_median_step_is_the_median() -> None:
    assert median_step([_step_time(9.0, 1.0), _step_time(5.0, 2.0), _step_time(6.0, 3.0)]).seconds == 6.0


def test_pooling_no_measurements_gives_no_samples() -> None:
    assert pool_kernels([]) == ()


def _comparison() -> StepComparison:
    return StepComparison(
        name="small",
        device="a CPU",
        layout="one process",
        layers=2,
        model_layers=4,
        steps=3,
        step=TimeComparison(1.1, 1.0),
        fastest=0.9,
        slowest=1.2,
        phases={StepPhase.FORWARD: TimeComparison(0.4, 0.5), StepPhase.OTHER: TimeComparison(0.0, 0.0)},
        kernel_kinds={"matmul": TimeComparison(0.3, 0.2)},
        predicted_peak=2.0**30,
        measured_peak=2.0**31,
        provenance={"measured": 1.0},
    )


def test_comparison_json_fields() -> None:
    content = json.loads(_comparison().to_json())
    assert content["error"] == pytest.approx(0.1)
    assert content["predicted_peak_bytes"] == 2.0**30
    assert content["measured_peak_bytes"] == 2.0**31
    assert content["parts"]["forward"]["error"] == pytest.approx(-0.2)
    assert content["parts"]["other"]["error"] is None
    assert {"predicted_s", "measured_s", "kinds", "device", "layout", "steps", "provenance_share"} <= set(content)


def test_comparison_text_shows_the_errors() -> None:
    text = _comparison().to_text()
    assert "2 of 4 layers" in text
    assert "+10.0 %" in text
    assert "-50.0 %" in text


def test_unmeasured_kernels_are_listed_with_their_seconds() -> None:
    """A record with all kernels but the update, which ran out of memory, and the clipping, which has no sample."""
    from calibrate.check.check_session import unmeasured_kernels
    from clustersim.build import distinct_kernels
    from clustersim.cost.calibration_record import (
        CalibrationRecord,
        DeviceInfo,
        KernelSample,
        MeasurementConditions,
        TimeStatistics,
    )
    from clustersim.cost.record_kinds import MeasurementOutcome
    from clustersim.model.kernels import Kernel

    def make_sample(kernel: Kernel) -> KernelSample:
        assert kernel.shape is not None
        fields = kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches
        if kernel.name == "optimizer.step":
            return KernelSample(
                kernel.name, *fields, None, MeasurementOutcome.OUT_OF_MEMORY, "its operands take 40 GiB"
            )
        return KernelSample(kernel.name, *fields, TimeStatistics(1e-3, 1e-3, 1e-3, 3))

    scenario = small_scenario()
    kernels = [kernel for kernel in distinct_kernels(scenario) if kernel.name != "optimizer.gradient_clip"]
    device, conditions = DeviceInfo("cpu-laptop", "a CPU"), MeasurementConditions("2026-11-20", "test", "test")
    record = CalibrationRecord(device, conditions, kernels=tuple(map(make_sample, kernels)))
    prediction = predict_step(scenario, record)
    missing = unmeasured_kernels(prediction.kernel_seconds, record)
    assert {item.kernel_name: item.reason for item in missing} == {
        "optimizer.step": "out of memory: its operands take 40 GiB",
        "optimizer.gradient_clip": "the record has no such kernel",
    }
    shown = sum(item.seconds for item in missing)
    assert 0.0 < shown == pytest.approx((1.0 - prediction.provenance["measured"]) * prediction.seconds)
    assert (
        f"{format_seconds(shown)} of the prediction rest on a model"
        in replace(_comparison(), unmeasured=missing).to_text()
    )


@pytest.mark.parametrize(
    ("device", "error"),
    [
        (("cpu-laptop", "AMD EPYC"), None),
        (("cpu-laptop", ""), None),  # a profile of a CPU does not say which one it is
        (("cpu-laptop", "another CPU"), "device.name: another CPU was measured, and this is AMD EPYC"),
        (("h100-sxm-80gb", ""), "device.accelerator: h100-sxm-80gb is not the scenario's, cpu-laptop"),
    ],
)
def test_a_record_to_check_is_of_this_device(tmp_path: Path, device: tuple[str, str], error: str | None) -> None:
    scenario, file = small_scenario(LLAMA, "cluster.name=laptop"), tmp_path / "record.json"
    write_record(CalibrationRecord(DeviceInfo(*device), MeasurementConditions("", "", "")), file)
    if error is None:
        assert read_matching_record(scenario, file, "AMD EPYC").device.name == device[1]
        return
    with pytest.raises(InputError, match=error):
        read_matching_record(scenario, file, "AMD EPYC")
