"""Kernels take measured or interpolated times, with an error estimate and provenance."""

import math
from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CalibrationRecord, ProfileAnchor
from clustersim.cost.measured_kernels import MeasuredKernels, fitted_model
from clustersim.cost.record_kinds import MeasurementOutcome, RecordOrigin
from clustersim.cost.timing import Bottleneck, KernelTiming, Provenance
from clustersim.model.kernels import AttentionShape, Kernel, MatmulLayout, MatmulShape, MemoryBoundOp
from clustersim.model.training import AttentionBackend
from tests.cost.records import (
    H100,
    MODEL,
    attention_kernel,
    kernel_fit_of,
    kernel_sample,
    matmul_kernel,
    norm_kernel,
    record_of,
)

SIZES = (1024, 2048, 4096, 8192)
CUBE = [matmul_kernel(MatmulShape(m, n, k)) for m in SIZES for n in SIZES for k in SIZES]
INNER = matmul_kernel(MatmulShape(3000, 5000, 1536))
OUTER = matmul_kernel(MatmulShape(3000, 5000, 9000))


def model_seconds(kernel: Kernel) -> float:
    return MODEL.time_kernel(kernel).seconds


def drifting_seconds(kernel: Kernel) -> float:
    """The model's time plus an excess that grows as n shrinks: 10 % for 8192, 40 % for 1024."""
    shape = kernel.shape
    assert isinstance(shape, MatmulShape)
    return model_seconds(kernel) * (1.1 + 0.1 * math.log2(8192 / shape.n))


def measured_timing(record: CalibrationRecord, kernel: Kernel) -> KernelTiming:
    return MeasuredKernels(record, H100).time_kernel(kernel)


def test_a_measured_kernel_takes_its_median_and_errs_by_its_dispersion():
    """p5 and p95 are 3 % below and above the median."""
    timing = measured_timing(record_of(CUBE, drifting_seconds, dispersion=0.03), CUBE[7])
    assert timing.seconds == drifting_seconds(CUBE[7])
    assert timing.provenance is Provenance.MEASURED
    assert timing.error == pytest.approx(0.03)
    assert timing.bottleneck is MODEL.time_kernel(CUBE[7]).bottleneck


def test_no_kernel_takes_less_than_its_launches():
    """4 launches of 3 us are more than the 5 us that the device was busy, and less than 50 us."""
    for busy, seconds, bound in (
        (5e-6, 12e-6, Bottleneck.LAUNCH),
        (50e-6, 50e-6, MODEL.time_kernel(CUBE[0]).bottleneck),
    ):
        kernel = replace(CUBE[0], launches=4)
        timing = measured_timing(replace(record_of([kernel], lambda _, busy=busy: busy), launch_interval=3e-6), kernel)
        assert timing.seconds == pytest.approx(seconds)
        assert timing.bottleneck is bound


def test_lookup_ignores_names_but_not_shapes_formats_and_layouts():
    record = record_of(CUBE, drifting_seconds)
    measured_kernel = CUBE[7]
    assert measured_kernel.shape is not None
    assert measured_timing(record, replace(measured_kernel, name="mlp.up")).provenance is Provenance.MEASURED
    others = (
        replace(measured_kernel, dtype=DType.FP16),
        replace(measured_kernel, shape=replace(measured_kernel.shape, operands=MatmulLayout.TN)),
        replace(measured_kernel, shape=replace(measured_kernel.shape, accumulated=DType.FP32)),
    )
    assert {measured_timing(record, other).provenance for other in others} == {Provenance.PUBLISHED}


def test_interpolation_is_within_the_stated_error():
    timing = measured_timing(record_of(CUBE, drifting_seconds), INNER)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.error is not None
    assert timing.error < 0.05
    assert timing.seconds == pytest.approx(drifting_seconds(INNER), rel=timing.error)
    assert timing.bottleneck is MODEL.time_kernel(INNER).bottleneck


def test_samples_equal_to_the_model_interpolate_exactly():
    timing = measured_timing(record_of(CUBE, model_seconds), INNER)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.seconds == model_seconds(INNER)
    assert timing.error == 0.0


def test_extrapolation_without_a_fit_uses_the_accelerators_model():
    assert measured_timing(record_of(CUBE, drifting_seconds), OUTER) == MODEL.time_kernel(OUTER)


def test_extrapolation_uses_the_fit_and_its_residual():
    record = replace(
        record_of(CUBE, drifting_seconds), kernel_fit=kernel_fit_of(matmul_bf16=0.08, rmsnorm_fused_bf16=0.2)
    )
    timing = measured_timing(record, OUTER)
    assert timing.seconds == model_seconds(OUTER)
    assert timing.provenance is Provenance.FITTED
    assert timing.error == 0.08


