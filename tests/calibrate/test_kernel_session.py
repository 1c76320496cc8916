"""A measurement session keeps its samples however it ends, and allocates its time budget by predicted time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveFit,
    DeviceInfo,
    FitResidual,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
    signature_of,
)
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.program.task import CollectiveType

pytest.importorskip("torch")
session_module = pytest.importorskip("calibrate.kernels.session")
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402 - after torch is known to be there

DEVICE = DeviceInfo("cpu-laptop", "Test CPU", torch="2.13.0", threads=1)
CONDITIONS = MeasurementConditions("2026-11-20", "clustersim calibrate", "by hand", before={"clock_mhz": 2000.0})


def _matmul(size: int) -> Kernel:
    return matmul_kernel(f"matmul.{size}", DType.FP32, MatmulShape(size, size, size), result_bytes=4)


def _kernel_sample(size: int, seconds: float = 1e-3) -> KernelSample:
    kernel = _matmul(size)
    assert kernel.shape is not None
    time = TimeStatistics(seconds, seconds, seconds, 5)
    return KernelSample(kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, 1, time)


def test_session_resumes_with_the_missing_kernels(tmp_path: Path) -> None:
    first = session_module.KernelSession(tmp_path / "r.json", DEVICE, CONDITIONS)
    first.add(_kernel_sample(64))
    first.save()
    second = session_module.KernelSession(tmp_path / "r.json", DEVICE, replace(CONDITIONS, before={}))
    assert second.missing_kernels([_matmul(64), _matmul(32), _matmul(32)]) == [_matmul(32)]
    second.add(_kernel_sample(32))
    record = second.finish({"clock_mhz": 1900.0}, lambda record: record)
    assert {sample.name for sample in record.kernels} == {"matmul.64", "matmul.32"}
    assert (record.conditions.before, record.conditions.after) == ({"clock_mhz": 2000.0}, {"clock_mhz": 1900.0})
    assert read_record(tmp_path / "r.json") == record


@pytest.mark.parametrize("other", [{"name": "Another CPU"}, {"torch": "2.12.0"}, {"threads": 2}])
def test_record_of_another_device_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    session_module.KernelSession(tmp_path / "r.json", DEVICE, CONDITIONS).save()
    with pytest.raises(InputError, match="cannot be merged"):
        session_module.KernelSession(tmp_path / "r.json", replace(DEVICE, **other), CONDITIONS)


def test_samples_are_saved_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 4.0, 5.0])
    monkeypatch.setattr(session_module, "monotonic", lambda: next(times))
    kernel_session = session_module.KernelSession(tmp_path / "r.json", DEVICE, CONDITIONS)
    kernel_session.add(_kernel_sample(64))
    assert not (tmp_path / "r.json").exists()
    kernel_session.add(_kernel_sample(32))
    kernel_session.add(_kernel_sample(16))
    assert len(read_record(tmp_path / "r.json").kernels) == 2


class _ManualClock:
    """A clock that is advanced manually."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _allocated_seconds(
    budget: Any, kernels: list[Kernel], clock: _ManualClock, used_seconds: Callable[[float], float]
) -> dict[str, float]:
    """Sampling seconds allocated to each kernel, when it takes `used_seconds` of them."""
    allocated = {}
    for kernel, method in budget.allocate(kernels, MeasurementMethod(), clock):
        allocated[kernel.name] = method.max_seconds
        clock.now += used_seconds(method.max_seconds)
    return allocated


def _predicted_seconds(kernel: Kernel) -> float:
    """Milliseconds given by the kernel name, so that all fit a budget of seconds."""
    return 1e-3 * float(kernel.name.removeprefix("matmul."))


