"""Rows of kernels: what is measured, what cannot be, and that measuring goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import MeasurementOutcome, signature_of
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.precision_recipe import mixed_precision

torch = pytest.importorskip("torch")
kernel_rows = pytest.importorskip("calibrate.kernels.measure")
from calibrate.devices import cpu  # noqa: E402
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.kernels import pytorch_ops  # noqa: E402
from calibrate.kernels import selection as kernels  # noqa: E402 - after torch is known to be there
from calibrate.kernels.timing import MeasurementMethod  # noqa: E402

FAST = MeasurementMethod(max_seconds=0.002, min_samples=2, max_samples=2, min_sample_seconds=0.0)
MIB = 2.0**20


@dataclass(frozen=True)
class Small(CpuDevice):
    """A CPU with little free memory and a cache of 1 MiB."""

    free: float = 64 * MIB

    @property
    def cache_bytes(self) -> float:
        return MIB

    def free_bytes(self) -> float:
        return self.free


def _matmul(size: int, dtype: DType = DType.FP32) -> Kernel:
    return matmul_kernel(f"matmul.{size}", dtype, MatmulShape(size, size, size), result_bytes=dtype.bytes)


def _sum(rows: int) -> Kernel:
    over = memory_bound.GRADIENT_SUM
    return over.forward_kernel("sum", DType.FP32, over.shape_for(rows, 256))


def test_a_row_is_the_kernel_and_its_time() -> None:
    kernel = _matmul(64)
    row = kernel_rows.measure_kernel(kernel, Small(), FAST)
    assert row.kernel == kernel
    assert row.signature == signature_of(kernel)
    assert row.outcome is MeasurementOutcome.MEASURED
    assert row.time is not None and 0.0 < row.time.p5 <= row.time.seconds <= row.time.p95


def test_kernels_of_one_signature_are_measured_once() -> None:
    first, second = _matmul(64), _matmul(32)
    again = matmul_kernel("by.another.name", DType.FP32, MatmulShape(64, 64, 64), result_bytes=4)
    rows = kernels.measure_kernels([first, second, again], Small(), method=FAST)
    assert [row.signature for row in rows] == [signature_of(first), signature_of(second)]


def test_rows_come_in_the_order_of_the_kernels_and_each_is_announced() -> None:
    said: list[str] = []
    rows = kernels.measure_kernels([_matmul(8), _matmul(64), _matmul(16)], Small(), method=FAST, advance=said.append)
    assert [row.name for row in rows] == ["matmul.8", "matmul.64", "matmul.16"]
    assert sorted(said) == sorted(row.name for row in rows)


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 x 4096 x 4096 FP32 are 192 MiB; 64 are free."""
    monkeypatch.setattr(pytorch_ops, "prepare_kernel", lambda *_: pytest.fail("was allocated"))
    row = kernel_rows.measure_kernel(_matmul(4096), Small(), FAST)
    assert (row.outcome, row.time) == (MeasurementOutcome.OUT_OF_MEMORY, None)
    assert row.source == "its operands take 192 MiB; 64 MiB are free"


def _raising(error: Exception) -> Callable[..., Any]:
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
def test_what_fails_is_a_row_and_the_others_are_measured(
    error: Exception, outcome: MeasurementOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytorch_ops, "prepare_kernel", _raising(error))
    failed, other = kernels.measure_kernels([_matmul(64), _matmul(32)], Small(), method=FAST)
    assert (failed.outcome, failed.time) == (outcome, None)
    assert failed.source and "\n" not in failed.source
    assert other.outcome is MeasurementOutcome.MEASURED


def test_formats_that_the_device_has_not_are_unsupported() -> None:
    row = kernel_rows.measure_kernel(_matmul(64, DType.FP8), Small(), FAST)
    assert row.outcome is MeasurementOutcome.UNSUPPORTED
    assert row.source.endswith("has no fp8")


