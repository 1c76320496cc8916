"""Measurement of single kernels, with cold caches.

A kernel is prepared as often as needed for its operands to cover twice the last-level cache, and the copies
are run in rotation; where that would take too many, the cache is flushed before each run. A kernel that is
not implemented here, or needs more memory than there is, yields a sample that says so, and measuring
continues.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from calibrate.devices.device import DeviceLostError, TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.kernels import pytorch_ops
from calibrate.kernels.compiler import missing_tool, summary_line
from calibrate.kernels.pytorch_ops.actions import RotatingAction
from calibrate.kernels.timing import MeasurementMethod, measure_action
from clustersim.common.units import format_bytes
from clustersim.cost.calibration_record import DeviceTelemetry, KernelSample, TimeStatistics, signature_of
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import Kernel

_CACHE_MULTIPLE: Final = 2.0  # rotated operands cover this multiple of the last-level cache
_MAX_COPIES: Final = 64  # of the operands; where more are needed, the cache is flushed
_MAX_COPY_CACHES: Final = 16.0  # limit of the copies' memory, untouched memory included, in last-level caches
_MAX_KERNEL_MEMORY: Final = 0.8  # fraction of free memory that one kernel may take
_MAX_COPY_MEMORY: Final = 0.2  # fraction of free memory that copies may take
_MAX_QUEUED_LAUNCHES: Final = 512  # launches that a GPU queues without blocking the host


ActionFactory = Callable[[Kernel, torch.device], Action]
"""Builds an action that runs a kernel once."""


@dataclass(frozen=True, slots=True)
class CacheControl:
    """How caches are kept cold: number of operand copies in rotation, and whether to flush before each run."""

    copies: int
    flush: bool


def distinct_kernels(kernels: Iterable[Kernel]) -> list[Kernel]:
    """One kernel per signature, in order of first occurrence; kernels without a shape are dropped."""
    by_signature = {key: kernel for kernel in kernels if (key := signature_of(kernel)) is not None}
    return list(by_signature.values())


def measure_sequence(
    kernels: Iterable[Kernel], device: TorchDevice, method: MeasurementMethod
) -> Iterator[KernelSample]:
    """Measure kernels one after the other, each signature once."""
    for kernel in distinct_kernels(kernels):
        yield measure_kernel(kernel, device, method)


def measure_kernel(kernel: Kernel, device: TorchDevice, method: MeasurementMethod) -> KernelSample:
    """Measure one kernel, which must have a shape.

    Raise KernelFailedError if the device is unusable afterwards.
    """
    if kernel.shape is None:
        raise ValueError(f"{kernel.name}: nothing says what it computes")
    name, kind, launches = kernel.name, kernel.kind, kernel.launches
    sample = KernelSample(name, kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, launches, time=None)
    try:
        statistics, telemetry = time_kernel(kernel, device, method)
        result = replace(sample, time=statistics, telemetry=telemetry)
    except Exception as error:  # whatever PyTorch raises for one kernel, the others can be measured
        result = _failed_sample(sample, device, error)
    device.release_memory()
    return result


def cache_control(kernel: Kernel, device: TorchDevice, method: MeasurementMethod) -> CacheControl:
    """How to keep the caches cold for a kernel."""
    if not method.cold_cache:
        return CacheControl(1, flush=False)
    needed_copies = math.ceil(_CACHE_MULTIPLE * device.cache_bytes / pytorch_ops.touched_bytes(kernel))
    available_bytes = min(_MAX_COPY_MEMORY * device.free_bytes(), _MAX_COPY_CACHES * device.cache_bytes)
    affordable_copies = max(1, int(available_bytes / pytorch_ops.allocated_bytes(kernel, device.torch)))
    if needed_copies > _MAX_COPIES or needed_copies > affordable_copies:
        return CacheControl(1, flush=True)
    return CacheControl(needed_copies, flush=False)


class KernelFailedError(DeviceLostError):
    """The device is unusable after a kernel; sample: the kernel's, for a record to keep."""

    def __init__(self, sample: KernelSample, device: str) -> None:
        super().__init__(
            sample.name, device, sample.source, "its row says so, and the same command continues without it"
        )
        self.sample = sample


class _TooLargeError(Exception):
    """The operands of a kernel do not fit."""


def time_kernel(
    kernel: Kernel, device: TorchDevice, method: MeasurementMethod, factory: ActionFactory | None = None
) -> tuple[TimeStatistics, DeviceTelemetry | None]:
    """Time statistics of a kernel, and telemetry of the device meanwhile; factory: alternative way to prepare it.

    Raise whatever PyTorch raises for it, and UnsupportedKernel if the device has no such kernel.
    """
    if not device.supports(kernel.dtype):
        raise pytorch_ops.UnsupportedKernel(f"{device.name} has no {kernel.dtype.value}")
    size = pytorch_ops.allocated_bytes(kernel, device.torch)
    if size > _MAX_KERNEL_MEMORY * device.free_bytes():
        free = format_bytes(device.free_bytes())
        raise _TooLargeError(f"its operands take {format_bytes(size)}; {free} are free")
    cache, prepare = cache_control(kernel, device, method), factory or pytorch_ops.prepare_kernel
    with pytorch_ops.kernel_settings(kernel, device.torch):
        action = device.prepare_under_load(
            lambda: _rotating_action(lambda: prepare(kernel, device.torch), cache.copies)
        )
        watch = device.stopwatch(flush_cache=cache.flush)
        batch = max(
            1,
            min(
                device.runs_per_flushed_sample if cache.flush else method.max_runs_per_sample,
                _MAX_QUEUED_LAUNCHES // kernel.launches,
            ),
        )
        with device.sample_telemetry() as telemetry:
            statistics = measure_action(
                watch, action, replace(method, max_runs_per_sample=batch), rotation_length=cache.copies
            )
        return statistics, telemetry.mean_telemetry


def _rotating_action(factory: Callable[[], Action], copies: int) -> Action:
    actions = [factory() for _ in range(copies)]
    return actions[0] if copies == 1 else RotatingAction(actions)


def _failed_sample(sample: KernelSample, device: TorchDevice, error: Exception) -> KernelSample:
    """The sample of a kernel that PyTorch rejected; raise KernelFailedError if the device is unusable."""
    match error:
        case pytorch_ops.UnsupportedKernel():
            return replace(sample, outcome=MeasurementOutcome.UNSUPPORTED, source=str(error))
        case _TooLargeError():
            return replace(sample, outcome=MeasurementOutcome.OUT_OF_MEMORY, source=str(error))
    if not device.is_usable_after(error):
        raise KernelFailedError(
            replace(sample, outcome=MeasurementOutcome.FAILED, source=summary_line(error)), device.name
        ) from error
    if device.is_out_of_memory(error):
        return replace(sample, outcome=MeasurementOutcome.OUT_OF_MEMORY, source="memory ran out while it ran")
    if (missing := missing_tool(error)) is not None:
        return replace(sample, outcome=MeasurementOutcome.NO_COMPILER, source=missing)
    return replace(sample, outcome=MeasurementOutcome.UNSUPPORTED, source=summary_line(error))
