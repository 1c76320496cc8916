"""A fake of `torch.cuda` and NVML on a virtual clock, so that calibrate's GPU code runs on machines without a GPU.

    cuda = FakeCuda().install(monkeypatch)     replaces torch.cuda, its events, streams and graphs; no NVML yet
    action = cuda.kernel(5e-6)                 takes 5 us at the boost clock, longer when the device is warm
    fake_nvml.install(cuda, monkeypatch)       NVML reports clocks, power, temperature and throttle reasons
    with fake_cuda_tensors(cuda): ...          `cuda` tensors are on `meta`, every operation is a fake kernel
    cuda.fail("synchronize", error, call=3)    raises at the third call, and at every later one if `sticky`

Calls that can fail: launch, synchronize, event, allocate, pinned, graph, and operators by name (`aten.mm`).
The host clock is `cuda.clock`, which also replaces `time.perf_counter` and the like in calibrate's modules.
"""

import importlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.calibrate.fake_gpu import Action, FakeChip, FakeKernel, VirtualClock, VirtualGpu, VirtualStream

_MODULES = (  # modules whose clocks are patched, so they must be imported
    "calibrate.devices.cuda",
    "calibrate.devices.burn_in",
    "calibrate.devices.gpu_variation",
    "calibrate.kernels.selection",
    "calibrate.kernels.session",
    "calibrate.kernels.progress",
    "calibrate.stages.run",
    "calibrate.stages.plan",
    "calibrate.in_situ.measure",
    "calibrate.host.measure",
    "calibrate.holdout.measure",
)


