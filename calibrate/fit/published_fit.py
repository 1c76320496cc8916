"""Fit of the roofline constants of all packaged accelerators to published measurements.

For every accelerator with published kernels, the constants of `cost.roofline` are found by grid search.
Accelerators without published kernels take a sibling's; where the best matmul found by an exhaustive search
is published for both, the fraction of peak is scaled by the ratio of those upper bounds. The results are the
values in `topologies/accelerators`: a test checks that they agree, so no value is tuned by hand.

References: the `source` and `locator` columns of `clustersim/validation/published/kernels.csv` and of
`published/bandwidth.csv`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from calibrate.fit.attention_constants import fit_attention_constants
from calibrate.fit.attention_libraries import attention_lines, derived_attention_libraries, fit_attention_libraries
from calibrate.fit.collective_quality import collective_fit_quality
from calibrate.fit.fit_quality import (
    AcceleratorFits,
    FitQuality,
    KernelFitEvaluation,
    quality_table,
    source_error_table,
)
from calibrate.fit.fit_state import with_constants
from calibrate.fit.grid_search import GridOptimum
from calibrate.fit.grouped_constants import fit_grouped_constants
from calibrate.fit.low_precision_formats import (
    SHARE_DIGITS,
    SiblingReference,
    fit_cast_share,
    fit_low_precision_formats,
)
from calibrate.fit.matmul_constants import MatmulMeasurement, fit_matmul, matmul_seconds
from calibrate.fit.published_kernels import (
    attention_samples,
    best_matmul_rates,
    matmul_samples,
    matmul_set_samples,
    measured_bandwidths,
)
from calibrate.fit.published_records import write_records
from clustersim.collectives.library_files import load_library
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.files import write_text_atomically
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.efficiency import KernelEfficiency


@dataclass(frozen=True, slots=True)
class FitTarget:
    """An accelerator with published kernels.

    latency_source: accelerator whose kernel latency it takes, for want of small kernels of its own;
    same_chip_accelerators: accelerators whose attention and block-scaled samples are added to its own;
    equal_source_weights: sources have equal weight, where one with most of the samples would otherwise dominate;
    format_source: accelerator whose ratios between block-scaled formats it takes, where it has no samples of some.
    """

    name: str
    latency_source: str | None = None
    same_chip_accelerators: tuple[str, ...] = ()
    equal_source_weights: bool = False
    format_source: str | None = None


@dataclass(frozen=True, slots=True)
class DerivedAccelerator:
    """An accelerator without enough published kernels, and the sibling whose constants it takes.

    low_precision_sibling: accelerator whose block-scaled formats it takes, if another's.
    """

    name: str
    sibling: str
    low_precision_sibling: str | None = None


TRAINING_OPERATORS: Final = "memory-bound operators of a training step"  # a quantity of bandwidth.csv
OPERATOR_BOARDS: Final = {
    "a100-sxm-80gb": ("a100-pcie-80gb", "a100-sxm-80gb"),
    "h100-sxm-80gb": ("h200-sxm-141gb", "h200-sxm-141gb"),
    "b200-sxm-180gb": ("b200-sxm-180gb", "b200-sxm-180gb"),
    "mi300x": ("mi300x", "mi300x"),
    "mi355x": ("mi355x", "mi355x"),
}
"""Boards of an accelerator's chip: on which operators of a step were measured, and whose mean they are relative to."""

TARGETS: Final = (
    FitTarget("a100-sxm-80gb", same_chip_accelerators=("a100-pcie-80gb",)),
    FitTarget("h100-sxm-80gb", same_chip_accelerators=("h800-sxm-80gb",)),
    FitTarget("a100-pcie-80gb", latency_source="a100-sxm-80gb", same_chip_accelerators=("a100-sxm-80gb",)),
    FitTarget("b200-sxm-180gb", latency_source="h100-sxm-80gb", equal_source_weights=True),
    FitTarget("mi300x", latency_source="h100-sxm-80gb", equal_source_weights=True, format_source="h100-sxm-80gb"),
)
DERIVED_ACCELERATORS: Final = (
    DerivedAccelerator("a100-sxm-40gb", "a100-sxm-80gb"),
    DerivedAccelerator("v100-sxm-32gb", "a100-sxm-80gb"),
    DerivedAccelerator("h100-pcie-80gb", "h100-sxm-80gb"),
    DerivedAccelerator("h200-sxm-141gb", "h100-sxm-80gb"),
    DerivedAccelerator("h100-sxm-96gb", "h100-sxm-80gb"),
    DerivedAccelerator("h800-sxm-80gb", "h100-sxm-80gb"),
    DerivedAccelerator("gb200", "b200-sxm-180gb"),
    DerivedAccelerator("b300-sxm-288gb", "b200-sxm-180gb"),
    DerivedAccelerator("gb300", "b200-sxm-180gb", low_precision_sibling="b300-sxm-288gb"),
    DerivedAccelerator("mi325x", "mi300x"),
    DerivedAccelerator("mi355x", "mi300x"),
)