def test_kernels_without_a_residual_take_the_worst_familys():
    record = replace(
        record_of(CUBE, drifting_seconds), kernel_fit=kernel_fit_of(matmul_bf16=0.08, rmsnorm_fused_bf16=0.2)
    )
    assert measured_timing(record, norm_kernel(4096, 4096, MemoryBoundOp.LAYERNORM)).error == 0.2
    assert measured_timing(record, replace(OUTER, shape=None)).error == 0.2
    assert measured_timing(replace(record, kernel_fit=kernel_fit_of()), OUTER).error is None


def test_the_fit_replaces_the_datasheet():
    """Half the peak and bandwidth: a large matmul takes twice as long, apart from its start."""
    fitted = kernel_fit_of(matmul_bf16=0.1)
    half_rate = replace(
        fitted,
        peak={dtype: rate / 2.0 for dtype, rate in fitted.peak.items()},
        memory_bandwidth=fitted.memory_bandwidth / 2.0,
        efficiency=replace(fitted.efficiency, kernel_latency=0.0),
    )
    full_rate = replace(fitted, efficiency=half_rate.efficiency)
    kernel = matmul_kernel(MatmulShape(16384, 16384, 16384))
    slow, fast = (
        measured_timing(replace(record_of([], model_seconds), kernel_fit=kernel_fit), kernel).seconds
        for kernel_fit in (half_rate, full_rate)
    )
    assert slow == pytest.approx(2.0 * fast, rel=1e-12)
    assert fitted_model(None, H100).time_kernel(kernel) == MODEL.time_kernel(kernel)


def test_a_flat_hull_contains_only_its_own_plane():
    """All samples have the same k."""
    plane = record_of([kernel for kernel in CUBE if kernel.shape.k == 4096], drifting_seconds)
    assert measured_timing(plane, matmul_kernel(MatmulShape(3000, 5000, 4096))).provenance is Provenance.INTERPOLATED
    assert measured_timing(plane, matmul_kernel(MatmulShape(3000, 5000, 4097))).provenance is Provenance.PUBLISHED


def test_another_layout_interpolates_in_its_own_hull_from_all_samples():
    """Samples of both layouts take 30 % more than modelled; of TN there are the eight corners."""
    corners = [
        matmul_kernel(MatmulShape(m, n, k, operands=MatmulLayout.TN))
        for m in (1024, 8192)
        for n in (1024, 8192)
        for k in (1024, 8192)
    ]
    transposed = replace(INNER, shape=MatmulShape(3000, 5000, 1536, operands=MatmulLayout.TN))
    assert (
        measured_timing(record_of(CUBE, lambda kernel: 1.3 * model_seconds(kernel)), transposed).provenance
        is Provenance.PUBLISHED
    )
    timing = measured_timing(record_of([*CUBE, *corners], lambda kernel: 1.3 * model_seconds(kernel)), transposed)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.seconds == pytest.approx(1.3 * model_seconds(transposed), rel=0.01)


def test_failed_samples_are_ignored():
    record = record_of(CUBE, drifting_seconds)
    failed = replace(kernel_sample(CUBE[7], 1.0), time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY)
    failed_only = replace(record, kernels=(failed,))
    assert measured_timing(failed_only, CUBE[7]) == MODEL.time_kernel(CUBE[7])


