"""How is a GPU measured?

By its own events, with the host well ahead: what is to be timed is launched behind a kernel that does nothing for as
long as launching takes, so that the device never waits for the host. What it takes the host to launch is measured by
itself (`copies.launch_interval`). The L2 cache is flushed by writing twice as many bytes as it has.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from calibrate.devices import cuda_errors
from calibrate.devices.stopwatch import Action, Load
from clustersim.cost.record import Device
from clustersim.dtypes import DType
from clustersim.units import Bytes, Seconds

_AHEAD: Final = 1.5  # times what launching took last
_FIRST: Final = 1e-4  # seconds that a launch may take, before one was seen
_LONGEST: Final = 0.5  # seconds that the device is kept waiting, at most
_LASTING: Final = 2.0  # times what a run took alone that something beside it lasts
_CLOCK: Final = 2e9  # cycles per second, at least what GPUs run at; a lower clock waits longer
_SINCE: Final = {  # compute capability from which tensor cores have a format (CUDA C++ Programming Guide, table 24)
    DType.FP32: (0, 0),
    DType.FP16: (7, 0),
    DType.TF32: (8, 0),
    DType.BF16: (8, 0),
    DType.FP8: (8, 9),
}
_QUERIES: Final = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
}


class CudaStopwatch:
    """Events on the current stream.

    between: runs before each timed run, and is not timed; beside: what runs on another stream at the same time.
    """

    def __init__(self, between: Action | None = None, beside: Load | None = None) -> None:
        self._between = between
        self._beside = beside
        self._launch = _FIRST  # seconds that launching a run took last
        self._run = _FIRST  # seconds that a run took last

    def now(self) -> Seconds:
        """Seconds by the wall."""
        return perf_counter()

    def time(self, action: Action, repeats: int) -> Seconds:
        """Seconds that the device works on so many runs of an action."""
        torch.cuda.synchronize()
        ahead = min(_LONGEST, _AHEAD * self._launch * repeats)
        end = None if self._beside is None else self._beside(ahead + _LASTING * self._run * repeats)
        torch.cuda._sleep(int(_CLOCK * ahead))  # type: ignore[no-untyped-call]
        began = perf_counter()
        pairs = self._together(action, repeats) if self._between is None else self._apart(action, repeats)
        self._launch = (perf_counter() - began) / repeats
        torch.cuda.synchronize()
        if end is not None:
            end()
        spent: Seconds = 1e-3 * sum(start.elapsed_time(end) for start, end in pairs)
        self._run = spent / repeats
        return spent

    def _together(self, action: Action, repeats: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        start = _marked()
        for _ in range(repeats):
            action()
        return [(start, _marked())]

    def _apart(self, action: Action, repeats: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        pairs = []
        for _ in range(repeats):
            if self._between is not None:
                self._between()
            start = _marked()
            action()
            pairs.append((start, _marked()))
        return pairs


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU by its number, as `devices.TorchDevice` has it."""

    number: int

    @property
    def torch(self) -> torch.device:
        """What PyTorch calls it."""
        return torch.device("cuda", self.number)

    @property
    def name(self) -> str:
        """What the driver calls it."""
        return torch.cuda.get_device_name(self.number)

    @property
    def cache_bytes(self) -> Bytes:
        """Its L2 cache."""
        return float(torch.cuda.get_device_properties(self.number).L2_cache_size)

    def supports(self, dtype: DType) -> bool:
        """Whether its matrix units have that format."""
        if torch.version.hip is not None:
            return dtype is not DType.TF32
        return torch.cuda.get_device_capability(self.number) >= _SINCE[dtype]

    def describe(self, accelerator: str) -> Device:
        """As a record has it."""
        properties = torch.cuda.get_device_properties(self.number)
        return Device(
            accelerator,
            self.name,
            memory_bytes=float(properties.total_memory),
            compute_units=properties.multi_processor_count,
            driver=self._queried("driver_version") or "",
            cuda=torch.version.cuda or f"hip {torch.version.hip}",
            torch=torch.__version__,
        )

    def conditions(self) -> Mapping[str, float]:
        """Clocks, temperature and power as nvidia-smi gives them; nothing where it is not there."""
        found = {}
        for query, name in _QUERIES.items():
            try:
                found[name] = float(self._queried(query) or "")
            except ValueError:  # [N/A]
                continue
        return found

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""
        torch.cuda.synchronize(self.number)

    def stopwatch(self, *, flushed: bool = False, beside: Load | None = None) -> CudaStopwatch:
        """Its events; flushed: other memory is written before each run; beside: what runs at the same time."""
        if not flushed:
            return CudaStopwatch(beside=beside)
        other = torch.empty(int(2 * self.cache_bytes), dtype=torch.int8, device=self.torch)
        return CudaStopwatch(lambda: _write(other))

    def host_seconds(self, action: Action, repeats: int) -> Seconds:
        """Seconds until so many runs are launched and done, by the wall."""
        self.synchronize()
        began = perf_counter()
        for _ in range(repeats):
            action()
        self.synchronize()
        return perf_counter() - began

    def free_bytes(self) -> Bytes:
        """Memory that the driver can give, and what PyTorch's allocator holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.number)
        return float(free + torch.cuda.memory_reserved(self.number) - torch.cuda.memory_allocated(self.number))

    def release(self) -> None:
        """Give memory back that nothing holds any more."""
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Forget the peak of memory so far."""
        torch.cuda.reset_peak_memory_stats(self.number)

    def peak_bytes(self) -> Bytes:
        """The most memory that tensors have held since then."""
        return float(torch.cuda.max_memory_allocated(self.number))

    def out_of_memory(self, error: Exception) -> bool:
        """Whether an error says that memory ran out."""
        return cuda_errors.out_of_memory(error)

    def survives(self, error: Exception) -> bool:
        """Whether the device can be used on after an error: it does not say otherwise, and neither does the device."""
        if cuda_errors.lost(error):
            return False
        try:
            self.synchronize()
        except RuntimeError:  # a lost context answers everything with its error
            return False
        return True

    def _queried(self, query: str) -> str | None:
        """One answer of nvidia-smi about this GPU, None where it has none."""
        command = shutil.which("nvidia-smi")
        if command is None:
            return None
        unique = getattr(torch.cuda.get_device_properties(self.number), "uuid", None)
        which = self.number if unique is None else f"GPU-{unique}"
        asked = [command, f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", str(which)]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        return answer.stdout.strip() if answer.returncode == 0 else None


def _marked() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _write(other: torch.Tensor) -> None:
    other.zero_()
