"""Formats with scales: rates predict shapes that they have not seen, and constants come back from rows."""

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
SIZES = (256, 512, 1024, 2048, 4096, 8192)


def _narrow(fits: AcceleratorFits) -> list[KernelFitEvaluation]:
    return [
        evaluation
        for evaluation in fits.evaluations
        if evaluation.kind.removeprefix("matmul ") in {dtype.value for dtype in LOW_PRECISION_DTYPES}
    ]


def test_low_precision_matmuls_are_predicted_within_ten_percent_left_out_by_shape(fits: AcceleratorFits) -> None:
    """The mean over all rows, each from those of other shapes; and of each accelerator and format within a fifth."""
    judged = _narrow(fits)
    measured = np.concatenate(
        [[row.seconds for row in kernel_fit_evaluation.samples] for kernel_fit_evaluation in judged]
    )
    errors = np.abs(np.concatenate([item.optimum.leave_one_out for item in judged]) / measured - 1.0)
    assert len(errors) >= 150
    assert np.mean(errors) <= 0.10
    assert {element.kind.removeprefix("matmul ") for element in judged} == {
        dtype.value for dtype in LOW_PRECISION_DTYPES
    }
    assert max(entry.quality.loo_mape for entry in judged) <= 0.20


def test_every_format_that_an_accelerator_has_kernels_for_has_a_share_and_a_source(fits: AcceleratorFits) -> None:
    for name, efficiency in fits.efficiencies.items():
        accelerator = load_accelerator(name)
        assert all(dtype.peak_dtype in accelerator.peak for dtype in efficiency.matmul.shares), name
        assert bool(efficiency.matmul.shares) == ("formats" in accelerator.sources), name


def test_blocks_of_128_are_mxfp8_on_blackwell_and_slower_by_their_prologue_on_hopper(fits: AcceleratorFits) -> None:
    for name in ("b200-sxm-180gb", "gb200", "b300-sxm-288gb", "gb300"):
        shares = fits.efficiencies[name].matmul.shares
        assert shares[DType.FP8_BLOCKWISE] == shares[DType.MXFP8]
    hopper = fits.efficiencies["h100-sxm-80gb"].matmul
    assert hopper.prologue_of(DType.FP8_BLOCKWISE) > hopper.prologue_of(DType.FP8) > hopper.prologue


def test_casts_reach_less_than_other_streaming_kernels_where_rows_say_so(fits: AcceleratorFits) -> None:
    """A sixth less on Blackwell (torchao's kernels for MXFP8), a twenty-fifth on Hopper."""
    judged = [evaluation for evaluation in fits.evaluations if evaluation.kind == "casts"]
    assert {kernel_fit_evaluation.accelerator for kernel_fit_evaluation in judged} == {
        "h100-sxm-80gb",
        "b200-sxm-180gb",
    }
    assert all(item.quality.loo_mape <= 0.15 for item in judged)
    assert fits.efficiencies["b200-sxm-180gb"].casts < fits.efficiencies["h100-sxm-80gb"].casts < 1.0


def _with(dtype: DType, share: float, prologue: float | None = None, start: float | None = None) -> Accelerator:
    matmul = H100.efficiency.matmul.with_peak_fraction(dtype, share).with_format_overheads(dtype, prologue, start)
    return replace(H100, efficiency=replace(H100.efficiency, matmul=matmul))


def _rows(truth: Accelerator, dtype: DType) -> list[MatmulMeasurement]:
    """What products of all kinds of shapes take by an accelerator's constants."""
    shapes = [MatmulShape(m, n, k) for m in SIZES for n in (1024, 8192) for k in (512, 4096)]
    made: list[MatmulMeasurement] = []
    for shape in shapes:
        moved = (shape.m + shape.n) * shape.k * dtype.bytes + shape.m * shape.n * 2.0
        kernel = Kernel("x", KernelKind.MATMUL, dtype, 2.0 * shape.m * shape.n * shape.k, moved, shape)
        made.append(MatmulSample("x", shape, dtype, moved, Roofline(truth).time_kernel(kernel).seconds))
    return made


