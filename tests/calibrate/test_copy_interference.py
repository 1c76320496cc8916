"""Copy bandwidths, launch interval, and kernels overlapping copies."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import COPY

torch = pytest.importorskip("torch")
copy_interference = pytest.importorskip("calibrate.kernels.copy_interference")
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.kernels import copy_benchmark  # noqa: E402 - after torch is known to be there
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402

FAST_METHOD = MeasurementMethod(max_seconds=0.005, min_samples=2, max_samples=3, min_sample_seconds=0.0)


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small buffers, one thread."""
    monkeypatch.setattr(copy_interference, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(copy_interference, "_SAMPLE_SECONDS", 1e-3)
    monkeypatch.setattr(copy_benchmark, "_SIZES", (2**16, 2**18))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_copy_interference_measures_isolated_and_overlapped_times() -> None:
    kernel, threads = copy_interference.square_matmul(DType.FP32, 64), threading.active_count()
    sample = copy_interference.measure_copy_interference(kernel, CpuDevice(), FAST_METHOD)
    assert sample.overlapped_with == COPY
    assert sample.kernel.kernel == kernel
    assert sample.kernel.time.seconds > 0.0 and sample.overlapped_time.seconds > 0.0
    assert sample.overlapped_time.repetitions + sample.overlapped_time.dropped == 12
    assert threading.active_count() == threads  # the copy thread has ended


def test_background_copy_runs_until_stopped() -> None:
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    stop = copy_interference._copy_until_ended(source, target, 0.0)
    try:
        while not np.array_equal(source, target):
            pass
        target[:] = 0
        while not np.array_equal(source, target):  # copied repeatedly
            pass
    finally:
        stop()
    target[:] = 0
    assert not target.any()


def test_unsupported_kernel_has_no_interference_sample() -> None:
    assert (
        copy_interference.measure_copy_interference(
            copy_interference.square_matmul(DType.FP8, 64), CpuDevice(), FAST_METHOD
        )
        is None
    )


def test_cpu_copies_are_device_copies_and_measured_ones_are_skipped() -> None:
    samples = list(copy_benchmark.measure_copies(CpuDevice(), FAST_METHOD, measured={("device", 2.0**16)}))
    assert [(sample.route, sample.bytes) for sample in samples] == [("device", 2.0**18)]
    assert all(sample.time.seconds > 0.0 for sample in samples)


def test_launch_interval_is_of_the_order_of_microseconds() -> None:
    assert 1e-7 < copy_benchmark.measure_launch_interval(CpuDevice()) < 1e-3
