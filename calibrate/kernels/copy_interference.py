"""By how much do kernels slow down while copies use the device's memory? Collectives: `calibrate.collectives.interference`.

The kernel is timed alone, then while the copies run from before it starts until after it ends: on a GPU on another
stream, on a CPU in another thread (whose copies leave Python's lock to it).
"""

from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action, Load
from calibrate.devices.telemetry_sampling import repeated
from calibrate.kernels.copy_benchmark import copying
from calibrate.kernels.measure import row
from calibrate.kernels.pytorch_ops import prepare, settings
from calibrate.kernels.timing import Method, spread
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import COPY, InterferenceSample, KernelSample
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.linear import matmul_kernel

Octets = NDArray[np.uint8]

SIZES: Final = {"cuda": 8192, "cpu": 1024}  # rows of a product that lasts milliseconds
_ROUNDS: Final = 12
_LONG: Final = 5e-3  # seconds of kernels beside copies
_COPIED: Final = 2**28  # bytes of a copy, more than caches hold


def typical_kernel(device: TorchDevice) -> Kernel:
    """A square product in the format that the device trains in."""
    narrow = device.torch.type != "cpu" and device.supports(DType.BF16)
    return usual_kernel(DType.BF16 if narrow else DType.FP32, SIZES[device.torch.type])


def usual_kernel(dtype: DType, size: int) -> Kernel:
    """A square product of a linear layer."""
    return matmul_kernel("beside.matmul", dtype, MatmulShape(size, size, size), result_bytes=dtype.bytes)


def beside_copy(kernel: Kernel, device: TorchDevice, method: Method) -> InterferenceSample | None:
    """A kernel alone and beside copies in the device's memory; None where the kernel cannot be measured."""
    size = min(_COPIED, 0.05 * device.free_bytes())
    load = _copy_thread if device.torch.type == "cpu" else _copy_stream
    return _beside(row(kernel, device, method), device, load(device, size))


def _beside(alone: KernelSample, device: TorchDevice, load: Load) -> InterferenceSample | None:
    """A fixed number of rounds, the first of which is not counted."""
    if alone.time is None:
        return None
    repeats = max(1, round(_LONG / alone.time.seconds))
    with settings(alone.kernel, device.torch):
        action = prepare(alone.kernel, device.torch)
        watch = device.stopwatch(beside=load)
        samples = [watch.time(action, repeats) / repeats for _ in range(_ROUNDS + 1)]
    return InterferenceSample(alone, COPY, spread(samples[1:]))


def _copy_thread(_device: TorchDevice, size: Bytes) -> Load:
    """Copies of one thread, as a collective library's; NumPy's leave Python's lock to others."""
    source = np.random.default_rng().bytes(int(size))
    return partial(_copy_until_ended, np.frombuffer(source, np.uint8), np.empty(int(size), np.uint8))


def _copy_until_ended(source: Octets, target: Octets, _seconds: Seconds) -> Action:
    return repeated(partial(np.copyto, target, source), between=0.0)


def _copy_stream(device: TorchDevice, size: Bytes) -> Load:
    """Copies on a stream of their own, as many as last that long alone."""
    run = copying(device, "device", size)
    watch, stream = device.stopwatch(), torch.cuda.Stream(device.torch)  # type: ignore[no-untyped-call]
    watch.time(run, 3)
    alone = watch.time(run, 10) / 10

    def begin(seconds: Seconds) -> Action:
        with torch.cuda.stream(stream):
            for _ in range(1 + int(seconds / alone)):
                run()
        return stream.synchronize

    return begin
