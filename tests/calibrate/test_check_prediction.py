"""What the simulator says of a step adds up, and a comparison says what it was given."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from clustersim.common.units import format_seconds
from clustersim.model.kernels import KernelKind
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from clustersim.simulation import simulate
from tests.calibrate.check_scenarios import LLAMA, one_thread, scenario

torch = pytest.importorskip("torch")

from calibrate.check.measurement import median_step, merge_rank_times, pool_kernels  # noqa: E402
from calibrate.check.phase_timer import StepPhase, StepTime  # noqa: E402
from calibrate.check.prediction import adapt_scenario, peak_allocated, predict_step  # noqa: E402
from calibrate.check.step_comparison import StepComparison, TimeComparison  # noqa: E402 - torch first
from calibrate.check.step_profile import profile_step  # noqa: E402
from calibrate.check.supported import build_plan, build_trainer  # noqa: E402
from calibrate.check.trainer import random_batch  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2"])
def test_parts_sum_to_the_step(layout: str) -> None:
    given = scenario(LLAMA, "cluster.gpus=2", f"layout.{layout}")
    found = predict_step(given, None)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert min(found.phases.values()) > -1e-12


def test_kinds_of_one_process_are_all_of_its_step() -> None:
    found = predict_step(scenario(), None)
    assert sum(found.kernel_kinds.values()) == pytest.approx(found.seconds)


def test_a_profile_finds_every_kind_that_is_simulated() -> None:
    given = scenario(LLAMA)
    trainer, batch = build_trainer(given, CPU), random_batch(build_plan(given), CPU)
    profile_step(trainer, batch, CPU)  # the optimizer's states are made in the first step
    found = profile_step(trainer, batch, CPU)
    assert set(found.kernel_kinds) == set(predict_step(given, None).kernel_kinds)
    assert KernelKind.ATTENTION_BACKWARD in found.kernel_kinds


@pytest.mark.parametrize("changes", [(), ("model.heads=2", "model.kv_heads=2", "model.head_dim=64", "model.ffn=16")])
def test_tensors_take_what_the_ledger_says(changes: tuple[str, ...]) -> None:
    """Within 3 %: statistics of norms, masks and what the optimizer needs for a moment are not counted.

    Where layers are mostly attention, queries and keys that values keep in memory are an eighth of all.
    """
    shapes = "model.layers=4", "model.vocab=256", "model.max_positions=256", "training.sequence=256"
    given = scenario(LLAMA, *shapes, *changes)
    trainer, batch = build_trainer(given, CPU), random_batch(build_plan(given), CPU)
    profile_step(trainer, batch, CPU)
    assert profile_step(trainer, batch, CPU).peak_bytes == pytest.approx(peak_allocated(given), rel=0.03)


def test_gradients_are_zeroed_before_forward_and_belong_to_no_pass() -> None:
    found, bare = predict_step(adapt_scenario(scenario(), on_cpu=True), None), predict_step(scenario(), None)
    zeroing = sum(seconds for kernel, seconds in found.kernel_seconds.items() if kernel.name == "gradients.zero")
    assert zeroing > 0.0
    assert found.phases[StepPhase.OTHER] - bare.phases[StepPhase.OTHER] == pytest.approx(zeroing)
    for part in (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER):
        assert found.phases[part] == pytest.approx(bare.phases[part])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_on_a_cpu_nothing_runs_beside_fsdps_reductions(on_cpu: bool) -> None:
    """A unit's reduce-scatter begins when its backward has ended; the next unit's begins when it has, or at once."""
    given = adapt_scenario(scenario(LLAMA, "cluster.gpus=2", "layout.data=fsdp"), on_cpu=on_cpu)
    trace, tasks = (result := simulate(given)).trace, result.program.programs[0].tasks
    computing, reducing = [], []
    for row in trace.rank_events(0).tolist():
        task, span = tasks[int(trace.task[row])], (float(trace.start[row]), float(trace.end[row]))
        if isinstance(task, ComputeTask):
            computing.append(span)
        elif isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.REDUCE_SCATTER:
            reducing.append(span)
    assert len(reducing) == given.model.layer_count + 2  # one microbatch; layers, embedding and head
    beside = [span for span in computing for start, end in reducing if span[0] < end and start < span[1]]
    assert bool(beside) is not on_cpu


def _time(seconds: float, forward: float) -> StepTime:
    return StepTime(
        seconds, {StepPhase.FORWARD: forward, StepPhase.BACKWARD: 2.0, StepPhase.OPTIMIZER: 1.0, StepPhase.OTHER: 0.0}
    )


def test_a_step_of_several_ranks_is_the_slowest_ones() -> None:
    step = merge_rank_times([_time(5.0, 2.0), _time(6.0, 1.0)])
    assert step.seconds == 6.0
    assert step.phases[StepPhase.FORWARD] == 1.5
    assert step.phases[StepPhase.OTHER] == 6.0 - 1.5 - 2.0 - 1.0


def test_the_typical_step_is_the_median() -> None:
    assert median_step([_time(9.0, 1.0), _time(5.0, 2.0), _time(6.0, 3.0)]).seconds == 6.0


def test_nothing_measured_pools_to_nothing() -> None:
    assert pool_kernels([]) == ()


def _comparison() -> StepComparison:
    return StepComparison(
        name="small", device="a CPU", layout="one process", layers=2, model_layers=4, steps=3, step=TimeComparison(1.1, 1.0),
        fastest=0.9, slowest=1.2, phases={StepPhase.FORWARD: TimeComparison(0.4, 0.5), StepPhase.OTHER: TimeComparison(0.0, 0.0)},
        kernel_kinds={"matmul": TimeComparison(0.3, 0.2)}, predicted_peak=2.0**30, measured_peak=2.0**31, provenance={"measured": 1.0},
    )  # fmt: skip


def test_json_says_what_the_issue_asks_for() -> None:
    content = json.loads(_comparison().to_json())
    assert content["error"] == pytest.approx(0.1)
    assert content["predicted_peak_bytes"] == 2.0**30
    assert content["measured_peak_bytes"] == 2.0**31
    assert content["parts"]["forward"]["error"] == pytest.approx(-0.2)
    assert content["parts"]["other"]["error"] is None
    assert {"predicted_s", "measured_s", "kinds", "device", "layout", "steps", "provenance_share"} <= set(content)


def test_the_table_says_how_far_off_it_is() -> None:
    text = _comparison().to_text()
    assert "2 of 4 layers" in text
    assert "+10.0 %" in text
    assert "-50.0 %" in text


def test_kernels_that_were_not_measured_are_named_with_their_seconds() -> None:
    """A record of all kernels but the update, which had no memory, and the clipping, of which it has no row."""
    from calibrate.check.check_session import unmeasured_kernels
    from clustersim.build import distinct_kernels
    from clustersim.cost.calibration_record import (
        CalibrationRecord,
        DeviceInfo,
        KernelSample,
        MeasurementConditions,
        MeasurementOutcome,
        TimeStatistics,
    )
    from clustersim.model.kernels import Kernel

    def row(kernel: Kernel) -> KernelSample:
        assert kernel.shape is not None
        known = kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches
        if kernel.name == "optimizer.step":
            return KernelSample(kernel.name, *known, None, MeasurementOutcome.OUT_OF_MEMORY, "its operands take 40 GiB")
        return KernelSample(kernel.name, *known, TimeStatistics(1e-3, 1e-3, 1e-3, 3))

    given = scenario()
    kernels = [kernel for kernel in distinct_kernels(given) if kernel.name != "optimizer.gradient_clip"]
    device, conditions = DeviceInfo("cpu-laptop", "a CPU"), MeasurementConditions("2026-11-20", "test", "test")
    record = CalibrationRecord(device, conditions, kernels=tuple(map(row, kernels)))
    found = predict_step(given, record)
    missing = unmeasured_kernels(found.kernel_seconds, record)
    assert {unmeasured_kernel.kernel_name: unmeasured_kernel.reason for unmeasured_kernel in missing} == {
        "optimizer.step": "out of memory: its operands take 40 GiB",
        "optimizer.gradient_clip": "the record has no such kernel",
    }
    shown = sum(item.seconds for item in missing)
    assert 0.0 < shown == pytest.approx((1.0 - found.provenance["measured"]) * found.seconds)
    assert (
        f"{format_seconds(shown)} of the prediction rest on a model"
        in replace(_comparison(), unmeasured=missing).to_text()
    )
