"""By how much do kernels slow down while something else uses the device: a copy, a collective?

The kernel is timed alone, then while the other work runs from before it starts until after it ends: on a GPU on
another stream, on a CPU in another thread (whose copies leave Python's lock to it). A collective takes as many ranks
as the default process group has; all of them time the same kernel as often, beside as many collectives.
"""

import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action, Load
from calibrate.kernels.copies import copying
from calibrate.kernels.routines import prepare, settings
from calibrate.kernels.rows import row
from calibrate.kernels.timing import Method, spread
from clustersim.cost.record import BesideRow, KernelRow
from clustersim.dtypes import DType
from clustersim.units import Bytes, Seconds
from clustersim.workload.kernels import Kernel, MatmulShape
from clustersim.workload.linear import product

Octets = NDArray[np.uint8]

COPY: Final = "copy"
ALL_REDUCE: Final = "all_reduce"
SIZES: Final = {"cuda": 8192, "cpu": 1024}  # rows of a product that lasts milliseconds
_ROUNDS: Final = 12
_LONG: Final = 5e-3  # seconds of kernels beside the other work
_COPIED: Final = 2**28  # bytes of a copy, more than caches hold
_REDUCED: Final = 2**26  # bytes of a collective


def typical_kernel(device: TorchDevice) -> Kernel:
    """A square product in the format that the device trains in."""
    narrow = device.torch.type != "cpu" and device.supports(DType.BF16)
    return usual_kernel(DType.BF16 if narrow else DType.FP32, SIZES[device.torch.type])


def usual_kernel(dtype: DType, size: int) -> Kernel:
    """A square product of a linear layer."""
    return product("beside.matmul", dtype, MatmulShape(size, size, size), result=dtype.bytes)


def beside_copy(kernel: Kernel, device: TorchDevice, method: Method) -> BesideRow | None:
    """A kernel alone and beside copies in the device's memory; None where the kernel cannot be measured."""
    size = min(_COPIED, 0.05 * device.free_bytes())
    load = _copy_thread if device.torch.type == "cpu" else _copy_stream
    return _beside(row(kernel, device, method), device, COPY, load(device, size))


def beside_all_reduce(kernel: Kernel, device: TorchDevice, method: Method) -> BesideRow | None:
    """A kernel alone and beside all-reduces of the default process group; all of its ranks must call this."""
    alone = row(kernel, device, method)
    seconds = 0.0 if alone.time is None else 4.0 * max(_LONG, alone.time.seconds)
    return _beside(alone, device, ALL_REDUCE, _collective(device, seconds))


def _beside(alone: KernelRow, device: TorchDevice, name: str, load: Load) -> BesideRow | None:
    """A fixed number of rounds, the first of which is not counted: all ranks of a collective must agree on it."""
    if alone.time is None:
        return None
    repeats = max(1, round(_LONG / alone.time.seconds))
    with settings(alone.kernel, device.torch):
        action = prepare(alone.kernel, device.torch)
        watch = device.stopwatch(beside=load)
        samples = [watch.time(action, repeats) / repeats for _ in range(_ROUNDS + 1)]
    return BesideRow(alone, name, spread(samples[1:]))


def _copy_thread(_device: TorchDevice, size: Bytes) -> Load:
    """Copies of one thread, as a collective library's; NumPy's leave Python's lock to others."""
    source = np.random.default_rng().bytes(int(size))
    return partial(_copy_until_ended, np.frombuffer(source, np.uint8), np.empty(int(size), np.uint8))


def _copy_until_ended(source: Octets, target: Octets, _seconds: Seconds) -> Action:
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            np.copyto(target, source)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


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


@dataclass(frozen=True, slots=True)
class _AllReduces:
    """So many all-reduces whatever is asked for, as many on every rank."""

    tensor: Tensor
    many: int

    def __call__(self, _seconds: Seconds) -> Action:
        works = [distributed.all_reduce(self.tensor, async_op=True) for _ in range(self.many)]

        def end() -> None:
            for work in works:
                if work is not None:
                    work.wait()

        return end


def _collective(device: TorchDevice, seconds: Seconds) -> Load:
    """All-reduces that last so long alone on the slowest rank."""
    once = _AllReduces(torch.zeros(_REDUCED // 4, device=device.torch), 1)
    device.host_seconds(once(0.0), 1)
    spent = torch.tensor([device.host_seconds(lambda: once(0.0)(), 3) / 3, seconds], device=device.torch)
    distributed.all_reduce(spent, op=distributed.ReduceOp.MAX)
    alone, longest = (float(value) for value in spent)
    return replace(once, many=1 + int(longest / alone))
