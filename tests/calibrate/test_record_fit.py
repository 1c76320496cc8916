"""The fit recovers constants that a record was generated with, and keeps those that it does not determine."""

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
from tests.calibrate.synthetic_records import (
    attention_kernels,
    kernel_sample,
    memory_bound_kernels,
    sized_matmul,
    sized_matmuls,
    synthetic_record,
    with_constants,
)

H100 = load_accelerator("h100-sxm-80gb")
CPU = load_accelerator("cpu-laptop")


def true_accelerator() -> Accelerator:
    """An H100 whose constants differ from the packaged file."""
    efficiency = H100.efficiency
    return with_constants(
        replace(H100, peak={**H100.peak, DType.FP32: 45e12}),
        matmul=replace(
            efficiency.matmul,
            peak_fraction=0.66,
            peak_fraction_by_format={**efficiency.matmul.peak_fraction_by_format, DType.FP8: 0.6},
            edge=24.0,
            prologue=96.0,
        ),
        attention_forward=replace(efficiency.attention_forward, peak_fraction=0.7, key_overhead=256.0),
        attention_backward=replace(efficiency.attention_backward, peak_fraction=0.55),
        memory_bandwidth_fraction=0.79,
        kernel_latency=3e-6,
        launch_interval=2e-6,
    )


def measured_kernels() -> list[Kernel]:
    return [
        *sized_matmuls([64, 256, 1024, 4096, 8192]),
        *sized_matmuls([512, 4096], DType.FP32),
        *sized_matmuls([1024, 8192], DType.FP8),
        *memory_bound_kernels([128, 2048, 16384], [1024, 8192]),
        *attention_kernels([512, 1024, 2048, 4096, 8192]),
        *attention_kernels([512, 1024, 2048, 4096, 8192], head_dim=64),
    ]


def unmeasured_kernels() -> list[Kernel]:
    return [
        *sized_matmuls([128, 768, 3072, 14336]),
        *sized_matmuls([2048], DType.FP32),
        *sized_matmuls([4096], DType.FP8),
        *memory_bound_kernels([512, 32768], [4096]),
        *attention_kernels([3072, 16384]),
    ]


def fitted_accelerator(fit: KernelFit, base: Accelerator) -> Accelerator:
    """The accelerator that the fit describes."""
    return replace(
        base,
        peak=fit.peak,
        memory_bandwidth=fit.memory_bandwidth,
        compute_units=fit.compute_units,
        efficiency=fit.efficiency,
    )


def relative_errors(fit: KernelFit, base: Accelerator, truth: Accelerator, kernels: Iterable[Kernel]) -> list[float]:
    """Relative errors of the fitted model on kernels, against their true times."""
    predicted, true_model = Roofline(fitted_accelerator(fit, base)), Roofline(truth)
    return [
        abs(predicted.time_kernel(kernel).seconds / true_model.time_kernel(kernel).seconds - 1.0) for kernel in kernels
    ]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("seed", [1, 2])
def test_unmeasured_kernels_are_predicted_within_the_stated_error(noise: float, seed: int) -> None:
    """The stated error is the family's leave-one-out error; it includes the noise, which the true times lack."""
    truth = true_accelerator()
    fit = fit_kernel_model(synthetic_record(truth, measured_kernels(), noise=noise, seed=seed), H100)
    stated = max(residual.leave_one_out_error for residual in fit.residuals.values())
    assert stated < 0.01 + 2.0 * noise
    assert float(np.mean(relative_errors(fit, H100, truth, unmeasured_kernels()))) < stated + 0.01


def test_constants_are_recovered_without_noise() -> None:
    truth = true_accelerator()
    fit = fit_kernel_model(synthetic_record(truth, measured_kernels()), H100)
    fitted, expected = fit.efficiency, truth.efficiency
    assert (fitted.matmul.edge, fitted.matmul.prologue) == (expected.matmul.edge, expected.matmul.prologue)
    assert fitted.matmul.peak_fraction == pytest.approx(expected.matmul.peak_fraction, rel=0.01)
    assert fitted.matmul.peak_fraction_by_format == pytest.approx(expected.matmul.peak_fraction_by_format, rel=0.01)
    assert fit.peak[DType.FP32] * fitted.matmul.peak_fraction == pytest.approx(
        45e12 * expected.matmul.peak_fraction, rel=0.01
    )
    assert fitted.memory_bandwidth_fraction * fit.memory_bandwidth == pytest.approx(
        expected.memory_bandwidth_fraction * truth.memory_bandwidth, rel=0.01
    )
    assert fitted.kernel_latency == pytest.approx(expected.kernel_latency, rel=0.03)
    assert fitted.launch_interval == expected.launch_interval


