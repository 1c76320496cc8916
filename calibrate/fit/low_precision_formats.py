"""How fast are products and casts in formats with scales, where they were published and where not?

An accelerator's file says in which of these formats it computes. The share of its peak that each has is

- fitted to its own rows, or to those of the same chip;
- in FP8, for want of own rows, as far from that of the other formats as its best FP8 matmul of a search is from its
  best BF16 one; or as far from a sibling's as their best matmuls are from each other;
- in another format as far from FP8's as a sibling's is from its FP8's;
- where no library has kernels of a format and runs those of another instead, the other's: blocks of 128 on Blackwell
  and CDNA 4 are MXFP8, whose scales are repeated (NVIDIA/TransformerEngine pull request 2157; HazyResearch/HipKittens
  pull request 76).

Casts reach the bandwidth that other streaming kernels reach, or a part of it where that predicts unseen ones better;
without rows the sibling's part.
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

SHARE_DIGITS: Final = 2  # of a derived share
SUBSTITUTE_FORMATS: Final[Mapping[DType, DType]] = {DType.FP8_BLOCKWISE: DType.MXFP8}


@dataclass(frozen=True, slots=True)
class SiblingReference:
    """What formats without rows are relative to.

    sibling: whose constants they keep their distance from; fp8: FP8's share relative to the sibling's, or to that of
    the other formats where there is no sibling.
    """

    sibling: KernelEfficiency | None
    fp8_ratio: float


def fit_low_precision_formats(
    accelerator: Accelerator, reference: SiblingReference, same_chip_accelerators: Sequence[str] = ()
) -> tuple[Accelerator, list[KernelFitEvaluation]]:
    """The accelerator with the shares of all formats with scales that its file lists."""
    extended = _with_fp8_share(accelerator, reference)
    evaluations = []
    for dtype in extended.efficiency.matmul.shares:
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
    """The bandwidth that casts reach, relative to other streaming kernels."""
    samples = [sample for sample in cast_samples() if sample.accelerator == accelerator.name]
    if not samples:
        has_low_precision = bool(accelerator.efficiency.matmul.shares)
        return (sibling.casts if sibling is not None and has_low_precision else 1.0), []
    measured, fold_keys = np.array([sample.seconds for sample in samples]), [sample.kernel.shape for sample in samples]
    optima = []
    for shares in (np.array([1.0]), CAST_SHARE_GRID):
        search = GridSearch(measured, [sample.publication for sample in samples], fold_keys=fold_keys)
        search.evaluate([(float(share),) for share in shares], _cast_seconds(accelerator, samples, shares))
        optima.append(search.optimum())
    optimum = select_supported(optima, measured)
    return optimum.constants[0], [KernelFitEvaluation(accelerator.name, "casts", samples, optimum)]


def derived_kernel_shares(efficiency: KernelEfficiency, sibling: KernelEfficiency) -> Mapping[DType, float]:
    """Shares of one kernel for all experts as far from those of other products as a sibling's."""
    peak_shares, sibling_shares = efficiency.matmul.shares, sibling.expert_matmul.kernel_shares
    common_formats = (dtype for dtype in sibling_shares if dtype in peak_shares)
    return {
        dtype: round(sibling_shares[dtype] * peak_shares[dtype] / sibling.matmul.shares[dtype], SHARE_DIGITS)
        for dtype in common_formats
    }


def with_substitute_shares(efficiency: KernelEfficiency) -> KernelEfficiency:
    """The same where another format's kernels run a format's products of experts."""
    grouped, listed = efficiency.grouped, efficiency.matmul.shares
    if grouped is None:
        return efficiency
    shares = grouped.kernel_shares
    substituted = {
        dtype: shares[substitute]
        for dtype, substitute in SUBSTITUTE_FORMATS.items()
        if dtype in listed and substitute in shares
    }
    return replace(efficiency, grouped=replace(grouped, kernel_shares={**substituted, **shares}))


def _with_fp8_share(accelerator: Accelerator, reference: SiblingReference) -> Accelerator:
    """The accelerator with FP8's share, which the others' are relative to; nothing of the others."""
    listed = load_accelerator(accelerator.name).efficiency.matmul.shares
    matmul = replace(accelerator.efficiency.matmul, shares={}, prologues={}, starts={})
    base_share = matmul.share if reference.sibling is None else reference.sibling.matmul.peak_fraction_of(DType.FP8)
    share = round(base_share * reference.fp8_ratio, SHARE_DIGITS)
    extended = replace(matmul, shares=dict.fromkeys((item for item in LOW_PRECISION_DTYPES if item in listed), share))
    if reference.sibling is not None and DType.FP8 in listed:
        extended = _copy_overheads(extended, DType.FP8, reference.sibling.matmul, DType.FP8)
    return _with_matmul(accelerator, extended)


def _derive_missing(matmul: MatmulEfficiency, sibling: KernelEfficiency | None, fitted: set[DType]) -> MatmulEfficiency:
    """What has no rows."""
    missing = [d_type for d_type in matmul.shares if d_type not in fitted and d_type is not DType.FP8]
    substituted = [item for item in missing if SUBSTITUTE_FORMATS.get(item) in matmul.shares]
    for dtype in (element for element in missing if element not in substituted):
        if sibling is None or dtype not in sibling.matmul.shares:
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
    """With the prologue and start that another format has of its own."""
    return matmul.with_format_overheads(dtype, source.prologues.get(source_format), source.starts.get(source_format))


def _format_samples(dtype: DType, names: Sequence[str]) -> list[MatmulMeasurement]:
    all_samples: list[MatmulMeasurement] = [*matmul_samples(), *matmul_set_samples()]
    return [sample for sample in all_samples if sample.accelerator in names and sample.dtype is dtype]


def _cast_seconds(accelerator: Accelerator, samples: Sequence[CastSample], shares: FloatArray) -> FloatArray:
    """[parts, rows] of kernels that reach so much of what others reach."""
    efficiency = accelerator.efficiency
    transfer_seconds = np.array([sample.kernel.bytes for sample in samples]) / (
        accelerator.memory_bandwidth * efficiency.memory
    )
    latency_seconds = np.array([sample.kernel.launches for sample in samples]) * efficiency.kernel_latency
    seconds: FloatArray = transfer_seconds[None, :] / shares[:, None] + latency_seconds[None, :]
    return seconds


def _with_matmul(accelerator: Accelerator, matmul: MatmulEfficiency) -> Accelerator:
    return replace(accelerator, efficiency=replace(accelerator.efficiency, matmul=matmul))
