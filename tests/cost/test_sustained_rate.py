"""Kernels at a sustained rate: compute-bound ones are slower, memory- and launch-bound ones not; errors grow."""

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.cost.device_models import slowest_deviation
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.roofline import Roofline, power_limited_rate
from clustersim.cost.sustained_rate import AttentionLibraries, SustainedKernels, job_rate
from clustersim.cost.timing import Bottleneck, KernelTiming, Provenance
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.efficiency import TrainingDerating
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape
from clustersim.model.training import AttentionBackend
from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.kernels import compare_kernels, read_kernels
from tests.cost.records import H100, MODEL, attention_kernel, matmul_kernel, norm_kernel, record_of

LARGE = matmul_kernel(MatmulShape(8192, 8192, 8192))
THIN = matmul_kernel(MatmulShape(8192, 8192, 16))
SMALL = matmul_kernel(MatmulShape(64, 64, 64))
NORM = norm_kernel(8192, 8192)
FLASH = attention_kernel(AttentionShape(1, 32, 32, 4096, 4096, 128, causal=True))
KERNELS = st.builds(MatmulShape, *[st.integers(1, 1 << 14)] * 3).map(matmul_kernel) | st.sampled_from([NORM, FLASH])


FLASH_BACKENDS = [AttentionBackend(library) for library in H100.efficiency.known_attention]
NO_FASTER_THAN_TIMED = [
    AttentionBackend.FLASH, AttentionBackend.CUDNN, AttentionBackend.FLASH2, AttentionBackend.FLASH1,
    AttentionBackend.STANDARD,
]  # fmt: skip


def sustained_kernels(
    record: CalibrationRecord, rate: float, attention: AttentionBackend = AttentionBackend.FLASH
) -> SustainedKernels:
    standalone = MeasuredKernels(record, H100)
    libraries = AttentionLibraries(H100, attention, record.attention_library)
    return SustainedKernels.from_rate(standalone, standalone.model, rate=rate, attention=libraries)


def double_model_seconds(kernel: Kernel) -> float:
    return 2.0 * MODEL.time_kernel(kernel).seconds


def test_only_compute_bound_kernels_are_slowed_by_the_rate() -> None:
    """5.5 us of a large matmul are start and drain, unaffected by the clock; thin ones and norms are memory-bound."""
    latency = H100.efficiency.kernel_latency
    step = SustainedKernels.from_rate(MODEL, MODEL, rate=0.8)
    standalone_seconds = MODEL.time_kernel(LARGE).seconds
    assert step.time_kernel(LARGE).seconds == pytest.approx((standalone_seconds - latency) / 0.8 + latency)
    for kernel in (THIN, NORM):
        assert MODEL.time_kernel(kernel).bottleneck is Bottleneck.MEMORY
        assert step.time_kernel(kernel) == MODEL.time_kernel(kernel)


@given(st.floats(0.5, 0.99), st.floats(0.01, 1.5))
def test_a_kernel_draws_what_matmuls_draw_or_runs_at_the_full_clock(rate: float, utilization: float) -> None:
    """Power u f^3 at clock f equals that of matmuls at clock r, r^3, where u is above r^3; else the clock is full.

    A kernel that keeps tensor cores busier than matmuls do is not slowed more than these.
    """
    clock = power_limited_rate(rate, utilization)
    if utilization >= 1.0:
        assert clock == rate
    elif utilization > rate**3:
        assert utilization * clock**3 == pytest.approx(rate**3)
    else:
        assert clock == 1.0


@given(st.sampled_from(FLASH_BACKENDS), st.floats(0.5, 1.0))
def test_attention_is_slowed_as_its_use_of_tensor_cores_says(attention: AttentionBackend, rate: float) -> None:
    """Its compute-bound time is divided by the clock at the utilization that it has in isolation."""
    latency = H100.efficiency.kernel_latency
    isolated = Roofline(H100, attention=attention).time_kernel(FLASH).seconds - latency
    in_step = Roofline(H100, rate, attention=attention).time_kernel(FLASH).seconds - latency
    utilization = FLASH.flops / isolated / H100.peak_flops(DType.BF16) / H100.efficiency.matmul.peak_fraction
    assert in_step == pytest.approx(isolated / power_limited_rate(rate, utilization))


