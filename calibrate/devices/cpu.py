"""How is a CPU measured?

By the wall clock, with the threads that PyTorch uses in this process. The last-level cache is flushed by
reading twice its size. There is no load generator and no burn-in: server processors settle on their clock
under load within milliseconds; one whose clock keeps changing (a laptop's power limit) shows in the spread
of samples, which the command warns about. The clock is read after each measurement, since a sampling thread
would take a core away from what is measured.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import torch

from calibrate.devices import system_info
from calibrate.devices.glibc_heap import trim_heap
from calibrate.devices.stopwatch import Action, BackgroundLoad
from calibrate.devices.telemetry_sampling import TelemetryLog
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import DeviceInfo, DeviceTelemetry

_CACHE_FOLDER: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_DEFAULT_CACHE_BYTES: Final = 32 * 2.0**20  # where the system does not report it
_SIZE_SUFFIXES: Final = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}
_SUPPORTED: Final = (DType.FP32, DType.BF16, DType.FP16)


@dataclass(frozen=True, slots=True)
class CpuStopwatch:
    """The wall clock. pre_run: runs before each timed run, untimed; background: load that runs concurrently."""

    pre_run: Action | None = None
    background: BackgroundLoad | None = None

    def now(self) -> Seconds:
        """Wall-clock seconds."""
        return perf_counter_ns() * 1e-9

    def time(self, action: Action, repeats: int) -> Seconds:
        """Total seconds of `repeats` runs of an action."""
        if self.background is not None:
            stop_background = self.background(0.0)  # runs until it is stopped
            spent = _time_runs(action, repeats)
            stop_background()
            return spent
        if self.pre_run is None:
            return _time_runs(action, repeats)
        spent = 0.0
        for _ in range(repeats):
            self.pre_run()
            spent += _time_runs(action, 1)
        return spent


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The CPU as a `devices.device.TorchDevice`."""

    @property
    def torch(self) -> torch.device:
        """The PyTorch device."""
        return torch.device("cpu")

    @property
    def name(self) -> str:
        """The processor's name."""
        return system_info.processor_name()

    @property
    def cache_bytes(self) -> Bytes:
        """The largest cache that a core can use."""
        sizes = [path.read_text(encoding="utf-8").strip() for path in _CACHE_FOLDER.glob("index*/size")]
        return max((float(size[:-1]) * _SIZE_SUFFIXES[size[-1]] for size in sizes), default=_DEFAULT_CACHE_BYTES)

    def supports(self, dtype: DType) -> bool:
        """Whether matmuls of that format run."""
        return dtype in _SUPPORTED

    def describe(self, accelerator: str) -> DeviceInfo:
        """The device as records describe it; compute units are the threads of one process."""
        threads = torch.get_num_threads()
        return DeviceInfo(
            accelerator,
            self.name,
            memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
            compute_units=threads,
            torch=torch.__version__,
            threads=threads,
            host=self.name,
            environment=system_info.library_environment(),
        )

    def telemetry(self) -> DeviceTelemetry:
        """The mean clock of the cores, where the system reports it."""
        return DeviceTelemetry(sm_clock_mhz=system_info.core_clock_mhz())

    def conditions(self) -> Mapping[str, float]:
        """Mean clock of the cores and load average over the last minute, by name."""
        clock = system_info.core_clock_mhz()
        load = {"load": os.getloadavg()[0]}
        return {"clock_mhz": clock, **load} if clock else load

    @contextmanager
    def sample_telemetry(self) -> Iterator[TelemetryLog]:
        """Read the clock once when the block ends."""
        log = TelemetryLog()
        yield log
        log.samples.append(self.telemetry())

    def synchronize(self) -> None:
        """No effect: CPU work is synchronous."""

    @property
    def runs_per_flushed_sample(self) -> int:
        """Runs in a sample with a cache flush before each; a flush takes longer than most runs."""
        return 2

    def load_generator(self) -> None:
        """None: a CPU needs no load generator."""

    def prepare_under_load(self, make: Callable[[], Action]) -> Action:
        """The prepared action."""
        return make()

    def stopwatch(self, *, flush_cache: bool = False, background: BackgroundLoad | None = None) -> CpuStopwatch:
        """The wall clock; flush_cache: evict the cache before each run; background: load that runs concurrently."""
        if not flush_cache:
            return CpuStopwatch(background=background)
        flush_buffer = torch.zeros(int(self.cache_bytes // 2))  # FP32: twice the cache
        return CpuStopwatch(lambda: _read_buffer(flush_buffer))

    def host_seconds(self, action: Action, repeats: int) -> Seconds:
        """Wall-clock seconds of `repeats` runs."""
        return _time_runs(action, repeats)

    def free_bytes(self) -> Bytes:
        """Memory that the system can provide without swapping."""
        return 1024.0 * float((system_info.read_field(Path("/proc/meminfo"), "MemAvailable") or "0 kB").split()[0])

    def release_memory(self) -> None:
        """Return freed memory to the system."""
        trim_heap()

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error means that memory ran out."""
        return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)

    def is_usable_after(self, _error: Exception) -> bool:
        """True: a CPU stays usable after any error."""
        return True


def _time_runs(action: Action, repeats: int) -> Seconds:
    began = perf_counter_ns()
    for _ in range(repeats):
        action()
    return (perf_counter_ns() - began) * 1e-9


def _read_buffer(buffer: torch.Tensor) -> None:
    buffer.sum()
