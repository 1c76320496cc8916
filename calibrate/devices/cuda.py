"""How is a GPU measured?

By its own events, with the host well ahead: what is to be timed is launched behind matrix products that last as long
as launching takes, so that the device neither waits for the host nor cools down (`filler`); more of them follow, so
that it works while the host decides what comes next. Beside other work it is the same, until that work ends, which
draws less alone.
What events take themselves (1 to 3 us) is told by an empty pair of them right after the timed one, and is taken off.
That is preferred to replaying a CUDA graph, which cannot capture everything (what autograd launches on the stream of
its forward, what asks the host), and in which a kernel is no shorter than behind a host that is ahead. Assumption: an
event takes as long after a kernel as after another event. The mean over a sample's runs does not depend on the
resolution of the device's timer. The L2 cache is flushed by reading twice as many bytes as it has: what is written
there would have to be written back while the next kernel runs. What it takes the host to launch is measured by itself
(`copies.launch_interval`).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache
from time import perf_counter
from typing import Final

import torch

from calibrate.devices import cuda_errors, system_info
from calibrate.devices.load_generator import Filler, timed_event
from calibrate.devices.matmul_support import multiplies
from calibrate.devices.sensors import sensor_of
from calibrate.devices.stopwatch import Action, Load
from calibrate.devices.telemetry import Sensor
from calibrate.devices.telemetry_sampling import Watch, watching
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import DeviceInfo, DeviceTelemetry

_AHEAD: Final = 1.5  # times what launching took last
_FIRST: Final = 1e-4  # seconds that a launch may take, before one was seen
_LONGEST: Final = 0.5  # seconds that the device is kept waiting, at most
_LEAD: Final = 0.05  # seconds of products before the first run: drivers set clocks by power every few milliseconds
_LASTING: Final = 2.0  # times what products and runs took alone that something beside them lasts
_FILLING: Final = {  # the format of products between, the first that there is
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
}
_FLOAT: Final = 4  # bytes

Pair = tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]
"""Before a run, after it, and after that: between the last two lies what an event takes."""


class CudaStopwatch:
    """Events on the current stream.

    filler: keeps the device busy before and after; between: runs before each timed run, and is not timed; beside: what
    runs on another stream at the same time.
    """

    def __init__(self, filler: Filler, between: Action | None = None, beside: Load | None = None) -> None:
        self._filler, self._between, self._beside = filler, between, beside
        self._launch = _FIRST  # seconds that launching a run took last
        self._run = _FIRST  # seconds that a run took last
        self._lead = _LEAD

    def now(self) -> Seconds:
        """Seconds by the wall."""
        return perf_counter()

    def time(self, action: Action, repeats: int) -> Seconds:
        """Seconds that the device works on so many runs of an action."""
        if self._beside is not None:
            return self._timed_beside(self._beside, action, repeats)
        self._filler.launch(max(self._lead, self._ahead(repeats)))
        self._lead = 0.0
        events = self._launched(action, repeats)
        self._filler.launch(0.0)
        return self._spent(events, repeats)

    def _timed_beside(self, beside: Load, action: Action, repeats: int) -> Seconds:
        ahead = max(_LEAD, self._ahead(repeats))
        alone = ahead + self._run * repeats
        torch.cuda.synchronize()
        end = beside(_LASTING * alone)
        self._filler.launch(ahead)
        events = self._launched(action, repeats)
        self._filler.launch((_LASTING - 1.0) * alone)
        spent = self._spent(events, repeats)
        end()
        return spent

    def _ahead(self, repeats: int) -> Seconds:
        return min(_LONGEST, _AHEAD * self._launch * repeats)

    def _launched(self, action: Action, repeats: int) -> list[Pair]:
        began = perf_counter()
        if self._between is None:
            events = [_marked(action, repeats)]
        else:
            events = []
            for _ in range(repeats):
                self._between()
                events.append(_marked(action, 1))
        self._launch = (perf_counter() - began) / repeats
        return events

    def _spent(self, events: list[Pair], repeats: int) -> Seconds:
        events[-1][-1].synchronize()
        whole = sum(start.elapsed_time(end) for start, end, _ in events)
        empty = sum(end.elapsed_time(after) for _, end, after in events)
        self._run = 1e-3 * max(0.0, whole - empty) / repeats
        return self._run * repeats


def _marked(action: Action, repeats: int) -> Pair:
    start = timed_event()
    for _ in range(repeats):
        action()
    return start, timed_event(), timed_event()


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
        """Whether PyTorch multiplies matrices of that format on it."""
        return multiplies(self.number, dtype)

    def describe(self, accelerator: str) -> DeviceInfo:
        """As a record has it."""
        properties = torch.cuda.get_device_properties(self.number)
        set_to = self._sensor.facts()
        return DeviceInfo(
            accelerator,
            self.name,
            memory_bytes=float(properties.total_memory),
            compute_units=properties.multi_processor_count,
            driver=set_to.driver,
            cuda=torch.version.cuda or f"hip {torch.version.hip}",
            torch=torch.__version__,
            cudnn=system_info.cudnn(),
            cublas=system_info.cublas(),
            attention=system_info.attention(),
            host=system_info.processor(),
            power_limit_w=set_to.power_limit_w,
            ecc=set_to.ecc,
            mig=set_to.mig,
            environment=system_info.environment(),
        )

    def state(self) -> DeviceTelemetry:
        """Its clocks, power and temperature now, as far as its driver tells."""
        return self._sensor.state()

    def conditions(self) -> Mapping[str, float]:
        """The same as numbers by name, for what a record says of before and after."""
        return {name: value for name, value in asdict(self.state()).items() if isinstance(value, float) and value}

    def watched(self) -> AbstractContextManager[Watch]:
        """Look at its state while the block runs."""
        return watching(self.state)

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""
        torch.cuda.synchronize(self.number)

    @property
    def flushes(self) -> int:
        """Runs in a sample, each after a flush: some 50 us each, and a few events; together a millisecond."""
        return 32

    def filler(self) -> Filler:
        """What keeps it busy while nothing is measured; it is made when it is first needed."""
        return _filler(self.number)

    def ready(self, make: Callable[[], Action]) -> Action:
        """What is to be timed, made and run once (which compiles it) while the device is kept busy."""
        with self.filler().beside():
            action = make()
            action()
        return action

    def stopwatch(self, *, flushed: bool = False, beside: Load | None = None) -> CudaStopwatch:
        """Its events; flushed: other memory is read before each run; beside: what runs at the same time."""
        if not flushed:
            return CudaStopwatch(self.filler(), beside=beside)
        other = torch.zeros(int(2 * self.cache_bytes) // _FLOAT, device=self.torch)
        total = torch.zeros((), device=self.torch)
        return CudaStopwatch(self.filler(), lambda: _read(other, total))

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
        _filler.cache_clear()
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

    @property
    def _sensor(self) -> Sensor:
        return sensor_of(self.number)


@cache
def _filler(number: int) -> Filler:
    device = CudaDevice(number)
    dtype = next(dtype for dtype in _FILLING if device.supports(dtype))
    return Filler(device.torch, _FILLING[dtype], _aside(number))


@cache
def _aside(number: int) -> torch.cuda.Stream:
    """One for all fillers: cuBLAS keeps a workspace of tens of MB for each stream that it has seen."""
    return torch.cuda.Stream(torch.device("cuda", number))  # type: ignore[no-untyped-call]


def _read(other: torch.Tensor, total: torch.Tensor) -> None:
    torch.sum(other, dim=0, out=total)
