"""Fit of matmul and cast constants of block-scaled formats, with fallbacks for formats that are not published.

An accelerator's file lists its block-scaled formats. The fraction of peak of each is

- fitted to the accelerator's own samples, or to those of the same chip;
- for FP8 without samples: that of the other formats times the ratio of its best FP8 to its best BF16 matmul
  of an exhaustive search; or a sibling's times the ratio of their best matmuls;
- for another format: FP8's times the sibling's ratio of that format to FP8;
- where libraries run a format with the kernels of another: the other's. Blocks of 128 on Blackwell and CDNA
  4 run as MXFP8 with repeated scales (NVIDIA/TransformerEngine pull request 2157; HazyResearch/HipKittens
  pull request 76).

Casts reach the bandwidth of other memory-bound kernels, or a fraction of it if that lowers the out-of-sample
error; without samples the sibling's fraction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.fit_quality import KernelFitEvaluation
from calibrate.fit.grid_search import GridSearch, select_supported
from calibrate.fit.matmul_constants import MatmulMeasurement, fit_low_precision_matmul
from calibrate.fit.memory_bound import CAST_SHARE_GRID
from calibrate.fit.published_kernels import CastSample, cast_samples, matmul_samples, matmul_set_samples
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.efficiency import KernelEfficiency, MatmulEfficiency

SHARE_DIGITS: Final = 2  # of a derived peak fraction
SUBSTITUTE_FORMATS: Final[Mapping[DType, DType]] = {DType.FP8_BLOCKWISE: DType.MXFP8}


@dataclass(frozen=True, slots=True)
class SiblingReference:
    """What constants of formats without samples are scaled from.

    sibling: accelerator whose ratios are kept; fp8_ratio: FP8's peak fraction relative to the sibling's, or to
    that of the other formats if there is no sibling.
    """

    sibling: KernelEfficiency | None
    fp8_ratio: float


def fit_low_precision_formats(
    accelerator: Accelerator, reference: SiblingReference, same_chip_accelerators: Sequence[str] = ()
) -> tuple[Accelerator, list[KernelFitEvaluation]]:
    """The accelerator with the peak fractions of all its block-scaled formats, and their evaluations."""
    extended = _with_fp8_share(accelerator, reference)
    evaluations = []
    for dtype in extended.efficiency.matmul.peak_fraction_by_format:
        samples = _format_samples(dtype, (accelerator.name, *same_chip_accelerators))
        if samples:
            constants, optimum = fit_low_precision_matmul(extended, samples)
            evaluations.append(KernelFitEvaluation(accelerator.name, f"matmul {dtype.value}", samples, optimum))
            extended = _with_matmul(extended, constants)
    fitted = {
        evaluation.samples[0].dtype for evaluation in evaluations if not isinstance(evaluation.samples[0], CastSample)
    }
    return _with_matmul(extended, _derive_missing(extended.efficiency.matmul, reference.sibling, fitted)), evaluations


def fit_cast_share(
    accelerator: Accelerator, sibling: KernelEfficiency | None
) -> tuple[float, list[KernelFitEvaluation]]:
    """Bandwidth of casts as a fraction of that of other memory-bound kernels, and its evaluation."""
    samples = [sample for sample in cast_samples() if sample.accelerator == accelerator.name]
    if not samples:
        has_low_precision = bool(accelerator.efficiency.matmul.peak_fraction_by_format)
        return (sibling.quantization_bandwidth_ratio if sibling is not None and has_low_precision else 1.0), []
    measured, fold_keys = np.array([sample.seconds for sample in samples]), [sample.kernel.shape for sample in samples]
    optima = []
    for shares in (np.array([1.0]), CAST_SHARE_GRID):
        search = GridSearch(measured, [sample.publication for sample in samples], fold_keys=fold_keys)
        search.evaluate([(float(share),) for share in shares], _cast_seconds(accelerator, samples, shares))
        optima.append(search.optimum())
    optimum = select_supported(optima, measured)
    return optimum.constants[0], [KernelFitEvaluation(accelerator.name, "casts", samples, optimum)]


def derived_kernel_shares(efficiency: KernelEfficiency, sibling: KernelEfficiency) -> Mapping[DType, float]:
    """Peak fractions of the grouped kernel: those of matmuls times a sibling's ratio of grouped kernel to matmul."""
    peak_shares, sibling_shares = (
        efficiency.matmul.peak_fraction_by_format,
        sibling.expert_matmul.kernel_peak_fraction_by_format,
    )
    common_formats = (dtype for dtype in sibling_shares if dtype in peak_shares)
    return {
        dtype: round(
            sibling_shares[dtype] * peak_shares[dtype] / sibling.matmul.peak_fraction_by_format[dtype], SHARE_DIGITS
        )
        for dtype in common_formats
    }


