"""A record of one accelerator says what another of the same architecture would take."""

import math
from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import BesideRow, CopyRow, Device, Origin, Record
from clustersim.cost.measured_kernels import RecordedKernels
from clustersim.cost.record_scaling import scaled
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
RECORD = measured([LARGE, WIDE, TINY], lambda kernel: MODEL.kernel(kernel).seconds, dispersion=0.1)


def test_compute_memory_and_launches_each_scale_by_their_own():
    there = scaled(RECORD, compute=2.0, bandwidth=4.0)
    before = [kernel.time.seconds for kernel in RECORD.kernels if kernel.time]
    after = [kernel_row.time.seconds for kernel_row in there.kernels if kernel_row.time]
    assert after == pytest.approx([before[0] / 2.0, before[1] / 4.0, before[2]])
    assert [item.time.dispersion for item in there.kernels if item.time] == pytest.approx([0.1] * 3)


def test_the_fit_of_the_record_decides_what_bounds_a_kernel():
    """With a thousandth of the bandwidth the large product is bound by memory."""
    slow = replace(fit(), memory_bandwidth=H100.memory_bandwidth / 1000.0)
    there = scaled(replace(RECORD, kernel_fit=slow), compute=2.0, bandwidth=4.0)
    time = there.kernels[0].time
    assert time is not None
    assert time.seconds == pytest.approx(MODEL.kernel(LARGE).seconds / 4.0)


def test_the_fit_is_scaled_with_the_rows():
    known = fit(matmul_bf16=0.1)
    there = scaled(replace(RECORD, kernel_fit=known), compute=2.0, bandwidth=4.0).kernel_fit
    assert there is not None
    assert there.peak[DType.BF16] == 2.0 * known.peak[DType.BF16]
    assert there.memory_bandwidth == 4.0 * known.memory_bandwidth
    assert replace(there, peak=known.peak, memory_bandwidth=known.memory_bandwidth) == known


def test_a_model_that_meets_its_rows_meets_them_after_scaling():
    """Without a kernel's start exactly, where both rates scale alike: else another tile may be the best."""
    still = replace(H100.efficiency, kernel_latency=0.0, launch_interval=0.0)
    known = replace(fit(), efficiency=still)
    model = RecordedKernels(Record(DEVICE, CONDITIONS, kernel_fit=known), H100)
    record = replace(measured([LARGE, WIDE], lambda kernel: model.kernel(kernel).seconds), kernel_fit=known)
    there = scaled(record, compute=2.0, bandwidth=2.0)
    alone = RecordedKernels(replace(there, kernels=()), H100)
    for kernel_row in there.kernels:
        assert kernel_row.time is not None
        assert alone.kernel(kernel_row.kernel).seconds == pytest.approx(kernel_row.time.seconds, rel=1e-12)


def test_only_copies_within_the_device_follow_its_bandwidth():
    copies = (CopyRow("device", 1e9, spread(1.0)), CopyRow("host to device", 1e9, spread(1.0)))
    there = scaled(replace(RECORD, copies=copies), compute=2.0, bandwidth=4.0)
    assert [copy.time.seconds for copy in there.copies] == [0.25, 1.0]


def test_a_kernel_beside_another_is_slowed_by_the_same_part():
    beside = BesideRow(row(LARGE, 1.0), "copy", spread(1.3))
    (there,) = scaled(replace(RECORD, beside=(beside,)), compute=2.0, bandwidth=4.0).beside
    assert there.kernel.time is not None
    assert there.kernel.time.seconds == 0.5
    assert there.slowing == pytest.approx(beside.slowing)


def test_collectives_stay_as_they_were():
    collectives, fits = calls({1e6: 1e-3}), (line(1e-5, 1e9, 0.1),)
    record = replace(RECORD, collectives=collectives, collective_fits=fits)
    there = scaled(record, compute=2.0, bandwidth=4.0)
    assert (there.collectives, there.collective_fits) == (collectives, fits)


def test_the_derivation_says_from_what_and_how():
    there = scaled(RECORD, compute=1.5, bandwidth=0.7)
    assert there.origin is Origin.DERIVED
    for word in ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb", "1.5", "0.7"):
        assert word in there.derivation
    again = scaled(there, compute=3.0, bandwidth=1.0)
    assert again.derivation.startswith(there.derivation)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan])
def test_ratios_that_are_none_are_refused(ratio: float):
    with pytest.raises(InputError, match=r"scale\.bandwidth"):
        scaled(RECORD, compute=1.0, bandwidth=ratio)


def test_an_accelerator_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="h100-sxm-80gb"):
        scaled(replace(RECORD, device=Device("h100-sxm-80", "")), compute=1.0, bandwidth=1.0)
