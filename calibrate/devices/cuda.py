"""How is a GPU measured?

By its own events, with the host well ahead: timed kernels are launched behind matmuls that last as long as
launching takes, so that the device neither waits for the host nor cools down (`load_generator`); more
matmuls follow, so that it stays busy while the host decides what comes next. With a background load it is
the same, until that load ends.
The cost of events themselves (1 to 3 us) is measured by an empty pair of events right after the timed one,
and subtracted. This is preferred to replaying a CUDA graph, which cannot capture everything (what autograd
launches on the stream of its forward, what synchronizes with the host), and in which a kernel is no shorter
than behind a host that is ahead. Assumption: an event costs as much after a kernel as after another event.
The mean over a sample's runs does not depend on the resolution of the device's timer. The L2 cache is
flushed by reading twice its size: written data would have to be written back while the next kernel runs.
Host launch time is measured separately (`kernels.copy_benchmark`).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache
from time import perf_counter
from typing import Final

import torch

from calibrate.devices import cuda_errors, system_info
from calibrate.devices.load_generator import LoadGenerator, record_timed_event
from calibrate.devices.matmul_support import supports_matmul
from calibrate.devices.sensors import gpu_sensor
from calibrate.devices.stopwatch import Action, BackgroundLoad
from calibrate.devices.telemetry import GpuSensor
from calibrate.devices.telemetry_sampling import TelemetryLog, sample_while_running
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import DeviceInfo, DeviceTelemetry

_LEAD_RATIO: Final = 1.5  # lead over the last launch time
_INITIAL_SECONDS: Final = 1e-4  # estimated seconds of a launch, before the first
_MAX_LEAD_SECONDS: Final = 0.5  # longest time that the device is kept busy ahead of a run
_WARM_UP_SECONDS: Final = (
    0.05  # seconds of matmuls before the first run: drivers adapt clocks to power every few milliseconds
)
_BACKGROUND_RATIO: Final = 2.0  # duration of the background load over that of lead and runs without it
_LOAD_DTYPES: Final = {  # formats of the load; the first that the device supports
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
}
_FP32_BYTES: Final = 4  # bytes of an FP32 number

EventTriple = tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]
"""Before a run, after it, and after that: the last two enclose nothing but the cost of an event."""


class CudaStopwatch:
    """Events on the current stream.

    load_generator: keeps the device busy before and after; pre_run: runs before each timed run, untimed;
    background: load that runs on another stream concurrently.
    """

    def __init__(
        self, load_generator: LoadGenerator, pre_run: Action | None = None, background: BackgroundLoad | None = None
    ) -> None:
        self._load_generator, self._pre_run, self._background = load_generator, pre_run, background
        self._launch_seconds = _INITIAL_SECONDS  # last launch time of a run
        self._run_seconds = _INITIAL_SECONDS  # last device time of a run
        self._warm_up_seconds = _WARM_UP_SECONDS

    def now(self) -> Seconds:
        """Wall-clock seconds."""
        return perf_counter()

    def time(self, action: Action, repeats: int) -> Seconds:
        """Total seconds that the device works on `repeats` runs of an action."""
        if self._background is not None:
            return self._time_with_background(self._background, action, repeats)
        self._load_generator.launch_load(max(self._warm_up_seconds, self._lead_seconds(repeats)))
        self._warm_up_seconds = 0.0
        events = self._launch_runs(action, repeats)
        self._load_generator.launch_load(0.0)
        return self._device_seconds(events, repeats)

    def _time_with_background(self, background: BackgroundLoad, action: Action, repeats: int) -> Seconds:
        lead_seconds = max(_WARM_UP_SECONDS, self._lead_seconds(repeats))
        expected_seconds = lead_seconds + self._run_seconds * repeats
        torch.cuda.synchronize()
        stop_background = background(_BACKGROUND_RATIO * expected_seconds)
        self._load_generator.launch_load(lead_seconds)
        events = self._launch_runs(action, repeats)
        self._load_generator.launch_load((_BACKGROUND_RATIO - 1.0) * expected_seconds)
        seconds = self._device_seconds(events, repeats)
        stop_background()
        return seconds

    def _lead_seconds(self, repeats: int) -> Seconds:
        return min(_MAX_LEAD_SECONDS, _LEAD_RATIO * self._launch_seconds * repeats)

    def _launch_runs(self, action: Action, repeats: int) -> list[EventTriple]:
        start_time = perf_counter()
        if self._pre_run is None:
            events = [_run_between_events(action, repeats)]
        else:
            events = []
            for _ in range(repeats):
                self._pre_run()
                events.append(_run_between_events(action, 1))
        self._launch_seconds = (perf_counter() - start_time) / repeats
        return events

    def _device_seconds(self, events: list[EventTriple], repeats: int) -> Seconds:
        events[-1][-1].synchronize()
        total_ms = sum(start.elapsed_time(end) for start, end, _ in events)
        event_ms = sum(end.elapsed_time(after) for _, end, after in events)
        self._run_seconds = 1e-3 * max(0.0, total_ms - event_ms) / repeats
        return self._run_seconds * repeats


def _run_between_events(action: Action, repeats: int) -> EventTriple:
    start = record_timed_event()
    for _ in range(repeats):
        action()
    return start, record_timed_event(), record_timed_event()


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU by its index, as a `devices.device.TorchDevice`."""

    index: int

    @property
    def torch(self) -> torch.device:
        """The PyTorch device."""
        return torch.device("cuda", self.index)

    @property
    def name(self) -> str:
        """The driver's name of the device."""
        return torch.cuda.get_device_name(self.index)

    @property
    def cache_bytes(self) -> Bytes:
        """Size of its L2 cache."""
        return float(torch.cuda.get_device_properties(self.index).L2_cache_size)

    def supports(self, dtype: DType) -> bool:
        """Whether PyTorch has matmuls of that format on it."""
        return supports_matmul(self.index, dtype)

    def describe(self, accelerator: str) -> DeviceInfo:
        """The device as records describe it."""
        properties = torch.cuda.get_device_properties(self.index)
        settings = self._sensor.read_settings()
        return DeviceInfo(
            accelerator,
            self.name,
            memory_bytes=float(properties.total_memory),
            compute_units=properties.multi_processor_count,
            driver=settings.driver,
            cuda=torch.version.cuda or f"hip {torch.version.hip}",
            torch=torch.__version__,
            cudnn=system_info.cudnn_version(),
            cublas=system_info.cublas_version(),
            attention=system_info.enabled_sdpa_backends(),
            host=system_info.processor_name(),
            power_limit_w=settings.power_limit_w,
            ecc=settings.ecc,
            mig=settings.mig,
            environment=system_info.library_environment(),
        )

    def telemetry(self) -> DeviceTelemetry:
        """Current clocks, power and temperature, as far as the driver reports them."""
        return self._sensor.read_telemetry()

    def conditions(self) -> Mapping[str, float]:
        """The same as numbers by name, for the conditions before and after a session."""
        return {name: value for name, value in asdict(self.telemetry()).items() if isinstance(value, float) and value}

    def sample_telemetry(self) -> AbstractContextManager[TelemetryLog]:
        """Sample telemetry while the block runs."""
        return sample_while_running(self.telemetry)

    def synchronize(self) -> None:
        """Wait until all launched work has finished."""
        torch.cuda.synchronize(self.index)

    @property
    def runs_per_flushed_sample(self) -> int:
        """Runs in a sample with a cache flush before each: some 50 us per flush plus events; a millisecond in total."""
        return 32

    def load_generator(self) -> LoadGenerator:
        """The load that keeps it busy while nothing is measured; built on first use."""
        return _load_generator(self.index)

    def prepare_under_load(self, make: Callable[[], Action]) -> Action:
        """The action to be timed, built and run once (which compiles it) while the device is kept busy."""
        with self.load_generator().background_load():
            action = make()
            action()
        return action

    def stopwatch(self, *, flush_cache: bool = False, background: BackgroundLoad | None = None) -> CudaStopwatch:
        """Event timing; flush_cache: evict the L2 before each run; background: load that runs concurrently."""
        if not flush_cache:
            return CudaStopwatch(self.load_generator(), background=background)
        flush_buffer = torch.zeros(int(2 * self.cache_bytes) // _FP32_BYTES, device=self.torch)
        total = torch.zeros((), device=self.torch)
        return CudaStopwatch(self.load_generator(), lambda: _read_buffer(flush_buffer, total))

    def host_seconds(self, action: Action, repeats: int) -> Seconds:
        """Wall-clock seconds until `repeats` runs are launched and finished."""
        self.synchronize()
        start_time = perf_counter()
        for _ in range(repeats):
            action()
        self.synchronize()
        return perf_counter() - start_time

    def free_bytes(self) -> Bytes:
        """Memory that the driver can provide, plus what PyTorch's allocator has reserved without using it."""
        free, _ = torch.cuda.mem_get_info(self.index)
        return float(free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index))

    def release_memory(self) -> None:
        """Return unused memory."""
        _load_generator.cache_clear()
        torch.cuda.empty_cache()

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error means that memory ran out."""
        return cuda_errors.is_out_of_memory(error)

    def is_usable_after(self, error: Exception) -> bool:
        """Whether the device is usable after an error: neither the error nor a synchronize says otherwise."""
        if cuda_errors.is_context_lost(error):
            return False
        try:
            self.synchronize()
        except RuntimeError:  # a lost context returns its error at every call
            return False
        return True

    @property
    def _sensor(self) -> GpuSensor:
        return gpu_sensor(self.index)


@cache
def _load_generator(index: int) -> LoadGenerator:
    device = CudaDevice(index)
    dtype = next(dtype for dtype in _LOAD_DTYPES if device.supports(dtype))
    return LoadGenerator(device.torch, _LOAD_DTYPES[dtype], _background_stream(index))


@cache
def _background_stream(index: int) -> torch.cuda.Stream:
    """One stream for all load generators: cuBLAS keeps a workspace of tens of MB for each stream it has seen."""
    return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]


def _read_buffer(buffer: torch.Tensor, total: torch.Tensor) -> None:
    torch.sum(buffer, dim=0, out=total)
