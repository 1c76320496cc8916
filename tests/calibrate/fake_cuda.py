"""A stand-in for `torch.cuda` and NVML on a virtual clock, so that calibrate's GPU paths run where there is no GPU.

    cuda = FakeCuda().install(monkeypatch)        torch.cuda, its events, streams and graphs are `cuda`'s; no NVML yet
    action = cuda.kernel(5e-6)                    takes 5 us at the boost clock, longer when the device is warm
    fake_nvml.install(cuda, monkeypatch)          NVML tells clocks, power, temperature and what throttles
    with fake_tensors.on(cuda): ...               tensors on `cuda` are on `meta`, and every operation is a kernel there
    cuda.fail("synchronize", error, call=3)       the third time that this is asked for, and from then on if `sticky`

What can fail: launch, synchronize, event, allocate, pinned, graph, and operations by name (`aten.mm`).
The host's clock is `cuda.clock`: also what `time.perf_counter` and its like are in calibrate's modules.
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

from tests.calibrate.fake_gpu import Action, Chip, Clock, Gpu, Stream, Work

_MODULES = (  # whose clocks are patched, so they must be there
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
    """`torch.cuda.Event`: takes its time on the device when it is recorded, and says when that was."""

    def __init__(self, cuda: "FakeCuda", enable_timing: bool = False, **_: Any) -> None:
        self._cuda, self._timed, self.at = cuda, enable_timing, None

    at: float | None

    def record(self, stream: "FakeStream | None" = None) -> None:
        self._cuda.meet("event")
        self.at = self._cuda.record(self._cuda.current if stream is None else stream.stream)

    def elapsed_time(self, end: "FakeEvent") -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at is None or end.at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if end.at > self._cuda.clock.now:
            raise RuntimeError("CUDA error: device not ready")
        resolution = self._cuda.chip.resolution
        seconds = end.at - self.at
        if resolution:
            seconds = (end.at // resolution - self.at // resolution) * resolution
        return 1e3 * seconds

    def query(self) -> bool:
        return self.at is None or self.at <= self._cuda.clock.now

    def synchronize(self) -> None:
        self._cuda.clock.until(self.at or 0.0)

    def wait(self, stream: "FakeStream | None" = None) -> None:
        waiting = self._cuda.current if stream is None else stream.stream
        waiting.ready = max(waiting.ready, self.at or 0.0)


class FakeStream:
    """`torch.cuda.Stream`."""

    def __init__(
        self, cuda: "FakeCuda", device: Any = None, priority: int = 0, *, stream: Stream | None = None
    ) -> None:
        self._cuda, self.priority = cuda, priority
        self.stream = cuda.gpu(device).stream() if stream is None else stream
        self.cuda_stream = id(self.stream)
        self.device = torch.device("cuda", cuda.gpus.index(self.stream.gpu))

    def synchronize(self) -> None:
        self._cuda.meet("synchronize")
        self._cuda.clock.until(self.stream.ready)

    def query(self) -> bool:
        return self.stream.ready <= self._cuda.clock.now

    def wait_stream(self, other: "FakeStream") -> None:
        self.stream.ready = max(self.stream.ready, other.stream.ready)

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        made = FakeEvent(self._cuda) if event is None else event
        made.record(self)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream is self.stream

    def __hash__(self) -> int:
        return id(self.stream)


class FakeGraph:
    """`torch.cuda.CUDAGraph`: kernels that were captured, launched together."""

    def __init__(self, cuda: "FakeCuda", **_: Any) -> None:
        self._cuda = cuda
        self.works: list[Work] = []

    def replay(self) -> None:
        self._cuda.meet("launch")
        self._cuda.clock.advance(self._cuda.chip.launch)
        for work in self.works:
            self._cuda.current.gpu.run(self._cuda.current, work)

    def reset(self) -> None:
        self.works.clear()

    def pool(self) -> tuple[int, int]:
        return (0, id(self))


class FakeCuda:
    """GPUs that can be reached, one of which is current."""

    def __init__(self, *chips: Chip, seed: int = 1) -> None:
        self.clock = Clock()
        self.gpus = [Gpu(chip, self.clock) for chip in chips or (Chip(),)]
        self.calls: Counter[str] = Counter()
        self._number = 0
        self._streams: dict[int, Stream] = {}
        self._failing: list[tuple[str, int, BaseException, bool]] = []
        self._capturing: FakeGraph | None = None
        self._random = random.Random(seed)

    @property
    def chip(self) -> Chip:
        return self.gpus[self._number].chip

    @property
    def current(self) -> Stream:
        """The current stream of the current device."""
        return self._streams.get(self._number, self.gpus[self._number].default)

    def gpu(self, device: Any = None) -> Gpu:
        """By its number, `torch.device`, or name; None: the current one."""
        return self.gpus[self._index(device)]

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return self._number if device < 0 else device
        index = None if device is None else torch.device(device).index
        return self._number if index is None else index

    def fail(self, point: str, error: BaseException, *, call: int = 1, sticky: bool = False) -> None:
        """Raise an error the n-th time from now that this is asked for; sticky: and whenever anything is after it."""
        self._failing.append((point, self.calls[point] + call, error, sticky))

    def meet(self, point: str) -> None:
        """Something is asked for."""
        self.calls[point] += 1
        for planned in self._failing:
            name, call, error, sticky = planned
            if (name == point and self.calls[point] == call) or (name == "*"):
                if sticky and name != "*":
                    self._failing.append(("*", 0, error, True))
                raise error

    def kernel(self, seconds: float, *, clocked: bool = True, load: float = 1.0) -> Action:
        """What launches a kernel of so many seconds at the boost clock; clocked: longer at a lower one."""
        cycles = seconds * self.chip.boost if clocked else 0.0
        return lambda: self.launch(Work(cycles, 0.0 if clocked else seconds, load))

    def launch(self, work: Work) -> None:
        """A kernel on the current stream, or into the graph that is captured."""
        self.meet("launch")
        if self._capturing is not None:
            self._capturing.works.append(work)
            return
        self.clock.advance(self.chip.launch)
        self.current.gpu.run(self.current, work)

    def record(self, stream: Stream) -> float:
        """An event on a stream; when it is over."""
        self.clock.advance(0.25 * stream.gpu.chip.launch)
        stream.ready = max(stream.ready, self.clock.now) + self._random.uniform(*stream.gpu.chip.event)
        return stream.ready

    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams of a device."""
        self.meet("synchronize")
        if self._capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.clock.until(self.gpu(device).done)

    def sleep(self, cycles: int) -> None:
        """A kernel that does nothing for so many cycles; it draws little power."""
        self.launch(Work(cycles=float(cycles), load=0.2))

    def allocate(self, size: float) -> None:
        """Memory for tensors; raise out of memory as PyTorch does."""
        self.meet("allocate")
        gpu = self.gpu()
        if gpu.allocated + size > gpu.chip.memory:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB.")
        gpu.allocated += size
        gpu.peak = max(gpu.peak, gpu.allocated)
        gpu.reserved = max(gpu.reserved, gpu.allocated)

    def free(self, size: float, gpu: Gpu) -> None:
        gpu.allocated -= size

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._number = self._number, self._index(device)
        try:
            yield
        finally:
            self._number = before

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with self.device(stream.device):
            before = self._streams.get(self._number)
            self._streams[self._number] = stream.stream
            try:
                yield
            finally:
                self._streams.pop(self._number)
                if before is not None:
                    self._streams[self._number] = before

    @contextmanager
    def graph(self, graph: FakeGraph, *_: Any, **__: Any) -> Iterator[None]:
        self.meet("graph")
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
            multi_processor_count=chip.units,
            L2_cache_size=int(chip.cache),
            uuid=chip.uuid,
            major=chip.capability[0],
            minor=chip.capability[1],
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        """Be `torch.cuda`, and the clock of calibrate's modules."""
        for name, value in self._functions().items():
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
        for known in (cuda._filler, cuda._aside, sensors.sensor_of):  # of an earlier stand-in
            known.cache_clear()
        for name in (
            "calibrate.devices.load_generator",
            "calibrate.devices.telemetry_sampling",
            "calibrate.stages.stage_telemetry",
        ):
            monkeypatch.setattr(sys.modules[name], "repeated", self._repeated)
        for module in [item for name, item in sys.modules.items() if name.split(".")[0] == "calibrate"]:
            for name, clock in clocks.items():
                if getattr(module, name, None) is getattr(time, name):
                    monkeypatch.setattr(module, name, clock)
        return self

    def _functions(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "device_count": lambda: len(self.gpus),
            "current_device": lambda: self._number,
            "set_device": self._set_device,
            "device": self.device,
            "Event": partial(FakeEvent, self),
            "Stream": partial(FakeStream, self),
            "CUDAGraph": partial(FakeGraph, self),
            "graph": self.graph,
            "stream": self.stream,
            "current_stream": lambda device=None: FakeStream(self, stream=self._stream_of(device)),
            "default_stream": lambda device=None: FakeStream(self, stream=self.gpu(device).default),
            "synchronize": self.synchronize,
            "_sleep": self.sleep,
            "get_device_properties": self.properties,
            "get_device_name": lambda device=None: self.gpu(device).chip.name,
            "get_device_capability": lambda device=None: self.gpu(device).chip.capability,
            "mem_get_info": self._memory,
            "memory_allocated": lambda device=None: int(self.gpu(device).allocated),
            "memory_reserved": lambda device=None: int(self.gpu(device).reserved),
            "max_memory_allocated": lambda device=None: int(self.gpu(device).peak),
            "reset_peak_memory_stats": self._reset_peak,
            "empty_cache": self._empty_cache,
            "is_current_stream_capturing": lambda: self._capturing is not None,
        }

    def _repeated(self, action: Action, between: float) -> Action:
        return self.clock.every(between, action)

    def _stream_of(self, device: Any) -> Stream:
        number = self._index(device)
        return self._streams.get(number, self.gpus[number].default)

    def _set_device(self, device: Any) -> None:
        self._number = self._index(device)

    def _memory(self, device: Any = None) -> tuple[int, int]:
        gpu = self.gpu(device)
        return int(gpu.chip.memory - gpu.reserved), int(gpu.chip.memory)

    def _reset_peak(self, device: Any = None) -> None:
        gpu = self.gpu(device)
        gpu.peak = gpu.allocated

    def _empty_cache(self) -> None:
        for gpu in self.gpus:
            gpu.reserved = gpu.allocated