def test_slow_attention_runs_at_the_full_clock_under_700_w_and_not_under_500_w() -> None:
    """FlashAttention-2 uses a third of the peak, 0.45 of what matmuls do: above 0.7^3, and below 0.85^3."""
    kernel = attention_kernel(AttentionShape(1, 16384, 16384, 16, 16, 128, causal=True))
    isolated = Roofline(H100, attention=AttentionBackend.FLASH2).time_kernel(kernel).seconds
    for rate, is_slowed in ((0.85, False), (0.7, True)):
        seconds = Roofline(H100, rate, attention=AttentionBackend.FLASH2).time_kernel(kernel).seconds
        assert (seconds > isolated) is is_slowed
        assert seconds < isolated / rate


def test_measured_kernels_are_slowed_by_the_models_factor() -> None:
    """Samples of twice the model's time stay twice as long in the step; a norm takes its measured time exactly."""
    record, step = (
        record_of([LARGE, NORM], double_model_seconds),
        SustainedKernels.from_rate(MODEL, MODEL, rate=0.8),
    )
    measured_step = sustained_kernels(record, 0.8)
    assert measured_step.time_kernel(LARGE).seconds == pytest.approx(2.0 * step.time_kernel(LARGE).seconds)
    assert measured_step.time_kernel(NORM).seconds == double_model_seconds(NORM)
    assert measured_step.time_kernel(NORM).in_situ_slowdown == 1.0
    assert measured_step.time_kernel(LARGE).in_situ_slowdown == pytest.approx(1 / 0.8, rel=0.01)


@given(
    st.lists(KERNELS, min_size=1, max_size=8, unique=True),
    st.floats(0.5, 1.25),
    st.sampled_from(NO_FASTER_THAN_TIMED),
)
def test_a_record_equal_to_the_model_equals_it_in_a_step_too(
    kernels: list[Kernel], rate: float, attention: AttentionBackend
) -> None:
    """Exactly, whatever the kernel's bottleneck and the rate."""
    record = record_of(kernels, lambda kernel: MODEL.time_kernel(kernel).seconds)
    model = replace(MODEL, attention=attention)
    measured_step, model_step = (
        sustained_kernels(record, rate, attention),
        SustainedKernels.from_rate(model, model, rate=rate),
    )
    for kernel in kernels:
        expected = model_step.time_kernel(kernel).seconds
        assert measured_step.time_kernel(kernel).seconds == pytest.approx(expected, rel=1e-14)
        assert measured_step.time_kernel(kernel).bottleneck is model_step.time_kernel(kernel).bottleneck


@given(KERNELS, st.floats(0.5, 1.25))
def test_without_a_record_kernels_take_the_roofline_time_at_the_rate(kernel: Kernel, rate: float) -> None:
    timing = SustainedKernels.from_rate(MODEL, MODEL, rate=rate).time_kernel(kernel)
    expected = Roofline(H100, rate).time_kernel(kernel)
    assert replace(timing, in_situ_slowdown=1.0) == expected


@given(KERNELS, st.floats(0.01, 0.5))
def test_without_derating_measured_kernels_are_unchanged(kernel: Kernel, dispersion: float) -> None:
    """As on a CPU: no accelerator file says that its steps are slower than its kernels."""
    record = record_of([kernel], double_model_seconds, dispersion)
    step = sustained_kernels(record, job_rate(TrainingDerating(), 1024), record.attention_library)
    assert step.time_kernel(kernel) == MeasuredKernels(record, H100).time_kernel(kernel)


