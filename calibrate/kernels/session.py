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
from calibrate.kernels.measure import KernelFailedError, distinct, row
from calibrate.kernels.timing import Method
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

_SAVED: Final = 3.0  # seconds between writes
_SHORTEST: Final = 0.02  # seconds of samples
_LONGEST: Final = 1.0
_FEWEST: Final = 3.0  # runs of a kernel: two to warm up, one sample

Clock = Callable[[], Seconds]


class Session:
    """A record that grows, and its file."""

    def __init__(self, path: Path, device: DeviceInfo, conditions: MeasurementConditions) -> None:
        """Go on with the file if there is one; raise InputError where it is of another device."""
        empty = CalibrationRecord(device, conditions)
        self.path = path
        self._fits = read_record(path) if path.exists() else empty
        self.record = _merged_with(path, self._fits, empty) if path.exists() else empty
        self._new: list[KernelSample] = []
        self._saved = monotonic()

    def add(self, measured: KernelSample) -> None:
        """One more kernel, written if it is time to, or if it may be the last."""
        self._new.append(measured)
        if monotonic() - self._saved >= _SAVED or measured.outcome is MeasurementOutcome.FAILED:
            self.save()

    def extend(self, other: CalibrationRecord) -> None:
        """All rows of another record."""
        self.record = merge_records(self.gathered(), other)

    def seen(self, moments: Sequence[TelemetrySample]) -> None:
        """How the device was meanwhile, which no prediction rests on."""
        found = self.gathered()
        self.record = replace(found, moments=(*found.moments, *moments))

    def predicted(self, steps: Sequence[HoldoutStep]) -> None:
        """Steps that were predicted from all rows so far; they count until another row comes."""
        self.record = replace(self.gathered(), steps=tuple(steps))

    def missing(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Those kernels that the record has no row of, or that may be measured now, each signature once."""
        known = {
            kernel_sample.signature
            for kernel_sample in self.gathered().kernels
            if kernel_sample.outcome not in _again()
        }
        return [kernel for kernel in distinct(kernels) if signature_of(kernel) not in known]

    def save(self) -> None:
        """Write the record; the fits that it came with stay until it is fitted again."""
        kept = replace(self.gathered(), kernel_fit=self._fits.kernel_fit, collective_fits=self._fits.collective_fits)
        write_record(kept, self.path)
        self._saved = monotonic()

    def fit(self, fitted: Callable[[CalibrationRecord], CalibrationRecord]) -> CalibrationRecord:
        """Fit the record to its rows so far."""
        self._fits = self.record = fitted(self.gathered())
        return self.record

    def finish(
        self, after: Mapping[str, float], fitted: Callable[[CalibrationRecord], CalibrationRecord]
    ) -> CalibrationRecord:
        """Fit the record and write it; after: the device's conditions now."""
        found = self.gathered()
        self.record = replace(found, conditions=replace(found.conditions, after=dict(after)))
        self.fit(fitted)
        self.save()
        return self.record

    def gathered(self) -> CalibrationRecord:
        """All rows so far."""
        if self._new:
            rows = CalibrationRecord(self.record.device, self.record.conditions, tuple(self._new))
            self.record, self._new = merge_records(self.record, rows), []
        return self.record


def _again() -> Sequence[MeasurementOutcome]:
    """Outcomes that may be another one now: somebody else may have had the memory, a compiler may be there."""
    return (
        (MeasurementOutcome.OUT_OF_MEMORY, MeasurementOutcome.NO_COMPILER)
        if compiler.present()
        else (MeasurementOutcome.OUT_OF_MEMORY,)
    )


def _merged_with(path: Path, there: CalibrationRecord, empty: CalibrationRecord) -> CalibrationRecord:
    try:
        return replace(merge_records(there, empty), steps=there.steps)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def conditions(device: TorchDevice, command: str, method: Method) -> MeasurementConditions:
    """How a session measures that begins now."""
    today = datetime.now(UTC).date().isoformat()
    return MeasurementConditions(today, command, str(method), before=dict(device.conditions()))


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a budget for kernels, by what they are predicted to take."""

    budget: Seconds | None
    predicted: Callable[[Kernel], Seconds]

    def of(self, kernels: Sequence[Kernel], method: Method, clock: Clock) -> Iterator[tuple[Kernel, Method]]:
        """Kernels, the longest first, with the method that its part allows, until the budget is spent.

        Those that alone would overrun what is left of it are passed over.
        """
        ordered = sorted(kernels, key=self.predicted, reverse=True)
        if self.budget is None:
            yield from ((kernel, method) for kernel in ordered)
            return
        shares, began, beyond = self._shares(ordered), clock(), 0.0
        for place, kernel in enumerate(ordered):
            before = clock()
            left = self.budget - (before - began)
            if left <= 0.0:
                return
            if _FEWEST * self.predicted(kernel) > left:
                continue
            part = left * shares[place] / sum(shares[place:]) - beyond / max(place, 1)
            seconds = min(_LONGEST, max(_SHORTEST, part))
            yield kernel, replace(method, seconds=seconds)
            beyond += max(0.0, clock() - before - seconds)

    def _shares(self, kernels: Sequence[Kernel]) -> list[float]:
        times = [self.predicted(kernel) for kernel in kernels]
        total = sum(times) or 1.0
        return [1.0 / len(kernels) + time / total for time in times]


def measured(
    kernels: Sequence[Kernel], device: TorchDevice, parts: Parts, method: Method, *, clock: Clock = monotonic
) -> Iterator[KernelSample]:
    """Measure kernels as their parts of the budget allow.

    Raise KernelFailedError after the row of the kernel that nothing can be measured after.
    """
    for kernel, allowed in parts.of(distinct(kernels), method, clock):
        try:
            found = row(kernel, device, allowed)
        except KernelFailedError as error:
            yield error.row
            raise
        yield found
