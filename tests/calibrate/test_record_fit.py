"""Constants that made a record's rows come back from it, and what the rows do not tell stays as it was."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from calibrate.fit.record_fit import fit_kernel_model
from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CopySample,
    KernelFit,
    TimeStatistics,
    family_of,
    signature_of,
)
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Provenance
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.model.kernels import Kernel
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels
from tests.calibrate.synthetic_records import attentions, matmul, matmuls, record_of, row, streams, with_constants

H100 = load_accelerator("h100-sxm-80gb")
CPU = load_accelerator("cpu-laptop")


def hidden_gpu() -> Accelerator:
    """An H100 whose constants are not the file's."""
    known = H100.efficiency
    return with_constants(
        replace(H100, peak={**H100.peak, DType.FP32: 45e12}),
        matmul=replace(
            known.matmul, share=0.66, shares={**known.matmul.shares, DType.FP8: 0.6}, edge=24.0, prologue=96.0
        ),
        attention_forward=replace(known.attention_forward, share=0.7, key_overhead=256.0),
        attention_backward=replace(known.attention_backward, share=0.55),
        memory=0.79,
        kernel_latency=3e-6,
        launch_interval=2e-6,
    )


def seen_kernels() -> list[Kernel]:
    return [
        *matmuls([64, 256, 1024, 4096, 8192]),
        *matmuls([512, 4096], DType.FP32),
        *matmuls([1024, 8192], DType.FP8),
        *streams([128, 2048, 16384], [1024, 8192]),
        *attentions([512, 1024, 2048, 4096, 8192]),
        *attentions([512, 1024, 2048, 4096, 8192], head_dim=64),
    ]


def unseen_kernels() -> list[Kernel]:
    return [
        *matmuls([128, 768, 3072, 14336]),
        *matmuls([2048], DType.FP32),
        *matmuls([4096], DType.FP8),
        *streams([512, 32768], [4096]),
        *attentions([3072, 16384]),
    ]


def fitted_gpu(fit: KernelFit, base: Accelerator) -> Accelerator:
    """The accelerator that the fit describes."""
    return replace(
        base,
        peak=fit.peak,
        memory_bandwidth=fit.memory_bandwidth,
        compute_units=fit.compute_units,
        efficiency=fit.efficiency,
    )


def errors(fit: KernelFit, base: Accelerator, truth: Accelerator, kernels: Iterable[Kernel]) -> list[float]:
    """Of the fitted model on kernels, against what they truly take."""
    predicted, true = Roofline(fitted_gpu(fit, base)), Roofline(truth)
    return [abs(predicted.time_kernel(kernel).seconds / true.time_kernel(kernel).seconds - 1.0) for kernel in kernels]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("seed", [1, 2])
def test_kernels_that_were_not_measured_are_predicted_within_the_stated_band(noise: float, seed: int) -> None:
    """The band is the left-out error of the family; it holds the noise itself, which the truth is free of."""
    truth = hidden_gpu()
    fit = fit_kernel_model(record_of(truth, seen_kernels(), noise=noise, seed=seed), H100)
    stated = max(residual.left_out for residual in fit.residuals.values())
    assert stated < 0.01 + 2.0 * noise
    assert float(np.mean(errors(fit, H100, truth, unseen_kernels()))) < stated + 0.01


def test_known_constants_come_back_from_rows_without_noise() -> None:
    truth = hidden_gpu()
    fit = fit_kernel_model(record_of(truth, seen_kernels()), H100)
    found, true = fit.efficiency, truth.efficiency
    assert (found.matmul.edge, found.matmul.prologue) == (true.matmul.edge, true.matmul.prologue)
    assert found.matmul.share == pytest.approx(true.matmul.share, rel=0.01)
    assert found.matmul.shares == pytest.approx(true.matmul.shares, rel=0.01)
    assert fit.peak[DType.FP32] * found.matmul.share == pytest.approx(45e12 * true.matmul.share, rel=0.01)
    assert found.memory * fit.memory_bandwidth == pytest.approx(true.memory * truth.memory_bandwidth, rel=0.01)
    assert found.kernel_latency == pytest.approx(true.kernel_latency, rel=0.03)
    assert found.launch_interval == true.launch_interval