def test_the_interval_of_a_measured_kernel_starts_at_its_standalone_time() -> None:
    """The lower bound is seconds / (1 + error): an exactly repeatable sample is not expected to get faster."""
    timing = sustained_kernels(record_of([LARGE], double_model_seconds), 0.8).time_kernel(LARGE)
    assert timing.error is not None
    assert timing.seconds / (1.0 + timing.error) == pytest.approx(double_model_seconds(LARGE))
    spread = sustained_kernels(record_of([LARGE], double_model_seconds, 0.1), 0.8).time_kernel(LARGE)
    assert spread.error == pytest.approx(timing.error + 0.1)


@pytest.mark.parametrize("origin", [RecordOrigin.PUBLISHED, RecordOrigin.DERIVED])
def test_unmeasured_records_are_derated_too(origin: RecordOrigin) -> None:
    record = record_of([LARGE], double_model_seconds)
    timing = sustained_kernels(replace(record, origin=origin), 0.8).time_kernel(LARGE)
    assert timing.seconds == sustained_kernels(record, 0.8).time_kernel(LARGE).seconds
    assert timing.error is None


def test_launch_bound_kernels_are_not_slowed() -> None:
    """A host that needs 1 ms for each launch: the kernel waits for it, whatever its clock."""
    record = replace(record_of([SMALL], lambda _: 1e-6), launch_interval=1e-3)
    assert sustained_kernels(record, 0.5).time_kernel(SMALL) == KernelTiming(
        1e-3, Provenance.MEASURED, Bottleneck.LAUNCH, 0.0
    )


def test_the_slowest_gpu_sets_the_rate() -> None:
    derating = TrainingDerating(sustained_ratio=0.9, gpu_spread=0.02)
    assert job_rate(derating, 1) == 0.9
    assert job_rate(derating, 1024) == pytest.approx(0.9 / (1.0 + 0.02 * slowest_deviation(1024)))


@given(st.sampled_from(FLASH_BACKENDS), st.sampled_from(FLASH_BACKENDS))
def test_another_library_is_relative_to_the_timed_one(requested: AttentionBackend, timed: AttentionBackend) -> None:
    """A slower one takes as much longer as in the model; a faster one is not faster than what was measured.

    The libraries of the measured system may have no faster one.
    """
    seconds = {library: Roofline(H100, attention=library).time_kernel(FLASH).seconds for library in (requested, timed)}
    standalone = MeasuredKernels(record_of([FLASH], double_model_seconds), H100)
    step = SustainedKernels.from_rate(
        standalone, standalone.model, rate=1.0, attention=AttentionLibraries(H100, requested, timed)
    )
    ratio = max(1.0, seconds[requested] / seconds[timed])
    assert step.time_kernel(FLASH).seconds == pytest.approx(ratio * double_model_seconds(FLASH))


@given(st.sampled_from(FLASH_BACKENDS), st.floats(0.5, 1.0))
def test_without_a_record_every_library_is_as_fast_as_its_constants(attention: AttentionBackend, rate: float) -> None:
    """Each is fitted to rates of it on this accelerator, so none bounds another, as a measured one does."""
    model = replace(MODEL, attention=attention)
    step = SustainedKernels.from_rate(model, model, rate=rate)
    assert step.time_kernel(FLASH).seconds == replace(model, in_step_rate=rate).time_kernel(FLASH).seconds


def test_standard_attention_leaves_flash_attention_kernels_as_they_are() -> None:
    libraries = AttentionLibraries(H100, AttentionBackend.STANDARD, AttentionBackend.FLASH)
    step = SustainedKernels.from_rate(MODEL, MODEL, rate=1.0, attention=libraries)
    assert step.time_kernel(FLASH) == MODEL.time_kernel(FLASH)


def test_a_record_measured_by_pytorch_has_pytorchs_attention() -> None:
    record = record_of([FLASH], double_model_seconds)
    assert record.attention_library is AttentionBackend.FLASH
    for torch, cudnn, library in (
        ("2.9.0", "9.10.2", AttentionBackend.FLASH2),
        ("2.10.0+cu128", "", AttentionBackend.FLASH2),
        ("2.11.0+cu130", "9.19.0", AttentionBackend.SDPA),
    ):
        device = replace(record.device, torch=torch, cudnn=cudnn)
        assert replace(record, device=device).attention_library is library