# Sibling for low-precision attention of an accelerator without samples: the same chip on another board.
LOW_PRECISION_ATTENTION_SOURCES: Final = {"b200-sxm-180gb": "gb200", "b300-sxm-288gb": "gb300"}


def fit_published() -> AcceleratorFits:
    """Fit every target and derive the others; deterministic, a few seconds."""
    efficiencies: dict[str, KernelEfficiency] = {}
    evaluations: list[KernelFitEvaluation] = []
    for target in TARGETS:
        sibling = efficiencies[target.latency_source] if target.latency_source else None
        formats = efficiencies[target.format_source] if target.format_source else None
        fitted, evaluated = _fit_target(target, sibling, formats)
        efficiencies[target.name] = fitted.efficiency
        evaluations.extend(evaluated)
    for derivation in DERIVED_ACCELERATORS:
        derived, evaluated = _fit_derived(*_derive_from_sibling(derivation, efficiencies))
        efficiencies[derivation.name] = derived.efficiency
        evaluations.extend(evaluated)
    derived_from = {derivation.name: derivation.sibling for derivation in DERIVED_ACCELERATORS}
    return AcceleratorFits(*fit_grouped_constants(_with_sibling_attention(efficiencies), derived_from, evaluations))


def _fit_target(
    target: FitTarget, sibling: KernelEfficiency | None, formats: KernelEfficiency | None
) -> tuple[Accelerator, list[KernelFitEvaluation]]:
    """Fit a target; sibling, formats: constants of its sources of kernel latency and of block-scaled formats."""
    accelerator = with_constants(
        load_accelerator(target.name),
        published=True,
        memory_bandwidth_fraction=_memory_share(target.name, sibling),
        operator_bandwidth_ratio=_operator_ratio(target.name),
    )
    accelerator, matmul_evaluations = _fit_matmuls(accelerator, sibling, formats, target)
    samples = [
        sample for sample in attention_samples() if sample.accelerator in (target.name, *target.same_chip_accelerators)
    ]
    accelerator, attention_evaluations = fit_attention_constants(
        accelerator, samples, equal_source_weights=target.equal_source_weights
    )
    libraries, library_evaluations = fit_attention_libraries(
        accelerator, equal_source_weights=target.equal_source_weights
    )
    accelerator = with_constants(accelerator, attention_libraries=libraries)
    return accelerator, [*matmul_evaluations, *attention_evaluations, *library_evaluations]


def _with_sibling_attention(efficiencies: Mapping[str, KernelEfficiency]) -> dict[str, KernelEfficiency]:
    """Copy the low-precision attention speed-up from the accelerator with the same chip where there are no samples."""
    completed = dict(efficiencies)
    for name, sibling in LOW_PRECISION_ATTENTION_SOURCES.items():
        if not {name, sibling} <= completed.keys():
            continue  # a subset of accelerators is being fitted
        completed[name] = replace(
            completed[name],
            **{
                direction: replace(
                    getattr(completed[name], direction),
                    speedup_by_format=getattr(completed[sibling], direction).speedup_by_format,
                )
                for direction in ("attention_forward", "attention_backward")
            },
        )
    return completed


def _fit_matmuls(
    accelerator: Accelerator,
    sibling: KernelEfficiency | None,
    formats: KernelEfficiency | None,
    target: FitTarget,
) -> tuple[Accelerator, list[KernelFitEvaluation]]:
    dense = _unscaled_matmuls(target.name)
    sibling_latency = sibling.kernel_latency if sibling else None
    constants, latency, optimum = fit_matmul(
        accelerator, dense, sibling_latency, equal_source_weights=target.equal_source_weights
    )
    fitted = with_constants(accelerator, matmul=constants, kernel_latency=latency)
    ratio = _share_ratio(_best_peak_share(accelerator, DType.FP8), _best_peak_share(accelerator, DType.BF16), 1.0)
    if formats is not None:  # relative to the source's FP8
        ratio *= constants.peak_fraction / formats.matmul.peak_fraction_of(DType.FP8)
    scaled, format_evaluations = fit_low_precision_formats(
        fitted, SiblingReference(formats, ratio), target.same_chip_accelerators
    )
    cast_share, cast_evaluations = fit_cast_share(scaled, sibling)
    return with_constants(scaled, quantization_bandwidth_ratio=cast_share), [
        KernelFitEvaluation(target.name, "matmul", dense, optimum),
        *format_evaluations,
        *cast_evaluations,
    ]


