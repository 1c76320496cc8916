"""A GPU on a virtual clock, for tests on machines without one: its heat, clocks, power, cache, streams.

The host's clock moves when the host launches, waits or works; a kernel begins when it was launched and its stream is
free, and lasts as long as its work takes at the SM clock of that moment. The clock falls from `boost` to `sustained`
with the heat, which follows the load with one time constant, so that a burst is fast and an hour is not. What another
thread would do is done at its moments by the host's clock (`Clock.every`), so that every run is the same.
"""

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Action = Callable[[], None]
SOON = 1e-4  # seconds after which a thread that does not sleep is on again
QUEUE = 1024  # launches that a stream takes in before the host must wait


class Clock:
    """The host's, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._others: list[_Other] = []
        self._within = False

    def advance(self, seconds: float) -> None:
        """So many seconds pass; what others do at their moments meanwhile takes the host no time."""
        until = self.now + seconds
        while not self._within and self._others:
            other = min(self._others, key=lambda each: each.due)
            if other.due > until:
                break
            self.now, self._within = max(self.now, other.due), True
            here = self.now
            try:
                other.action()
            finally:
                other.due = max(self.now + other.interval, here + SOON)
                self.now, self._within = here, False
        self.now = max(self.now, until)

    def until(self, moment: float) -> None:
        """Wait for it, if it has not come yet."""
        self.advance(max(0.0, moment - self.now))

    def every(self, interval: float, action: Action) -> Action:
        """What a thread does that sleeps so long before each time; what is returned ends it."""
        other = _Other(self.now + max(interval, SOON), interval, action)
        self._others.append(other)
        return lambda: self._others.remove(other) if other in self._others else None


@dataclass(eq=False)
class _Other:
    due: float
    interval: float
    action: Action


@dataclass(frozen=True)
class Chip:
    """What a GPU is. event: seconds that each takes on the device, from and to; launch: seconds of the host's.

    resolution: of what events say; heat: seconds in which all but 1/e of a change of load has come through.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "11111111-2222-3333-4444-555555555555"
    memory: float = 80 * 2.0**30
    units: int = 132
    cache: float = 50 * 2.0**20
    capability: tuple[int, int] = (9, 0)
    boost: float = 1.98e9
    sustained: float = 1.4e9
    heat: float = 2.0
    flop_per_cycle: float = 4096.0 * 132
    bandwidth: float = 3.0e12
    cache_bandwidth: float = 9.0e12
    link: float = 5.0e10
    least: float = 2e-6  # seconds of any kernel
    event: tuple[float, float] = (1e-6, 3e-6)
    resolution: float = 0.0
    launch: float = 4e-6
    idle_w: float = 70.0
    limit_w: float = 700.0
    ecc: bool = True
    mig: bool = False


@dataclass(frozen=True)
class Work:
    """What a kernel does: cycles of the SMs, bytes from memory or seconds of anything else, whichever lasts longest.

    load: part of the power that it draws; reads, writes: (what, bytes) that pass through the cache.
    """

    cycles: float = 0.0
    seconds: float = 0.0
    load: float = 1.0
    reads: tuple[tuple[int, float], ...] = ()
    writes: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class State:
    """A GPU at a moment. load: 0 while it waits."""

    clock: float
    heat: float
    load: float
    power: float


@dataclass(eq=False)
class Stream:
    """Kernels one after the other. ready: when the last is done."""

    gpu: "Gpu"
    ready: float = 0.0
    pending: deque[float] = field(default_factory=deque)


