"""Copies, launches, and kernels beside copies."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import COPY

torch = pytest.importorskip("torch")
beside = pytest.importorskip("calibrate.kernels.copy_interference")
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.kernels import copy_benchmark  # noqa: E402 - after torch is known to be there
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402

FAST = MeasurementMethod(max_seconds=0.005, min_samples=2, max_samples=3, min_sample_seconds=0.0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little memory, one thread."""
    monkeypatch.setattr(beside, "_COPIED", 2**20)
    monkeypatch.setattr(beside, "_LONG", 1e-3)
    monkeypatch.setattr(copy_benchmark, "_SIZES", (2**16, 2**18))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_kernel_beside_a_copy_is_measured_alone_and_together() -> None:
    kernel, threads = beside.square_matmul(DType.FP32, 64), threading.active_count()
    row = beside.measure_copy_interference(kernel, CpuDevice(), FAST)
    assert row.beside == COPY
    assert row.kernel.kernel == kernel
    assert row.kernel.time.seconds > 0.0 and row.together.seconds > 0.0
    assert row.together.repetitions + row.together.dropped == 12
    assert threading.active_count() == threads  # the copying has ended


def test_a_copy_goes_on_until_it_is_ended() -> None:
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    end = beside._copy_until_ended(source, target, 0.0)
    try:
        while not np.array_equal(source, target):
            pass
        target[:] = 0
        while not np.array_equal(source, target):  # and it is copied again
            pass
    finally:
        end()
    target[:] = 0
    assert not target.any()


def test_a_kernel_that_is_not_measured_has_no_row_beside_anything() -> None:
    assert beside.measure_copy_interference(beside.square_matmul(DType.FP8, 64), CpuDevice(), FAST) is None


def test_copies_of_a_cpu_are_in_its_own_memory_and_known_ones_are_left_out() -> None:
    rows = list(copy_benchmark.measure_copies(CpuDevice(), FAST, measured={("device", 2.0**16)}))
    assert [(row.route, row.bytes) for row in rows] == [("device", 2.0**18)]
    assert all(row.time.seconds > 0.0 for row in rows)


def test_a_launch_takes_microseconds() -> None:
    assert 1e-7 < copy_benchmark.measure_launch_interval(CpuDevice()) < 1e-3
