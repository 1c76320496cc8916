"""How far do the GPUs of this node differ, when all of them work?

GPUs of one kind are not equally fast under load: leakage, cooling and firmware decide what clock fits into the power
limit, and the slowest sets the pace of a step. All GPUs that this process sees run the products of `filler` at the same
time, and each times its own.
"""

from contextlib import ExitStack
from typing import Final

import torch

from calibrate.devices.cuda import CudaDevice
from calibrate.devices.device import TorchDevice
from calibrate.devices.filler import Batch, Filler
from calibrate.devices.watch import Watch
from calibrate.kernels.timing import spread
from clustersim.cost.record import GpuRow
from clustersim.units import Seconds

_WARM: Final = 2.0  # seconds, in which power limits have met the clocks
_SECONDS: Final = 2.0  # of samples


def gpu_rows(device: TorchDevice) -> tuple[GpuRow, ...]:
    """A product on every GPU at once, the median of many; none on a CPU, which is the node's only one."""
    if device.filler() is None:
        return ()
    gpus = [CudaDevice(number) for number in range(torch.cuda.device_count())]
    fillers = [gpu.filler() for gpu in gpus]
    _samples(gpus, fillers, _WARM)
    with ExitStack() as stack:
        seen = [stack.enter_context(gpu.watched()) for gpu in gpus]
        samples = _samples(gpus, fillers, _SECONDS)
    return tuple(_row(*each) for each in zip(gpus, samples, seen, strict=True))


def _row(gpu: CudaDevice, samples: list[Seconds], seen: Watch) -> GpuRow:
    return GpuRow(f"cuda:{gpu.number}", spread(samples), seen.under)


def _samples(gpus: list[CudaDevice], fillers: list[Filler], seconds: Seconds) -> list[list[Seconds]]:
    """Seconds of a product on each GPU, again and again while all are busy for so long."""
    spent: list[list[Seconds]] = [[] for _ in gpus]
    waiting = [_begun(gpu, filler) for gpu, filler in zip(gpus, fillers, strict=True)]
    done = 0.0
    while done < seconds:
        following = [_begun(gpu, filler) for gpu, filler in zip(gpus, fillers, strict=True)]
        times = [batch.seconds() for batch in waiting]
        for mine, time in zip(spent, times, strict=True):
            mine.append(time)
        done += max(time * batch.many for time, batch in zip(times, waiting, strict=True))
        waiting = following
    for batch in waiting:
        batch.seconds()
    return spent


def _begun(gpu: CudaDevice, filler: Filler) -> Batch:
    with torch.cuda.device(gpu.torch):
        return filler.batch()