@dataclass
class Cache:
    """The last cache: what was used last is in it; what was written is written back when it is driven out."""

    size: float
    held: OrderedDict[int, tuple[float, bool]] = field(default_factory=OrderedDict)
    used: float = 0.0

    def passes(self, what: int, size: float, *, dirty: bool) -> tuple[float, float]:
        """Bytes between cache and memory, and bytes that were there, when so many bytes of something are used."""
        before, was_dirty = self.held.pop(what, (0.0, False))
        kept = min(size, self.size)
        hit = min(before, size) if size <= self.size else 0.0
        moved = 0.0 if dirty else size - hit
        moved += size - kept if dirty else 0.0  # what does not fit is written through
        self.held[what] = kept, dirty or was_dirty
        self.used += kept - before
        return moved + self._driven_out(), hit

    def _driven_out(self) -> float:
        written = 0.0
        over = self.used - self.size
        self.used = min(self.used, self.size)
        while over > 0.0:
            oldest, (size, dirty) = next(iter(self.held.items()))
            gone = min(over, size)
            written += gone * dirty
            over -= gone
            if gone == size:
                del self.held[oldest]
            else:
                self.held[oldest] = size - gone, dirty
        return written


class Gpu:
    """A GPU that works."""

    def __init__(self, chip: Chip, clock: Clock) -> None:
        self.chip, self.clock = chip, clock
        self.cache = Cache(chip.cache)
        self.default = Stream(self)
        self.streams = [self.default]
        self.allocated = self.peak = self.reserved = 0.0
        self.slowing = 0.0  # part by which a kernel takes longer while another stream works
        self._heat, self._at = 0.0, 0.0
        self._starts: list[float] = []
        self._spans: list[tuple[float, float, float]] = []  # end, heat at the start, load

    def stream(self) -> Stream:
        """One more stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def frequency(self, heat: float) -> float:
        """Hertz of the SMs at that heat, of 0 to 1."""
        return self.chip.boost - (self.chip.boost - self.chip.sustained) * heat

    def run(self, stream: Stream, work: Work) -> None:
        """A kernel, launched now."""
        if len(stream.pending) >= QUEUE:
            self.clock.until(stream.pending.popleft())
        start = max(stream.ready, self.clock.now)
        self._pass(start, 0.0)
        seconds = self._seconds(work)
        others = max((item.ready for item in self.streams if item is not stream), default=0.0)
        end = start + seconds + self.slowing * min(seconds, max(0.0, others - start))
        self._starts.append(start)
        self._spans.append((end, self._heat, work.load))
        self._pass(end, work.load)
        stream.ready = end
        stream.pending.append(end)

    def _seconds(self, work: Work) -> float:
        chip, moved, hits = self.chip, 0.0, 0.0
        for dirty, used in ((False, work.reads), (True, work.writes)):
            for what, size in used:
                missed, hit = self.cache.passes(what, size, dirty=dirty)
                moved, hits = moved + missed, hits + hit
        memory = moved / chip.bandwidth + hits / chip.cache_bandwidth
        return max(work.cycles / self.frequency(self._heat), work.seconds, memory)

    def _pass(self, until: float, load: float) -> None:
        if until > self._at:
            self._heat = load + (self._heat - load) * math.exp((self._at - until) / self.chip.heat)
            self._at = until

    def state(self, moment: float) -> State:
        """How it was at a moment that has been simulated, or is, with nothing to do, later."""
        place = bisect_right(self._starts, moment) - 1
        if place < 0:
            return self._state(0.0, 0.0)
        start, (end, heat, load) = self._starts[place], self._spans[place]
        heat = load + (heat - load) * math.exp((start - min(moment, end)) / self.chip.heat)
        if moment <= end:
            return self._state(heat, load)
        return self._state(heat * math.exp((end - moment) / self.chip.heat), 0.0)

    def _state(self, heat: float, load: float) -> State:
        chip = self.chip
        return State(self.frequency(heat), heat, load, chip.idle_w + (chip.limit_w - chip.idle_w) * load)

    @property
    def done(self) -> float:
        """When all streams are."""
        return max(stream.ready for stream in self.streams)

    def loaded(self, since: float, until: float) -> float:
        """The part of that time in which something ran."""
        spans = zip(self._starts, (end for end, *_ in self._spans), strict=True)
        return _covered((max(start, since), min(end, until)) for start, end in spans) / (until - since)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > max(start, reached):
            covered += end - max(start, reached)
            reached = end
    return covered
