"""When does what break? The failures of one run, drawn before anybody knows what is done about them.

They depend on the seed, the run and the kind of failure alone, so that runs that differ in spares, storage, checkpoints
or restarts see the same ones (common random numbers), whoever computes them. With all rates times two the same gaps are
half as long.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, gamma, log
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.hardware.failures import FailureMode
from clustersim.reliability.failure_domains import Site
from clustersim.scenario.reliability import ReliabilityModel

DRAWS: Final = 11
"""Standard normal numbers that an event brings along, one for each length that it may cause."""


class Event(NamedTuple):
    """Something breaks. failure: its place among the kinds; node: where; draws: what its lengths are drawn with."""

    time: Seconds
    failure: int
    node: int
    draws: Sequence[float]


class _Times(Protocol):
    """When something of one kind breaks."""

    def until(self, end: Seconds) -> FloatArray:
        """Times after those that were asked for earlier, sorted."""


def events_of(reliability: ReliabilityModel, site: Site, seed: int, run: int, window: Seconds) -> Iterator[Event]:
    """Failures of a run in order, without end (none where nothing breaks), drawn for so many seconds at a time."""
    drawn = rate_factor(reliability.rate_geometric_std, seed, run)
    kinds = [
        _Kind(
            place,
            failure,
            site,
            reliability.rate_factor * (drawn if failure.is_rate_uncertain else 1.0),
            _key(seed, run, _number(failure.name)),
        )
        for place, failure in enumerate(reliability.failures)
        if failure.rate.per_second * site.counts.of(failure.rate.component) * reliability.rate_factor > 0.0
    ]
    end = 0.0
    while kinds:
        end += window
        yield from sorted(event for kind in kinds for event in kind.until(end))


def rate_factor(spread: float, seed: int, run: int) -> float:
    """By how much the rates of a run differ from those that are expected: lognormal, with a median of one."""
    if spread == 1.0:
        return 1.0
    return exp(log(spread) * float(np.random.default_rng(_key(seed, run, 0)).standard_normal()))


def _number(name: str) -> int:
    return crc32(name.encode())


def _key(seed: int, run: int, kind: int) -> int:
    """A number of its own for each kind in each run of each seed; its last two bits are free."""
    return ((kind << 32 | run) << 64 | seed) << 2


@dataclass
class _Kind:
    """Failures of one kind. factor: times its rate; key: of its generators, one for each thing that is drawn."""

    place: int
    failure: FailureMode
    site: Site
    factor: float
    key: int

    def __post_init__(self) -> None:
        many = self.site.counts.of(self.failure.rate.component)
        rate = self.failure.rate.per_second * self.factor
        when, self._where, self._draws = (np.random.default_rng(self.key + place) for place in range(3))
        self._times: _Times
        if self.failure.event_times:
            self._times = _Traced(self.failure.event_times, self.failure.trace_duration, self.factor, when)
        elif self.failure.weibull_shape == 1.0:
            self._times = _Poisson(rate * many, when)
        else:
            self._times = _Renewals(rate, self.failure.weibull_shape, many, when)

    def until(self, end: Seconds) -> list[Event]:
        """Those that follow, until a time."""
        times = self._times.until(end)
        nodes = self._where.integers(self.site.nodes, size=len(times))
        draws = self._draws.standard_normal((len(times), DRAWS))
        there = zip(times.tolist(), nodes.tolist(), draws.tolist(), strict=True)
        return [Event(time, self.place, node, drawn) for time, node, drawn in there]


class _Poisson:
    """Independent of age: exponential gaps."""

    def __init__(self, rate: float, random: np.random.Generator) -> None:
        self._rate, self._random = rate, random
        self._ahead: FloatArray = np.zeros(0)
        self._last = 0.0

    def until(self, end: Seconds) -> FloatArray:
        found = [self._ahead]
        while self._last <= end:
            many = int((end - self._last) * self._rate * 1.1) + 8
            times = self._last + np.cumsum(self._random.standard_exponential(many)) / self._rate
            self._last = float(times[-1])
            found.append(times)
        times = np.concatenate(found)
        there = int(np.searchsorted(times, end, side="right"))
        self._ahead = times[there:]
        return times[:there]


class _Renewals:
    """Weibull lives of components that are all new at the beginning, each replaced when it breaks.

    The mean life is one over the rate: scale x gamma(1 + 1/shape).
    """

    def __init__(self, rate: float, shape: float, many: int, random: np.random.Generator) -> None:
        self._scale, self._shape = 1.0 / rate / gamma(1.0 + 1.0 / shape), shape
        self._random = random
        self._next = self._scale * self._random.weibull(shape, many)

    def until(self, end: Seconds) -> FloatArray:
        found = []
        while len(broken := np.flatnonzero(self._next <= end)):
            found.append(self._next[broken])
            self._next[broken] += self._scale * self._random.weibull(self._shape, len(broken))
        return np.sort(np.concatenate(found)) if found else np.zeros(0)


class _Traced:
    """What was seen, again and again, from a time of it that is drawn for each run."""

    def __init__(self, trace: tuple[Seconds, ...], ends: Seconds, factor: float, random: np.random.Generator) -> None:
        self._length = ends / factor
        times = np.array(trace) / factor
        first = float(random.uniform(0.0, self._length))
        self._cycle = np.sort((times - first) % self._length)
        self._rounds, self._done = 0, 0

    def until(self, end: Seconds) -> FloatArray:
        last = int(end // self._length) + 1
        times = (self._cycle[None, :] + self._length * np.arange(last + 1)[:, None]).ravel()
        there = int(np.searchsorted(times, end, side="right"))
        found = times[self._done : there]
        self._done = there
        return found