def with_substitute_shares(efficiency: KernelEfficiency) -> KernelEfficiency:
    """Add the grouped-kernel fraction of formats that run with another format's kernels."""
    grouped, listed = efficiency.grouped_gemm, efficiency.matmul.peak_fraction_by_format
    if grouped is None:
        return efficiency
    shares = grouped.kernel_peak_fraction_by_format
    substituted = {
        dtype: shares[substitute]
        for dtype, substitute in SUBSTITUTE_FORMATS.items()
        if dtype in listed and substitute in shares
    }
    return replace(efficiency, grouped_gemm=replace(grouped, kernel_peak_fraction_by_format={**substituted, **shares}))


def _with_fp8_share(accelerator: Accelerator, reference: SiblingReference) -> Accelerator:
    """The accelerator with FP8's peak fraction for all scaled formats, as the base that the others are relative to."""
    listed = load_accelerator(accelerator.name).efficiency.matmul.peak_fraction_by_format
    matmul = replace(
        accelerator.efficiency.matmul, peak_fraction_by_format={}, prologue_by_format={}, kernel_latency_by_format={}
    )
    base_share = (
        matmul.peak_fraction if reference.sibling is None else reference.sibling.matmul.peak_fraction_of(DType.FP8)
    )
    share = round(base_share * reference.fp8_ratio, SHARE_DIGITS)
    extended = replace(
        matmul,
        peak_fraction_by_format=dict.fromkeys((dtype for dtype in LOW_PRECISION_DTYPES if dtype in listed), share),
    )
    if reference.sibling is not None and DType.FP8 in listed:
        extended = _copy_overheads(extended, DType.FP8, reference.sibling.matmul, DType.FP8)
    return _with_matmul(accelerator, extended)


def _derive_missing(matmul: MatmulEfficiency, sibling: KernelEfficiency | None, fitted: set[DType]) -> MatmulEfficiency:
    """Constants of the formats that have no samples."""
    missing = [dtype for dtype in matmul.peak_fraction_by_format if dtype not in fitted and dtype is not DType.FP8]
    substituted = [dtype for dtype in missing if SUBSTITUTE_FORMATS.get(dtype) in matmul.peak_fraction_by_format]
    for dtype in (dtype for dtype in missing if dtype not in substituted):
        if sibling is None or dtype not in sibling.matmul.peak_fraction_by_format:
            raise ValueError(f"{dtype.value}: neither published for this accelerator nor known of a sibling")
        ratio = matmul.peak_fraction_of(DType.FP8) / sibling.matmul.peak_fraction_of(DType.FP8)
        share = round(sibling.matmul.peak_fraction_of(dtype) * ratio, SHARE_DIGITS)
        matmul = _copy_overheads(matmul.with_peak_fraction(dtype, share), dtype, sibling.matmul, dtype)
    for dtype in substituted:
        substitute = SUBSTITUTE_FORMATS[dtype]
        matmul = _copy_overheads(
            matmul.with_peak_fraction(dtype, matmul.peak_fraction_of(substitute)), dtype, matmul, substitute
        )
    return matmul


def _copy_overheads(
    matmul: MatmulEfficiency, dtype: DType, source: MatmulEfficiency, source_format: DType
) -> MatmulEfficiency:
    """Copy the format-specific prologue and latency of another format."""
    return matmul.with_format_overheads(
        dtype, source.prologue_by_format.get(source_format), source.kernel_latency_by_format.get(source_format)
    )


def _format_samples(dtype: DType, names: Sequence[str]) -> list[MatmulMeasurement]:
    all_samples: list[MatmulMeasurement] = [*matmul_samples(), *matmul_set_samples()]
    return [sample for sample in all_samples if sample.accelerator in names and sample.dtype is dtype]


def _cast_seconds(accelerator: Accelerator, samples: Sequence[CastSample], shares: FloatArray) -> FloatArray:
    """Seconds of casts that reach a fraction of the memory-bound bandwidth: [shares, samples]."""
    efficiency = accelerator.efficiency
    bandwidth = efficiency.reached_bandwidth(accelerator.memory_bandwidth)
    transfer_seconds = np.array([sample.kernel.bytes for sample in samples]) / bandwidth
    latency_seconds = np.array([sample.kernel.launches for sample in samples]) * efficiency.kernel_latency
    seconds: FloatArray = transfer_seconds[None, :] / shares[:, None] + latency_seconds[None, :]
    return seconds


def _with_matmul(accelerator: Accelerator, matmul: MatmulEfficiency) -> Accelerator:
    return replace(accelerator, efficiency=replace(accelerator.efficiency, matmul=matmul))
