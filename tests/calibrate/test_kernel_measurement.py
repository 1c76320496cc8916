"""Kernel samples: measured times, outcomes of failed kernels, and cache control."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import signature_of
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.precision_recipe import mixed_precision

torch = pytest.importorskip("torch")
kernel_measurement = pytest.importorskip("calibrate.kernels.measure")
from calibrate.devices import cpu  # noqa: E402
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.kernels import pytorch_ops  # noqa: E402 - after torch is known to be there
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402

FAST_METHOD = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
MIB = 2.0**20


@dataclass(frozen=True)
class SmallCpuDevice(CpuDevice):
    """A CPU with little free memory and a cache of 1 MiB."""

    free: float = 64 * MIB

    @property
    def cache_bytes(self) -> float:
        return MIB

    def free_bytes(self) -> float:
        return self.free


def _matmul(size: int, dtype: DType = DType.FP32) -> Kernel:
    return matmul_kernel(f"matmul.{size}", dtype, MatmulShape(size, size, size), result_bytes=dtype.bytes)


def _gradient_sum(tokens: int) -> Kernel:
    operator = memory_bound.GRADIENT_SUM
    return operator.forward_kernel("sum", DType.FP32, operator.shape_for(tokens, 256))


def test_sample_has_the_kernel_and_its_time() -> None:
    kernel = _matmul(64)
    sample = kernel_measurement.measure_kernel(kernel, SmallCpuDevice(), FAST_METHOD)
    assert sample.kernel == kernel
    assert sample.signature == signature_of(kernel)
    assert sample.outcome is MeasurementOutcome.MEASURED
    assert sample.time is not None and 0.0 < sample.time.p5 <= sample.time.seconds <= sample.time.p95


def test_kernels_of_one_signature_are_measured_once() -> None:
    first, second = _matmul(64), _matmul(32)
    duplicate = matmul_kernel("by.another.name", DType.FP32, MatmulShape(64, 64, 64), result_bytes=4)
    samples = kernel_measurement.measure_sequence([first, second, duplicate], SmallCpuDevice(), FAST_METHOD)
    assert [sample.signature for sample in samples] == [signature_of(first), signature_of(second)]


def test_kernel_that_does_not_fit_is_refused_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 x 4096 x 4096 FP32 are 192 MiB; 64 are free."""
    monkeypatch.setattr(pytorch_ops, "prepare_kernel", lambda *_: pytest.fail("was allocated"))
    sample = kernel_measurement.measure_kernel(_matmul(4096), SmallCpuDevice(), FAST_METHOD)
    assert (sample.outcome, sample.time) == (MeasurementOutcome.OUT_OF_MEMORY, None)
    assert sample.source == "its operands take 192 MiB; 64 MiB are free"


def _failing_prepare(error: Exception) -> Callable[..., Any]:
    def prepare(kernel: Kernel, _device: Any) -> Any:
        if kernel.name == "matmul.64":
            raise error
        return lambda: None

    return prepare


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
            MeasurementOutcome.OUT_OF_MEMORY,
        ),
        (MemoryError(), MeasurementOutcome.OUT_OF_MEMORY),
        (RuntimeError("no kernel image is available\nfor execution"), MeasurementOutcome.UNSUPPORTED),
        (pytorch_ops.UnsupportedKernel("there is none"), MeasurementOutcome.UNSUPPORTED),
    ],
)
def test_failed_kernel_has_an_outcome_and_others_are_measured(
    error: Exception, outcome: MeasurementOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytorch_ops, "prepare_kernel", _failing_prepare(error))
    failed, other = kernel_measurement.measure_sequence([_matmul(64), _matmul(32)], SmallCpuDevice(), FAST_METHOD)
    assert (failed.outcome, failed.time) == (outcome, None)
    assert failed.source and "\n" not in failed.source
    assert other.outcome is MeasurementOutcome.MEASURED


def test_missing_format_is_unsupported() -> None:
    sample = kernel_measurement.measure_kernel(_matmul(64, DType.FP8), SmallCpuDevice(), FAST_METHOD)
    assert sample.outcome is MeasurementOutcome.UNSUPPORTED
    assert sample.source.endswith("has no fp8")