def test_attention_interpolates_over_length_and_heads_not_masks():
    """Batch x heads is one coordinate: 2 x 16 lies where 1 x 32 does."""

    def shape(batch: int, length: int, heads: int, *, causal: bool = True) -> AttentionShape:
        return AttentionShape(batch, length, length, heads, heads // 4, 128, causal)

    kernels = [
        attention_kernel(shape(1, length, heads)) for length in (1024, 2048, 4096, 8192) for heads in (8, 16, 32)
    ]
    record = record_of(kernels, lambda kernel: 1.2 * model_seconds(kernel))
    interpolated = measured_timing(record, attention_kernel(shape(2, 3000, 16)))
    assert interpolated.provenance is Provenance.INTERPOLATED
    assert interpolated.seconds == pytest.approx(1.2 * model_seconds(attention_kernel(shape(2, 3000, 16))), rel=0.01)
    assert (
        measured_timing(record, attention_kernel(shape(2, 3000, 16, causal=False))).provenance is Provenance.PUBLISHED
    )
    assert measured_timing(record, attention_kernel(shape(2, 3000, 32))).provenance is Provenance.PUBLISHED


def test_elementwise_kernels_interpolate_by_size_and_norms_by_width():
    """2^26 elements in rows of another width; a norm reduces over rows, so its width is a coordinate."""
    sums, norms = (
        record_of([norm_kernel(size, 4096, routine) for size in (4096, 65536)], model_seconds)
        for routine in (MemoryBoundOp.RESIDUAL, MemoryBoundOp.RMSNORM)
    )
    assert measured_timing(sums, norm_kernel(8192, 8192, MemoryBoundOp.RESIDUAL)).provenance is Provenance.INTERPOLATED
    assert measured_timing(norms, norm_kernel(8192, 8192)).provenance is Provenance.PUBLISHED
    assert measured_timing(norms, norm_kernel(16384, 4096)).provenance is Provenance.INTERPOLATED


@pytest.mark.parametrize(
    ("origin", "stands"), [(RecordOrigin.PUBLISHED, Provenance.PUBLISHED), (RecordOrigin.DERIVED, Provenance.DERIVED)]
)
def test_unmeasured_records_never_have_measured_provenance(origin: RecordOrigin, stands: Provenance):
    record = replace(record_of(CUBE, drifting_seconds), kernel_fit=kernel_fit_of(matmul_bf16=0.08), origin=origin)
    local_record = record_of(CUBE, drifting_seconds)
    for kernel in (CUBE[7], INNER, OUTER):
        timing = measured_timing(record, kernel)
        assert (timing.provenance, timing.error) == (stands, None), "errors are of other machines"
        assert timing.seconds == pytest.approx(measured_timing(local_record, kernel).seconds, rel=1e-12)


def test_a_single_sample_has_the_models_error():
    """2 x 16 heads lie where 1 x 32 do; with no other sample, the leave-one-out error is the model's."""
    sampled, queried = (attention_kernel(AttentionShape(b, 2048, 2048, h, h, 128, True)) for b, h in ((1, 32), (2, 16)))
    timing = measured_timing(record_of([sampled], lambda kernel: 1.25 * model_seconds(kernel)), queried)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.error == pytest.approx(1.0 - 1.0 / 1.25)


PROFILE = ProfileAnchor("trace.json", 1, 2, 1.0, 1.0, 1.0, AttentionBackend.FLASH)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.8])
def test_profiled_kernels_are_the_anchor_of_others(factor: float):
    """Where all samples differ from the model by one factor, so does a kernel of any size; it is no measurement."""
    record = record_of(CUBE[:8], lambda kernel: factor * MODEL.time_kernel(kernel).seconds)
    assert measured_timing(record, OUTER).provenance is not Provenance.FITTED
    timing = measured_timing(replace(record, profile=PROFILE), OUTER)
    assert timing.seconds == pytest.approx(factor * MODEL.time_kernel(OUTER).seconds)
    assert timing.provenance is Provenance.FITTED
    assert timing.error == pytest.approx(0.0, abs=0.05)  # the leave-one-out error approaches the model


def test_one_profiled_kernel_is_less_sure_of_others_the_farther_they_are():
    record = replace(record_of([CUBE[7]], lambda kernel: 1.5 * MODEL.time_kernel(kernel).seconds), profile=PROFILE)
    shape = CUBE[7].shape
    assert isinstance(shape, MatmulShape)
    errors = [
        measured_timing(record, matmul_kernel(replace(shape, m=shape.m * multiple))).error for multiple in (2, 4, 16)
    ]
    assert all(error is not None and 0.0 < error < 0.5 for error in errors)
    assert errors == sorted(errors)


def test_absent_kernels_take_no_time_at_any_size():
    """In their family, unless others of it were there."""
    absent = replace(kernel_sample(CUBE[0], 1.0), time=None, outcome=MeasurementOutcome.ABSENT)
    record = replace(record_of([norm_kernel(10, 20)], lambda _: 1e-5), profile=PROFILE)
    only_absent = replace(record, kernels=(*record.kernels, absent))
    assert [measured_timing(only_absent, kernel).seconds for kernel in (CUBE[0], OUTER)] == [0.0, 0.0]
    with_another = replace(only_absent, kernels=(*only_absent.kernels, kernel_sample(CUBE[1], 1e-3)))
    assert measured_timing(with_another, CUBE[0]).seconds == 0.0
    assert measured_timing(with_another, OUTER).seconds > 0.0


def test_places_of_a_step_are_averaged():
    """The dispersion over places is no error of their mean, which a step takes."""
    record = record_of([CUBE[7]], drifting_seconds, dispersion=0.03)
    (sample,) = record.kernels
    assert sample.time is not None
    profiled = replace(record, profile=PROFILE, kernels=(replace(sample, time=replace(sample.time, repetitions=9)),))
    assert measured_timing(profiled, CUBE[7]).error == pytest.approx(0.01)
