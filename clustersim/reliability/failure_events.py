"""When does what fail? The failures of one run, drawn independently of what is done about them.

They depend only on the seed, the run and the failure mode, so runs that differ in spares, storage,
checkpoints or restarts see the same ones (common random numbers), whichever process computes them. Doubling
all rates halves the same gaps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, gamma, log
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.hardware.failures import FailureMode
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.scenario.reliability import ReliabilityModel

DRAWS_PER_EVENT: Final = 11
"""Standard normal draws per event, one for each random duration that it may cause."""


_MAX_WINDOW_FAILURES: Final = 1e5  # expected failures in a window, each of which takes 500 bytes


class FailureEvent(NamedTuple):
    """A failure. failure_index: index of its mode; node: where; draws: z-scores of its random durations."""

    time: Seconds
    failure_index: int
    node: int
    draws: Sequence[float]


class _Failures(NamedTuple):
    """Failures of one mode, as arrays over them; see `FailureEvent`."""

    times: FloatArray
    failure_indices: IntArray
    nodes: IntArray
    draws: FloatArray


class _ArrivalProcess(Protocol):
    """Arrival process of the failures of one mode."""

    def arrivals_until(self, end: Seconds) -> FloatArray:
        """Arrival times after those returned before, up to `end`, sorted."""


def generate_failures(
    reliability: ReliabilityModel, domains: FailureDomains, seed: int, run: int, window: Seconds
) -> Iterator[FailureEvent]:
    """Failures of a run in order, endless (none if nothing can fail), drawn window by window.

    window: seconds of the first. Windows double until something fails, so that the first failure of a short job takes
    as many as the logarithm of its time; none is so long that it holds more failures than a run ever sees at a time.
    """
    uncertainty_factor = draw_rate_factor(reliability.rate_geometric_std, seed, run)
    processes = [
        _FailureProcess(
            failure_index,
            failure,
            domains,
            reliability.rate_factor * (uncertainty_factor if failure.is_rate_uncertain else 1.0),
            _seed_key(seed, run, _name_hash(failure.name)),
        )
        for failure_index, failure in enumerate(reliability.failures)
        if failure.rate.per_second * domains.counts.count_of(failure.rate.component) * reliability.rate_factor > 0.0
    ]
    longest = _MAX_WINDOW_FAILURES / sum(process.rate for process in processes) if processes else 0.0
    end = 0.0
    while processes:
        end += min(window, longest)
        events = _in_order([process.failures_until(end) for process in processes])
        yield from events
        window *= 1.0 if events else 2.0


def _in_order(failures: Sequence["_Failures"]) -> list[FailureEvent]:
    """Failures of some modes by time; equal times by mode, then by node."""
    times, modes, nodes = (np.concatenate(arrays) for arrays in zip(*(mode[:3] for mode in failures), strict=True))
    draws = np.concatenate([mode.draws for mode in failures])
    order = np.lexsort((nodes, modes, times))
    columns = (column[order].tolist() for column in (times, modes, nodes, draws))
    return list(map(FailureEvent, *columns))


def draw_rate_factor(geometric_std: float, seed: int, run: int) -> float:
    """Factor of a run's true failure rates over the expected ones: lognormal with median 1."""
    if geometric_std == 1.0:
        return 1.0
    return exp(log(geometric_std) * float(np.random.default_rng(_seed_key(seed, run, 0)).standard_normal()))


def _name_hash(name: str) -> int:
    return crc32(name.encode())


def _seed_key(seed: int, run: int, failure_hash: int) -> int:
    """A distinct RNG seed for each mode in each run of each seed; its last two bits are free."""
    return ((failure_hash << 32 | run) << 64 | seed) << 2


@dataclass
class _FailureProcess:
    """Failures of one mode. rate_factor: multiplies its rate; seed_key: of its RNGs, one for each drawn quantity."""

    failure_index: int
    failure: FailureMode
    domains: FailureDomains
    rate_factor: float
    seed_key: int

    def __post_init__(self) -> None:
        component_count = self.domains.counts.count_of(self.failure.rate.component)
        rate = self.failure.rate.per_second * self.rate_factor
        self.rate = rate * component_count
        time_rng, self._node_rng, self._draw_rng = (
            np.random.default_rng(self.seed_key + offset) for offset in range(3)
        )
        self._arrivals: _ArrivalProcess
        if self.failure.event_times:
            self._arrivals = _TraceReplay(
                self.failure.event_times, self.failure.trace_duration, self.rate_factor, time_rng
            )
        elif self.failure.weibull_shape == 1.0:
            self._arrivals = _PoissonArrivals(rate * component_count, time_rng)
        else:
            self._arrivals = _WeibullRenewals(rate, self.failure.weibull_shape, component_count, time_rng)

    def failures_until(self, end: Seconds) -> _Failures:
        """The next failures up to a time."""
        times = self._arrivals.arrivals_until(end)
        nodes = self._node_rng.integers(self.domains.nodes, size=len(times))
        draws = self._draw_rng.standard_normal((len(times), DRAWS_PER_EVENT))
        return _Failures(times, np.full(len(times), self.failure_index), nodes, draws)


class _PoissonArrivals:
    """Poisson process: exponential gaps, independent of age."""

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self._rate, self._rng = rate, rng
        self._pending: FloatArray = np.zeros(0)
        self._last_time = 0.0

    def arrivals_until(self, end: Seconds) -> FloatArray:
        batches = [self._pending]
        while self._last_time <= end:
            batch_size = int((end - self._last_time) * self._rate * 1.1) + 8
            times = self._last_time + np.cumsum(self._rng.standard_exponential(batch_size)) / self._rate
            self._last_time = float(times[-1])
            batches.append(times)
        times = np.concatenate(batches)
        arrived_count = int(np.searchsorted(times, end, side="right"))
        self._pending = times[arrived_count:]
        return times[:arrived_count]


class _WeibullRenewals:
    """Superposed renewal processes: Weibull lifetimes of components, all new at time 0, each replaced when it fails.

    The mean lifetime is 1 / rate = scale x gamma(1 + 1/shape).
    """

    def __init__(self, rate: float, shape: float, component_count: int, rng: np.random.Generator) -> None:
        self._scale, self._shape = 1.0 / rate / gamma(1.0 + 1.0 / shape), shape
        self._rng = rng
        self._next_failure = self._scale * self._rng.weibull(shape, component_count)

    def arrivals_until(self, end: Seconds) -> FloatArray:
        batches = []
        while len(failed := np.flatnonzero(self._next_failure <= end)):
            batches.append(self._next_failure[failed])
            self._next_failure[failed] += self._scale * self._rng.weibull(self._shape, len(failed))
        return np.sort(np.concatenate(batches)) if batches else np.zeros(0)


class _TraceReplay:
    """An observed failure trace, replayed cyclically from an offset drawn for each run."""

    def __init__(
        self, trace: tuple[Seconds, ...], duration: Seconds, rate_factor: float, rng: np.random.Generator
    ) -> None:
        self._period = duration / rate_factor
        times = np.array(trace) / rate_factor
        offset = float(rng.uniform(0.0, self._period))
        self._cycle = np.sort((times - offset) % self._period)
        self._consumed_count = 0

    def arrivals_until(self, end: Seconds) -> FloatArray:
        cycle_count = int(end // self._period) + 1
        times = (self._cycle[None, :] + self._period * np.arange(cycle_count + 1)[:, None]).ravel()
        arrived_count = int(np.searchsorted(times, end, side="right"))
        arrived = times[self._consumed_count : arrived_count]
        self._consumed_count = arrived_count
        return arrived
