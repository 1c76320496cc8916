"""A record of one accelerator says what another of the same architecture would take."""

import math
from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CopySample,
    DeviceInfo,
    InterferenceSample,
    RecordOrigin,
)
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_scaling import scale_record
from clustersim.model.kernels import MatmulShape
from tests.cost.records import (
    CONDITIONS,
    DEVICE,
    H100,
    MODEL,
    calls,
    fit,
    line,
    measured,
    product,
    row,
    spread,
    streamed,
)

LARGE, WIDE, TINY = product(MatmulShape(8192, 8192, 8192)), streamed(65536, 8192), streamed(1, 64)
RECORD = measured([LARGE, WIDE, TINY], lambda kernel: MODEL.time_kernel(kernel).seconds, dispersion=0.1)


def test_compute_memory_and_launches_each_scale_by_their_own():
    there = scale_record(RECORD, compute=2.0, bandwidth=4.0)
    before = [kernel.time.seconds for kernel in RECORD.kernels if kernel.time]
    after = [kernel_sample.time.seconds for kernel_sample in there.kernels if kernel_sample.time]
    assert after == pytest.approx([before[0] / 2.0, before[1] / 4.0, before[2]])
    assert [item.time.dispersion for item in there.kernels if item.time] == pytest.approx([0.1] * 3)


def test_the_fit_of_the_record_decides_what_bounds_a_kernel():
    """With a thousandth of the bandwidth the large product is bound by memory."""
    slow = replace(fit(), memory_bandwidth=H100.memory_bandwidth / 1000.0)
    there = scale_record(replace(RECORD, kernel_fit=slow), compute=2.0, bandwidth=4.0)
    time = there.kernels[0].time
    assert time is not None
    assert time.seconds == pytest.approx(MODEL.time_kernel(LARGE).seconds / 4.0)


def test_the_fit_is_scaled_with_the_rows():
    known = fit(matmul_bf16=0.1)
    there = scale_record(replace(RECORD, kernel_fit=known), compute=2.0, bandwidth=4.0).kernel_fit
    assert there is not None
    assert there.peak[DType.BF16] == 2.0 * known.peak[DType.BF16]
    assert there.memory_bandwidth == 4.0 * known.memory_bandwidth
    assert replace(there, peak=known.peak, memory_bandwidth=known.memory_bandwidth) == known


def test_a_model_that_meets_its_rows_meets_them_after_scaling():
    """Without a kernel's start exactly, where both rates scale alike: else another tile may be the best."""
    still = replace(H100.efficiency, kernel_latency=0.0, launch_interval=0.0)
    known = replace(fit(), efficiency=still)
    model = MeasuredKernels(CalibrationRecord(DEVICE, CONDITIONS, kernel_fit=known), H100)
    record = replace(measured([LARGE, WIDE], lambda kernel: model.time_kernel(kernel).seconds), kernel_fit=known)
    there = scale_record(record, compute=2.0, bandwidth=2.0)
    alone = MeasuredKernels(replace(there, kernels=()), H100)
    for kernel_sample in there.kernels:
        assert kernel_sample.time is not None
        assert alone.time_kernel(kernel_sample.kernel).seconds == pytest.approx(kernel_sample.time.seconds, rel=1e-12)


def test_only_copies_within_the_device_follow_its_bandwidth():
    copies = (CopySample("device", 1e9, spread(1.0)), CopySample("host to device", 1e9, spread(1.0)))
    there = scale_record(replace(RECORD, copies=copies), compute=2.0, bandwidth=4.0)
    assert [copy.time.seconds for copy in there.copies] == [0.25, 1.0]


def test_a_kernel_beside_another_is_slowed_by_the_same_part():
    beside = InterferenceSample(row(LARGE, 1.0), "copy", spread(1.3))
    (there,) = scale_record(replace(RECORD, beside=(beside,)), compute=2.0, bandwidth=4.0).beside
    assert there.kernel.time is not None
    assert there.kernel.time.seconds == 0.5
    assert there.kernel_slowdown == pytest.approx(beside.kernel_slowdown)


def test_collectives_stay_as_they_were():
    collectives, fits = calls({1e6: 1e-3}), (line(1e-5, 1e9, 0.1),)
    record = replace(RECORD, collectives=collectives, collective_fits=fits)
    there = scale_record(record, compute=2.0, bandwidth=4.0)
    assert (there.collectives, there.collective_fits) == (collectives, fits)


def test_the_derivation_says_from_what_and_how():
    there = scale_record(RECORD, compute=1.5, bandwidth=0.7)
    assert there.origin is RecordOrigin.DERIVED
    for word in ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb", "1.5", "0.7"):
        assert word in there.derivation
    again = scale_record(there, compute=3.0, bandwidth=1.0)
    assert again.derivation.startswith(there.derivation)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan])
def test_ratios_that_are_none_are_refused(ratio: float):
    with pytest.raises(InputError, match=r"scale\.bandwidth"):
        scale_record(RECORD, compute=1.0, bandwidth=ratio)


def test_an_accelerator_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="h100-sxm-80gb"):
        scale_record(replace(RECORD, device=DeviceInfo("h100-sxm-80", "")), compute=1.0, bandwidth=1.0)
