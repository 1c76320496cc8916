"""Calibration records built from published measurements.

One record for each accelerator with published kernels or collectives, of origin `published`: every sample
with its source, the constants of `calibrate.fit.published_fit` (if fitted to this accelerator), and alpha
and beta of its collectives. A published single value has p5 and p95 equal to that value and one repetition.
Where several sources measured the same thing, the sample holds their median, p5 and p95 are their minimum
and maximum, and repetitions is their number. Collectives are those within one node with the library's
default choice of algorithm: results across nodes depend on a network that a record does not describe.

    python -m calibrate fit-published --records calibrate/records/published
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.fit.alpha_beta import fit_collectives
from calibrate.fit.fit_quality import AcceleratorFits, KernelFitEvaluation
from calibrate.fit.published_collectives import BenchmarkTable, read_benchmarks
from calibrate.fit.published_kernels import (
    AttentionSample,
    CastSample,
    GroupedGemmSample,
    MatmulSample,
    MatmulSetSample,
    attention_samples,
    matmul_samples,
)
from clustersim.common.errors import OutputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveFit,
    CollectiveSample,
    DeviceInfo,
    FitResidual,
    KernelFit,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
    family_of,
)
from clustersim.cost.record_file import require_same_origin, write_record
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import KernelKind
from clustersim.validation.kernels import flash_kernel

CONDITIONS: Final = MeasurementConditions(
    date="",
    command="python -m calibrate fit-published --records",
    method="published by others, each row by its source; a single value each, or the median of several sources",
)
DERIVATION: Final = (
    "rows of clustersim/validation/published/kernels.csv and collectives.csv; "
    "constants by python -m calibrate fit-published"
)
_DIGITS: Final = 6  # significant digits of computed values, few enough to be identical on every machine


def write_records(fits: AcceleratorFits, folder: Path) -> None:
    """Write every record as DIR/<accelerator>.json; raise OutputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror})") from error
    record_by_path = {folder / f"{name}.json": record for name, record in build_records(fits).items()}
    for path in record_by_path:
        require_same_origin(path, RecordOrigin.PUBLISHED)
    for path, record in record_by_path.items():
        write_record(record, path)


def build_records(fits: AcceleratorFits) -> dict[str, CalibrationRecord]:
    """The record of every accelerator with published kernels or collectives."""
    kernels, collectives = _kernel_samples(), _collective_samples()
    names = sorted({*kernels, *collectives})
    return {name: _build_record(name, kernels.get(name, ()), collectives.get(name, ()), fits) for name in names}


def _build_record(
    name: str, kernels: Sequence[KernelSample], collectives: Sequence[CollectiveSample], fits: AcceleratorFits
) -> CalibrationRecord:
    return CalibrationRecord(
        device=DeviceInfo(name, load_accelerator(name).description),
        conditions=CONDITIONS,
        kernels=tuple(kernels),
        collectives=tuple(collectives),
        kernel_fit=_kernel_fit(name, fits),
        collective_fits=tuple(map(_round_fit, fit_collectives(collectives))),
        origin=RecordOrigin.PUBLISHED,
        derivation=DERIVATION,
    )


def _kernel_samples() -> dict[str, list[KernelSample]]:
    by_accelerator: dict[str, dict[Hashable, list[KernelSample]]] = {}
    for accelerator, sample in [*map(_matmul_sample, matmul_samples()), *map(_attention_sample, attention_samples())]:
        by_accelerator.setdefault(accelerator, {}).setdefault(sample.signature, []).append(sample)
    return {
        name: [_merge_kernel_samples(duplicates) for duplicates in by_signature.values()]
        for name, by_signature in by_accelerator.items()
    }


def _merge_kernel_samples(duplicates: Sequence[KernelSample]) -> KernelSample:
    """One sample from all measurements of one kernel."""
    return replace(
        duplicates[0],
        time=_time_statistics([sample.time.seconds for sample in duplicates if sample.time]),
        source=_join_sources(duplicates),
    )


def _time_statistics(seconds: Sequence[Seconds]) -> TimeStatistics:
    return TimeStatistics(float(np.median(seconds)), min(seconds), max(seconds), len(seconds))


def _join_sources(samples: Iterable[KernelSample | CollectiveSample]) -> str:
    return "; ".join(dict.fromkeys(sample.source for sample in samples))


