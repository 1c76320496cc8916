"""Benchmark of overlapping kernels and collectives, on fakes with known mutual slowdowns."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from calibrate.collectives import contention_benchmark  # noqa: E402 - after torch is known to be there
from calibrate.collectives.contention_benchmark import (  # noqa: E402
    CpuContentionBenchmark,
    GpuContentionBenchmark,
    KernelAction,
    durations_within,
)
from calibrate.collectives.timing import CollectiveIteration  # noqa: E402

CPU_DEVICE: Any = SimpleNamespace(torch=torch.device("cpu"))
COLD_START_SECONDS = 0.01  # additional seconds of the first kernel and of the first call


@dataclass
class TwoStreamGpu:
    """Two streams in order, executed concurrently: kernel and call slow each other down by known fractions.

    is_serialized: queued kernels run before any call, as on a device without resources for both.
    """

    kernel_slowdown: float
    call_slowdown: float
    is_serialized: bool = False
    now: float = 0.0
    queues: dict[str, list[Any]] = field(default_factory=lambda: {"main": [], "side": []})
    current: str = "main"
    warm: set[str] = field(default_factory=set)

    def work(self, kind: str, seconds: float) -> None:
        self.queues[self.current].append([kind, seconds + (0.0 if kind in self.warm else COLD_START_SECONDS)])
        self.warm.add(kind)

    def drain(self, _device: object = None) -> None:
        while self._process_events() or self._advance():
            pass

    def _process_events(self) -> bool:
        """Process events and satisfied waits at the head of a queue; whether there were any."""
        for queue in self.queues.values():
            if queue and (queue[0][0] == "mark" or (queue[0][0] == "wait" and queue[0][1].time is not None)):
                kind, event = queue.pop(0)
                if kind == "mark":
                    event.time = self.now
                return True
        return False

    def _advance(self) -> bool:
        """Advance to the next end of a kernel or call; False if nothing is running."""
        running = {queue[0][0]: queue for queue in self.queues.values() if queue and queue[0][0] != "wait"}
        if self.is_serialized and "kernel" in running:
            running.pop("call", None)
        slowdown = {
            "kernel": 1 + self.kernel_slowdown if "call" in running else 1.0,
            "call": 1 + self.call_slowdown if "kernel" in running else 1.0,
        }
        if not running:
            return False
        elapsed = min(queue[0][1] * slowdown[kind] for kind, queue in running.items())
        self.now += elapsed
        for kind, queue in running.items():
            queue[0][1] -= elapsed / slowdown[kind]
            if queue[0][1] <= 1e-15:
                queue.pop(0)
        return True


class QueuedEvent:
    def __init__(self, gpu: TwoStreamGpu) -> None:
        self.gpu, self.time = gpu, None

    def record(self) -> None:
        self.gpu.queues[self.gpu.current].append(("mark", self))

    def elapsed_time(self, end: "QueuedEvent") -> float:
        assert self.time is not None and end.time is not None, "both are over"
        return 1e3 * (end.time - self.time)


class QueuedStream:
    def __init__(self, gpu: TwoStreamGpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_event(self, event: QueuedEvent) -> None:
        self.gpu.queues[self.name].append(("wait", event))


def install_gpu(gpu: TwoStreamGpu, monkeypatch: pytest.MonkeyPatch) -> TwoStreamGpu:
    """Replace torch.cuda by this GPU, in a world of one rank."""

    @contextmanager
    def use_stream(stream: QueuedStream) -> Iterator[None]:
        gpu.current = stream.name
        yield
        gpu.current = "main"

    monkeypatch.setattr(torch.cuda, "Event", lambda **_: QueuedEvent(gpu))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: QueuedStream(gpu, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: QueuedStream(gpu, "main"))
    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.drain)
    monkeypatch.setattr(contention_benchmark.dist, "all_reduce", lambda _tensor: None)
    monkeypatch.setattr(contention_benchmark, "max_over_ranks", lambda values, _device: values)
    monkeypatch.setattr(contention_benchmark, "min_over_ranks", lambda value, _device: value)
    return gpu


@pytest.mark.parametrize(("p", "q"), [(0.0, 0.0), (0.25, 0.0), (0.25, 0.5), (1.0, 3.0)])
@pytest.mark.parametrize(("kernel", "call"), [(1e-3, 3e-3), (2e-5, 5e-4), (0.05, 1e-3), (1e-3, 0.2)])
def test_kernel_and_call_slowdowns_are_recovered(
    monkeypatch: pytest.MonkeyPatch, p: float, q: float, kernel: float, call: float
) -> None:
    """Short and long kernels overlapping short and long calls; the slow first run of each is excluded."""
    gpu = install_gpu(TwoStreamGpu(p, q), monkeypatch)
    iteration = CollectiveIteration(lambda: None, lambda: gpu.work("call", call))
    result = GpuContentionBenchmark(CPU_DEVICE, 2).measure(KernelAction(lambda: gpu.work("kernel", kernel)), iteration)
    assert result is not None
    assert result.call_overlapped is not None
    assert (result.kernel_isolated.seconds, result.call_isolated.seconds) == pytest.approx((kernel, call))
    assert (result.kernel_overlapped.seconds, result.call_overlapped.seconds) == pytest.approx(
        (kernel * (1 + p), call * (1 + q))
    )
    assert not any(gpu.queues.values()), "everything was waited for"


def test_round_trip_counts_as_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install_gpu(TwoStreamGpu(0.5, 1.0), monkeypatch)
    iteration = CollectiveIteration(lambda: None, lambda: gpu.work("call", 2e-3), transfer_count=2)
    result = GpuContentionBenchmark(CPU_DEVICE, 2).measure(KernelAction(lambda: gpu.work("kernel", 1e-3)), iteration)
    assert result is not None and result.call_overlapped is not None
    assert (result.call_isolated.seconds, result.call_overlapped.seconds) == pytest.approx((1e-3, 2e-3))


def test_serialized_kernel_and_call_have_no_overlap_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install_gpu(TwoStreamGpu(0.5, 0.5, is_serialized=True), monkeypatch)
    iteration = CollectiveIteration(lambda: None, lambda: gpu.work("call", 1e-3))
    assert (
        GpuContentionBenchmark(CPU_DEVICE, 2).measure(KernelAction(lambda: gpu.work("kernel", 1e-3)), iteration) is None
    )


@pytest.mark.parametrize(("call", "is_known"), [(0.01, True), (0.06, False)])
def test_queued_launches_are_limited(monkeypatch: pytest.MonkeyPatch, call: float, is_known: bool) -> None:
    """At most 4096 launches, here 512 kernels of 0.1 ms; if they end before the first call, there is no result."""
    gpu, launched = install_gpu(TwoStreamGpu(0.25, 0.5), monkeypatch), [0]

    def run() -> None:
        launched[0] += 8
        gpu.work("kernel", 1e-4)

    max_queued = 0

    def drain(_device: object) -> None:
        nonlocal max_queued
        max_queued, launched[0] = max(max_queued, launched[0]), 0
        gpu.drain()

    monkeypatch.setattr(torch.cuda, "synchronize", drain)
    result = GpuContentionBenchmark(CPU_DEVICE, 1).measure(
        KernelAction(run, launches=8), CollectiveIteration(lambda: None, lambda: gpu.work("call", call))
    )
    assert max_queued <= 4096
    if is_known:
        assert result is not None and result.call_overlapped is not None
        assert (result.kernel_overlapped.seconds, result.call_overlapped.seconds) == pytest.approx(
            (1.25e-4, 1.5 * call)
        )
    else:
        assert result is None


def test_durations_fully_overlapped_by_others() -> None:
    """Kernels from 0 to 4, calls from 0.5 to 2.5: only the second kernel is overlapped by calls all the time."""
    assert durations_within([0.0, 1.0, 2.0, 3.0, 4.0], [0.5, 1.5, 2.5]) == [1.0]
    assert durations_within([0.5, 1.5, 2.5], [0.0, 1.0, 2.0, 3.0, 4.0]) == [1.0, 1.0]
    assert durations_within([0.0, 1.0], [1.0, 2.0]) == durations_within([0.0, 1.0], [0.0]) == []


@pytest.mark.parametrize(("lost", "p"), [(0.0, 0.0), (0.2, 0.25), (0.5, 1.0), (1.0, 99.0), (1.4, 99.0)])
def test_time_lost_on_a_cpu_is_converted_to_a_slowdown(monkeypatch: pytest.MonkeyPatch, lost: float, p: float) -> None:
    """Calls of 10 ms cost kernels p / (1 + p) of that, at most 0.99. Isolated times are unaffected."""
    now, main, lock = [0.0], threading.get_ident(), threading.Lock()

    def advance_clock(seconds: float) -> None:
        with lock:
            now[0] += seconds

    monkeypatch.setattr(contention_benchmark, "perf_counter", lambda: now[0])
    monkeypatch.setattr(contention_benchmark.dist, "barrier", lambda: None)
    monkeypatch.setattr(contention_benchmark, "max_over_ranks", lambda values, _device: values)
    iteration = CollectiveIteration(
        lambda: None, lambda: advance_clock(0.01 if threading.get_ident() == main else lost * 0.01), transfer_count=2
    )
    result = CpuContentionBenchmark(CPU_DEVICE, 2).measure(KernelAction(lambda: advance_clock(2e-3)), iteration)
    assert result.kernel_overlapped.seconds / result.kernel_isolated.seconds == pytest.approx(1 + p)
    assert (result.kernel_isolated.seconds, result.call_isolated.seconds) == pytest.approx((2e-3, 5e-3))
    assert result.call_overlapped is None, "it is in what kernels lose"
