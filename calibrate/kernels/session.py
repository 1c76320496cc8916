"""How does measuring survive an interruption, and keep to its budget?

The record's file is written every few seconds, whole or not at all; started again with the same file, a session goes on
with what is not in it. A file of another device, or of other versions, is refused. Every kernel has a part of the
budget: half of it is the same for all, half goes where the predicted time is; what a kernel leaves over is the others'.
What kernels took besides their samples so far (operands, warm-up) is taken off each part.
Kernels that are left when the budget is spent, and those that take longer than is left of it, are for a later session.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Final

from calibrate.devices.device import TorchDevice
from calibrate.kernels import compiler
from calibrate.kernels.measure import KernelFailedError, distinct_kernels, measure_kernel
from calibrate.kernels.timing import MeasurementMethod
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    HoldoutStep,
    KernelSample,
    MeasurementConditions,
    MeasurementOutcome,
    TelemetrySample,
    merge_records,
    signature_of,
)
from clustersim.cost.record_file import read_record, write_record
from clustersim.model.kernels import Kernel

_SAVE_INTERVAL: Final = 3.0  # seconds between writes
_MIN_SAMPLE_SECONDS: Final = 0.02  # seconds of samples
_MAX_SAMPLE_SECONDS: Final = 1.0
_MIN_RUNS: Final = 3.0  # runs of a kernel: two to warm up, one sample

Clock = Callable[[], Seconds]


class KernelSession:
    """A record that grows, and its file."""

    def __init__(self, path: Path, device: DeviceInfo, conditions: MeasurementConditions) -> None:
        """Go on with the file if there is one; raise InputError where it is of another device."""
        empty = CalibrationRecord(device, conditions)
        self.path = path
        self._fitted_record = read_record(path) if path.exists() else empty
        self.record = _merge_file(path, self._fitted_record, empty) if path.exists() else empty
        self._pending: list[KernelSample] = []
        self._last_save = monotonic()

    def add(self, sample: KernelSample) -> None:
        """One more kernel, written if it is time to, or if it may be the last."""
        self._pending.append(sample)
        if monotonic() - self._last_save >= _SAVE_INTERVAL or sample.outcome is MeasurementOutcome.FAILED:
            self.save()

    def extend(self, record: CalibrationRecord) -> None:
        """All rows of another record."""
        self.record = merge_records(self.merged_record(), record)

    def add_telemetry(self, samples: Sequence[TelemetrySample]) -> None:
        """How the device was meanwhile, which no prediction rests on."""
        record = self.merged_record()
        self.record = replace(record, moments=(*record.moments, *samples))

    def set_steps(self, steps: Sequence[HoldoutStep]) -> None:
        """Steps that were predicted from all rows so far; they count until another row comes."""
        self.record = replace(self.merged_record(), steps=tuple(steps))

    def missing_kernels(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Those kernels that the record has no row of, or that may be measured now, each signature once."""
        measured = {
            sample.signature for sample in self.merged_record().kernels if sample.outcome not in _retryable_outcomes()
        }
        return [kernel for kernel in distinct_kernels(kernels) if signature_of(kernel) not in measured]

    def save(self) -> None:
        """Write the record; the fits that it came with stay until it is fitted again."""
        record = replace(
            self.merged_record(),
            kernel_fit=self._fitted_record.kernel_fit,
            collective_fits=self._fitted_record.collective_fits,
        )
        write_record(record, self.path)
        self._last_save = monotonic()

    def fit(self, fit_record: Callable[[CalibrationRecord], CalibrationRecord]) -> CalibrationRecord:
        """Fit the record to its rows so far."""
        self._fitted_record = self.record = fit_record(self.merged_record())
        return self.record

    def finish(
        self, after: Mapping[str, float], fit_record: Callable[[CalibrationRecord], CalibrationRecord]
    ) -> CalibrationRecord:
        """Fit the record and write it; after: the device's conditions now."""
        record = self.merged_record()
        self.record = replace(record, conditions=replace(record.conditions, after=dict(after)))
        self.fit(fit_record)
        self.save()
        return self.record

    def merged_record(self) -> CalibrationRecord:
        """All rows so far."""
        if self._pending:
            pending = CalibrationRecord(self.record.device, self.record.conditions, tuple(self._pending))
            self.record, self._pending = merge_records(self.record, pending), []
        return self.record


def _retryable_outcomes() -> Sequence[MeasurementOutcome]:
    """Outcomes that may be another one now: somebody else may have had the memory, a compiler may be there."""
    return (
        (MeasurementOutcome.OUT_OF_MEMORY, MeasurementOutcome.NO_COMPILER)
        if compiler.is_available()
        else (MeasurementOutcome.OUT_OF_MEMORY,)
    )


def _merge_file(path: Path, existing: CalibrationRecord, empty: CalibrationRecord) -> CalibrationRecord:
    try:
        return replace(merge_records(existing, empty), steps=existing.steps)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def session_conditions(device: TorchDevice, command: str, method: MeasurementMethod) -> MeasurementConditions:
    """How a session measures that begins now."""
    today = datetime.now(UTC).date().isoformat()
    return MeasurementConditions(today, command, str(method), before=dict(device.conditions()))


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Parts of a budget for kernels, by what they are predicted to take."""

    total_seconds: Seconds | None
    predict_seconds: Callable[[Kernel], Seconds]

    def allocate(
        self, kernels: Sequence[Kernel], method: MeasurementMethod, clock: Clock
    ) -> Iterator[tuple[Kernel, MeasurementMethod]]:
        """Kernels, the longest first, with the method that its part allows, until the budget is spent.

        Those that alone would overrun what is left of it are passed over.
        """
        ordered = sorted(kernels, key=self.predict_seconds, reverse=True)
        if self.total_seconds is None:
            yield from ((kernel, method) for kernel in ordered)
            return
        shares, started, overrun = self._shares(ordered), clock(), 0.0
        for index, kernel in enumerate(ordered):
            kernel_start = clock()
            remaining = self.total_seconds - (kernel_start - started)
            if remaining <= 0.0:
                return
            if _MIN_RUNS * self.predict_seconds(kernel) > remaining:
                continue
            share = remaining * shares[index] / sum(shares[index:]) - overrun / max(index, 1)
            seconds = min(_MAX_SAMPLE_SECONDS, max(_MIN_SAMPLE_SECONDS, share))
            yield kernel, replace(method, max_seconds=seconds)
            overrun += max(0.0, clock() - kernel_start - seconds)

    def _shares(self, kernels: Sequence[Kernel]) -> list[float]:
        times = [self.predict_seconds(kernel) for kernel in kernels]
        total = sum(times) or 1.0
        return [1.0 / len(kernels) + time / total for time in times]


def measure_within_budget(
    kernels: Sequence[Kernel],
    device: TorchDevice,
    budget: TimeBudget,
    method: MeasurementMethod,
    *,
    clock: Clock = monotonic,
) -> Iterator[KernelSample]:
    """Measure kernels as their parts of the budget allow.

    Raise KernelFailedError after the row of the kernel that nothing can be measured after.
    """
    for kernel, kernel_method in budget.allocate(distinct_kernels(kernels), method, clock):
        try:
            sample = measure_kernel(kernel, device, kernel_method)
        except KernelFailedError as error:
            yield error.sample
            raise
        yield sample