class FakeEvent:
    """`torch.cuda.Event`: occupies the device for its duration when it is recorded, and keeps its time stamp."""

    def __init__(self, cuda: "FakeCuda", enable_timing: bool = False, **_: Any) -> None:
        self._cuda, self._is_timed, self.time = cuda, enable_timing, None

    time: float | None

    def record(self, stream: "FakeStream | None" = None) -> None:
        self._cuda.check_call("event")
        self.time = self._cuda.record(self._cuda.current if stream is None else stream.stream)

    def elapsed_time(self, end: "FakeEvent") -> float:
        if not (self._is_timed and end._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.time is None or end.time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if end.time > self._cuda.clock.now:
            raise RuntimeError("CUDA error: device not ready")
        resolution = self._cuda.chip.resolution
        seconds = end.time - self.time
        if resolution:
            seconds = (end.time // resolution - self.time // resolution) * resolution
        return 1e3 * seconds

    def query(self) -> bool:
        return self.time is None or self.time <= self._cuda.clock.now

    def synchronize(self) -> None:
        self._cuda.clock.wait_until(self.time or 0.0)

    def wait(self, stream: "FakeStream | None" = None) -> None:
        target = self._cuda.current if stream is None else stream.stream
        target.ready_time = max(target.ready_time, self.time or 0.0)


class FakeStream:
    """`torch.cuda.Stream`."""

    def __init__(
        self, cuda: "FakeCuda", device: Any = None, priority: int = 0, *, stream: VirtualStream | None = None
    ) -> None:
        self._cuda, self.priority = cuda, priority
        self.stream = cuda.gpu(device).stream() if stream is None else stream
        self.cuda_stream = id(self.stream)
        self.device = torch.device("cuda", cuda.gpus.index(self.stream.gpu))

    def synchronize(self) -> None:
        self._cuda.check_call("synchronize")
        self._cuda.clock.wait_until(self.stream.ready_time)

    def query(self) -> bool:
        return self.stream.ready_time <= self._cuda.clock.now

    def wait_stream(self, other: "FakeStream") -> None:
        self.stream.ready_time = max(self.stream.ready_time, other.stream.ready_time)

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        recorded = FakeEvent(self._cuda) if event is None else event
        recorded.record(self)
        return recorded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream is self.stream

    def __hash__(self) -> int:
        return id(self.stream)


class FakeGraph:
    """`torch.cuda.CUDAGraph`: captured kernels, launched at once."""

    def __init__(self, cuda: "FakeCuda", **_: Any) -> None:
        self._cuda = cuda
        self.kernels: list[FakeKernel] = []

    def replay(self) -> None:
        self._cuda.check_call("launch")
        self._cuda.clock.advance(self._cuda.chip.launch)
        for work in self.kernels:
            self._cuda.current.gpu.run(self._cuda.current, work)

    def reset(self) -> None:
        self.kernels.clear()

    def pool(self) -> tuple[int, int]:
        return (0, id(self))


class FakeCuda:
    """The visible GPUs, one of which is the current device."""

    def __init__(self, *chips: FakeChip, seed: int = 1) -> None:
        self.clock = VirtualClock()
        self.gpus = [VirtualGpu(chip, self.clock) for chip in chips or (FakeChip(),)]
        self.calls: Counter[str] = Counter()
        self._device_index = 0
        self._streams: dict[int, VirtualStream] = {}
        self._failing: list[tuple[str, int, BaseException, bool]] = []
        self._capturing: FakeGraph | None = None
        self._random = random.Random(seed)

    @property
    def chip(self) -> FakeChip:
        return self.gpus[self._device_index].chip

    @property
    def current(self) -> VirtualStream:
        """The current stream of the current device."""
        return self._streams.get(self._device_index, self.gpus[self._device_index].default)

    def gpu(self, device: Any = None) -> VirtualGpu:
        """A GPU by index, `torch.device` or name; None: the current one."""
        return self.gpus[self._index(device)]

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return self._device_index if device < 0 else device
        index = None if device is None else torch.device(device).index
        return self._device_index if index is None else index

    def fail(self, point: str, error: BaseException, *, call: int = 1, sticky: bool = False) -> None:
        """Raise an error at the n-th call from now; sticky: and at every later call of any kind."""
        self._failing.append((point, self.calls[point] + call, error, sticky))

    def check_call(self, point: str) -> None:
        """Count a call, and raise the error that is injected for it."""
        self.calls[point] += 1
        for failure in self._failing:
            name, call, error, sticky = failure
            if (name == point and self.calls[point] == call) or (name == "*"):
                if sticky and name != "*":
                    self._failing.append(("*", 0, error, True))
                raise error

    def kernel(self, seconds: float, *, clocked: bool = True, load: float = 1.0) -> Action:
        """An action that launches a kernel of `seconds` at the boost clock; clocked: it is slower at a lower clock."""
        cycles = seconds * self.chip.boost if clocked else 0.0
        return lambda: self.launch(FakeKernel(cycles, 0.0 if clocked else seconds, load))

    def launch(self, work: FakeKernel) -> None:
        """Launch a kernel on the current stream, or add it to the graph that is being captured."""
        self.check_call("launch")
        if self._capturing is not None:
            self._capturing.kernels.append(work)
            return
        self.clock.advance(self.chip.launch)
        self.current.gpu.run(self.current, work)

    def record(self, stream: VirtualStream) -> float:
        """Record an event on a stream; return the time at which it completes."""
        self.clock.advance(0.25 * stream.gpu.chip.launch)
        stream.ready_time = max(stream.ready_time, self.clock.now) + self._random.uniform(*stream.gpu.chip.event)
        return stream.ready_time

    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams of a device."""
        self.check_call("synchronize")
        if self._capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.clock.wait_until(self.gpu(device).finish_time)

    def sleep(self, cycles: int) -> None:
        """Launch a kernel that idles for that many cycles at low power."""
        self.launch(FakeKernel(cycles=float(cycles), load=0.2))

    def allocate(self, size: float) -> None:
        """Allocate device memory for tensors; raise OutOfMemoryError as PyTorch does."""
        self.check_call("allocate")
        gpu = self.gpu()
        if gpu.allocated + size > gpu.chip.memory:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB.")
        gpu.allocated += size
        gpu.peak = max(gpu.peak, gpu.allocated)
        gpu.reserved = max(gpu.reserved, gpu.allocated)

    def free(self, size: float, gpu: VirtualGpu) -> None:
        gpu.allocated -= size

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        previous, self._device_index = self._device_index, self._index(device)
        try:
            yield
        finally:
            self._device_index = previous

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with self.device(stream.device):
            previous = self._streams.get(self._device_index)
            self._streams[self._device_index] = stream.stream
            try:
                yield
            finally:
                self._streams.pop(self._device_index)
                if previous is not None:
                    self._streams[self._device_index] = previous

    @contextmanager
    def graph(self, graph: FakeGraph, *_: Any, **__: Any) -> Iterator[None]:
        self.check_call("graph")
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None

    def properties(self, device: Any = None) -> Any:
        chip = self.gpu(device).chip
        return SimpleNamespace(
            name=chip.name,
            total_memory=int(chip.memory),
            multi_processor_count=chip.sm_count,
            L2_cache_size=int(chip.cache),
            uuid=chip.uuid,
            major=chip.capability[0],
            minor=chip.capability[1],
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        """Replace `torch.cuda` and the clocks of calibrate's modules."""
        for name, value in self._torch_cuda_functions().items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name in _MODULES:
            importlib.import_module(name)
        clocks: dict[str, Callable[..., Any]] = {
            "perf_counter": lambda: self.clock.now,
            "perf_counter_ns": lambda: int(1e9 * self.clock.now),
            "monotonic": lambda: self.clock.now,
            "sleep": self.clock.advance,
        }
        cuda, sensors = (importlib.import_module(f"calibrate.devices.{name}") for name in ("cuda", "sensors"))
        for cached_function in (
            cuda._load_generator,
            cuda._background_stream,
            sensors.gpu_sensor,
        ):  # of an earlier FakeCuda
            cached_function.cache_clear()
        for name in (
            "calibrate.devices.load_generator",
            "calibrate.devices.telemetry_sampling",
            "calibrate.stages.stage_telemetry",
        ):
            monkeypatch.setattr(sys.modules[name], "run_periodically", self._run_periodically)
        for module in [candidate for name, candidate in sys.modules.items() if name.split(".")[0] == "calibrate"]:
            for name, clock in clocks.items():
                if getattr(module, name, None) is getattr(time, name):
                    monkeypatch.setattr(module, name, clock)
        return self

    def _torch_cuda_functions(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "device_count": lambda: len(self.gpus),
            "current_device": lambda: self._device_index,
            "set_device": self._set_device,
            "device": self.device,
            "Event": partial(FakeEvent, self),
            "Stream": partial(FakeStream, self),
            "CUDAGraph": partial(FakeGraph, self),
            "graph": self.graph,
            "stream": self.stream,
            "current_stream": lambda device=None: FakeStream(self, stream=self._current_stream(device)),
            "default_stream": lambda device=None: FakeStream(self, stream=self.gpu(device).default),
            "synchronize": self.synchronize,
            "_sleep": self.sleep,
            "get_device_properties": self.properties,
            "get_device_name": lambda device=None: self.gpu(device).chip.name,
            "get_device_capability": lambda device=None: self.gpu(device).chip.capability,
            "mem_get_info": self._memory_info,
            "memory_allocated": lambda device=None: int(self.gpu(device).allocated),
            "memory_reserved": lambda device=None: int(self.gpu(device).reserved),
            "max_memory_allocated": lambda device=None: int(self.gpu(device).peak),
            "reset_peak_memory_stats": self._reset_peak,
            "empty_cache": self._empty_cache,
            "is_current_stream_capturing": lambda: self._capturing is not None,
        }

    def _run_periodically(self, action: Action, interval: float) -> Action:
        return self.clock.run_periodically(interval, action)

    def _current_stream(self, device: Any) -> VirtualStream:
        index = self._index(device)
        return self._streams.get(index, self.gpus[index].default)

    def _set_device(self, device: Any) -> None:
        self._device_index = self._index(device)

    def _memory_info(self, device: Any = None) -> tuple[int, int]:
        gpu = self.gpu(device)
        return int(gpu.chip.memory - gpu.reserved), int(gpu.chip.memory)

    def _reset_peak(self, device: Any = None) -> None:
        gpu = self.gpu(device)
        gpu.peak = gpu.allocated

    def _empty_cache(self) -> None:
        for gpu in self.gpus:
            gpu.reserved = gpu.allocated