@pytest.mark.parametrize(("prologue", "start"), [(None, None), (256.0, None), (None, 2e-6), (384.0, 1e-6)])
def test_a_format_has_what_of_its_own_its_rows_say_and_no_more(prologue: float | None, start: float | None) -> None:
    truth = _with(DType.MXFP8, 0.6, prologue, start)
    found, winner = fit_low_precision_matmul(_with(DType.MXFP8, 0.8), _rows(truth, DType.MXFP8))
    assert found.shares[DType.MXFP8] == 0.6
    assert found.prologues.get(DType.MXFP8) == prologue
    assert found.starts.get(DType.MXFP8) == pytest.approx(start)
    assert winner.predicted == pytest.approx(winner.leave_one_out)


def test_few_shapes_give_a_share_alone() -> None:
    """Seven of them, where two constants want eight."""
    rows = _rows(_with(DType.MXFP8, 0.6, 256.0, 2e-6), DType.MXFP8)[:7]
    found, _ = fit_low_precision_matmul(_with(DType.MXFP8, 0.8), rows)
    assert DType.MXFP8 in found.shares
    assert DType.MXFP8 not in {**found.prologues, **found.starts}


def test_rows_of_one_shape_are_left_out_together() -> None:
    """Rows of 1 s, twice, and of 4 s: without its twin's help a row of 1 s is predicted to take 4 s."""
    search = GridSearch(np.array([1.0, 1.0, 4.0]), fold_keys=["one", "one", "other"])
    for value in (1.0, 2.0, 4.0):
        search.evaluate([(value,)], np.full((1, 3), value))
    assert search.optimum().leave_one_out.tolist() == [4.0, 4.0, 1.0]


def test_a_set_takes_what_its_products_take() -> None:
    """Of Transformer Engine's sets of four, a fit of the products' own sum gives the constants back."""
    dtype = DType.MXFP8
    (given, *_) = (matmul_set_sample for matmul_set_sample in matmul_set_samples() if matmul_set_sample.dtype is dtype)
    assert len(given.matmuls) == 4
    known = replace(own(B200, dtype), shares=np.array([0.5]))
    alone = [search_matmul(B200, [replace(matmul, seconds=1.0)], known).predicted[0] for matmul in given.matmuls]
    together = search_matmul(B200, [MatmulSetSample(given.matmuls, 1.0)], known).predicted[0]
    assert together == pytest.approx(sum(alone))


def test_formats_without_rows_keep_a_siblings_distance_from_fp8() -> None:
    """H100 PCIe has no rows: with FP8 at half the sibling's share all are."""
    card = load_accelerator("h100-pcie-80gb")
    assert not any(row.accelerator == card.name for row in matmul_samples())
    found, judged = fit_low_precision_formats(card, SiblingReference(H100.efficiency, 0.5))
    assert not judged
    for dtype, share in found.efficiency.matmul.shares.items():
        assert share == pytest.approx(H100.efficiency.matmul.shares[dtype] / 2, abs=0.011)
    assert found.efficiency.matmul.prologues == H100.efficiency.matmul.prologues


def test_a_format_of_which_nothing_is_known_is_no_format_of_a_file() -> None:
    ampere = load_accelerator("a100-sxm-80gb").efficiency
    with pytest.raises(ValueError, match="fp8-rowwise: neither published"):
        fit_low_precision_formats(replace(B200, name="gb300"), SiblingReference(ampere, 1.0))


def test_casts_without_rows_are_the_siblings() -> None:
    card = load_accelerator("h100-pcie-80gb")
    assert fit_cast_share(card, H100.efficiency) == (H100.efficiency.casts, [])
    assert fit_cast_share(load_accelerator("a100-sxm-80gb"), H100.efficiency) == (1.0, [])
