"""Fit of grouped matmuls (experts of a mixture) of all accelerators to published kernels.

The grid searches are those of `calibrate.fit.grouped_gemm`. Accelerators without samples take a sibling's rates,
scaled as their other matmuls are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from calibrate.fit.fit_quality import KernelFitEvaluation
from calibrate.fit.fit_state import with_constants
from calibrate.fit.grouped_gemm import fit_kernel_share, fit_low_precision_share, fit_streamed_gemm
from calibrate.fit.low_precision_formats import SHARE_DIGITS, derived_kernel_shares, with_substitute_shares
from calibrate.fit.published_kernels import GroupedGemmSample, grouped_gemm_samples
from clustersim.common.dtypes import LOW_PRECISION_DTYPES
from clustersim.common.units import Seconds
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.efficiency import GroupedGemmEfficiency, KernelEfficiency

# Accelerators whose grouped matmuls are fitted; the first has host-bound ones, whose host call time the others take.
GROUPED_GEMM_TARGETS: Final = ("b200-sxm-180gb", "a100-pcie-80gb", "mi355x", "mi300x")
# Sibling for grouped matmuls of an accelerator without samples: same architecture, else the next older one.
GROUPED_GEMM_SOURCES: Final = {
    **{"a100-sxm-80gb": "a100-pcie-80gb", "h100-sxm-80gb": "a100-pcie-80gb"},
    "mi300x": "mi355x",  # of which none is published that runs one matmul per expert
}


def fit_grouped_constants(
    efficiencies: Mapping[str, KernelEfficiency],
    siblings: Mapping[str, str],
    evaluations: Sequence[KernelFitEvaluation],
) -> tuple[Mapping[str, KernelEfficiency], Sequence[KernelFitEvaluation]]:
    """Fit the grouped matmuls of accelerators that have samples; the others' rates are scaled from them.

    The ratio to the rate of other matmuls is kept. siblings: whose constants an accelerator takes, by its name.
    """
    fitted: dict[str, GroupedGemmEfficiency] = {}
    all_evaluations, call_seconds = list(evaluations), None
    for name in (target_name for target_name in GROUPED_GEMM_TARGETS if target_name in efficiencies):
        source = GROUPED_GEMM_SOURCES.get(name, "")
        grouped = _scale_shares(fitted[source], efficiencies[source], efficiencies[name]) if source in fitted else None
        accelerator = replace(load_accelerator(name), efficiency=replace(efficiencies[name], grouped_gemm=grouped))
        fitted[name], evaluated = _fit_high_precision_experts(accelerator, call_seconds)
        all_evaluations.extend(evaluated)
        call_seconds = fitted[name].host_launch
    sibling_by_accelerator = {**siblings, **GROUPED_GEMM_SOURCES}
    derived = dict(efficiencies)
    for name, efficiency in efficiencies.items():
        ancestor: str | None = name
        while ancestor is not None and ancestor not in fitted:
            ancestor = sibling_by_accelerator.get(ancestor)
        if ancestor is not None:
            derived[name] = replace(
                efficiency, grouped_gemm=_scale_shares(fitted[ancestor], efficiencies[ancestor], efficiency)
            )
    return _fit_low_precision_experts(derived, sibling_by_accelerator, all_evaluations)


def _fit_low_precision_experts(
    efficiencies: Mapping[str, KernelEfficiency],
    sibling_by_accelerator: Mapping[str, str],
    evaluations: Sequence[KernelFitEvaluation],
) -> tuple[Mapping[str, KernelEfficiency], Sequence[KernelFitEvaluation]]:
    """Fit grouped kernels in block-scaled formats; without samples the sibling's ratio to matmuls is kept."""
    fitted_efficiencies, all_evaluations = dict(efficiencies), list(evaluations)
    for name, efficiency in efficiencies.items():
        sibling = fitted_efficiencies.get(sibling_by_accelerator.get(name, ""))
        derived_shares = {} if sibling is None else derived_kernel_shares(efficiency, sibling)
        grouped = (
            None
            if efficiency.grouped_gemm is None
            else replace(efficiency.grouped_gemm, kernel_peak_fraction_by_format=derived_shares)
        )
        accelerator = replace(load_accelerator(name), efficiency=replace(efficiency, grouped_gemm=grouped))
        for samples in _low_precision_expert_samples(name):
            fitted, optimum = fit_low_precision_share(accelerator, samples)
            accelerator = with_constants(accelerator, grouped_gemm=fitted)
            all_evaluations.append(
                KernelFitEvaluation(name, f"experts in one kernel {samples[0].dtype.value}", samples, optimum)
            )
        fitted_efficiencies[name] = with_substitute_shares(accelerator.efficiency)
    return fitted_efficiencies, all_evaluations


def _low_precision_expert_samples(name: str) -> list[list[GroupedGemmSample]]:
    """An accelerator's grouped-kernel samples, one list per block-scaled format."""
    samples = [sample for sample in grouped_gemm_samples() if sample.accelerator == name and not sample.is_streamed]
    return [
        format_samples
        for format_samples in (
            [sample for sample in samples if sample.dtype is dtype] for dtype in LOW_PRECISION_DTYPES
        )
        if format_samples
    ]


def _fit_high_precision_experts(
    accelerator: Accelerator, call_seconds: Seconds | None
) -> tuple[GroupedGemmEfficiency, list[KernelFitEvaluation]]:
    samples = [
        sample
        for sample in grouped_gemm_samples()
        if sample.accelerator == accelerator.name and sample.dtype not in LOW_PRECISION_DTYPES
    ]
    streamed, single_kernel = (
        [sample for sample in samples if sample.is_streamed],
        [sample for sample in samples if not sample.is_streamed],
    )
    constants, evaluations = accelerator.efficiency.expert_matmul, []
    if streamed:
        constants, optimum = fit_streamed_gemm(accelerator, streamed, call_seconds)
        evaluations = [KernelFitEvaluation(accelerator.name, "experts on streams", streamed, optimum)]
    if not single_kernel:
        return constants, evaluations
    constants_with_share, optimum = fit_kernel_share(with_constants(accelerator, grouped_gemm=constants), single_kernel)
    return constants_with_share, [
        *evaluations,
        KernelFitEvaluation(accelerator.name, "experts in one kernel", single_kernel, optimum),
    ]


def _scale_shares(
    grouped: GroupedGemmEfficiency, sibling: KernelEfficiency, efficiency: KernelEfficiency
) -> GroupedGemmEfficiency:
    ratio = efficiency.matmul.peak_fraction / sibling.matmul.peak_fraction
    fractions = grouped.multi_stream_peak_fraction, grouped.kernel_peak_fraction
    multi_stream, kernel = (round(fraction * ratio, SHARE_DIGITS) for fraction in fractions)
    return replace(grouped, multi_stream_peak_fraction=multi_stream, kernel_peak_fraction=kernel)
