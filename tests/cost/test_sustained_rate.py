"""Kernels within a step: arithmetic is slower, memory and launches are not; what was measured is no longer so sure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CalibrationRecord, RecordOrigin
from clustersim.cost.device_models import slowest_deviation
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.roofline import Roofline
from clustersim.cost.sustained_rate import SustainedKernels, attention_ratio, job_rate
from clustersim.cost.timing import Bottleneck, KernelTiming, Provenance
from clustersim.hardware.efficiency import TrainingDerating
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape
from clustersim.model.training import AttentionBackend
from tests.cost.records import H100, MODEL, attention, measured, product, streamed

LARGE = product(MatmulShape(8192, 8192, 8192))
NARROW = product(MatmulShape(8192, 8192, 16))
SMALL = product(MatmulShape(64, 64, 64))
NORM = streamed(8192, 8192)
FLASH = attention(AttentionShape(1, 32, 32, 4096, 4096, 128, causal=True))
KERNELS = st.builds(MatmulShape, *[st.integers(1, 1 << 14)] * 3).map(product) | st.sampled_from([NORM, FLASH])


def in_step(record: CalibrationRecord, rate: float, times: float = 1.0) -> SustainedKernels:
    alone = MeasuredKernels(record, H100)
    return SustainedKernels.from_rate(alone, alone.model, rate=rate, attention_slowdown=times)


def twice(kernel: Kernel) -> float:
    return 2.0 * MODEL.time_kernel(kernel).seconds


def test_arithmetic_takes_longer_by_the_rate_and_memory_does_not() -> None:
    """Of a large product 5.5 us are start and drain, which no clock shortens; a narrow one and a norm are memory's."""
    latency = H100.efficiency.kernel_latency
    step = SustainedKernels.from_rate(MODEL, MODEL, rate=0.8, attention_slowdown=1.0)
    alone = MODEL.time_kernel(LARGE).seconds
    assert step.time_kernel(LARGE).seconds == pytest.approx((alone - latency) / 0.8 + latency)
    for kernel in (NARROW, NORM):
        assert MODEL.time_kernel(kernel).bottleneck is Bottleneck.MEMORY
        assert step.time_kernel(kernel) == MODEL.time_kernel(kernel)


def test_what_was_measured_takes_as_much_longer_as_the_model_of_it() -> None:
    """Rows of twice the model's time: twice as long in the step too, and a norm as measured, to the last digit."""
    record, step = (
        measured([LARGE, NORM], twice),
        SustainedKernels.from_rate(MODEL, MODEL, rate=0.8, attention_slowdown=1.0),
    )
    recorded = in_step(record, 0.8)
    assert recorded.time_kernel(LARGE).seconds == pytest.approx(2.0 * step.time_kernel(LARGE).seconds)
    assert recorded.time_kernel(NORM).seconds == twice(NORM)
    assert recorded.time_kernel(NORM).in_situ_slowdown == 1.0
    assert recorded.time_kernel(LARGE).in_situ_slowdown == pytest.approx(1 / 0.8, rel=0.01)


@given(st.lists(KERNELS, min_size=1, max_size=8, unique=True), st.floats(0.5, 1.25), st.floats(1.0, 4.0))
def test_a_record_of_what_the_model_says_is_the_model_in_a_step_too(
    kernels: list[Kernel], rate: float, times: float
) -> None:
    """To the last digit, whatever bounds the kernel and however slow the step is."""
    record = measured(kernels, lambda kernel: MODEL.time_kernel(kernel).seconds)
    recorded, modelled = (
        in_step(record, rate, times),
        SustainedKernels.from_rate(MODEL, MODEL, rate=rate, attention_slowdown=times),
    )
    for kernel in kernels:
        assert recorded.time_kernel(kernel).seconds == modelled.time_kernel(kernel).seconds
        assert recorded.time_kernel(kernel).bottleneck is modelled.time_kernel(kernel).bottleneck


@given(KERNELS, st.floats(0.5, 1.25))
def test_without_a_record_kernels_take_what_the_model_says_at_that_rate(kernel: Kernel, rate: float) -> None:
    timing = SustainedKernels.from_rate(MODEL, MODEL, rate=rate, attention_slowdown=1.0).time_kernel(kernel)
    expected = Roofline(H100, rate).time_kernel(kernel)
    assert replace(timing, in_situ_slowdown=1.0) == expected


@given(KERNELS, st.floats(0.01, 0.5))
def test_where_a_step_does_nothing_what_was_measured_stays(kernel: Kernel, dispersion: float) -> None:
    """A CPU's pace: no accelerator file says that its steps are slower than its kernels."""
    pace = TrainingDerating()
    record = measured([kernel], twice, dispersion)
    step = in_step(
        record, job_rate(pace, 1024), attention_ratio(pace, AttentionBackend.FLASH2, record.attention_library)
    )
    assert step.time_kernel(kernel) == MeasuredKernels(record, H100).time_kernel(kernel)