@pytest.mark.parametrize("rate", [20e9, 900e9])
def test_a_cpu_with_a_handful_of_small_kernels_gets_rates_of_its_own(rate: float) -> None:
    """The file's 200 GFLOP/s and 30 GB/s are placeholders; the machine is a tenth as fast, or far faster."""
    truth = replace(CPU, peak={DType.FP32: rate}, memory_bandwidth=11e9)
    sizes = [(256, 64, 64), (256, 256, 64), (256, 64, 256), (64, 256, 256), (256, 1000, 64), (1000, 64, 256)]
    kernels = [matmul(*size, DType.FP32) for size in sizes] + list(streams([256], [64, 256], DType.FP32))
    record = record_of(truth, kernels, noise=0.03)
    record = replace(record, device=replace(record.device, threads=4, compute_units=0))
    fit = fit_kernel_model(record, CPU)
    assert fit.compute_units == 4
    assert 0.0 < fit.efficiency.matmul.share <= 1.0
    assert 0.0 < fit.efficiency.memory <= 1.0
    unseen = [matmul(512, 256, 256, DType.FP32), matmul(512, 512, 64, DType.FP32), *streams([512], [256], DType.FP32)]
    assert float(np.mean(errors(fit, CPU, truth, unseen))) < 0.1


def test_rows_that_only_show_the_start_of_a_kernel_leave_the_rates_alone() -> None:
    """A product of 16 x 16 x 16 takes its launch; whether the share is 0.3 or 0.7 does not show."""
    kernels = [matmul(16, 16, 16 * index) for index in range(1, 6)]
    fit = fit_kernel_model(record_of(H100, kernels, noise=0.01), H100)
    assert fit.efficiency.matmul == H100.efficiency.matmul
    assert fit.peak == H100.peak


def test_a_single_row_moves_the_share_only_if_it_is_far_off() -> None:
    kernel = matmul(8192, 8192, 8192)
    as_known = Roofline(H100).time_kernel(kernel).seconds
    near = fit_kernel_model(with_rows(record_of(H100, []), row(kernel, as_known * 1.05)), H100)
    far = fit_kernel_model(with_rows(record_of(H100, []), row(kernel, as_known * 2.0)), H100)
    assert near.efficiency.matmul == H100.efficiency.matmul
    assert far.efficiency.matmul.share == pytest.approx(H100.efficiency.matmul.share / 2.0, rel=0.02)
    assert far.residuals["matmul bf16"].left_out == pytest.approx(0.5)  # without the row, the file's constants


def with_rows(record: CalibrationRecord, *rows: object) -> CalibrationRecord:
    return replace(record, kernels=rows)  # type: ignore[arg-type]


def test_a_gpu_that_beats_its_datasheet_has_its_own_peak() -> None:
    truth = replace(H100, peak={**H100.peak, DType.BF16: 2.5e15}, memory_bandwidth=6e12)
    fit = fit_kernel_model(record_of(truth, seen_kernels()), H100)
    assert fit.peak[DType.BF16] > H100.peak[DType.BF16]
    assert fit.memory_bandwidth > H100.memory_bandwidth
    assert fit.efficiency.matmul.share <= 1.0
    assert float(np.mean(errors(fit, H100, truth, matmuls([2048, 6144])))) < 0.02