def _derive_from_sibling(
    derivation: DerivedAccelerator, efficiencies: Mapping[str, KernelEfficiency]
) -> tuple[Accelerator, SiblingReference]:
    """The sibling's constants with own tiles, bandwidth and best-matmul ratio, and the format reference."""
    accelerator = load_accelerator(derivation.name)
    sibling, reference = efficiencies[derivation.sibling], load_accelerator(derivation.sibling)
    dense = _share_ratio(_best_peak_share(accelerator, DType.BF16), _best_peak_share(reference, DType.BF16), 1.0)
    matmul_constants = accelerator.efficiency.matmul
    share = round(sibling.matmul.peak_fraction * dense, SHARE_DIGITS)
    matmul = replace(
        sibling.matmul, peak_fraction=share, tiles=matmul_constants.tiles, tn_only=matmul_constants.tn_only
    )
    forward, backward = (  # clocks under load limit matmuls and attention equally
        constants.scaled(dense).rounded(SHARE_DIGITS)
        for constants in (sibling.attention_forward, sibling.attention_backward)
    )
    derived = with_constants(
        accelerator,
        published=False,
        matmul=matmul,
        attention_forward=forward,
        attention_backward=backward,
        attention_libraries=derived_attention_libraries(accelerator.efficiency, sibling, dense),
        memory_bandwidth_fraction=_memory_share(derivation.name, sibling),
        operator_bandwidth_ratio=_operator_ratio(derivation.name, sibling),
        kernel_latency=sibling.kernel_latency,
    )
    return derived, _sibling_reference(derived, derivation.low_precision_sibling or derivation.sibling, efficiencies)


def _sibling_reference(
    accelerator: Accelerator, sibling_name: str, efficiencies: Mapping[str, KernelEfficiency]
) -> SiblingReference:
    """FP8's ratio to a sibling's is that of their best FP8 matmuls, or else of their best BF16 matmuls."""
    reference = load_accelerator(sibling_name)
    dense = _share_ratio(_best_peak_share(accelerator, DType.BF16), _best_peak_share(reference, DType.BF16), 1.0)
    return SiblingReference(
        efficiencies[sibling_name],
        _share_ratio(_best_peak_share(accelerator, DType.FP8), _best_peak_share(reference, DType.FP8), dense),
    )


def _fit_derived(
    accelerator: Accelerator, reference: SiblingReference
) -> tuple[Accelerator, list[KernelFitEvaluation]]:
    """Fit what a derived accelerator's few samples support: peak fractions of scaled formats, casts, and attention.

    Its unscaled matmuls are an out-of-sample test of the derived constants.
    """
    dense = _unscaled_matmuls(accelerator.name)
    attention = [sample for sample in attention_samples() if sample.accelerator == accelerator.name]
    evaluations: list[KernelFitEvaluation] = []
    if dense:
        predicted = matmul_seconds(accelerator, dense)
        prediction = GridOptimum((), predicted, predicted, predicted)
        evaluations.append(KernelFitEvaluation(accelerator.name, "matmul, not fitted", dense, prediction))
    accelerator, format_evaluations = fit_low_precision_formats(accelerator, reference)
    cast_share, cast_evaluations = fit_cast_share(accelerator, reference.sibling)
    accelerator = with_constants(accelerator, quantization_bandwidth_ratio=cast_share)
    evaluations.extend((*format_evaluations, *cast_evaluations))
    if attention:
        accelerator, attention_evaluations = fit_attention_constants(accelerator, attention)
        evaluations.extend(attention_evaluations)
    return accelerator, evaluations


def _unscaled_matmuls(name: str) -> list[MatmulMeasurement]:
    """An accelerator's matmul samples in unscaled formats."""
    samples: list[MatmulMeasurement] = [*matmul_samples(), *matmul_set_samples()]
    return [sample for sample in samples if sample.accelerator == name and sample.dtype not in LOW_PRECISION_DTYPES]


def _best_peak_share(accelerator: Accelerator, dtype: DType) -> float | None:
    """Fraction of peak that the best matmul of an exhaustive search reached, if published."""
    rate = best_matmul_rates().get((accelerator.name, dtype))
    return None if rate is None else rate / accelerator.peak_flops(dtype)


def _share_ratio(share: float | None, reference: float | None, default: float) -> float:
    return default if share is None or reference is None else share / reference


def _memory_share(name: str, sibling: KernelEfficiency | None) -> float:
    """Mean measured bandwidth over the datasheet's; a sibling's fraction if none is measured.

    Where operators of a step alone are measured that have a ratio, it is what they reach over the sibling's ratio.
    """
    measured, peak = measured_bandwidths(name), load_accelerator(name).memory_bandwidth
    if sibling is not None and not measured:
        return sibling.memory_bandwidth_fraction
    share = float(np.mean(list(measured.values()))) / peak
    if sibling is not None and name in OPERATOR_BOARDS and measured.keys() == {TRAINING_OPERATORS}:
        share /= sibling.operator_bandwidth_ratio
    return round(share, SHARE_DIGITS)


