"""What would a record say of another accelerator of the same architecture?

Kernels that compute bounds take less by the ratio of the compute rates, those that memory bounds by the ratio of the
memory bandwidths; those that launches bound take what they took. Which it is, the kernel model says that is fitted to
the record (or the accelerator's own). Assumed: the same compute units, libraries and clocks under load, so that kernels
reach the same part of the peak; collectives and copies to the host do not depend on the accelerator.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import BesideRow, CopyRow, KernelFit, KernelRow, Origin, Record, Spread
from clustersim.cost.measured_kernels import fitted_model
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Bound
from clustersim.hardware.accelerator import load_accelerator

DEVICE_MEMORY: Final = "device"
"""The route of copies within device memory (`cost.record.CopyRow`)."""


def scaled(record: Record, *, compute: float, bandwidth: float) -> Record:
    """The record of an accelerator with so many times the compute rate and the memory bandwidth.

    The device is still named as the one that was measured. Raise InputError where a ratio is not above zero, or where
    the measured accelerator is not known.
    """
    for name, ratio in (("compute", compute), ("bandwidth", bandwidth)):
        if not 0.0 < ratio < math.inf:
            raise InputError(f"scale.{name}: {ratio!r} is not a ratio above zero; 1.0 leaves times as they are")
    ratios = {Bound.COMPUTE: compute, Bound.MEMORY: bandwidth}
    model = fitted_model(record.kernel_fit, load_accelerator(record.device.accelerator))
    return replace(
        record,
        kernels=tuple(_row(row, _ratio(row, model, ratios)) for row in record.kernels),
        copies=tuple(_copy(copy, bandwidth) for copy in record.copies),
        beside=tuple(_beside(beside_row, _ratio(beside_row.kernel, model, ratios)) for beside_row in record.beside),
        kernel_fit=None if record.kernel_fit is None else _fit(record.kernel_fit, compute, bandwidth),
        steps=(),
        origin=Origin.DERIVED,
        derivation=_derivation(record, compute, bandwidth),
    )


def _ratio(row: KernelRow, model: Roofline, ratios: Mapping[Bound, float]) -> float:
    return ratios.get(model.kernel(row.kernel).bound, 1.0)


def _row(row: KernelRow, ratio: float) -> KernelRow:
    return row if row.time is None else replace(row, time=_faster(row.time, ratio))


def _copy(copy: CopyRow, bandwidth: float) -> CopyRow:
    return replace(copy, time=_faster(copy.time, bandwidth)) if copy.route == DEVICE_MEMORY else copy


def _beside(each: BesideRow, ratio: float) -> BesideRow:
    """Both faster by the same, so that the kernel is slowed by the same part."""
    return replace(each, kernel=_row(each.kernel, ratio), together=_faster(each.together, ratio))


def _faster(time: Spread, ratio: float) -> Spread:
    return replace(time, seconds=time.seconds / ratio, p5=time.p5 / ratio, p95=time.p95 / ratio)


def _fit(fit: KernelFit, compute: float, bandwidth: float) -> KernelFit:
    peak = {dtype: rate * compute for dtype, rate in fit.peak.items()}
    return replace(fit, peak=peak, memory_bandwidth=fit.memory_bandwidth * bandwidth)


def _derivation(record: Record, compute: float, bandwidth: float) -> str:
    device, before = record.device, f"{record.derivation}; then " if record.derivation else ""
    return (
        f"{before}times of {device.name or device.accelerator} ({device.accelerator}, {record.conditions.date}), "
        f"divided by {compute:g} where compute bounds a kernel and by {bandwidth:g} where memory bandwidth does; "
        f"launches, collectives and copies to the host as they were"
    )
