"""Formats with scales: fitted rates predict held-out shapes, and constants are recovered from samples."""

from dataclasses import replace

import numpy as np
import pytest

from calibrate.fit.fit_quality import AcceleratorFits, KernelFitEvaluation
from calibrate.fit.grid_search import GridSearch
from calibrate.fit.low_precision_formats import SiblingReference, fit_cast_share, fit_low_precision_formats
from calibrate.fit.matmul_constants import MatmulMeasurement, fit_low_precision_matmul, search_matmul
from calibrate.fit.matmul_constants import single_point_grid as own
from calibrate.fit.published_kernels import MatmulSample, MatmulSetSample, matmul_samples, matmul_set_samples
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape

H100, B200 = load_accelerator("h100-sxm-80gb"), load_accelerator("b200-sxm-180gb")
MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)


def _low_precision_evaluations(fits: AcceleratorFits) -> list[KernelFitEvaluation]:
    return [
        evaluation
        for evaluation in fits.evaluations
        if evaluation.kind.removeprefix("matmul ") in {dtype.value for dtype in LOW_PRECISION_DTYPES}
    ]


def test_low_precision_matmul_errors_are_below_10_percent(fits: AcceleratorFits) -> None:
    """Mean over all samples, held out by shape; below 20 % for every accelerator and format."""
    evaluations = _low_precision_evaluations(fits)
    measured = np.concatenate([[sample.seconds for sample in evaluation.samples] for evaluation in evaluations])
    errors = np.abs(
        np.concatenate([kernel_fit_evaluation.optimum.leave_one_out for kernel_fit_evaluation in evaluations])
        / measured
        - 1.0
    )
    assert len(errors) >= 150
    assert np.mean(errors) <= 0.10
    assert {item.kind.removeprefix("matmul ") for item in evaluations} == {
        dtype.value for dtype in LOW_PRECISION_DTYPES
    }
    assert max(element.quality.loo_mape for element in evaluations) <= 0.20


def test_formats_of_an_accelerator_have_shares_and_sources(fits: AcceleratorFits) -> None:
    for name, efficiency in fits.efficiencies.items():
        accelerator = load_accelerator(name)
        assert all(dtype.peak_dtype in accelerator.peak for dtype in efficiency.matmul.peak_fraction_by_format), name
        assert bool(efficiency.matmul.peak_fraction_by_format) == ("formats" in accelerator.sources), name


def test_blockwise_fp8_is_mxfp8_on_blackwell_and_slower_on_hopper(fits: AcceleratorFits) -> None:
    for name in ("b200-sxm-180gb", "gb200", "b300-sxm-288gb", "gb300"):
        shares = fits.efficiencies[name].matmul.peak_fraction_by_format
        assert shares[DType.FP8_BLOCKWISE] == shares[DType.MXFP8]
    hopper = fits.efficiencies["h100-sxm-80gb"].matmul
    assert hopper.prologue_of(DType.FP8_BLOCKWISE) > hopper.prologue_of(DType.FP8) > hopper.prologue


def test_casts_have_a_lower_share_than_other_memory_bound_kernels(fits: AcceleratorFits) -> None:
    """A sixth less on Blackwell (torchao's kernels for MXFP8), a twenty-fifth on Hopper."""
    evaluations = [evaluation for evaluation in fits.evaluations if evaluation.kind == "casts"]
    assert {kernel_fit_evaluation.accelerator for kernel_fit_evaluation in evaluations} == {
        "h100-sxm-80gb",
        "b200-sxm-180gb",
    }
    assert all(item.quality.loo_mape <= 0.15 for item in evaluations)
    assert (
        fits.efficiencies["b200-sxm-180gb"].quantization_bandwidth_ratio
        < fits.efficiencies["h100-sxm-80gb"].quantization_bandwidth_ratio
        < 1.0
    )


def _with_format(dtype: DType, share: float, prologue: float | None = None, start: float | None = None) -> Accelerator:
    matmul = H100.efficiency.matmul.with_peak_fraction(dtype, share).with_format_overheads(dtype, prologue, start)
    return replace(H100, efficiency=replace(H100.efficiency, matmul=matmul))


def _modelled_samples(truth: Accelerator, dtype: DType) -> list[MatmulMeasurement]:
    """Modelled times of matmuls of various shapes on an accelerator."""
    shapes = [MatmulShape(m, n, k) for m in MATMUL_SIZES for n in (1024, 8192) for k in (512, 4096)]
    samples: list[MatmulMeasurement] = []
    for shape in shapes:
        byte_count = (shape.m + shape.n) * shape.k * dtype.bytes + shape.m * shape.n * 2.0
        kernel = Kernel("x", KernelKind.MATMUL, dtype, 2.0 * shape.m * shape.n * shape.k, byte_count, shape)
        samples.append(MatmulSample("x", shape, dtype, byte_count, Roofline(truth).time_kernel(kernel).seconds))
    return samples