def _operator_ratio(name: str, sibling: KernelEfficiency | None = None) -> float:
    """Bandwidth of memory-bound operators in training relative to the mean of what was measured on the chip."""
    if name not in OPERATOR_BOARDS:
        return 1.0 if sibling is None else sibling.operator_bandwidth_ratio
    operators, measured = OPERATOR_BOARDS[name]
    bandwidth = measured_bandwidths(operators)[TRAINING_OPERATORS]
    share = bandwidth / load_accelerator(operators).memory_bandwidth
    return round(share / _memory_share(measured, sibling), SHARE_DIGITS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("--json", metavar="FILE", help="write the fits as JSON; - is stdout")
    parser.add_argument(
        "--records", metavar="DIR", type=Path, help="write a calibration record for each accelerator to DIR"
    )


def command(options: argparse.Namespace) -> None:
    """Fit, and print tables (or write JSON to a file, or to standard output for `-`); write records if asked."""
    fits, collectives = fit_published(), collective_fit_quality(load_library("nccl"))
    if options.records is not None:
        write_records(fits, options.records)
    if options.json is None:
        tables = [quality_table([*fits.qualities, *collectives]), "", source_error_table(fits.source_errors), ""]
        print("\n".join([*tables, *_constant_lines(fits)]))
        return
    _write_json(fits, collectives, options.json)


def _write_json(fits: AcceleratorFits, collectives: Sequence[FitQuality], target: str) -> None:
    qualities = [asdict(quality) for quality in (*fits.qualities, *collectives)]
    efficiency = {
        name: _with_format_names(asdict(kernel_efficiency)) for name, kernel_efficiency in fits.efficiencies.items()
    }
    source_errors = [asdict(source_error) for source_error in fits.source_errors]
    text = (
        json.dumps({"qualities": qualities, "leave_one_source_out": source_errors, "efficiency": efficiency}, indent=2)
        + "\n"
    )
    if target == "-":
        sys.stdout.write(text)
        return
    write_text_atomically(target, text)


def _with_format_names(constants: Mapping[Any, Any]) -> dict[str, Any]:
    """The same mapping with DType keys replaced by their names."""
    return {
        key.value if isinstance(key, DType) else key: _with_format_names(value) if isinstance(value, Mapping) else value
        for key, value in constants.items()
    }


def _constant_lines(fits: AcceleratorFits) -> list[str]:
    lines = []
    for name, efficiency in fits.efficiencies.items():
        lines.append(f"{name}: {'published' if efficiency.published else 'derived'}")
        lines.extend(f"  {line}" for line in _efficiency_lines(efficiency))
    return lines


def _efficiency_lines(efficiency: KernelEfficiency) -> list[str]:
    matmul = efficiency.matmul
    sizes = f"prologue {matmul.prologue:g}, edge {matmul.edge:g}"
    shares = "".join(f", {_format_label(efficiency, dtype)}" for dtype in matmul.peak_fraction_by_format)
    lines = [f"matmul: peak_fraction {matmul.peak_fraction:g}{shares}, {sizes}"]
    if efficiency.grouped_gemm is not None:
        constants = asdict(efficiency.grouped_gemm)
        scaled = constants.pop("kernel_peak_fraction_by_format")
        constants |= {f"kernel_peak_fraction {dtype.value}": share for dtype, share in scaled.items()}
        lines.append("grouped: " + ", ".join(f"{key} {value:g}" for key, value in constants.items()))
    lines += attention_lines(efficiency)
    ratios = {"quantization": efficiency.quantization_bandwidth_ratio, "operators": efficiency.operator_bandwidth_ratio}
    relative = "".join(f", {name} {ratio:g}" for name, ratio in ratios.items() if ratio != 1.0)
    memory = f"memory bandwidth {efficiency.memory_bandwidth_fraction:g}{relative}"
    return [*lines, f"{memory}, kernel_latency {efficiency.kernel_latency * 1e6:g} us"]


def _format_label(efficiency: KernelEfficiency, dtype: DType) -> str:
    """The constants of one block-scaled format."""
    matmul = efficiency.matmul
    prologue = f" (prologue {matmul.prologue_by_format[dtype]:g})" if dtype in matmul.prologue_by_format else ""
    start = (
        f" (kernel_latency {matmul.kernel_latency_by_format[dtype] * 1e6:g} us)"
        if dtype in matmul.kernel_latency_by_format
        else ""
    )
    return f"{dtype.value} {matmul.peak_fraction_by_format[dtype]:g}{prologue}{start}"