def test_kernel_without_a_shape_has_no_sample() -> None:
    bare = Kernel("cast", KernelKind.COPY, DType.BF16, 0.0, 8.0)
    assert list(kernel_measurement.measure_sequence([bare], SmallCpuDevice(), FAST_METHOD)) == []
    with pytest.raises(ValueError, match="nothing says what it computes"):
        kernel_measurement.measure_kernel(bare, SmallCpuDevice(), FAST_METHOD)


def test_operands_are_rotated_through_twice_the_cache() -> None:
    """Two matrices and the result of 128 x 128 FP32 are 192 KiB: 11 copies exceed 2 MiB."""
    control = kernel_measurement.cache_control(_matmul(128), SmallCpuDevice(free=1024 * MIB), MeasurementMethod())
    assert (control.copies, control.flush) == (11, False)


def test_operands_larger_than_the_cache_need_no_copies() -> None:
    assert (
        kernel_measurement.cache_control(_matmul(512), SmallCpuDevice(free=1024 * MIB), MeasurementMethod()).copies == 1
    )


def test_cache_is_flushed_instead_of_too_many_copies() -> None:
    assert kernel_measurement.cache_control(
        _matmul(16), SmallCpuDevice(), MeasurementMethod()
    ) == kernel_measurement.CacheControl(1, flush=True)


def test_copies_take_a_limited_fraction_of_memory() -> None:
    assert kernel_measurement.cache_control(_matmul(128), SmallCpuDevice(free=4 * MIB), MeasurementMethod()).flush


def test_sparse_reads_of_large_operands_are_flushed() -> None:
    """A few rows of a table of 8 MiB, which is half of the copy limit for a cache of 1 MiB."""
    shape = MemoryBoundShape(MemoryBoundOp.LOOKUP, 32, 256, fused=True, table=8192)
    lookup = Kernel("lookup", KernelKind.EMBEDDING, DType.FP32, 0.0, 2 * 32 * 1024.0, shape)
    assert pytorch_ops.allocated_bytes(lookup, torch.device("cpu")) > 8 * MIB
    assert kernel_measurement.cache_control(lookup, SmallCpuDevice(free=1024 * MIB), MeasurementMethod()).flush


def test_warm_operands_are_neither_rotated_nor_flushed() -> None:
    assert kernel_measurement.cache_control(
        _matmul(16), SmallCpuDevice(), MeasurementMethod(cold_cache=False)
    ) == kernel_measurement.CacheControl(1, flush=False)


def test_optimizer_touches_less_memory_than_its_passes_move() -> None:
    """Foreach makes several passes over the same memory: weights, gradients and two moments are touched."""
    from clustersim.model.optimizer_kernels import optimizer_step_kernels
    from clustersim.model.training import NONE_FUSED, Training

    fp32 = mixed_precision(DType.FP32, gradients=DType.FP32, master=None)
    (step,) = optimizer_step_kernels(Training(1, 1, recipe=fp32, fused=NONE_FUSED), 1000)
    assert isinstance(step.shape, MemoryBoundShape)
    assert pytorch_ops.touched_bytes(step) == 16_000 < step.bytes


def test_rotating_action_runs_its_copies_in_turn() -> None:
    from calibrate.kernels.pytorch_ops.actions import RotatingAction

    executed: list[int] = []
    action = RotatingAction([lambda index=index: executed.append(index) for index in range(3)])  # type: ignore[misc]
    for _ in range(5):
        action()
    assert executed == [0, 1, 2, 0, 1]


def test_flushing_between_runs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by a second per flush, and by a millisecond per run."""
    stopwatch = CpuDevice().stopwatch(flush_cache=True)
    assert stopwatch.pre_run is not None
    clock = [0]

    def spend(nanoseconds: int) -> None:
        clock[0] += nanoseconds

    monkeypatch.setattr(cpu, "perf_counter_ns", lambda: clock[0])
    slow_stopwatch = type(stopwatch)(lambda: spend(10**9))
    assert slow_stopwatch.time(lambda: spend(10**6), 3) == pytest.approx(3e-3)
    assert clock[0] == 3 * 10**9 + 3 * 10**6


def test_memory_bound_sum_is_slower_than_the_clock_resolution() -> None:
    sample = kernel_measurement.measure_kernel(_gradient_sum(1024), SmallCpuDevice(), FAST_METHOD)
    assert sample.time is not None and sample.time.seconds > 1e-6
