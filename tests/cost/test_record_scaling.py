"""A record scaled to another accelerator of the same architecture."""

import math
from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, CopySample, DeviceInfo, InterferenceSample
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.record_scaling import scale_record
from clustersim.model.kernels import MatmulShape
from tests.cost.records import (
    CONDITIONS,
    DEVICE,
    H100,
    MODEL,
    collective_fit,
    collective_samples,
    kernel_fit_of,
    kernel_sample,
    matmul_kernel,
    norm_kernel,
    record_of,
    spread,
)

LARGE, LARGE_NORM, SMALL_NORM = (
    matmul_kernel(MatmulShape(8192, 8192, 8192)),
    norm_kernel(65536, 8192),
    norm_kernel(1, 64),
)
RECORD = record_of([LARGE, LARGE_NORM, SMALL_NORM], lambda kernel: MODEL.time_kernel(kernel).seconds, dispersion=0.1)


def test_compute_and_memory_scale_by_their_factors_and_launches_not():
    scaled_record = scale_record(RECORD, compute=2.0, bandwidth=4.0)
    before = [kernel.time.seconds for kernel in RECORD.kernels if kernel.time]
    after = [item.time.seconds for item in scaled_record.kernels if item.time]
    assert after == pytest.approx([before[0] / 2.0, before[1] / 4.0, before[2]])
    assert [element.time.dispersion for element in scaled_record.kernels if element.time] == pytest.approx([0.1] * 3)


def test_the_fit_of_the_record_decides_a_kernels_bottleneck():
    """With a thousandth of the bandwidth the large product is bound by memory."""
    slow = replace(kernel_fit_of(), memory_bandwidth=H100.memory_bandwidth / 1000.0)
    scaled_record = scale_record(replace(RECORD, kernel_fit=slow), compute=2.0, bandwidth=4.0)
    time = scaled_record.kernels[0].time
    assert time is not None
    assert time.seconds == pytest.approx(MODEL.time_kernel(LARGE).seconds / 4.0)


def test_the_fit_is_scaled_with_the_samples():
    original_fit = kernel_fit_of(matmul_bf16=0.1)
    scaled_fit = scale_record(replace(RECORD, kernel_fit=original_fit), compute=2.0, bandwidth=4.0).kernel_fit
    assert scaled_fit is not None
    assert scaled_fit.peak[DType.BF16] == 2.0 * original_fit.peak[DType.BF16]
    assert scaled_fit.memory_bandwidth == 4.0 * original_fit.memory_bandwidth
    assert replace(scaled_fit, peak=original_fit.peak, memory_bandwidth=original_fit.memory_bandwidth) == original_fit


def test_a_model_equal_to_its_samples_equals_them_after_scaling():
    """Exact without kernel latency and with equal factors: otherwise another tile may be the best."""
    without_latency = replace(H100.efficiency, kernel_latency=0.0, launch_interval=0.0)
    original_fit = replace(kernel_fit_of(), efficiency=without_latency)
    model = MeasuredKernels(CalibrationRecord(DEVICE, CONDITIONS, kernel_fit=original_fit), H100)
    record = replace(
        record_of([LARGE, LARGE_NORM], lambda kernel: model.time_kernel(kernel).seconds), kernel_fit=original_fit
    )
    scaled_record = scale_record(record, compute=2.0, bandwidth=2.0)
    fit_only = MeasuredKernels(replace(scaled_record, kernels=()), H100)
    for item in scaled_record.kernels:
        assert item.time is not None
        assert fit_only.time_kernel(item.kernel).seconds == pytest.approx(item.time.seconds, rel=1e-12)


def test_only_copies_within_the_device_follow_its_bandwidth():
    copies = (CopySample("device", 1e9, spread(1.0)), CopySample("host to device", 1e9, spread(1.0)))
    scaled_record = scale_record(replace(RECORD, copies=copies), compute=2.0, bandwidth=4.0)
    assert [copy.time.seconds for copy in scaled_record.copies] == [0.25, 1.0]


def test_interference_slowdowns_are_kept():
    overlapped = InterferenceSample(kernel_sample(LARGE, 1.0), "copy", spread(1.3))
    (scaled_sample,) = scale_record(
        replace(RECORD, interference=(overlapped,)), compute=2.0, bandwidth=4.0
    ).interference
    assert scaled_sample.kernel.time is not None
    assert scaled_sample.kernel.time.seconds == 0.5
    assert scaled_sample.kernel_slowdown == pytest.approx(overlapped.kernel_slowdown)


def test_collectives_are_not_scaled():
    collectives, fits = collective_samples({1e6: 1e-3}), (collective_fit(1e-5, 1e9, 0.1),)
    record = replace(RECORD, collectives=collectives, collective_fits=fits)
    scaled_record = scale_record(record, compute=2.0, bandwidth=4.0)
    assert (scaled_record.collectives, scaled_record.collective_fits) == (collectives, fits)


def test_the_derivation_names_source_and_factors():
    scaled_record = scale_record(RECORD, compute=1.5, bandwidth=0.7)
    assert scaled_record.origin is RecordOrigin.DERIVED
    for word in ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb", "1.5", "0.7"):
        assert word in scaled_record.derivation
    rescaled = scale_record(scaled_record, compute=3.0, bandwidth=1.0)
    assert rescaled.derivation.startswith(scaled_record.derivation)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan])
def test_invalid_ratios_are_rejected(ratio: float):
    with pytest.raises(InputError, match=r"scale\.bandwidth"):
        scale_record(RECORD, compute=1.0, bandwidth=ratio)


def test_an_unknown_accelerator_is_rejected():
    with pytest.raises(InputError, match="h100-sxm-80gb"):
        scale_record(replace(RECORD, device=DeviceInfo("h100-sxm-80", "")), compute=1.0, bandwidth=1.0)