@pytest.mark.parametrize("kind", list(KernelKind))
def test_an_older_library_slows_only_attention(kind: KernelKind) -> None:
    """And the scaled time counts as derived, not measured."""
    kernel = replace(FLASH, kind=kind)
    record = record_of([kernel], lambda _: 3.0, 0.1)
    timing = sustained_kernels(record, 1.0, AttentionBackend.FLASH2).time_kernel(kernel)
    is_attention = kind in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)
    assert (timing.seconds > 3.3) is is_attention
    assert is_attention or timing.seconds == pytest.approx(3.0)
    assert timing.provenance is (Provenance.DERIVED if is_attention else Provenance.MEASURED)
    assert timing.error == (None if is_attention else pytest.approx(0.1))


def test_low_precision_matmuls_have_a_separate_sustained_rate() -> None:
    """Both compute-bound, rates 0.8 and 0.8 x 1.25 = 1: the low-precision matmul takes its standalone time."""
    step = SustainedKernels.from_rate(MODEL, MODEL, rate=0.8, low_precision_factor=1.25)
    sizes = MatmulShape(8192, 8192, 8192)
    high_precision, low_precision = (
        Kernel("product", KernelKind.MATMUL, dtype, 2.0 * 8192**3, 3.0 * 8192**2 * dtype.bytes, sizes)
        for dtype in (DType.BF16, DType.FP8)
    )
    assert step.time_kernel(low_precision).seconds == MODEL.time_kernel(low_precision).seconds
    assert step.time_kernel(high_precision).seconds > 1.2 * MODEL.time_kernel(high_precision).seconds


@pytest.mark.parametrize("gpu", ["b200-sxm-180gb", "gb200", "gb300"])
def test_attention_ratio_is_that_of_the_longest_published_kernels(gpu: str) -> None:
    """Over that of the fastest with as many heads, each relative to what the constants give for its shape."""
    ratios = []
    for direction in ("fwd", "bwd"):
        cases = [case for case in read_kernels() if _is_cudnn(case, gpu, direction)]
        rows = [(case.text("heads"), row) for case, row in zip(cases, compare_kernels(cases), strict=True)]
        heads, longest = max(rows, key=lambda item: item[1].measured)
        fastest = max(_relative_rate(row) for other_heads, row in rows if other_heads == heads)
        ratios.append(_relative_rate(longest) / fastest)
    assert load_accelerator(gpu).derating.attention_ratio == pytest.approx(fmean(ratios), abs=0.01)


def _relative_rate(comparison: CaseComparison) -> float:
    """The measured rate over the predicted one."""
    assert comparison.predicted is not None
    return comparison.predicted / comparison.measured


def _is_cudnn(case: ValidationCase, gpu: str, direction: str) -> bool:
    """Whether a row is cuDNN's attention in BF16 with heads of 128."""
    expected = {
        "op": "attention", "gpu": gpu.removesuffix("-sxm-180gb"), "source": "cudnn-frontend",
        "direction": direction, "dtype": "bf16", "head_dim": "128", "v_head_dim": "",
    }  # fmt: skip
    return all(case.text(column) == value for column, value in expected.items())


def test_attention_runs_at_its_own_rate_and_no_library_below_it() -> None:
    """0.93 where matmuls sustain 0.73; a library that draws less power is not slowed at all; matmuls are as before."""
    b200, kernel = (
        load_accelerator("b200-sxm-180gb"),
        attention_kernel(AttentionShape(1, 32768, 32768, 32, 32, 128, causal=True)),
    )
    factor = b200.derating.attention_speedup
    assert factor == pytest.approx(0.93 / 0.73)
    for library, rate in ((AttentionBackend.FLASH, 0.93), (AttentionBackend.FLASH2, 1.0)):
        isolated, step = (
            Roofline(b200, matmul_rate, attention=library, attention_factor=factor).time_kernel(kernel).seconds
            for matmul_rate in (1.0, b200.derating.sustained_ratio)
        )
        assert step == pytest.approx(isolated / rate, rel=0.01)
