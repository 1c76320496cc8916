"""How long does each isolated kernel take, and what else is measured on the device alone?

First the machine: copies, the launch interval, a matmul overlapped with a copy, the other GPUs of the node.
Then the requested kernels that the record lacks, the longest first, in the stage's remaining time.
"""

from dataclasses import dataclass, replace
from time import monotonic
from typing import ClassVar, Final

from calibrate.kernels.copy_interference import typical_kernel
from calibrate.kernels.imbalanced_gemm import measure_imbalanced, missing_cases
from calibrate.kernels.progress import count_progress
from calibrate.kernels.selection import failed_signatures, has_device_samples, measure_device, measure_rough_rates
from calibrate.kernels.session import TimeBudget, measure_within_budget
from calibrate.stages.stage import CalibrationContext
from calibrate.stages.stage_telemetry import record_telemetry
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.cost.roofline import Roofline
from clustersim.model.kernels import Kernel

_IMBALANCED_SECONDS: Final = 0.3  # seconds of samples of a grouped GEMM with imbalanced groups, and of the balanced one
_MACHINE_TIME_FRACTION: Final = 0.1  # fraction of the stage's time, after which no more copies are measured


@dataclass(frozen=True, slots=True)
class KernelStage:
    """Isolated measurements of the requested kernels."""

    name: ClassVar[str] = "kernels"
    minutes: ClassVar[float] = 8.0
    min_seconds: ClassVar[Seconds] = 5.0  # copies, launches and some kernels

    def unavailable_reason(self, context: CalibrationContext) -> str:  # noqa: ARG002 - every device has kernels
        """Empty: every device runs kernels."""
        return ""

    def has_work(self, context: CalibrationContext) -> bool:
        """Whether a kernel is missing or failed for lack of memory, or the machine was not measured."""
        is_complete = has_device_samples(context.current_record, context.device) and not missing_cases(
            context.requested_kernels, context.current_record
        )
        return bool(context.session.missing_kernels(context.requested_kernels)) or not is_complete

    def describe(self, context: CalibrationContext) -> str:
        """How many kernels are missing, are there already, and are retried."""
        missing_count, requested_count = (
            len(context.session.missing_kernels(context.requested_kernels)),
            len(context.requested_kernels),
        )
        status = f", {requested_count - missing_count:,} are there already" if missing_count < requested_count else ""
        retry_count = missing_count - len(context.new_kernels)
        status += f", {retry_count:,} had no memory or no compiler and are tried again" if retry_count else ""
        machine = "" if has_device_samples(context.current_record, context.device) else "; copies, launches"
        return f"{missing_count:,} of {requested_count:,} kernels of {context.request_label}{status}{machine}"

    def measure(self, context: CalibrationContext, seconds: Seconds) -> str:
        """Measure the machine, then kernels while there is time."""
        with record_telemetry(context, self.name):
            return self._measure_all(context, seconds)

    def _measure_all(self, context: CalibrationContext, seconds: Seconds) -> str:
        start_time, session = monotonic(), context.session
        measure_device(session, context.device, context.method, _MACHINE_TIME_FRACTION * seconds)
        missing_kernels = session.missing_kernels(context.requested_kernels)
        dtype, failed = typical_kernel(context.device).dtype, failed_signatures(context.current_record)
        roofline, rough_estimate = Roofline(context.accelerator), measure_rough_rates(context.device, dtype, failed)
        file_dtypes = (
            context.accelerator.formats
        )  # samples of other dtypes say that the device lacks them, or what it does beyond its file

        def predicted_seconds(kernel: Kernel) -> Seconds:
            modelled = roofline.time_kernel(kernel).seconds if kernel.dtype in file_dtypes else 0.0
            return max(modelled, rough_estimate.kernel_seconds(kernel))

        time_shares = TimeBudget(max(0.0, seconds - (monotonic() - start_time)), predicted_seconds)
        with count_progress(self.name, len(missing_kernels)) as advance:
            for sample in measure_within_budget(missing_kernels, context.device, time_shares, context.method):
                session.add(sample)
                advance(sample.name)
        _measure_imbalanced(context, seconds - (monotonic() - start_time))
        return _describe_result(len(missing_kernels), len(session.missing_kernels(context.requested_kernels)))


def _measure_imbalanced(context: CalibrationContext, seconds: Seconds) -> None:
    """Measure grouped GEMMs with imbalanced groups, while there is time."""
    start_time, current = monotonic(), context.session.merged_record()
    for kernel in missing_cases(context.requested_kernels, current):
        if monotonic() - start_time > seconds:
            return
        samples = tuple(
            measure_imbalanced([kernel], context.device, replace(context.method, max_seconds=_IMBALANCED_SECONDS))
        )
        context.session.extend(replace(CalibrationRecord(current.device, current.conditions), imbalanced_gemms=samples))
    context.session.save()


def _describe_result(missing_count: int, remaining_count: int) -> str:
    if not remaining_count:
        return f"{missing_count:,} measured"
    hint = "the same command continues with them, a larger --budget has room for long ones"
    return (
        f"{missing_count - remaining_count:,} measured, {remaining_count:,} left that the budget had no time "
        f"for; {hint}"
    )