def test_the_band_of_a_measured_kernel_begins_where_it_was_measured_alone() -> None:
    """Low is seconds / (1 + error): a row that repeats itself exactly is not expected to be faster than the row."""
    timing = in_step(measured([LARGE], twice), 0.8).time_kernel(LARGE)
    assert timing.error is not None
    assert timing.seconds / (1.0 + timing.error) == pytest.approx(twice(LARGE))
    spread = in_step(measured([LARGE], twice, 0.1), 0.8).time_kernel(LARGE)
    assert spread.error == pytest.approx(timing.error + 0.1)


@pytest.mark.parametrize("origin", [RecordOrigin.PUBLISHED, RecordOrigin.DERIVED])
def test_records_of_others_are_of_kernels_alone_too(origin: RecordOrigin) -> None:
    own = measured([LARGE], twice)
    timing = in_step(replace(own, origin=origin), 0.8).time_kernel(LARGE)
    assert timing.seconds == in_step(own, 0.8).time_kernel(LARGE).seconds
    assert timing.error is None


def test_a_launch_that_takes_longer_than_the_kernel_is_not_slowed() -> None:
    """A host that needs 1 ms for each launch: the kernel waits for it, whatever its clock."""
    record = replace(measured([SMALL], lambda _: 1e-6), launch_interval=1e-3)
    assert in_step(record, 0.5).time_kernel(SMALL) == KernelTiming(1e-3, Provenance.MEASURED, Bottleneck.LAUNCH, 0.0)


def test_the_slowest_of_the_job_sets_the_rate() -> None:
    pace = TrainingDerating(sustained_ratio=0.9, gpu_spread=0.02)
    assert job_rate(pace, 1) == 0.9
    assert job_rate(pace, 1024) == pytest.approx(0.9 / (1.0 + 0.02 * slowest_deviation(1024)))


@pytest.mark.parametrize(
    ("asked", "timed", "times"),
    [
        (AttentionBackend.FLASH, AttentionBackend.FLASH, 1.0),
        (AttentionBackend.FLASH2, AttentionBackend.FLASH, 1.5),
        (AttentionBackend.FLASH1, AttentionBackend.FLASH, 3.0),
        (AttentionBackend.FLASH2, AttentionBackend.FLASH2, 1.0),
        (AttentionBackend.FLASH1, AttentionBackend.FLASH2, 2.0),
        (
            AttentionBackend.FLASH,
            AttentionBackend.FLASH2,
            1.0,
        ),  # measured: this machine's libraries may have no faster one
        (AttentionBackend.STANDARD, AttentionBackend.FLASH2, 1.0),
    ],
)
def test_older_attention_is_relative_to_the_one_that_was_timed(
    asked: AttentionBackend, timed: AttentionBackend, times: float
) -> None:
    assert attention_ratio(TrainingDerating(flash2_slowdown=1.5), asked, timed) == times


def test_attention_of_a_record_is_pytorch_s_where_pytorch_was_timed() -> None:
    record = measured([FLASH], twice)
    assert record.attention_library is AttentionBackend.FLASH
    assert replace(record, device=replace(record.device, torch="2.9.0")).attention_library is AttentionBackend.FLASH2


@pytest.mark.parametrize("kind", list(KernelKind))
def test_an_older_library_takes_longer_for_attention_and_for_nothing_else(kind: KernelKind) -> None:
    """And what then takes longer was not measured."""
    kernel = replace(FLASH, kind=kind)
    timing = in_step(measured([kernel], lambda _: 3.0, 0.1), 1.0, 1.6).time_kernel(kernel)
    longer = kind in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)
    assert timing.seconds == pytest.approx(3.0 * (1.6 if longer else 1.0))
    assert timing.provenance is (Provenance.DERIVED if longer else Provenance.MEASURED)
    assert timing.error == (None if longer else pytest.approx(0.1))


def test_products_in_narrow_formats_have_a_pace_of_their_own() -> None:
    """Where arithmetic bounds them both, rates 0.8 and 0.8 x 1.25 = 1: the narrow product takes what it takes alone."""
    step = SustainedKernels.from_rate(MODEL, MODEL, rate=0.8, attention_slowdown=1.0, low_precision_factor=1.25)
    sizes = MatmulShape(8192, 8192, 8192)
    wide, narrow = (
        Kernel("product", KernelKind.MATMUL, dtype, 2.0 * 8192**3, 3.0 * 8192**2 * dtype.bytes, sizes)
        for dtype in (DType.BF16, DType.FP8)
    )
    assert step.time_kernel(narrow).seconds == MODEL.time_kernel(narrow).seconds
    assert step.time_kernel(wide).seconds > 1.2 * MODEL.time_kernel(wide).seconds
