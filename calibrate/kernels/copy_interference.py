"""Kernel slowdown while copies use the device's memory.

The kernel is timed in isolation, then while copies run from before its start until after its end: on a GPU
on another stream, on a CPU in another thread (whose copies release Python's GIL). Collectives:
`calibrate.collectives` has the same benchmark for kernels and collectives.
"""

from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action, BackgroundLoad
from calibrate.devices.telemetry_sampling import run_periodically
from calibrate.kernels.copy_benchmark import copy_action
from calibrate.kernels.measure import measure_kernel
from calibrate.kernels.pytorch_ops import kernel_settings, prepare_kernel
from calibrate.kernels.timing import MeasurementMethod, time_statistics
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import COPY, InterferenceSample, KernelSample
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel

ByteArray = NDArray[np.uint8]

MATMUL_SIZES: Final = {"cuda": 8192, "cpu": 1024}  # m, n and k of a matmul that takes milliseconds
_SAMPLES: Final = 12
_SAMPLE_SECONDS: Final = 5e-3  # seconds of kernels per sample
_COPY_BYTES: Final = 2**28  # bytes of a copy, larger than the caches


def typical_kernel(device: TorchDevice) -> Kernel:
    """A square matmul in the format that the device trains in."""
    uses_bf16 = device.torch.type != "cpu" and device.supports(DType.BF16)
    return square_matmul(DType.BF16 if uses_bf16 else DType.FP32, MATMUL_SIZES[device.torch.type])


def square_matmul(dtype: DType, size: int) -> Kernel:
    """A square matmul of a linear layer."""
    return matmul_kernel("overlapped.matmul", dtype, MatmulShape(size, size, size), result_bytes=dtype.bytes)


def measure_copy_interference(
    kernel: Kernel, device: TorchDevice, method: MeasurementMethod
) -> InterferenceSample | None:
    """A kernel's time in isolation and overlapped with copies in device memory; None if it cannot be measured."""
    size = min(_COPY_BYTES, 0.05 * device.free_bytes())
    start_copies = _copies_in_thread if device.torch.type == "cpu" else _copies_on_stream
    return _measure_overlapped(measure_kernel(kernel, device, method), device, start_copies(device, size))


def _measure_overlapped(isolated: KernelSample, device: TorchDevice, load: BackgroundLoad) -> InterferenceSample | None:
    """Time a fixed number of samples, of which the first is discarded."""
    if isolated.time is None:
        return None
    repeats = max(1, round(_SAMPLE_SECONDS / isolated.time.seconds))
    with kernel_settings(isolated.kernel, device.torch):
        action = prepare_kernel(isolated.kernel, device.torch)
        watch = device.stopwatch(background=load)
        samples = [watch.time(action, repeats) / repeats for _ in range(_SAMPLES + 1)]
    return InterferenceSample(isolated, COPY, time_statistics(samples[1:]))


def _copies_in_thread(_device: TorchDevice, size: Bytes) -> BackgroundLoad:
    """Load of memory copies in one thread, as a collective library's; NumPy's copies release the GIL."""
    source = np.random.default_rng().bytes(int(size))
    return partial(_copy_until_ended, np.frombuffer(source, np.uint8), np.empty(int(size), np.uint8))


def _copy_until_ended(source: ByteArray, target: ByteArray, _seconds: Seconds) -> Action:
    return run_periodically(partial(np.copyto, target, source), interval=0.0)


def _copies_on_stream(device: TorchDevice, size: Bytes) -> BackgroundLoad:
    """Load of memory copies on a stream of their own, as many as last for the requested time in isolation."""
    run = copy_action(device, "device", size)
    watch, stream = device.stopwatch(), torch.cuda.Stream(device.torch)  # type: ignore[no-untyped-call]
    watch.time(run, 3)
    copy_seconds = watch.time(run, 10) / 10

    def start(seconds: Seconds) -> Action:
        with torch.cuda.stream(stream):
            for _ in range(1 + int(seconds / copy_seconds)):
                run()
        return stream.synchronize

    return start
