"""How much do the GPUs of this node differ when all of them work?

GPUs of one type differ in speed under load: leakage, cooling and firmware determine which clock fits into
the power limit, and the slowest GPU limits a step. All GPUs visible to this process run the matmuls of
`load_generator` at the same time, and each is timed by its own events.
"""

from collections import deque
from contextlib import ExitStack
from time import perf_counter, sleep
from typing import Final

import torch

from calibrate.devices.cuda import CudaDevice
from calibrate.devices.device import TorchDevice
from calibrate.devices.load_generator import MatmulBatch
from calibrate.devices.sample_statistics import time_statistics
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import GpuSample

_WARM_UP_SECONDS: Final = 2.0  # seconds, after which clocks have settled at the power limits
_SAMPLING_SECONDS: Final = 2.0  # seconds of sampling
_POLL_SECONDS: Final = 1e-3  # seconds between polls; a batch lasts ten times as long


class GpuLoadQueue:
    """Matmul batches on one GPU, each launched while another runs, so that the GPU never idles."""

    def __init__(self, gpu: CudaDevice) -> None:
        self.gpu = gpu
        self.samples: list[Seconds] = []
        self._pending: deque[MatmulBatch] = deque(gpu.load_generator().launch_batch() for _ in range(2))

    def poll(self) -> None:
        """Record the time of each finished batch, and launch another."""
        while self._pending[0].is_done:
            self.samples.append(self._pending.popleft().seconds_per_matmul())
            self._pending.append(self.gpu.load_generator().launch_batch())


def measure_gpu_variation(device: TorchDevice) -> tuple[GpuSample, ...]:
    """Median matmul time on every GPU, all working concurrently; empty on a CPU, of which a node has only one."""
    if device.load_generator() is None:
        return ()
    queues = [GpuLoadQueue(CudaDevice(index)) for index in range(torch.cuda.device_count())]
    _run_queues(queues, _WARM_UP_SECONDS)
    for queue in queues:
        queue.samples.clear()
    with ExitStack() as stack:
        logs = [stack.enter_context(queue.gpu.sample_telemetry()) for queue in queues]
        _run_queues(queues, _SAMPLING_SECONDS)
    pairs = zip(queues, logs, strict=True)
    return tuple(
        GpuSample(f"cuda:{queue.gpu.index}", time_statistics(queue.samples), log.mean_telemetry) for queue, log in pairs
    )


def _run_queues(queues: list[GpuLoadQueue], seconds: Seconds) -> None:
    start_time = perf_counter()
    while perf_counter() - start_time < seconds:
        sleep(_POLL_SECONDS)
        for queue in queues:
            queue.poll()
