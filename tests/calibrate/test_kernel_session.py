"""A session keeps what it measured, whatever ends it, and spends its budget where the time is."""

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
    MeasurementOutcome,
    TimeStatistics,
    signature_of,
)
from clustersim.cost.record_file import read_record, write_record
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.program.task import CollectiveType

pytest.importorskip("torch")
session = pytest.importorskip("calibrate.kernels.session")
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402 - after torch is known to be there

DEVICE = DeviceInfo("cpu-laptop", "Test CPU", torch="2.13.0", threads=1)
HOW = MeasurementConditions("2026-11-20", "clustersim calibrate", "by hand", before={"clock_mhz": 2000.0})


def _matmul(size: int) -> Kernel:
    return matmul_kernel(f"matmul.{size}", DType.FP32, MatmulShape(size, size, size), result_bytes=4)


def _row(size: int, seconds: float = 1e-3) -> KernelSample:
    kernel = _matmul(size)
    assert kernel.shape is not None
    time = TimeStatistics(seconds, seconds, seconds, 5)
    return KernelSample(kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, 1, time)


def test_a_session_goes_on_with_what_its_file_lacks(tmp_path: Path) -> None:
    first = session.KernelSession(tmp_path / "r.json", DEVICE, HOW)
    first.add(_row(64))
    first.save()
    second = session.KernelSession(tmp_path / "r.json", DEVICE, replace(HOW, before={}))
    assert second.missing([_matmul(64), _matmul(32), _matmul(32)]) == [_matmul(32)]
    second.add(_row(32))
    record = second.finish({"clock_mhz": 1900.0}, lambda found: found)
    assert {row.name for row in record.kernels} == {"matmul.64", "matmul.32"}
    assert (record.conditions.before, record.conditions.after) == ({"clock_mhz": 2000.0}, {"clock_mhz": 1900.0})
    assert read_record(tmp_path / "r.json") == record


@pytest.mark.parametrize("other", [{"name": "Another CPU"}, {"torch": "2.12.0"}, {"threads": 2}])
def test_a_file_of_another_device_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    session.KernelSession(tmp_path / "r.json", DEVICE, HOW).save()
    with pytest.raises(InputError, match="cannot be merged"):
        session.KernelSession(tmp_path / "r.json", replace(DEVICE, **other), HOW)


def test_rows_are_written_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 4.0, 5.0])
    monkeypatch.setattr(session, "monotonic", lambda: next(times))
    made = session.KernelSession(tmp_path / "r.json", DEVICE, HOW)
    made.add(_row(64))
    assert not (tmp_path / "r.json").exists()
    made.add(_row(32))
    made.add(_row(16))
    assert len(read_record(tmp_path / "r.json").kernels) == 2


class _Clock:
    """Advances when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _spent(parts: Any, kernels: list[Kernel], clock: _Clock, uses: Callable[[float], float]) -> dict[str, float]:
    """Seconds of samples that each kernel is given, when it takes what `uses` makes of them."""
    given = {}
    for kernel, method in parts.of(kernels, MeasurementMethod(), clock):
        given[kernel.name] = method.seconds
        clock.now += uses(method.seconds)
    return given


def _weights(kernel: Kernel) -> float:
    """Milliseconds by the name, so that a budget of seconds has room for all."""
    return 1e-3 * float(kernel.name.removeprefix("matmul."))


def test_half_of_the_budget_is_shared_by_time_and_half_by_heads() -> None:
    """Predicted 90 and 10: shares are 1/2 + 0.9 and 1/2 + 0.1 of 2: of 1 s, 0.7 and 0.3."""
    parts = session.TimeBudget(1.0, _weights)
    given = _spent(parts, [_matmul(10), _matmul(90)], _Clock(), lambda seconds: seconds)
    assert given == pytest.approx({"matmul.90": 0.7, "matmul.10": 0.3})
    assert list(given) == ["matmul.90", "matmul.10"]


def test_what_one_kernel_leaves_over_is_the_others() -> None:
    """The first uses a half of its 0.7 s: 0.65 s are left for the second."""
    parts = session.TimeBudget(1.0, _weights)
    given = _spent(parts, [_matmul(10), _matmul(90)], _Clock(), lambda seconds: seconds / 2)
    assert given["matmul.10"] == pytest.approx(0.65)


def test_what_kernels_take_besides_their_samples_is_taken_off_the_others_parts() -> None:
    """Ten alike share 2 s; each needs 0.1 s for its operands, which the first does not know: 0.2 s of samples.

    The second has a ninth of 1.7 s, less 0.1 s. From then on all has its place, and the budget is kept.
    """
    clock = _Clock()
    parts = session.TimeBudget(2.0, lambda _: 1e-3)
    given = list(_spent(parts, [_matmul(size) for size in range(1, 11)], clock, lambda each: each + 0.1).values())
    assert given[:2] == pytest.approx([0.2, 1.7 / 9 - 0.1])
    assert len(given) == 10
    assert clock.now == pytest.approx(2.0)


def test_a_spent_budget_leaves_the_shortest_out() -> None:
    parts = session.TimeBudget(1.0, _weights)
    given = _spent(parts, [_matmul(10), _matmul(90), _matmul(50)], _Clock(), lambda _: 0.6)
    assert list(given) == ["matmul.90", "matmul.50"]


def test_a_kernel_that_would_overrun_what_is_left_is_passed_over() -> None:
    """Three runs of 400 ms do not fit in a second; those of 90 ms do, and of 10 ms in what these leave."""
    parts = session.TimeBudget(1.0, _weights)
    given = _spent(parts, [_matmul(10), _matmul(90), _matmul(400)], _Clock(), lambda _: 0.5)
    assert list(given) == ["matmul.90", "matmul.10"]


def test_without_a_budget_the_method_is_the_methods_own() -> None:
    parts = session.TimeBudget(None, _weights)
    assert [method for _, method in parts.of([_matmul(1)], MeasurementMethod(max_seconds=7.0), _Clock())] == [
        MeasurementMethod(max_seconds=7.0)
    ]


def test_a_record_gathers_all_kinds_of_rows(tmp_path: Path) -> None:
    made = session.KernelSession(tmp_path / "r.json", DEVICE, HOW)
    made.extend(CalibrationRecord(DEVICE, HOW, launch_interval=2e-6))
    made.add(_row(64))
    made.save()
    found = read_record(tmp_path / "r.json")
    assert (found.launch_interval, len(found.kernels)) == (2e-6, 1)


def test_what_had_no_memory_is_tried_again_and_fits_stay_until_the_next(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    failed = replace(_row(64), time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY)
    fits = (CollectiveFit(CollectiveType.ALL_REDUCE, 2, 1, 1e-4, 1e9, FitResidual(3, 0.1, 0.2)),)
    write_record(CalibrationRecord(DEVICE, HOW, (failed, _row(128)), collective_fits=fits), path)
    made = session.KernelSession(path, DEVICE, HOW)
    assert [signature_of(item) for item in made.missing([_matmul(64), _matmul(128)])] == [failed.signature]
    made.save()
    assert read_record(path).collective_fits == fits
