"""Benchmarks of memory copies and of the kernel launch rate.

Routes: `device` within the device's own memory (for a CPU, its memory), `host_to_device` and
`device_to_host` with pinned host memory. The launch interval is the time per kernel when many tiny ones are
launched without waiting: the lower bound of any kernel that a program launches one by one.
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
from calibrate.kernels.timing import MeasurementMethod, measure_action
from clustersim.common.units import Bytes, Seconds, format_bytes
from clustersim.cost.calibration_record import CopySample

_SIZES: Final = tuple(2**power for power in range(20, 31, 2))  # 1 MiB to 1 GiB
_MAX_MEMORY_FRACTION: Final = 0.1  # of free memory, for one copy
_RUNS_PER_SAMPLE: Final = 4  # copies per sample
_LAUNCHES: Final = 2000
_SAMPLES: Final = 7


def measure_copies(
    device: TorchDevice, method: MeasurementMethod, measured: Container[tuple[str, Bytes]] = ()
) -> Iterator[CopySample]:
    """Copies of all sizes that fit, on each route, except those measured; skipped sizes go to stderr."""
    routes = ("device",) if device.torch.type == "cpu" else ("device", "host_to_device", "device_to_host")
    for route in routes:
        for size in _SIZES:
            if (route, float(size)) not in measured and size <= _MAX_MEMORY_FRACTION * device.free_bytes():
                sample = _copy_if_memory_suffices(device, route, size, method)
                if sample is None:
                    break  # larger ones do not fit either
                yield sample


def _copy_if_memory_suffices(
    device: TorchDevice, route: str, size: int, method: MeasurementMethod
) -> CopySample | None:
    """Measure a copy; None if memory runs out.

    Pinned memory is limited by the host's free memory, by containers and by the driver, none of which can be
    queried.
    """
    try:
        return measure_copy(device, route, size, method)
    except RuntimeError as error:
        if not device.is_usable_after(error) or not device.is_out_of_memory(error):
            raise
    device.release_memory()
    kind = "memory" if route == "device" else "memory, or pinned memory of the host,"
    print(f"copies {route}: no {kind} for {format_bytes(float(size))} and more; they are left out", file=sys.stderr)
    return None


def measure_copy(device: TorchDevice, route: str, size: int, method: MeasurementMethod) -> CopySample:
    """Measure one copy; small ones with the cache flushed before each run."""
    flushed = method.cold_cache and size < device.cache_bytes
    watch = device.stopwatch(flush_cache=flushed)
    runs = max(_RUNS_PER_SAMPLE, device.runs_per_flushed_sample) if flushed else _RUNS_PER_SAMPLE
    time = measure_action(
        watch,
        device.prepare_under_load(lambda: copy_action(device, route, size)),
        replace(method, max_runs_per_sample=runs),
    )
    device.release_memory()
    return CopySample(route, float(size), time)


def copy_action(device: TorchDevice, route: str, size: Bytes) -> Action:
    """An action that copies this many bytes once."""
    source = _allocate(device, size, host=route.startswith("host")).random_()
    target = _allocate(device, size, host=route.endswith("host"))

    def copy_once() -> None:
        target.copy_(source, non_blocking=True)

    return copy_once


def measure_launch_interval(device: TorchDevice) -> Seconds:
    """Median seconds per kernel when many tiny kernels are launched back to back."""
    scalar = torch.zeros(1, device=device.torch)

    def launch_once() -> None:
        scalar.add_(1.0)

    device.host_seconds(launch_once, _LAUNCHES)
    return float(np.median([device.host_seconds(launch_once, _LAUNCHES) for _ in range(_SAMPLES)])) / _LAUNCHES


def _allocate(device: TorchDevice, size: Bytes, *, host: bool) -> Tensor:
    if host:
        return torch.empty(int(size), dtype=torch.int8, pin_memory=device.torch.type == "cuda")
    return torch.empty(int(size), dtype=torch.int8, device=device.torch)
