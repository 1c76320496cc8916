"""Resumable measurement session with a time budget.

The record's file is written atomically every few seconds; started again with the same file, a session
continues with what is missing. A file of another device, or of other versions, is rejected. Every kernel has
a share of the budget: half of the budget is divided equally, half in proportion to predicted time; time that
a kernel leaves over goes to the others. The overhead of kernels so far (operands, warm-up) is subtracted
from each share. Kernels that are left when the budget is spent, and those that take longer than what
remains, are left for a later session.
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
    TelemetrySample,
    merge_records,
    signature_of,
)
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import Kernel

_SAVE_INTERVAL: Final = 3.0  # seconds between writes of the file
_MIN_SAMPLE_SECONDS: Final = 0.02  # seconds of sampling per kernel
_MAX_SAMPLE_SECONDS: Final = 1.0
_MIN_RUNS: Final = 3.0  # runs of a kernel: two for warm-up, one sample

Clock = Callable[[], Seconds]


class KernelSession:
    """A growing record and its file."""

    def __init__(self, path: Path, device: DeviceInfo, conditions: MeasurementConditions) -> None:
        """Resume from the file if there is one; raise InputError if it is of another device."""
        empty = CalibrationRecord(device, conditions)
        self.path = path
        self._fitted_record = read_record(path) if path.exists() else empty
        self.record = _merge_file(path, self._fitted_record, empty) if path.exists() else empty
        self._pending: list[KernelSample] = []
        self._last_save = monotonic()

    def add(self, sample: KernelSample) -> None:
        """Add one kernel sample; write if it is due, or if the device was lost."""
        self._pending.append(sample)
        if monotonic() - self._last_save >= _SAVE_INTERVAL or sample.outcome is MeasurementOutcome.FAILED:
            self.save()

    def extend(self, record: CalibrationRecord) -> None:
        """Merge all samples of another record."""
        self.record = merge_records(self.merged_record(), record)

    def add_telemetry(self, samples: Sequence[TelemetrySample]) -> None:
        """Add telemetry of the device, which no prediction depends on."""
        record = self.merged_record()
        self.record = replace(record, telemetry=(*record.telemetry, *samples))

    def set_steps(self, steps: Sequence[HoldoutStep]) -> None:
        """Set the holdout steps, predicted from all samples so far; adding another sample invalidates them."""
        self.record = replace(self.merged_record(), holdout_steps=tuple(steps))

    def missing_kernels(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Kernels without a sample in the record, or whose outcome may differ now, each signature once."""
        measured = {
            sample.signature for sample in self.merged_record().kernels if sample.outcome not in _retryable_outcomes()
        }
        return [kernel for kernel in distinct_kernels(kernels) if signature_of(kernel) not in measured]

    def save(self) -> None:
        """Write the record; existing fits are kept until it is fitted again."""
        record = replace(
            self.merged_record(),
            kernel_fit=self._fitted_record.kernel_fit,
            collective_fits=self._fitted_record.collective_fits,
        )
        write_record(record, self.path)
        self._last_save = monotonic()

    def fit(self, fit_record: Callable[[CalibrationRecord], CalibrationRecord]) -> CalibrationRecord:
        """Fit the record to its samples so far."""
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
        """The record with all samples so far."""
        if self._pending:
            pending = CalibrationRecord(self.record.device, self.record.conditions, tuple(self._pending))
            self.record, self._pending = merge_records(self.record, pending), []
        return self.record


def _retryable_outcomes() -> Sequence[MeasurementOutcome]:
    """Outcomes worth retrying: memory may have become free, a compiler may have been installed."""
    return (
        (MeasurementOutcome.OUT_OF_MEMORY, MeasurementOutcome.NO_COMPILER)
        if compiler.is_available()
        else (MeasurementOutcome.OUT_OF_MEMORY,)
    )


def _merge_file(path: Path, existing: CalibrationRecord, empty: CalibrationRecord) -> CalibrationRecord:
    try:
        return replace(merge_records(existing, empty), holdout_steps=existing.holdout_steps)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def session_conditions(device: TorchDevice, command: str, method: MeasurementMethod) -> MeasurementConditions:
    """Conditions of a session that starts now."""
    today = datetime.now(UTC).date().isoformat()
    return MeasurementConditions(today, command, str(method), before=dict(device.conditions()))


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Division of a time budget among kernels, by predicted time.

    total_seconds: None if unlimited; predict_seconds: predicted time of a kernel.
    """

    total_seconds: Seconds | None
    predict_seconds: Callable[[Kernel], Seconds]

    def allocate(
        self, kernels: Sequence[Kernel], method: MeasurementMethod, clock: Clock
    ) -> Iterator[tuple[Kernel, MeasurementMethod]]:
        """Kernels, longest first, with the measurement method that their share allows, until the budget is spent.

        Kernels that would exceed the remaining budget are skipped.
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
    """Measure kernels within the budget.

    Raise KernelFailedError after yielding the sample of the kernel that lost the device.
    """
    for kernel, kernel_method in budget.allocate(distinct_kernels(kernels), method, clock):
        try:
            sample = measure_kernel(kernel, device, kernel_method)
        except KernelFailedError as error:
            yield error.sample
            raise
        yield sample
