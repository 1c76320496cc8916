"""The plan of a session: budget shares, missing stages, and burn-in of a GPU."""

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
    TimeStatistics,
)
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.scenario import Scenario
from tests.calibrate.fake_stages import BURN_IN_SAMPLES, HOLDOUT_STEPS, HOST_SAMPLES, IN_SITU_SAMPLES, FakeStages

torch = pytest.importorskip("torch")
from calibrate.devices.cpu import CpuDevice  # noqa: E402 - after torch is known to be there
from calibrate.kernels.session import KernelSession  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402
from calibrate.stages import holdout_stage as residual_part  # noqa: E402
from calibrate.stages import kernel_stage as kernels_part  # noqa: E402
from calibrate.stages import run as parts_run  # noqa: E402
from calibrate.stages.plan import STAGES, format_plan, plan_session  # noqa: E402
from calibrate.stages.stage import CalibrationContext  # noqa: E402
from tests.sentences import parts  # noqa: E402

GPU_INFO = DeviceInfo("h100-sxm-80gb", "Test GPU", torch="2.13.0")
CONDITIONS = MeasurementConditions("2026-11-20", "clustersim calibrate", "by hand")
CONSTANT_TIME = TimeStatistics(1e-3, 1e-3, 1e-3, 5)
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class FakeGpuDevice(CpuDevice):
    """A device that claims to be a GPU, and never computes."""

    @property
    def torch(self) -> Any:
        return torch.device("cuda", 0)

    def release_memory(self) -> None:
        pass


def _matmul(size: int) -> Kernel:
    return matmul_kernel(f"matmul.{size}", DType.BF16, MatmulShape(size, size, size), result_bytes=2)


def _kernel_sample(kernel: Kernel) -> KernelSample:
    assert kernel.shape is not None
    return KernelSample(
        kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, 1, CONSTANT_TIME
    )


KERNELS = tuple(map(_matmul, (128, 256)))
COMPLETE_RECORD = CalibrationRecord(
    GPU_INFO,
    CONDITIONS,
    tuple(map(_kernel_sample, KERNELS)),
    copies=(CopySample("device", 2.0**20, CONSTANT_TIME),),
    interference=(InterferenceSample(_kernel_sample(KERNELS[0]), "copy", CONSTANT_TIME),),
    launch_interval=1e-6,
    in_situ=IN_SITU_SAMPLES,
    host_launches=HOST_SAMPLES,
    gpus=(GpuSample("0", CONSTANT_TIME),),
    holdout_steps=HOLDOUT_STEPS,
)


@pytest.fixture
def scenario() -> Scenario:
    mapping = {"model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 1}, "training": {"sequence": 64}}
    mapping["training"] |= {"global_batch": 1}  # type: ignore[index]
    return Scenario.from_mapping(mapping)


def _make_context(path: Path, scenario: Scenario | None, kernels: Sequence[Kernel] = KERNELS) -> CalibrationContext:
    accelerator = load_accelerator(GPU_INFO.accelerator)
    return CalibrationContext(
        FakeGpuDevice(),
        accelerator,
        KernelSession(path, GPU_INFO, CONDITIONS),
        MeasurementMethod(),
        kernels,
        "plan.yaml",
        scenario,
    )


def test_default_budget_shares_of_20_minutes(tmp_path: Path, scenario: Scenario) -> None:
    plan = plan_session(_make_context(tmp_path / "r.json", scenario), 20 * MINUTE)
    assert {planned_stage.stage.name: planned_stage.seconds for planned_stage in plan} == pytest.approx(
        {"burn_in": 2 * MINUTE, "kernels": 8 * MINUTE, "in_situ": 5 * MINUTE, "host": 2 * MINUTE, "holdout": 3 * MINUTE}
    )


def test_budget_of_skipped_stages_goes_to_kernels(tmp_path: Path) -> None:
    plan = {
        planned_stage.stage.name: planned_stage
        for planned_stage in plan_session(_make_context(tmp_path / "r.json", None), 20 * MINUTE)
    }
    assert {name: planned_stage.seconds for name, planned_stage in plan.items()} == pytest.approx(
        {"burn_in": 2 * MINUTE, "kernels": 18 * MINUTE, "in_situ": 0.0, "host": 0.0, "holdout": 0.0}
    )
    assert plan["holdout"].description == "steps of which model? name a scenario with --for"


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ({}, ()),
        ({"holdout_steps": ()}, ("burn_in", "holdout")),
        ({"in_situ": ()}, ("burn_in", "in_situ")),
        ({"host_launches": (), "holdout_steps": ()}, ("burn_in", "host", "holdout")),
        ({"gpus": ()}, ("burn_in", "kernels")),
        ({"kernels": COMPLETE_RECORD.kernels[:1]}, ("burn_in", "kernels", "in_situ", "host", "holdout")),
    ],
)
def test_only_missing_stages_are_planned(
    lost: dict[str, Any], left: tuple[str, ...], tmp_path: Path, scenario: Scenario
) -> None:
    """New kernels make all stages due: layers may have families without a factor, and steps are predictions."""
    write_record(replace(COMPLETE_RECORD, **lost), tmp_path / "r.json")
    plan = plan_session(_make_context(tmp_path / "r.json", scenario), 20 * MINUTE)
    assert tuple(planned_stage.stage.name for planned_stage in plan if planned_stage.seconds) == left