@pytest.mark.parametrize(("prologue", "start"), [(None, None), (256.0, None), (None, 2e-6), (384.0, 1e-6)])
def test_format_constants_are_recovered(prologue: float | None, start: float | None) -> None:
    truth = _with_format(DType.MXFP8, 0.6, prologue, start)
    efficiency, winner = fit_low_precision_matmul(_with_format(DType.MXFP8, 0.8), _modelled_samples(truth, DType.MXFP8))
    assert efficiency.peak_fraction_by_format[DType.MXFP8] == 0.6
    assert efficiency.prologue_by_format.get(DType.MXFP8) == prologue
    assert efficiency.kernel_latency_by_format.get(DType.MXFP8) == pytest.approx(start)
    assert winner.predicted == pytest.approx(winner.leave_one_out)


def test_few_shapes_only_fit_a_share() -> None:
    """Seven shapes, where two constants need eight."""
    samples = _modelled_samples(_with_format(DType.MXFP8, 0.6, 256.0, 2e-6), DType.MXFP8)[:7]
    efficiency, _ = fit_low_precision_matmul(_with_format(DType.MXFP8, 0.8), samples)
    assert DType.MXFP8 in efficiency.peak_fraction_by_format
    assert DType.MXFP8 not in {**efficiency.prologue_by_format, **efficiency.kernel_latency_by_format}


def test_samples_of_one_shape_are_left_out_together() -> None:
    """Samples of 1 s, twice, and of 4 s: without its twin a sample of 1 s is predicted to take 4 s."""
    search = GridSearch(np.array([1.0, 1.0, 4.0]), fold_keys=["one", "one", "other"])
    for value in (1.0, 2.0, 4.0):
        search.evaluate([(value,)], np.full((1, 3), value))
    assert search.optimum().leave_one_out.tolist() == [4.0, 4.0, 1.0]


def test_matmul_set_time_is_the_sum_of_its_matmuls() -> None:
    """Transformer Engine's sets of four matmuls: the predicted sum of the matmuls is the time of the set."""
    dtype = DType.MXFP8
    (matmul_set, *_) = (
        matmul_set_sample for matmul_set_sample in matmul_set_samples() if matmul_set_sample.dtype is dtype
    )
    assert len(matmul_set.matmuls) == 4
    grid = replace(own(B200, dtype), shares=np.array([0.5]))
    separate_seconds = [
        search_matmul(B200, [replace(matmul, seconds=1.0)], grid).predicted[0] for matmul in matmul_set.matmuls
    ]
    set_seconds = search_matmul(B200, [MatmulSetSample(matmul_set.matmuls, 1.0)], grid).predicted[0]
    assert set_seconds == pytest.approx(sum(separate_seconds))


def test_formats_without_samples_keep_the_sibling_ratio_to_fp8() -> None:
    """H100 PCIe has no samples: with FP8 at half the sibling's share, all formats are halved."""
    accelerator = load_accelerator("h100-pcie-80gb")
    assert not any(sample.accelerator == accelerator.name for sample in matmul_samples())
    fitted, evaluations = fit_low_precision_formats(accelerator, SiblingReference(H100.efficiency, 0.5))
    assert not evaluations
    for dtype, share in fitted.efficiency.matmul.peak_fraction_by_format.items():
        assert share == pytest.approx(H100.efficiency.matmul.peak_fraction_by_format[dtype] / 2, abs=0.011)
    assert fitted.efficiency.matmul.prologue_by_format == H100.efficiency.matmul.prologue_by_format


def test_format_without_any_source_is_refused() -> None:
    ampere = load_accelerator("a100-sxm-80gb").efficiency
    with pytest.raises(ValueError, match="fp8-rowwise: neither published"):
        fit_low_precision_formats(replace(B200, name="gb300"), SiblingReference(ampere, 1.0))


def test_casts_without_samples_use_the_sibling_share() -> None:
    accelerator = load_accelerator("h100-pcie-80gb")
    assert fit_cast_share(accelerator, H100.efficiency) == (H100.efficiency.quantization_bandwidth_ratio, [])
    assert fit_cast_share(load_accelerator("a100-sxm-80gb"), H100.efficiency) == (1.0, [])