@pytest.mark.parametrize("rate", [20e9, 900e9])
def test_cpu_rates_are_fitted_from_a_few_small_kernels(rate: float) -> None:
    """The packaged 200 GFLOP/s and 30 GB/s are placeholders; the machine is a tenth as fast, or far faster."""
    truth = replace(CPU, peak={DType.FP32: rate}, memory_bandwidth=11e9)
    sizes = [(256, 64, 64), (256, 256, 64), (256, 64, 256), (64, 256, 256), (256, 1000, 64), (1000, 64, 256)]
    kernels = [sized_matmul(*size, DType.FP32) for size in sizes] + list(
        memory_bound_kernels([256], [64, 256], DType.FP32)
    )
    record = synthetic_record(truth, kernels, noise=0.03)
    record = replace(record, device=replace(record.device, threads=4, compute_units=0))
    fit = fit_kernel_model(record, CPU)
    assert fit.compute_units == 4
    assert 0.0 < fit.efficiency.matmul.peak_fraction <= 1.0
    assert 0.0 < fit.efficiency.memory_bandwidth_fraction <= 1.0
    unmeasured = [
        sized_matmul(512, 256, 256, DType.FP32),
        sized_matmul(512, 512, 64, DType.FP32),
        *memory_bound_kernels([512], [256], DType.FP32),
    ]
    assert float(np.mean(relative_errors(fit, CPU, truth, unmeasured))) < 0.1


def test_launch_bound_samples_keep_the_packaged_rates() -> None:
    """A matmul of 16 x 16 x 16 takes its launch time, which does not depend on the share."""
    kernels = [sized_matmul(16, 16, 16 * multiple) for multiple in range(1, 6)]
    fit = fit_kernel_model(synthetic_record(H100, kernels, noise=0.01), H100)
    assert fit.efficiency.matmul == H100.efficiency.matmul
    assert fit.peak == H100.peak


def test_a_single_sample_changes_the_share_only_if_far_off() -> None:
    kernel = sized_matmul(8192, 8192, 8192)
    packaged_seconds = Roofline(H100).time_kernel(kernel).seconds
    near = fit_kernel_model(
        with_samples(synthetic_record(H100, []), kernel_sample(kernel, packaged_seconds * 1.05)), H100
    )
    far = fit_kernel_model(
        with_samples(synthetic_record(H100, []), kernel_sample(kernel, packaged_seconds * 2.0)), H100
    )
    assert near.efficiency.matmul == H100.efficiency.matmul
    assert far.efficiency.matmul.peak_fraction == pytest.approx(H100.efficiency.matmul.peak_fraction / 2.0, rel=0.02)
    assert far.residuals["matmul bf16"].leave_one_out_error == pytest.approx(
        0.5
    )  # without the sample, the packaged constants


def with_samples(record: CalibrationRecord, *samples: object) -> CalibrationRecord:
    return replace(record, kernels=samples)  # type: ignore[arg-type]


def test_peak_is_raised_above_an_exceeded_datasheet() -> None:
    truth = replace(H100, peak={**H100.peak, DType.BF16: 2.5e15}, memory_bandwidth=6e12)
    fit = fit_kernel_model(synthetic_record(truth, measured_kernels()), H100)
    assert fit.peak[DType.BF16] > H100.peak[DType.BF16]
    assert fit.memory_bandwidth > H100.memory_bandwidth
    assert fit.efficiency.matmul.peak_fraction <= 1.0
    assert float(np.mean(relative_errors(fit, H100, truth, sized_matmuls([2048, 6144])))) < 0.02


def test_formats_of_equal_width_keep_their_rates_when_one_exceeds_the_peak() -> None:
    """One peak covers all of them: that of the fastest, to which the shares of the others are relative."""
    formats = {DType.FP8: 0.3, DType.FP8_ROWWISE: 0.9}
    matmul_efficiency = replace(H100.efficiency.matmul, peak_fraction_by_format=formats)
    truth = with_constants(replace(H100, peak={**H100.peak, DType.FP8: 4e15}), matmul=matmul_efficiency)
    kernels = [kernel for dtype in (DType.BF16, *formats) for kernel in sized_matmuls([1024, 4096, 8192], dtype)]
    fit = fit_kernel_model(synthetic_record(truth, kernels), H100)
    assert fit.peak[DType.FP8] > H100.peak[DType.FP8]
    for dtype in formats:
        assert float(np.mean(relative_errors(fit, H100, truth, sized_matmuls([2048, 6144], dtype)))) < 0.02