def test_complete_record_is_reported(tmp_path: Path, scenario: Scenario) -> None:
    write_record(COMPLETE_RECORD, tmp_path / "r.json")
    context = _make_context(tmp_path / "r.json", scenario)
    assert format_plan(context, plan_session(context, 20 * MINUTE)).endswith(
        "has all that was asked for of Test GPU (h100-sxm-80gb)"
    )


def test_plan_lists_device_kernels_stages_and_file(tmp_path: Path, scenario: Scenario) -> None:
    write_record(replace(COMPLETE_RECORD, kernels=COMPLETE_RECORD.kernels[:1], copies=()), tmp_path / "r.json")
    context = _make_context(tmp_path / "r.json", scenario)
    text = format_plan(context, plan_session(context, 20 * MINUTE))
    assert "Test GPU (h100-sxm-80gb) for about 20 min 0 s, and continues" in text
    assert parts("1 of 2 kernels of plan.yaml, 1 ... there already ... copies, launches").search(text)
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == [stage.name for stage in STAGES]


def test_plan_reports_retried_kernels(tmp_path: Path, scenario: Scenario) -> None:
    """Another process may have used the memory; burn-in is repeated, since a sample of a cold GPU would be wrong."""
    first, *remaining = COMPLETE_RECORD.kernels
    failed = replace(first, time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY, source="its operands take 90 GB")
    write_record(replace(COMPLETE_RECORD, kernels=(failed, *remaining)), tmp_path / "r.json")
    context = _make_context(tmp_path / "r.json", scenario)
    plan = plan_session(context, 20 * MINUTE)
    assert [planned_stage.stage.name for planned_stage in plan if planned_stage.seconds] == ["burn_in", "kernels"]
    assert "1 had no memory or no compiler and are tried again" in format_plan(context, plan)


@pytest.mark.parametrize("budget", [1.0, 199.0])
def test_too_small_budget_names_the_minimum(budget: float, tmp_path: Path, scenario: Scenario) -> None:
    """Burn-in needs 20 s and has a tenth of the budget."""
    context = _make_context(tmp_path / "r.json", scenario)
    with pytest.raises(InputError, match=r"burn_in takes 10%.*at least 20 s.*200s or more"):
        plan_session(context, budget)
    assert plan_session(context, 200.0)


def test_stages_run_in_order_from_burn_in_to_residual(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_stages, order = FakeStages().install(monkeypatch), []
    monkeypatch.setattr(fake_stages, "_count_call", lambda stage, _seconds: order.append(stage))
    for module in (parts_run, residual_part):
        monkeypatch.setattr(module, "fit_record", lambda record, _accelerator: record)
    monkeypatch.setattr(kernels_part.KernelStage, "measure", lambda *_: order.append("kernels") or "none")
    context = _make_context(tmp_path / "r.json", scenario)
    parts_run.run_session(context, plan_session(context, 20 * MINUTE))
    assert order == ["burn_in", "kernels", "in_situ", "host", "holdout"]
    record = read_record(tmp_path / "r.json")
    assert record.telemetry[: len(BURN_IN_SAMPLES)] == BURN_IN_SAMPLES
    assert record.holdout_steps == HOLDOUT_STEPS  # predictions do not depend on telemetry
