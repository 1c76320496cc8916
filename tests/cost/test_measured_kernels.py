"""Kernels take what was measured, or what lies between, and say how well that is known."""

import math
from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import CalibrationRecord, MeasurementOutcome, RecordOrigin
from clustersim.cost.measured_kernels import MeasuredKernels, fitted_model
from clustersim.cost.timing import Bottleneck, KernelTiming, Provenance
from clustersim.model.kernels import AttentionShape, Kernel, MatmulLayout, MatmulShape, MemoryBoundOp
from tests.cost.records import H100, MODEL, attention, fit, measured, product, row, streamed

SIZES = (1024, 2048, 4096, 8192)
CUBE = [product(MatmulShape(m, n, k)) for m in SIZES for n in SIZES for k in SIZES]
INNER = product(MatmulShape(3000, 5000, 1536))
OUTER = product(MatmulShape(3000, 5000, 9000))


def modelled(kernel: Kernel) -> float:
    return MODEL.time_kernel(kernel).seconds


def drifting(kernel: Kernel) -> float:
    """The model, and more the smaller n is: 10 % for 8192, 40 % for 1024."""
    shape = kernel.shape
    assert isinstance(shape, MatmulShape)
    return modelled(kernel) * (1.1 + 0.1 * math.log2(8192 / shape.n))


def timed(record: CalibrationRecord, kernel: Kernel) -> KernelTiming:
    return MeasuredKernels(record, H100).time_kernel(kernel)


def test_a_measured_kernel_takes_its_median_and_errs_by_its_dispersion():
    """p5 and p95 are 3 % below and above the median."""
    timing = timed(measured(CUBE, drifting, dispersion=0.03), CUBE[7])
    assert timing.seconds == drifting(CUBE[7])
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
        timing = timed(replace(measured([kernel], lambda _, busy=busy: busy), launch_interval=3e-6), kernel)
        assert timing.seconds == pytest.approx(seconds)
        assert timing.bottleneck is bound


def test_names_make_no_difference_but_shapes_formats_and_layouts_do():
    record = measured(CUBE, drifting)
    known = CUBE[7]
    assert known.shape is not None
    assert timed(record, replace(known, name="mlp.up")).provenance is Provenance.MEASURED
    others = (
        replace(known, dtype=DType.FP16),
        replace(known, shape=replace(known.shape, operands=MatmulLayout.TN)),
        replace(known, shape=replace(known.shape, accumulated=DType.FP32)),
    )
    assert {timed(record, other).provenance for other in others} == {Provenance.PUBLISHED}


def test_between_measured_kernels_the_law_comes_back_within_the_stated_error():
    timing = timed(measured(CUBE, drifting), INNER)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.error is not None
    assert timing.error < 0.05
    assert timing.seconds == pytest.approx(drifting(INNER), rel=timing.error)
    assert timing.bottleneck is MODEL.time_kernel(INNER).bottleneck


def test_where_rows_follow_the_model_so_does_what_lies_between():
    timing = timed(measured(CUBE, modelled), INNER)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.seconds == modelled(INNER)
    assert timing.error == 0.0


def test_beyond_measured_kernels_the_accelerators_own_model_answers_without_a_fit():
    assert timed(measured(CUBE, drifting), OUTER) == MODEL.time_kernel(OUTER)


def test_beyond_measured_kernels_the_fitted_model_answers_with_its_residual():
    record = replace(measured(CUBE, drifting), kernel_fit=fit(matmul_bf16=0.08, rmsnorm_fused_bf16=0.2))
    timing = timed(record, OUTER)
    assert timing.seconds == modelled(OUTER)
    assert timing.provenance is Provenance.FITTED
    assert timing.error == 0.08


def test_what_has_no_residual_of_its_own_errs_as_the_worst_family():
    record = replace(measured(CUBE, drifting), kernel_fit=fit(matmul_bf16=0.08, rmsnorm_fused_bf16=0.2))
    assert timed(record, streamed(4096, 4096, MemoryBoundOp.LAYERNORM)).error == 0.2
    assert timed(record, replace(OUTER, shape=None)).error == 0.2
    assert timed(replace(record, kernel_fit=fit()), OUTER).error is None


def test_the_fit_stands_for_the_datasheet():
    """Half the peak and bandwidth: a large product takes twice as long, but for its start."""
    known = fit(matmul_bf16=0.1)
    half = replace(
        known,
        peak={dtype: rate / 2.0 for dtype, rate in known.peak.items()},
        memory_bandwidth=known.memory_bandwidth / 2.0,
        efficiency=replace(known.efficiency, kernel_latency=0.0),
    )
    whole = replace(known, efficiency=half.efficiency)
    kernel = product(MatmulShape(16384, 16384, 16384))
    slow, fast = (
        timed(replace(measured([], modelled), kernel_fit=kernel_fit), kernel).seconds for kernel_fit in (half, whole)
    )
    assert slow == pytest.approx(2.0 * fast, rel=1e-12)
    assert fitted_model(None, H100).time_kernel(kernel) == MODEL.time_kernel(kernel)


