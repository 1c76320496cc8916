"""What would a calibration record of published measurements hold?

One record for each accelerator with published kernels or collectives, of origin `published`: every row with its source,
the constants that `calibrate.fit.published_fit` found (where it fitted them to this accelerator), and alpha and beta of
its collectives. What is published is a single value: its p5 and p95 are that value, and it counts as one repetition.
Where sources differ about one thing, the row holds their median, p5 and p95 are their least and most, and repetitions
how many there are. Collectives are those within one node, by the library's own choice of algorithm: beyond, a table
belongs to one network, of which a record knows nothing.

    python -m calibrate fit-published --records calibrate/records/published
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.fit.alpha_beta import fit_calls
from calibrate.fit.fit_quality import Fits, Judged
from calibrate.fit.published_collectives import Benchmark, read_benchmarks
from calibrate.fit.published_kernels import AttentionRow, CastRow, GroupedRow, MatmulRow, MatmulSet, attentions, matmuls
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
    RecordOrigin,
    TimeStatistics,
    family_of,
)
from clustersim.cost.record_file import require_same_origin, write_record
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
_DIGITS: Final = 6  # of what is computed: enough, and the same on every machine


def write_records(fits: Fits, folder: Path) -> None:
    """Write every record as DIR/<accelerator>.json; raise OutputError where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror})") from error
    made = {folder / f"{name}.json": record for name, record in records(fits).items()}
    for path in made:
        require_same_origin(path, RecordOrigin.PUBLISHED)
    for path, record in made.items():
        write_record(record, path)


def records(fits: Fits) -> dict[str, CalibrationRecord]:
    """The record of every accelerator of which kernels or collectives were published."""
    kernels, collectives = _kernels(), _collectives()
    names = sorted({*kernels, *collectives})
    return {name: _record(name, kernels.get(name, ()), collectives.get(name, ()), fits) for name in names}


def _record(
    name: str, kernels: Sequence[KernelSample], collectives: Sequence[CollectiveSample], fits: Fits
) -> CalibrationRecord:
    return CalibrationRecord(
        device=DeviceInfo(name, load_accelerator(name).description),
        conditions=CONDITIONS,
        kernels=tuple(kernels),
        collectives=tuple(collectives),
        kernel_fit=_kernel_fit(name, fits),
        collective_fits=tuple(map(_rounded, fit_calls(collectives))),
        origin=RecordOrigin.PUBLISHED,
        derivation=DERIVATION,
    )


def _kernels() -> dict[str, list[KernelSample]]:
    found: dict[str, dict[Hashable, list[KernelSample]]] = {}
    for accelerator, row in [*map(_matmul, matmuls()), *map(_attention, attentions())]:
        found.setdefault(accelerator, {}).setdefault(row.signature, []).append(row)
    return {name: [_one(same) for same in rows.values()] for name, rows in found.items()}


def _one(same: Sequence[KernelSample]) -> KernelSample:
    """One row of those of one kernel."""
    return replace(same[0], time=_spread([row.time.seconds for row in same if row.time]), source=_sources(same))


def _spread(seconds: Sequence[Seconds]) -> TimeStatistics:
    return TimeStatistics(float(np.median(seconds)), min(seconds), max(seconds), len(seconds))


def _sources(rows: Iterable[KernelSample | CollectiveSample]) -> str:
    return "; ".join(dict.fromkeys(row.source for row in rows))


def _matmul(row: MatmulRow) -> tuple[str, KernelSample]:
    time, shape = _spread([row.seconds]), row.shape
    known = ("matmul", KernelKind.MATMUL, row.dtype, shape, row.flops, row.moved, 1)
    return row.accelerator, KernelSample(*known, time, source=row.source)


def _attention(row: AttentionRow) -> tuple[str, KernelSample]:
    kernel, time = flash_kernel(row.shape, row.dtype, backward=row.backward), _spread([row.seconds])
    known = (kernel.name, kernel.kind, kernel.dtype, row.shape, kernel.flops, kernel.bytes, 1)
    return row.accelerator, KernelSample(*known, time, source=row.source)


def _kernel_fit(name: str, fits: Fits) -> KernelFit | None:
    """None where the constants are a sibling's."""
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
        residuals=_residuals([judged for judged in fits.judged if judged.accelerator == name]),
    )


def _residuals(judged: Iterable[Judged]) -> Mapping[str, FitResidual]:
    """By family; attention fitted with a sibling's rows is judged by them too."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for item in judged:
        seconds = zip(item.rows, item.winner.predicted, item.winner.left_out, strict=True)
        for row, predicted, left_out in seconds:
            if isinstance(row, GroupedRow | MatmulSet | CastRow):  # of which records have none
                continue
            pair = (abs(predicted / row.seconds - 1.0), abs(left_out / row.seconds - 1.0))
            errors.setdefault(family_of(_row(row).signature), []).append(pair)
    return {name: _residual(pairs) for name, pairs in errors.items()}


def _row(row: MatmulRow | AttentionRow) -> KernelSample:
    return _matmul(row)[1] if isinstance(row, MatmulRow) else _attention(row)[1]


def _residual(pairs: Sequence[tuple[float, float]]) -> FitResidual:
    error, left_out = np.mean(pairs, axis=0).tolist()
    return FitResidual(len(pairs), round(error, _DIGITS), round(left_out, _DIGITS))


def _collectives() -> dict[str, list[CollectiveSample]]:
    found: dict[str, dict[CollectiveCall, list[CollectiveSample]]] = {}
    for table in read_benchmarks():
        if table.place.algorithm or table.place.nodes > 1 or table.place.alike:
            continue
        for row in _rows(table):
            found.setdefault(table.place.accelerator, {}).setdefault(row.call, []).append(row)
    return {name: [_one_call(same) for same in rows.values()] for name, rows in found.items()}


def _rows(table: Benchmark) -> Iterable[CollectiveSample]:
    for size, seconds in zip(table.sizes, table.measured, strict=True):
        call = CollectiveCall(table.place.collective, size, table.place.gpus, 1)
        yield CollectiveSample(call, _spread([seconds]), f"{table.source}: {table.locator}")


def _one_call(same: Sequence[CollectiveSample]) -> CollectiveSample:
    return replace(same[0], time=_spread([row.time.seconds for row in same]), source=_sources(same))


def _rounded(fit: CollectiveFit) -> CollectiveFit:
    residual = fit.residual
    return replace(
        fit,
        alpha=_to_digits(fit.alpha),
        beta=_to_digits(fit.beta),
        residual=FitResidual(residual.rows, round(residual.error, _DIGITS), round(residual.left_out, _DIGITS)),
    )


def _to_digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