def _matmul_sample(sample: MatmulSample) -> tuple[str, KernelSample]:
    statistics, shape = _time_statistics([sample.seconds]), sample.shape
    fields = ("matmul", KernelKind.MATMUL, sample.dtype, shape, sample.flops, sample.moved_bytes, 1)
    return sample.accelerator, KernelSample(*fields, statistics, source=sample.source)


def _attention_sample(sample: AttentionSample) -> tuple[str, KernelSample]:
    kernel, statistics = (
        flash_kernel(sample.shape, sample.dtype, backward=sample.backward),
        _time_statistics([sample.seconds]),
    )
    fields = (kernel.name, kernel.kind, kernel.dtype, sample.shape, kernel.flops, kernel.bytes, 1)
    return sample.accelerator, KernelSample(*fields, statistics, source=sample.source)


def _kernel_fit(name: str, fits: AcceleratorFits) -> KernelFit | None:
    """The fitted constants; None if they are a sibling's."""
    efficiency = fits.efficiencies.get(name)
    if efficiency is None or not efficiency.published:
        return None
    accelerator = load_accelerator(name)
    return KernelFit(
        peak=dict(accelerator.peak),
        memory_bandwidth=accelerator.memory_bandwidth,
        compute_units=accelerator.compute_units,
        efficiency=replace(efficiency, kernel_latency=round(efficiency.kernel_latency, 9)),
        factors={},
        residuals=_residuals_by_family(
            [evaluation for evaluation in fits.evaluations if evaluation.accelerator == name]
        ),
    )


def _residuals_by_family(evaluations: Iterable[KernelFitEvaluation]) -> Mapping[str, FitResidual]:
    """Fit residual by kernel family; attention fitted with a sibling's samples is evaluated on those too."""
    error_pairs: dict[str, list[tuple[float, float]]] = {}
    for evaluation in evaluations:
        seconds = zip(evaluation.samples, evaluation.optimum.predicted, evaluation.optimum.leave_one_out, strict=True)
        for sample, predicted, left_out in seconds:
            if isinstance(
                sample, GroupedGemmSample | MatmulSetSample | CastSample
            ):  # records do not contain such samples
                continue
            pair = (abs(predicted / sample.seconds - 1.0), abs(left_out / sample.seconds - 1.0))
            error_pairs.setdefault(family_of(_kernel_sample(sample).signature), []).append(pair)
    return {name: _mean_residual(pairs) for name, pairs in error_pairs.items()}


def _kernel_sample(sample: MatmulSample | AttentionSample) -> KernelSample:
    return _matmul_sample(sample)[1] if isinstance(sample, MatmulSample) else _attention_sample(sample)[1]


def _mean_residual(pairs: Sequence[tuple[float, float]]) -> FitResidual:
    error, left_out = np.mean(pairs, axis=0).tolist()
    return FitResidual(len(pairs), round(error, _DIGITS), round(left_out, _DIGITS))


def _collective_samples() -> dict[str, list[CollectiveSample]]:
    by_accelerator: dict[str, dict[CollectiveCall, list[CollectiveSample]]] = {}
    for table in read_benchmarks():
        if table.benchmark.algorithm or table.benchmark.node_count > 1 or table.benchmark.is_equivalent_gpu:
            continue
        for sample in _benchmark_samples(table):
            by_accelerator.setdefault(table.benchmark.accelerator, {}).setdefault(sample.call, []).append(sample)
    return {
        name: [_merge_collective_samples(duplicates) for duplicates in by_call.values()]
        for name, by_call in by_accelerator.items()
    }


def _benchmark_samples(table: BenchmarkTable) -> Iterable[CollectiveSample]:
    for size, seconds in zip(table.sizes, table.measured_seconds, strict=True):
        call = CollectiveCall(table.benchmark.collective, size, table.benchmark.gpu_count, 1)
        yield CollectiveSample(call, _time_statistics([seconds]), f"{table.source}: {table.locator}")


def _merge_collective_samples(duplicates: Sequence[CollectiveSample]) -> CollectiveSample:
    return replace(
        duplicates[0],
        time=_time_statistics([sample.time.seconds for sample in duplicates]),
        source=_join_sources(duplicates),
    )


def _round_fit(fit: CollectiveFit) -> CollectiveFit:
    residual = fit.residual
    return replace(
        fit,
        alpha=_round_significant(fit.alpha),
        beta=_round_significant(fit.beta),
        residual=FitResidual(
            residual.samples, round(residual.error, _DIGITS), round(residual.leave_one_out_error, _DIGITS)
        ),
    )


def _round_significant(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
