"""What would a record of another accelerator of the same architecture contain?

Compute-bound kernels scale with the ratio of the compute rates, memory-bound ones with the ratio of the
memory bandwidths; launch-bound ones keep their times. Which bound applies is given by the kernel model
fitted to the record (or the accelerator's own). Assumed: the same compute units, libraries and clocks under
load, so that kernels reach the same fraction of the peak; collectives and host copies do not depend on the
accelerator.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CopySample,
    InterferenceSample,
    KernelFit,
    KernelSample,
    TimeStatistics,
)
from clustersim.cost.measured_kernels import fitted_model
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Bottleneck
from clustersim.hardware.accelerator import load_accelerator

DEVICE_MEMORY_ROUTE: Final = "device"
"""The route of copies within device memory (`cost.calibration_record.CopySample`)."""


def scale_record(record: CalibrationRecord, *, compute: float, bandwidth: float) -> CalibrationRecord:
    """The record of an accelerator with these multiples of the compute rate and the memory bandwidth.

    The device is still named as the one that was measured. Raises InputError where a ratio is not above zero,
    or where the measured accelerator is not known.
    """
    for name, ratio in (("compute", compute), ("bandwidth", bandwidth)):
        if not 0.0 < ratio < math.inf:
            raise InputError(f"scale.{name}: {ratio!r} is not a ratio above zero; 1.0 leaves times as they are")
    ratios = {Bottleneck.COMPUTE: compute, Bottleneck.MEMORY: bandwidth}
    model = fitted_model(record.kernel_fit, load_accelerator(record.device.accelerator))
    return replace(
        record,
        kernels=tuple(_scale_kernel(sample, _bottleneck_ratio(sample, model, ratios)) for sample in record.kernels),
        copies=tuple(_scale_copy(copy, bandwidth) for copy in record.copies),
        interference=tuple(
            _scale_interference(interference, _bottleneck_ratio(interference.kernel, model, ratios))
            for interference in record.interference
        ),
        kernel_fit=None if record.kernel_fit is None else _scale_fit(record.kernel_fit, compute, bandwidth),
        holdout_steps=(),
        origin=RecordOrigin.DERIVED,
        derivation=_describe_derivation(record, compute, bandwidth),
    )


def _bottleneck_ratio(sample: KernelSample, model: Roofline, ratios: Mapping[Bottleneck, float]) -> float:
    return ratios.get(model.time_kernel(sample.kernel).bottleneck, 1.0)


def _scale_kernel(sample: KernelSample, ratio: float) -> KernelSample:
    return sample if sample.time is None else replace(sample, time=_scale_time(sample.time, ratio))


def _scale_copy(sample: CopySample, bandwidth: float) -> CopySample:
    return replace(sample, time=_scale_time(sample.time, bandwidth)) if sample.route == DEVICE_MEMORY_ROUTE else sample


def _scale_interference(sample: InterferenceSample, ratio: float) -> InterferenceSample:
    """Scale both times equally, so that the kernel's slowdown is unchanged."""
    return replace(
        sample, kernel=_scale_kernel(sample.kernel, ratio), overlapped_time=_scale_time(sample.overlapped_time, ratio)
    )


def _scale_time(time: TimeStatistics, ratio: float) -> TimeStatistics:
    return replace(time, seconds=time.seconds / ratio, p5=time.p5 / ratio, p95=time.p95 / ratio)


def _scale_fit(fit: KernelFit, compute: float, bandwidth: float) -> KernelFit:
    peak = {dtype: rate * compute for dtype, rate in fit.peak.items()}
    return replace(fit, peak=peak, memory_bandwidth=fit.memory_bandwidth * bandwidth)


def _describe_derivation(record: CalibrationRecord, compute: float, bandwidth: float) -> str:
    device, previous = record.device, f"{record.derivation}; then " if record.derivation else ""
    return (
        f"{previous}times of {device.name or device.accelerator} ({device.accelerator}, {record.conditions.date}), "
        f"divided by {compute:g} where compute bounds a kernel and by {bandwidth:g} where memory bandwidth does; "
        f"launches, collectives and copies to the host as they were"
    )
