"""How is a CPU measured?

By the wall clock, with the threads that PyTorch computes with in this process. Its last cache is flushed by writing
twice as many bytes as it has.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import torch

from calibrate.devices.stopwatch import Action, Load
from clustersim.cost.record import Device
from clustersim.dtypes import DType
from clustersim.units import Bytes, Seconds

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE: Final = 32 * 2.0**20  # where the system does not say
_SIZES: Final = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}
_SUPPORTED: Final = (DType.FP32, DType.BF16, DType.FP16)


@dataclass(frozen=True, slots=True)
class CpuStopwatch:
    """The wall clock. between: runs before each timed one, and is not timed; beside: what runs at the same time."""

    between: Action | None = None
    beside: Load | None = None

    def now(self) -> Seconds:
        """Seconds by the wall."""
        return perf_counter_ns() * 1e-9

    def time(self, action: Action, repeats: int) -> Seconds:
        """Seconds of so many runs of an action."""
        if self.beside is not None:
            end = self.beside(0.0)  # goes on until it is ended
            spent = _timed(action, repeats)
            end()
            return spent
        if self.between is None:
            return _timed(action, repeats)
        spent = 0.0
        for _ in range(repeats):
            self.between()
            spent += _timed(action, 1)
        return spent


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The CPU, as `devices.TorchDevice` has it."""

    @property
    def torch(self) -> torch.device:
        """What PyTorch calls it."""
        return torch.device("cpu")

    @property
    def name(self) -> str:
        """The processor's name."""
        return _processor("model name") or platform.processor() or platform.machine()

    @property
    def cache_bytes(self) -> Bytes:
        """The largest cache that a core can use."""
        sizes = [path.read_text(encoding="utf-8").strip() for path in _CACHES.glob("index*/size")]
        return max((float(size[:-1]) * _SIZES[size[-1]] for size in sizes), default=_USUAL_CACHE)

    def supports(self, dtype: DType) -> bool:
        """Whether it multiplies matrices of that format."""
        return dtype in _SUPPORTED

    def describe(self, accelerator: str) -> Device:
        """As a record has it; compute units are threads, which compute one process's kernels."""
        threads = torch.get_num_threads()
        return Device(
            accelerator,
            self.name,
            memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
            compute_units=threads,
            torch=torch.__version__,
            threads=threads,
        )

    def conditions(self) -> Mapping[str, float]:
        """The cores' mean clock and the load of the machine over the last minute."""
        clock = _processor("cpu MHz")
        load = {"load": os.getloadavg()[0]}
        return {"clock_mhz": float(clock), **load} if clock else load

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def stopwatch(self, *, flushed: bool = False, beside: Load | None = None) -> CpuStopwatch:
        """The wall clock; flushed: other memory is written before each run; beside: what runs at the same time."""
        if not flushed:
            return CpuStopwatch(beside=beside)
        other = torch.zeros(int(self.cache_bytes // 2))  # FP32: twice the cache
        return CpuStopwatch(lambda: _write(other))

    def host_seconds(self, action: Action, repeats: int) -> Seconds:
        """Seconds of so many runs, by the wall."""
        return _timed(action, repeats)

    def free_bytes(self) -> Bytes:
        """Memory that the system can give without swapping."""
        return 1024.0 * float((_field(Path("/proc/meminfo"), "MemAvailable") or "0 kB").split()[0])

    def release(self) -> None:
        """The system has it back already."""

    def reset_peak(self) -> None:
        """Forget the process's peak so far (proc(5): clear_refs)."""
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def peak_bytes(self) -> Bytes:
        """The most memory that the process has held since then."""
        return 1024.0 * float((_field(Path("/proc/self/status"), "VmHWM") or "0 kB").split()[0])

    def out_of_memory(self, error: Exception) -> bool:
        """Whether an error says that memory ran out."""
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def survives(self, _error: Exception) -> bool:
        """A CPU can always be used on."""
        return True


def _timed(action: Action, repeats: int) -> Seconds:
    began = perf_counter_ns()
    for _ in range(repeats):
        action()
    return (perf_counter_ns() - began) * 1e-9


def _write(other: torch.Tensor) -> None:
    other.add_(1.0)


def _processor(key: str) -> str | None:
    return _field(Path("/proc/cpuinfo"), key)


def _field(path: Path, key: str) -> str | None:
    """The value of the first line `key: value` of a file of the system; None without."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == key), None)