def test_casts_have_their_own_share_of_the_bandwidth() -> None:
    """Other memory-bound kernels are fitted as without casts."""
    truth, sizes = with_constants(H100, quantization_bandwidth_ratio=0.6), ((2048, 4096), (8192, 8192), (16384, 8192))
    casts = [
        kernel
        for dtype in (DType.FP8, DType.MXFP8)
        for size in sizes
        for kernel in quantize_kernels("cast", OperandCast(1, 2), size, high_precision=DType.BF16, low_precision=dtype)
    ]
    memory_bound = list(memory_bound_kernels([2048, 16384], [1024, 8192]))
    fit, fit_without_casts = (
        fit_kernel_model(synthetic_record(truth, kernels), H100) for kernels in ([*memory_bound, *casts], memory_bound)
    )
    assert fit.efficiency.quantization_bandwidth_ratio == pytest.approx(0.6, abs=0.01)
    assert replace(fit.efficiency, quantization_bandwidth_ratio=1.0) == replace(
        fit_without_casts.efficiency, quantization_bandwidth_ratio=1.0
    )
    (unmeasured,) = quantize_kernels(
        "cast", OperandCast(2, 2), (4096, 16384), high_precision=DType.BF16, low_precision=DType.FP8
    )
    assert relative_errors(fit, H100, truth, [unmeasured]) == [pytest.approx(0.0, abs=0.02)]


def test_copies_give_the_memory_bandwidth_without_memory_bound_kernels() -> None:
    """10 GB copied in 7 ms are 20 GB moved: 2.86 TB/s of the datasheet's 3.35; 5 GB take half of it."""
    statistics = (TimeStatistics(seconds, seconds, seconds, 1) for seconds in (7e-3, 3.5e-3))
    copies = tuple(CopySample("device", size, time) for size, time in zip((10e9, 5e9), statistics, strict=True))
    record = replace(synthetic_record(H100, [sized_matmul(4096, 4096, 4096)]), copies=copies)
    fit = fit_kernel_model(record, H100)
    assert fit.memory_bandwidth == H100.memory_bandwidth
    assert fit.efficiency.memory_bandwidth_fraction == pytest.approx(20e9 / 7e-3 / 3.35e12, rel=0.01)


def test_slow_family_has_a_factor() -> None:
    """Unfused norms take 3 times the memory-bound time of the other kernels.

    Larger ones are predicted with that factor.
    """
    kernels = list(memory_bound_kernels((512, 1024, 4096), (2048, 8192)))
    record = synthetic_record(H100, kernels, noise=0.01)
    slow = "rmsnorm bf16"
    samples = tuple(
        replace(sample, time=replace(sample.time, **dict.fromkeys(("seconds", "p5", "p95"), 3.0 * sample.time.seconds)))
        if sample.time is not None and family_of(sample.signature) == slow
        else sample
        for sample in record.kernels
    )
    fit = fit_kernel_model(replace(record, kernels=samples), H100)
    assert fit.factors[slow] == pytest.approx(3.0, rel=0.15)
    assert fit.residuals[slow].leave_one_out_error < 0.15
    other_factors = [factor for name, factor in fit.factors.items() if name != slow]
    assert other_factors == pytest.approx([1.0] * len(other_factors), rel=0.15)
    larger = next(
        candidate for candidate in memory_bound_kernels((32768,), (16384,)) if kernel_family(candidate) == slow
    )
    model_seconds = Roofline(H100).time_kernel(larger).seconds
    timing = MeasuredKernels(replace(record, kernels=samples, kernel_fit=fit), H100).time_kernel(larger)
    assert timing.provenance is Provenance.FITTED
    assert timing.seconds == pytest.approx(3.0 * model_seconds, rel=0.15)


def kernel_family(kernel: Kernel) -> str:
    kernel_signature = signature_of(kernel)
    assert kernel_signature is not None
    return family_of(kernel_signature)
