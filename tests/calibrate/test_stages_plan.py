"""What a session plans: shares of a budget, what is left to do, and what a GPU needs first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CopySample,
    DeviceInfo,
    GpuSample,
    InterferenceSample,
    KernelSample,
    MeasurementConditions,
    MeasurementOutcome,
    TimeStatistics,
)
from clustersim.cost.record_file import read_record, write_record
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.scenario import Scenario
from tests.calibrate.fake_stages import CHAIN, HOST, SOAKED, STEPS, StandIns

torch = pytest.importorskip("torch")
from calibrate.devices.cpu import CpuDevice  # noqa: E402 - after torch is known to be there
from calibrate.kernels.session import KernelSession  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402
from calibrate.stages import holdout_stage as residual_part  # noqa: E402
from calibrate.stages import kernel_stage as kernels_part  # noqa: E402
from calibrate.stages import run as parts_run  # noqa: E402
from calibrate.stages.plan import STAGES, format_plan, plan_session  # noqa: E402
from calibrate.stages.stage import CalibrationContext  # noqa: E402

GPU = DeviceInfo("h100-sxm-80gb", "Test GPU", torch="2.13.0")
HOW = MeasurementConditions("2026-11-20", "clustersim calibrate", "by hand")
ONCE = TimeStatistics(1e-3, 1e-3, 1e-3, 5)
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Gpu(CpuDevice):
    """A device that says it is a GPU, and is never asked to compute."""

    @property
    def torch(self) -> Any:
        return torch.device("cuda", 0)

    def release_memory(self) -> None:
        pass


def _matmul(size: int) -> Kernel:
    return matmul_kernel(f"matmul.{size}", DType.BF16, MatmulShape(size, size, size), result_bytes=2)


def _row(kernel: Kernel) -> KernelSample:
    assert kernel.shape is not None
    return KernelSample(kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, 1, ONCE)


KERNELS = tuple(map(_matmul, (128, 256)))
WHOLE = CalibrationRecord(
    GPU,
    HOW,
    tuple(map(_row, KERNELS)),
    copies=(CopySample("device", 2.0**20, ONCE),),
    beside=(InterferenceSample(_row(KERNELS[0]), "copy", ONCE),),
    launch_interval=1e-6,
    chain=CHAIN,
    host=HOST,
    gpus=(GpuSample("0", ONCE),),
    steps=STEPS,
)


@pytest.fixture
def scenario() -> Scenario:
    asked = {"model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 1}, "training": {"sequence": 64}}
    asked["training"] |= {"global_batch": 1}  # type: ignore[index]
    return Scenario.from_mapping(asked)


def _bench(path: Path, scenario: Scenario | None, asked: Sequence[Kernel] = KERNELS) -> CalibrationContext:
    accelerator = load_accelerator(GPU.accelerator)
    return CalibrationContext(
        Gpu(), accelerator, KernelSession(path, GPU, HOW), MeasurementMethod(), asked, "plan.yaml", scenario
    )


def test_twenty_minutes_are_two_eight_five_two_and_three(tmp_path: Path, scenario: Scenario) -> None:
    plan = plan_session(_bench(tmp_path / "r.json", scenario), 20 * MINUTE)
    assert {planned_stage.stage.name: planned_stage.seconds for planned_stage in plan} == pytest.approx(
        {"soak": 2 * MINUTE, "kernels": 8 * MINUTE, "chain": 5 * MINUTE, "host": 2 * MINUTE, "residual": 3 * MINUTE}
    )


def test_what_cannot_be_measured_leaves_its_time_to_kernels(tmp_path: Path) -> None:
    plan = {
        planned_stage.stage.name: planned_stage
        for planned_stage in plan_session(_bench(tmp_path / "r.json", None), 20 * MINUTE)
    }
    assert {name: item.seconds for name, item in plan.items()} == pytest.approx(
        {"soak": 2 * MINUTE, "kernels": 18 * MINUTE, "chain": 0.0, "host": 0.0, "residual": 0.0}
    )
    assert plan["residual"].description == "steps of which model? name a scenario with --for"


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ({}, ()),
        ({"steps": ()}, ("soak", "residual")),
        ({"chain": ()}, ("soak", "chain")),
        ({"host": (), "steps": ()}, ("soak", "host", "residual")),
        ({"gpus": ()}, ("soak", "kernels")),
        ({"kernels": WHOLE.kernels[:1]}, ("soak", "kernels", "chain", "host", "residual")),
    ],
)
def test_only_what_is_missing_is_due(
    lost: dict[str, Any], left: tuple[str, ...], tmp_path: Path, scenario: Scenario
) -> None:
    """New kernels make everything due, since a layer may have families without a factor, and steps are predictions."""
    write_record(replace(WHOLE, **lost), tmp_path / "r.json")
    plan = plan_session(_bench(tmp_path / "r.json", scenario), 20 * MINUTE)
    assert tuple(planned_stage.stage.name for planned_stage in plan if planned_stage.seconds) == left


def test_where_all_is_there_it_says_so(tmp_path: Path, scenario: Scenario) -> None:
    write_record(WHOLE, tmp_path / "r.json")
    bench = _bench(tmp_path / "r.json", scenario)
    assert format_plan(bench, plan_session(bench, 20 * MINUTE)).endswith(
        "has all that was asked for of Test GPU (h100-sxm-80gb)"
    )


def test_the_plan_names_device_kernels_parts_and_file(tmp_path: Path, scenario: Scenario) -> None:
    write_record(replace(WHOLE, kernels=WHOLE.kernels[:1], copies=()), tmp_path / "r.json")
    bench = _bench(tmp_path / "r.json", scenario)
    text = format_plan(bench, plan_session(bench, 20 * MINUTE))
    assert "Test GPU (h100-sxm-80gb) for about 20 min 0 s, and goes on with" in text
    assert "1 of 2 kernels of plan.yaml, 1 are there already; copies, launches" in text
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == [part.name for part in STAGES]


def test_the_plan_says_what_is_tried_again(tmp_path: Path, scenario: Scenario) -> None:
    """Somebody else may have had the memory; it is soaked for, since a row of a cold GPU would be wrong."""
    first, *rest = WHOLE.kernels
    failed = replace(first, time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY, source="its operands take 90 GB")
    write_record(replace(WHOLE, kernels=(failed, *rest)), tmp_path / "r.json")
    bench = _bench(tmp_path / "r.json", scenario)
    plan = plan_session(bench, 20 * MINUTE)
    assert [planned_stage.stage.name for planned_stage in plan if planned_stage.seconds] == ["soak", "kernels"]
    assert "1 had no memory or no compiler and are tried again" in format_plan(bench, plan)


@pytest.mark.parametrize("budget", [1.0, 199.0])
def test_a_budget_too_small_for_the_soak_names_the_least(budget: float, tmp_path: Path, scenario: Scenario) -> None:
    """The soak needs 20 s and has a tenth."""
    bench = _bench(tmp_path / "r.json", scenario)
    with pytest.raises(InputError, match=r"soak takes 10% of it, and at least 20 s; give 200s or more"):
        plan_session(bench, budget)
    assert plan_session(bench, 200.0)


def test_a_gpu_is_soaked_first_and_a_layer_comes_before_its_steps(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, order = StandIns().install(monkeypatch), []
    monkeypatch.setattr(others, "_count", lambda part, _seconds: order.append(part))
    for module in (parts_run, residual_part):
        monkeypatch.setattr(module, "fitted", lambda record, _accelerator: record)
    monkeypatch.setattr(kernels_part.KernelStage, "measure", lambda *_: order.append("kernels") or "none")
    bench = _bench(tmp_path / "r.json", scenario)
    parts_run.run_session(bench, plan_session(bench, 20 * MINUTE))
    assert order == ["soak", "kernels", "chain", "host", "residual"]
    record = read_record(tmp_path / "r.json")
    assert record.moments[: len(SOAKED)] == SOAKED
    assert record.steps == STEPS  # moments say nothing that predictions rest on
