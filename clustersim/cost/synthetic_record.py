"""Build a synthetic calibration record from a user's kernel time function.

One sample for each kernel that has a shape, by which records identify kernels. Kernels that the function
leaves to the model (None), and those without a shape, are not in the record.
"""

from collections.abc import Callable, Iterable
from math import isfinite

from clustersim.common.errors import InputError, format_value
from clustersim.common.plugins import as_input_errors
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    KernelSignature,
    MeasurementConditions,
    TimeStatistics,
    signature_of,
)
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.model.kernels import Kernel


def record_from_function(
    kernel_seconds: Callable[[Kernel], Seconds | None], kernels: Iterable[Kernel], *, accelerator: str, description: str
) -> CalibrationRecord:
    """A record of an accelerator whose isolated kernel times a function computes. description: what the function is.

    Raises InputError where the function raises, or returns something other than a positive time.
    """
    samples: dict[KernelSignature, KernelSample] = {}
    for kernel in kernels:
        key = signature_of(kernel)
        if key is not None and key not in samples and (duration := _evaluate(kernel_seconds, kernel)) is not None:
            samples[key] = _kernel_sample(kernel, key, duration)
    device, conditions = (
        DeviceInfo(accelerator, description),
        MeasurementConditions(date="", command="", method="computed"),
    )
    return CalibrationRecord(
        device, conditions, tuple(samples.values()), origin=RecordOrigin.DERIVED, derivation=description
    )


def _evaluate(kernel_seconds: Callable[[Kernel], Seconds | None], kernel: Kernel) -> Seconds | None:
    """The function's seconds for a kernel; None leaves it to the model."""
    with as_input_errors(f"{getattr(kernel_seconds, '__name__', 'the function')}({kernel.name})"):
        duration = kernel_seconds(kernel)
        if duration is None:
            return None
        if not (isfinite(duration) and duration > 0.0):
            raise InputError(
                f"{format_value(duration)} is no time above zero, in seconds; None leaves the kernel to the model"
            )
        return float(duration)


def _kernel_sample(kernel: Kernel, kernel_signature: KernelSignature, duration: Seconds) -> KernelSample:
    return KernelSample(
        kernel.name,
        *(kernel_signature.kind, kernel_signature.dtype, kernel_signature.shape),
        *(kernel.flops, kernel.bytes, kernel.launches),
        time=TimeStatistics(duration, duration, duration, repetitions=1),
    )
