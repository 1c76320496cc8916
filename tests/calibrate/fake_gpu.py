"""A virtual GPU for tests on machines without one: its temperature, clocks, power, cache and streams.

The host clock advances when the host launches, waits or computes; a kernel starts once it is launched and
its stream is free, and takes as long as its cycles need at the SM clock at its start. The clock falls from
`boost` to `sustained` with the heat, a first-order lag of the load, so that a burst is fast and sustained
load is not. Background threads are simulated by timers of the host clock (`VirtualClock.run_periodically`),
so runs are deterministic.
"""

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Action = Callable[[], None]
MIN_TIMER_INTERVAL = 1e-4  # seconds between calls of a thread that does not sleep
MAX_PENDING_LAUNCHES = 1024  # launches that a stream queues before the host must wait


class VirtualClock:
    """The host clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[_VirtualTimer] = []
        self._in_callback = False

    def advance(self, seconds: float) -> None:
        """Let that many seconds pass; timer callbacks that are due meanwhile take no host time."""
        end_time = self.now + seconds
        while not self._in_callback and self._timers:
            timer = min(self._timers, key=lambda candidate: candidate.due_time)
            if timer.due_time > end_time:
                break
            self.now, self._in_callback = max(self.now, timer.due_time), True
            call_time = self.now
            try:
                timer.action()
            finally:
                timer.due_time = max(self.now + timer.interval, call_time + MIN_TIMER_INTERVAL)
                self.now, self._in_callback = call_time, False
        self.now = max(self.now, end_time)

    def wait_until(self, time: float) -> None:
        """Wait until a time, unless it has passed."""
        self.advance(max(0.0, time - self.now))

    def run_periodically(self, interval: float, action: Action) -> Action:
        """Simulate a thread that sleeps for an interval before every call of the action.

        The returned function stops it.
        """
        timer = _VirtualTimer(self.now + max(interval, MIN_TIMER_INTERVAL), interval, action)
        self._timers.append(timer)
        return lambda: self._timers.remove(timer) if timer in self._timers else None


@dataclass(eq=False)
class _VirtualTimer:
    due_time: float
    interval: float
    action: Action


@dataclass(frozen=True)
class FakeChip:
    """Properties of a GPU.

    event: range of device seconds that recording an event takes; launch: host seconds per launch; event
    resolution in seconds (`resolution`); heat: time constant of the heat (63 % of a change of load) in seconds.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "11111111-2222-3333-4444-555555555555"
    memory: float = 80 * 2.0**30
    sm_count: int = 132
    cache: float = 50 * 2.0**20
    capability: tuple[int, int] = (9, 0)
    boost: float = 1.98e9
    sustained: float = 1.4e9
    heat: float = 2.0
    flop_per_cycle: float = 4096.0 * 132
    bandwidth: float = 3.0e12
    cache_bandwidth: float = 9.0e12
    link: float = 5.0e10
    min_kernel_seconds: float = 2e-6  # minimum duration of a kernel
    event: tuple[float, float] = (1e-6, 3e-6)
    resolution: float = 0.0
    launch: float = 4e-6
    idle_w: float = 70.0
    limit_w: float = 700.0
    ecc: bool = True
    mig: bool = False


@dataclass(frozen=True)
class FakeKernel:
    """Resources of a kernel: SM cycles, memory traffic, or fixed seconds; the longest of the three is its duration.

    load: fraction of the maximum power; reads, writes: (tensor key, bytes) that pass through the cache.
    """

    cycles: float = 0.0
    seconds: float = 0.0
    load: float = 1.0
    reads: tuple[tuple[int, float], ...] = ()
    writes: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class FakeGpuState:
    """State of a GPU at one time. load: 0 while idle."""

    clock: float
    heat: float
    load: float
    power: float


@dataclass(eq=False)
class VirtualStream:
    """Kernels in order. ready_time: end of the last one."""

    gpu: "VirtualGpu"
    ready_time: float = 0.0
    pending: deque[float] = field(default_factory=deque)