def test_a_kernel_without_a_shape_has_no_row() -> None:
    bare = Kernel("cast", KernelKind.COPY, DType.BF16, 0.0, 8.0)
    assert kernels.measure_kernels([bare], Small(), method=FAST) == []
    with pytest.raises(ValueError, match="nothing says what it computes"):
        kernel_rows.measure_kernel(bare, Small(), FAST)


def test_operands_are_rotated_through_twice_the_cache() -> None:
    """Two matrices and the result of 128 x 128 FP32 are 192 KiB: 11 of them are 2 MiB."""
    found = kernel_rows.cache_control(_matmul(128), Small(free=1024 * MIB), MeasurementMethod())
    assert (found.copies, found.flush) == (11, False)


def test_what_is_larger_than_the_cache_needs_no_copies() -> None:
    assert kernel_rows.cache_control(_matmul(512), Small(free=1024 * MIB), MeasurementMethod()).copies == 1


def test_what_would_take_too_many_copies_is_flushed() -> None:
    assert kernel_rows.cache_control(_matmul(16), Small(), MeasurementMethod()) == kernel_rows.CacheControl(
        1, flush=True
    )


def test_copies_take_no_more_than_a_part_of_the_memory() -> None:
    assert kernel_rows.cache_control(_matmul(128), Small(free=4 * MIB), MeasurementMethod()).flush


def test_what_reads_little_of_much_memory_is_flushed_instead_of_copied() -> None:
    """A few rows of a table of 8 MiB, which is half of what copies may take of a cache of 1 MiB."""
    shape = MemoryBoundShape(MemoryBoundOp.LOOKUP, 32, 256, fused=True, table=8192)
    lookup = Kernel("lookup", KernelKind.EMBEDDING, DType.FP32, 0.0, 2 * 32 * 1024.0, shape)
    assert pytorch_ops.allocated_bytes(lookup, torch.device("cpu")) > 8 * MIB
    assert kernel_rows.cache_control(lookup, Small(free=1024 * MIB), MeasurementMethod()).flush


def test_warm_operands_are_neither_rotated_nor_flushed() -> None:
    assert kernel_rows.cache_control(
        _matmul(16), Small(), MeasurementMethod(cold_cache=False)
    ) == kernel_rows.CacheControl(1, flush=False)


def test_an_optimizers_memory_is_not_what_its_passes_move() -> None:
    """Foreach passes many times over the same memory: weights, gradients and two moments are touched."""
    from clustersim.model.optimizer_kernels import optimizer_step_kernels
    from clustersim.model.training import Training

    full = mixed_precision(DType.FP32, gradients=DType.FP32, master=None)
    (step,) = optimizer_step_kernels(Training(1, 1, recipe=full, fused=False), 1000)
    assert isinstance(step.shape, MemoryBoundShape)
    assert pytorch_ops.touched_bytes(step) == 16_000 < step.bytes


def test_rotation_runs_each_copy_in_turn() -> None:
    from calibrate.kernels.pytorch_ops.actions import RotatingAction

    ran: list[int] = []
    action = RotatingAction([lambda number=number: ran.append(number) for number in range(3)])  # type: ignore[misc]
    for _ in range(5):
        action()
    assert ran == [0, 1, 2, 0, 1]


def test_flushing_happens_between_runs_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that flushing moves by a second, and each run by a millisecond."""
    watch = CpuDevice().stopwatch(flush_cache=True)
    assert watch.pre_run is not None
    clock = [0]

    def spend(nanoseconds: int) -> None:
        clock[0] += nanoseconds

    monkeypatch.setattr(cpu, "perf_counter_ns", lambda: clock[0])
    slow = type(watch)(lambda: spend(10**9))
    assert slow.time(lambda: spend(10**6), 3) == pytest.approx(3e-3)
    assert clock[0] == 3 * 10**9 + 3 * 10**6


def test_a_sum_is_slower_from_memory_than_its_clock_can_miss() -> None:
    row = kernel_rows.measure_kernel(_sum(1024), Small(), FAST)
    assert row.time is not None and row.time.seconds > 1e-6