def test_formats_of_as_many_bits_keep_their_rates_where_one_beats_the_datasheet() -> None:
    """One peak stands for all of them: that of the fastest, to which the others' shares are relative then."""
    formats = {DType.FP8: 0.3, DType.FP8_ROWWISE: 0.9}
    own = replace(H100.efficiency.matmul, shares=formats)
    truth = with_constants(replace(H100, peak={**H100.peak, DType.FP8: 4e15}), matmul=own)
    seen = [kernel for dtype in (DType.BF16, *formats) for kernel in matmuls([1024, 4096, 8192], dtype)]
    fit = fit_kernel_model(record_of(truth, seen), H100)
    assert fit.peak[DType.FP8] > H100.peak[DType.FP8]
    for dtype in formats:
        assert float(np.mean(errors(fit, H100, truth, matmuls([2048, 6144], dtype)))) < 0.02


def test_casts_reach_a_part_of_the_bandwidth_of_their_own() -> None:
    """And what other streaming kernels reach is theirs, as without casts."""
    truth, sizes = with_constants(H100, casts=0.6), ((2048, 4096), (8192, 8192), (16384, 8192))
    casts = [
        kernel
        for dtype in (DType.FP8, DType.MXFP8)
        for size in sizes
        for kernel in quantize_kernels("cast", OperandCast(1, 2), size, high_precision=DType.BF16, low_precision=dtype)
    ]
    others = list(streams([2048, 16384], [1024, 8192]))
    fit, without = (fit_kernel_model(record_of(truth, kernels), H100) for kernels in ([*others, *casts], others))
    assert fit.efficiency.casts == pytest.approx(0.6, abs=0.01)
    assert replace(fit.efficiency, casts=1.0) == replace(without.efficiency, casts=1.0)
    (unseen,) = quantize_kernels(
        "cast", OperandCast(2, 2), (4096, 16384), high_precision=DType.BF16, low_precision=DType.FP8
    )
    assert errors(fit, H100, truth, [unseen]) == [pytest.approx(0.0, abs=0.02)]


def test_copies_stand_for_the_memory_bandwidth_where_nothing_else_streams() -> None:
    """10 GB copied in 7 ms are 20 GB moved: 2.86 TB/s of the datasheet's 3.35; 5 GB take half of it."""
    times = (TimeStatistics(item, item, item, 1) for item in (7e-3, 3.5e-3))
    copies = tuple(CopySample("device", size, time) for size, time in zip((10e9, 5e9), times, strict=True))
    record = replace(record_of(H100, [matmul(4096, 4096, 4096)]), copies=copies)
    fit = fit_kernel_model(record, H100)
    assert fit.memory_bandwidth == H100.memory_bandwidth
    assert fit.efficiency.memory == pytest.approx(20e9 / 7e-3 / 3.35e12, rel=0.01)


def test_a_family_that_is_slower_than_the_model_of_all_has_its_factor() -> None:
    """Unfused norms take 3 times as long as the bandwidth of the others allows; then 3 is what is predicted of more."""
    kernels = list(streams((512, 1024, 4096), (2048, 8192)))
    record = record_of(H100, kernels, noise=0.01)
    slow = "rmsnorm bf16"
    rows = tuple(
        replace(kernel, time=replace(kernel.time, **dict.fromkeys(("seconds", "p5", "p95"), 3.0 * kernel.time.seconds)))
        if kernel.time is not None and family_of(kernel.signature) == slow
        else kernel
        for kernel in record.kernels
    )
    fit = fit_kernel_model(replace(record, kernels=rows), H100)
    assert fit.factors[slow] == pytest.approx(3.0, rel=0.15)
    assert fit.residuals[slow].left_out < 0.15
    others = [factor for name, factor in fit.factors.items() if name != slow]
    assert others == pytest.approx([1.0] * len(others), rel=0.15)
    larger = next(stream for stream in streams((32768,), (16384,)) if family_of(stream) == slow)
    plain = Roofline(H100).time_kernel(larger).seconds
    known = MeasuredKernels(replace(record, kernels=rows, kernel_fit=fit), H100).time_kernel(larger)
    assert known.provenance is Provenance.FITTED
    assert known.seconds == pytest.approx(3.0 * plain, rel=0.15)


def family_of(kernel: Kernel) -> str:
    known = signature_of(kernel)
    assert known is not None
    return family_of(known)