@dataclass
class VirtualCache:
    """The last-level cache: LRU, write-back; data larger than the cache is written through."""

    size: float
    entries: OrderedDict[int, tuple[float, bool]] = field(default_factory=OrderedDict)
    used_bytes: float = 0.0

    def access(self, key: int, size: float, *, dirty: bool) -> tuple[float, float]:
        """For an access of `size` bytes of a tensor: bytes moved from or to memory, and bytes hit in the cache."""
        cached, was_dirty = self.entries.pop(key, (0.0, False))
        new_size = min(size, self.size)
        hit = min(cached, size) if size <= self.size else 0.0
        memory_bytes = 0.0 if dirty else size - hit
        memory_bytes += size - new_size if dirty else 0.0  # data that does not fit is written through
        self.entries[key] = new_size, dirty or was_dirty
        self.used_bytes += new_size - cached
        return memory_bytes + self._evict(), hit

    def _evict(self) -> float:
        written_bytes = 0.0
        excess = self.used_bytes - self.size
        self.used_bytes = min(self.used_bytes, self.size)
        while excess > 0.0:
            oldest, (size, dirty) = next(iter(self.entries.items()))
            evicted = min(excess, size)
            written_bytes += evicted * dirty
            excess -= evicted
            if evicted == size:
                del self.entries[oldest]
            else:
                self.entries[oldest] = size - evicted, dirty
        return written_bytes


class VirtualGpu:
    """A GPU that executes kernels."""

    def __init__(self, chip: FakeChip, clock: VirtualClock) -> None:
        self.chip, self.clock = chip, clock
        self.cache = VirtualCache(chip.cache)
        self.default = VirtualStream(self)
        self.streams = [self.default]
        self.allocated = self.peak = self.reserved = 0.0
        self.slowdown = 0.0  # relative slowdown of a kernel while another stream is busy
        self._heat, self._heat_time = 0.0, 0.0
        self._starts: list[float] = []
        self._spans: list[tuple[float, float, float]] = []  # end, heat at the start, load

    def stream(self) -> VirtualStream:
        """Add a stream."""
        self.streams.append(VirtualStream(self))
        return self.streams[-1]

    def frequency(self, heat: float) -> float:
        """SM clock in hertz at a heat of 0 to 1."""
        return self.chip.boost - (self.chip.boost - self.chip.sustained) * heat

    def run(self, stream: VirtualStream, work: FakeKernel) -> None:
        """Execute a kernel that is launched now."""
        if len(stream.pending) >= MAX_PENDING_LAUNCHES:
            self.clock.wait_until(stream.pending.popleft())
        start = max(stream.ready_time, self.clock.now)
        self._update_heat(start, 0.0)
        seconds = self._seconds(work)
        others_ready = max((other.ready_time for other in self.streams if other is not stream), default=0.0)
        end = start + seconds + self.slowdown * min(seconds, max(0.0, others_ready - start))
        self._starts.append(start)
        self._spans.append((end, self._heat, work.load))
        self._update_heat(end, work.load)
        stream.ready_time = end
        stream.pending.append(end)

    def _seconds(self, work: FakeKernel) -> float:
        chip, memory_bytes, cache_bytes = self.chip, 0.0, 0.0
        for dirty, accesses in ((False, work.reads), (True, work.writes)):
            for key, size in accesses:
                miss, hit = self.cache.access(key, size, dirty=dirty)
                memory_bytes, cache_bytes = memory_bytes + miss, cache_bytes + hit
        memory = memory_bytes / chip.bandwidth + cache_bytes / chip.cache_bandwidth
        return max(work.cycles / self.frequency(self._heat), work.seconds, memory)

    def _update_heat(self, time: float, load: float) -> None:
        if time > self._heat_time:
            self._heat = load + (self._heat - load) * math.exp((self._heat_time - time) / self.chip.heat)
            self._heat_time = time

    def state_at(self, time: float) -> FakeGpuState:
        """The state at a time that has been simulated, or, idle, a later one."""
        index = bisect_right(self._starts, time) - 1
        if index < 0:
            return self._make_state(0.0, 0.0)
        start, (end, heat, load) = self._starts[index], self._spans[index]
        heat = load + (heat - load) * math.exp((start - min(time, end)) / self.chip.heat)
        if time <= end:
            return self._make_state(heat, load)
        return self._make_state(heat * math.exp((end - time) / self.chip.heat), 0.0)

    def _make_state(self, heat: float, load: float) -> FakeGpuState:
        chip = self.chip
        return FakeGpuState(self.frequency(heat), heat, load, chip.idle_w + (chip.limit_w - chip.idle_w) * load)

    @property
    def finish_time(self) -> float:
        """End of the last kernel of all streams."""
        return max(stream.ready_time for stream in self.streams)

    def busy_fraction(self, start_time: float, end_time: float) -> float:
        """Fraction of an interval in which a kernel ran."""
        spans = zip(self._starts, (end for end, *_ in self._spans), strict=True)
        return _union_seconds((max(start, start_time), min(end, end_time)) for start, end in spans) / (
            end_time - start_time
        )


def _union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    covered, last_end = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > max(start, last_end):
            covered += end - max(start, last_end)
            last_end = end
    return covered