def test_budget_is_shared_half_by_predicted_time_and_half_equally() -> None:
    """Predicted 90 and 10: shares are 1/2 + 0.9 and 1/2 + 0.1 of 2: of 1 s, 0.7 and 0.3."""
    budget = session_module.TimeBudget(1.0, _predicted_seconds)
    allocated = _allocated_seconds(budget, [_matmul(10), _matmul(90)], _ManualClock(), lambda seconds: seconds)
    assert allocated == pytest.approx({"matmul.90": 0.7, "matmul.10": 0.3})
    assert list(allocated) == ["matmul.90", "matmul.10"]


def test_unused_time_is_redistributed() -> None:
    """The first uses half of its 0.7 s: 0.65 s remain for the second."""
    budget = session_module.TimeBudget(1.0, _predicted_seconds)
    allocated = _allocated_seconds(budget, [_matmul(10), _matmul(90)], _ManualClock(), lambda seconds: seconds / 2)
    assert allocated["matmul.10"] == pytest.approx(0.65)


def test_overheads_are_subtracted_from_later_allocations() -> None:
    """Ten equal kernels share 2 s; each has 0.1 s of overhead, unknown to the first, which gets 0.2 s of samples.

    The second gets a ninth of 1.7 s, less 0.1 s. From then on the overhead is included, and the budget is kept.
    """
    clock = _ManualClock()
    budget = session_module.TimeBudget(2.0, lambda _: 1e-3)
    allocated = list(
        _allocated_seconds(
            budget, [_matmul(size) for size in range(1, 11)], clock, lambda seconds: seconds + 0.1
        ).values()
    )
    assert allocated[:2] == pytest.approx([0.2, 1.7 / 9 - 0.1])
    assert len(allocated) == 10
    assert clock.now == pytest.approx(2.0)


def test_exhausted_budget_skips_the_shortest_kernels() -> None:
    budget = session_module.TimeBudget(1.0, _predicted_seconds)
    allocated = _allocated_seconds(budget, [_matmul(10), _matmul(90), _matmul(50)], _ManualClock(), lambda _: 0.6)
    assert list(allocated) == ["matmul.90", "matmul.50"]


def test_kernel_that_would_exceed_the_budget_is_skipped() -> None:
    """Three runs of 400 ms do not fit in a second; those of 90 ms do, and of 10 ms in the remainder."""
    budget = session_module.TimeBudget(1.0, _predicted_seconds)
    allocated = _allocated_seconds(budget, [_matmul(10), _matmul(90), _matmul(400)], _ManualClock(), lambda _: 0.5)
    assert list(allocated) == ["matmul.90", "matmul.10"]


def test_without_a_budget_the_method_is_unchanged() -> None:
    budget = session_module.TimeBudget(None, _predicted_seconds)
    assert [
        method for _, method in budget.allocate([_matmul(1)], MeasurementMethod(max_seconds=7.0), _ManualClock())
    ] == [MeasurementMethod(max_seconds=7.0)]


def test_record_merges_all_kinds_of_samples(tmp_path: Path) -> None:
    kernel_session = session_module.KernelSession(tmp_path / "r.json", DEVICE, CONDITIONS)
    kernel_session.extend(CalibrationRecord(DEVICE, CONDITIONS, launch_interval=2e-6))
    kernel_session.add(_kernel_sample(64))
    kernel_session.save()
    record = read_record(tmp_path / "r.json")
    assert (record.launch_interval, len(record.kernels)) == (2e-6, 1)


def test_out_of_memory_is_retried_and_fits_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    failed = replace(_kernel_sample(64), time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY)
    fits = (CollectiveFit(CollectiveType.ALL_REDUCE, 2, 1, 1e-4, 1e9, FitResidual(3, 0.1, 0.2)),)
    write_record(CalibrationRecord(DEVICE, CONDITIONS, (failed, _kernel_sample(128)), collective_fits=fits), path)
    kernel_session = session_module.KernelSession(path, DEVICE, CONDITIONS)
    assert [signature_of(item) for item in kernel_session.missing_kernels([_matmul(64), _matmul(128)])] == [
        failed.signature
    ]
    kernel_session.save()
    assert read_record(path).collective_fits == fits