def test_a_flat_hull_contains_only_its_own_plane():
    """All rows have the same k."""
    plane = measured([kernel for kernel in CUBE if kernel.shape.k == 4096], drifting)
    assert timed(plane, product(MatmulShape(3000, 5000, 4096))).provenance is Provenance.INTERPOLATED
    assert timed(plane, product(MatmulShape(3000, 5000, 4097))).provenance is Provenance.PUBLISHED


def test_another_layout_lies_between_only_rows_of_its_own_but_learns_from_all():
    """Rows of both layouts take 30 % more than modelled; of TN there are the eight corners."""
    corners = [
        product(MatmulShape(m, n, k, operands=MatmulLayout.TN))
        for m in (1024, 8192)
        for n in (1024, 8192)
        for k in (1024, 8192)
    ]
    turned = replace(INNER, shape=MatmulShape(3000, 5000, 1536, operands=MatmulLayout.TN))
    assert timed(measured(CUBE, lambda each: 1.3 * modelled(each)), turned).provenance is Provenance.PUBLISHED
    timing = timed(measured([*CUBE, *corners], lambda each: 1.3 * modelled(each)), turned)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.seconds == pytest.approx(1.3 * modelled(turned), rel=0.01)


def test_rows_that_were_not_measured_do_not_count():
    record = measured(CUBE, drifting)
    missing = replace(row(CUBE[7], 1.0), time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY)
    lonely = replace(record, kernels=(missing,))
    assert timed(lonely, CUBE[7]) == MODEL.time_kernel(CUBE[7])


def test_attention_lies_between_sequences_and_heads_but_never_across_masks():
    """Batch x heads count together: 2 x 16 lies where 1 x 32 does."""

    def shape(batch: int, length: int, heads: int, *, causal: bool = True) -> AttentionShape:
        return AttentionShape(batch, length, length, heads, heads // 4, 128, causal)

    kernels = [attention(shape(1, length, heads)) for length in (1024, 2048, 4096, 8192) for heads in (8, 16, 32)]
    record = measured(kernels, lambda each: 1.2 * modelled(each))
    between = timed(record, attention(shape(2, 3000, 16)))
    assert between.provenance is Provenance.INTERPOLATED
    assert between.seconds == pytest.approx(1.2 * modelled(attention(shape(2, 3000, 16))), rel=0.01)
    assert timed(record, attention(shape(2, 3000, 16, causal=False))).provenance is Provenance.PUBLISHED
    assert timed(record, attention(shape(2, 3000, 32))).provenance is Provenance.PUBLISHED


def test_what_works_on_elements_lies_between_numbers_of_elements_and_a_norm_between_widths():
    """2^26 elements in rows of another width; a norm's rows are summed, so its width counts."""
    sums, norms = (
        measured([streamed(size, 4096, routine) for size in (4096, 65536)], modelled)
        for routine in (MemoryBoundOp.RESIDUAL, MemoryBoundOp.RMSNORM)
    )
    assert timed(sums, streamed(8192, 8192, MemoryBoundOp.RESIDUAL)).provenance is Provenance.INTERPOLATED
    assert timed(norms, streamed(8192, 8192)).provenance is Provenance.PUBLISHED
    assert timed(norms, streamed(16384, 4096)).provenance is Provenance.INTERPOLATED


@pytest.mark.parametrize(
    ("origin", "stands"), [(RecordOrigin.PUBLISHED, Provenance.PUBLISHED), (RecordOrigin.DERIVED, Provenance.DERIVED)]
)
def test_what_was_not_measured_here_is_never_called_so(origin: RecordOrigin, stands: Provenance):
    record = replace(measured(CUBE, drifting), kernel_fit=fit(matmul_bf16=0.08), origin=origin)
    here = measured(CUBE, drifting)
    for kernel in (CUBE[7], INNER, OUTER):
        timing = timed(record, kernel)
        assert (timing.provenance, timing.error) == (stands, None), "errors are of other machines"
        assert timing.seconds == pytest.approx(timed(here, kernel).seconds, rel=1e-12)


def test_one_row_errs_as_its_model_does():
    """2 x 16 heads lie where 1 x 32 do; nothing else was measured, so what is left out is met by the model alone."""
    one, other = (attention(AttentionShape(b, 2048, 2048, h, h, 128, True)) for b, h in ((1, 32), (2, 16)))
    timing = timed(measured([one], lambda each: 1.25 * modelled(each)), other)
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.error == pytest.approx(1.0 - 1.0 / 1.25)
