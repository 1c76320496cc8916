"""How fast is memory copied, and how fast can the host launch kernels?

Routes: `device` within the device's own memory (of a CPU: its memory), `host_to_device` and `device_to_host` with
pinned host memory. A launch interval is what one kernel takes when many tiny ones are launched without waiting: the
floor under any kernel that a program launches one by one.
"""

import sys
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.kernels.timing import Method, measure
from clustersim.common.units import Bytes, Seconds, format_bytes
from clustersim.cost.calibration_record import CopySample

_SIZES: Final = tuple(2**power for power in range(20, 31, 2))  # 1 MiB to 1 GiB
_PART: Final = 0.1  # of the free memory that a copy may take
_RUNS: Final = 4  # in a sample
_LAUNCHES: Final = 2000
_ROUNDS: Final = 7


def copies(device: TorchDevice, method: Method, known: Container[tuple[str, Bytes]] = ()) -> Iterator[CopySample]:
    """Copies of all sizes that fit, on each route, but for those known already; those without memory are said."""
    routes = ("device",) if device.torch.type == "cpu" else ("device", "host_to_device", "device_to_host")
    for route in routes:
        for size in _SIZES:
            if (route, float(size)) not in known and size <= _PART * device.free_bytes():
                found = _copy_if_there_is_memory(device, route, size, method)
                if found is None:
                    break  # nor is there for larger ones
                yield found


def _copy_if_there_is_memory(device: TorchDevice, route: str, size: int, method: Method) -> CopySample | None:
    """Pinned memory is limited by the host's free memory, by containers and by the driver, and none of them says so."""
    try:
        return copy(device, route, size, method)
    except RuntimeError as error:
        if not device.survives(error) or not device.out_of_memory(error):
            raise
    device.release()
    kind = "memory" if route == "device" else "memory, or pinned memory of the host,"
    print(f"copies {route}: no {kind} for {format_bytes(float(size))} and more; they are left out", file=sys.stderr)
    return None


def copy(device: TorchDevice, route: str, size: int, method: Method) -> CopySample:
    """One copy; small ones with the cache flushed before each."""
    flushed = method.cold and size < device.cache_bytes
    watch = device.stopwatch(flushed=flushed)
    runs = max(_RUNS, device.flushes) if flushed else _RUNS
    time = measure(watch, device.ready(lambda: copying(device, route, size)), replace(method, batch=runs))
    device.release()
    return CopySample(route, float(size), time)


def copying(device: TorchDevice, route: str, size: Bytes) -> Action:
    """What copies so many bytes once."""
    source = _memory(device, size, host=route.startswith("host")).random_()
    target = _memory(device, size, host=route.endswith("host"))

    def run() -> None:
        target.copy_(source, non_blocking=True)

    return run


def launch_interval(device: TorchDevice) -> Seconds:
    """Median seconds that a tiny kernel takes when many are launched one after the other."""
    one = torch.zeros(1, device=device.torch)

    def run() -> None:
        one.add_(1.0)

    device.host_seconds(run, _LAUNCHES)
    return float(np.median([device.host_seconds(run, _LAUNCHES) for _ in range(_ROUNDS)])) / _LAUNCHES


def _memory(device: TorchDevice, size: Bytes, *, host: bool) -> Tensor:
    if host:
        return torch.empty(int(size), dtype=torch.int8, pin_memory=device.torch.type == "cuda")
    return torch.empty(int(size), dtype=torch.int8, device=device.torch)
