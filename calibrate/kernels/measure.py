"""How long does this device take for each kernel?

A kernel is prepared as often as it takes for its operands together to be twice the last cache, and the copies are run
in turn; where that would take too many, the cache is flushed before each run. What has no kernel here, or needs more
memory than there is, becomes a row that says so, and measuring goes on.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from calibrate.devices.device import DeviceLostError, TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.kernels import pytorch_ops
from calibrate.kernels.compiler import lacks, sentence
from calibrate.kernels.pytorch_ops.actions import Rotation
from calibrate.kernels.timing import Method, measure
from clustersim.common.units import format_bytes
from clustersim.cost.calibration_record import (
    DeviceTelemetry,
    KernelSample,
    MeasurementOutcome,
    TimeStatistics,
    signature_of,
)
from clustersim.model.kernels import Kernel

_CACHES: Final = 2.0  # times the last cache that rotated operands take
_COPIES: Final = 64  # of the operands, at most; smaller ones are flushed
_WASTED: Final = 16.0  # times the last cache that copies may take, with memory that a run does not touch
_FREE: Final = 0.8  # part of the free memory that one kernel may take
_ROTATED: Final = 0.2  # part of it that copies may take
_QUEUED: Final = 512  # launches that a GPU takes in without making the host wait


Preparation = Callable[[Kernel, torch.device], Action]
"""Makes what runs a kernel once."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the caches are kept cold: so many copies of the operands in turn, flushed before each run or not."""

    copies: int
    flushed: bool


def distinct(kernels: Iterable[Kernel]) -> list[Kernel]:
    """One kernel of each signature, in the order in which they come; those without a shape are left out."""
    found = {known: kernel for kernel in kernels if (known := signature_of(kernel)) is not None}
    return list(found.values())


def rows(kernels: Iterable[Kernel], device: TorchDevice, method: Method) -> Iterator[KernelSample]:
    """Measure kernels one after the other, each signature once."""
    for kernel in distinct(kernels):
        yield row(kernel, device, method)


def row(kernel: Kernel, device: TorchDevice, method: Method) -> KernelSample:
    """Measure one kernel; kernel.shape must be given.

    Raise KernelFailedError where nothing can be measured on the device after it.
    """
    if kernel.shape is None:
        raise ValueError(f"{kernel.name}: nothing says what it computes")
    name, kind, launches = kernel.name, kernel.kind, kernel.launches
    made = KernelSample(name, kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, launches, time=None)
    try:
        time, under = timed(kernel, device, method)
        found = replace(made, time=time, under=under)
    except Exception as error:  # whatever PyTorch raises for one kernel, the others can be measured
        found = _failed(made, device, error)
    device.release()
    return found


def arrangement(kernel: Kernel, device: TorchDevice, method: Method) -> Arrangement:
    """How a kernel is kept cold."""
    if not method.cold:
        return Arrangement(1, flushed=False)
    needed = math.ceil(_CACHES * device.cache_bytes / pytorch_ops.touched(kernel))
    spent = min(_ROTATED * device.free_bytes(), _WASTED * device.cache_bytes)
    affordable = max(1, int(spent / pytorch_ops.allocated(kernel, device.torch)))
    if needed > _COPIES or needed > affordable:
        return Arrangement(1, flushed=True)
    return Arrangement(needed, flushed=False)


class KernelFailedError(DeviceLostError):
    """After a kernel this process cannot use the device any more; row: of the kernel, for a record to keep."""

    def __init__(self, row: KernelSample, device: str) -> None:
        super().__init__(row.name, device, row.source, "its row says so, and the same command goes on without it")
        self.row = row


class _TooLargeError(Exception):
    """A kernel's operands do not fit."""


def timed(
    kernel: Kernel, device: TorchDevice, method: Method, make: Preparation | None = None
) -> tuple[TimeStatistics, DeviceTelemetry | None]:
    """What a kernel takes, and the device under it; make: prepares it in another way.

    Raise whatever PyTorch raises for it, and Unsupported where the device has no such kernel.
    """
    if not device.supports(kernel.dtype):
        raise pytorch_ops.Unsupported(f"{device.name} has no {kernel.dtype.value}")
    size = pytorch_ops.allocated(kernel, device.torch)
    if size > _FREE * device.free_bytes():
        free = format_bytes(device.free_bytes())
        raise _TooLargeError(f"its operands take {format_bytes(size)}; {free} are free")
    cold, prepare = arrangement(kernel, device, method), make or pytorch_ops.prepare
    with pytorch_ops.settings(kernel, device.torch):
        action = device.ready(lambda: _rotation(lambda: prepare(kernel, device.torch), cold.copies))
        watch = device.stopwatch(flushed=cold.flushed)
        batch = max(1, min(device.flushes if cold.flushed else method.batch, _QUEUED // kernel.launches))
        with device.watched() as seen:
            time = measure(watch, action, replace(method, batch=batch), round_of=cold.copies)
        return time, seen.under


def _rotation(make: Callable[[], Action], copies: int) -> Action:
    actions = [make() for _ in range(copies)]
    return actions[0] if copies == 1 else Rotation(actions)


def _failed(made: KernelSample, device: TorchDevice, error: Exception) -> KernelSample:
    """What PyTorch refuses is not measured; what leaves the device unusable is not survived."""
    match error:
        case pytorch_ops.Unsupported():
            return replace(made, outcome=MeasurementOutcome.UNSUPPORTED, source=str(error))
        case _TooLargeError():
            return replace(made, outcome=MeasurementOutcome.OUT_OF_MEMORY, source=str(error))
    if not device.survives(error):
        raise KernelFailedError(
            replace(made, outcome=MeasurementOutcome.FAILED, source=sentence(error)), device.name
        ) from error
    if device.out_of_memory(error):
        return replace(made, outcome=MeasurementOutcome.OUT_OF_MEMORY, source="memory ran out while it ran")
    if (lacking := lacks(error)) is not None:
        return replace(made, outcome=MeasurementOutcome.NO_COMPILER, source=lacking)
    return replace(made, outcome=MeasurementOutcome.UNSUPPORTED, source=sentence(error))
