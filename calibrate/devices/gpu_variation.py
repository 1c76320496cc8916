"""How far do the GPUs of this node differ, when all of them work?

GPUs of one kind are not equally fast under load: leakage, cooling and firmware decide what clock fits into the power
limit, and the slowest sets the pace of a step. All GPUs that this process sees run the products of `filler` at the same
time, and each times its own.
"""

from collections import deque
from contextlib import ExitStack
from time import perf_counter, sleep
from typing import Final

import torch

from calibrate.devices.cuda import CudaDevice
from calibrate.devices.device import TorchDevice
from calibrate.devices.load_generator import Batch
from calibrate.devices.sample_statistics import spread
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import GpuSample

_WARM: Final = 2.0  # seconds, in which power limits have met the clocks
_SECONDS: Final = 2.0  # of samples
_POLLED: Final = 1e-3  # seconds; a batch lasts ten times as long


class Line:
    """Batches of products on one GPU, each launched while another runs, so that it never waits for the others."""

    def __init__(self, gpu: CudaDevice) -> None:
        self.gpu = gpu
        self.samples: list[Seconds] = []
        self._waiting: deque[Batch] = deque(gpu.filler().batch() for _ in range(2))

    def go_on(self) -> None:
        """Take the time of a batch that is done, and launch another."""
        while self._waiting[0].done:
            self.samples.append(self._waiting.popleft().seconds())
            self._waiting.append(self.gpu.filler().batch())


def gpu_rows(device: TorchDevice) -> tuple[GpuSample, ...]:
    """A product on every GPU at once, the median of many; none on a CPU, which is the node's only one."""
    if device.filler() is None:
        return ()
    lines = [Line(CudaDevice(number)) for number in range(torch.cuda.device_count())]
    _go_on(lines, _WARM)
    for line in lines:
        line.samples.clear()
    with ExitStack() as stack:
        seen = [stack.enter_context(line.gpu.watched()) for line in lines]
        _go_on(lines, _SECONDS)
    found = zip(lines, seen, strict=True)
    return tuple(GpuSample(f"cuda:{line.gpu.number}", spread(line.samples), watch.under) for line, watch in found)


def _go_on(lines: list[Line], seconds: Seconds) -> None:
    began = perf_counter()
    while perf_counter() - began < seconds:
        sleep(_POLLED)
        for line in lines:
            line.go_on()
