"""What do a kernel and a collective take beside each other? Two ways of finding out, and what each assumes.

- GPU (`SideBySide`): collectives on a stream of their own, one after the other, while kernels run from before the first
  until after the last. Events between them say what really ran beside what: kernels count that began after the first
  collective had ended (so they do not keep collectives from running) and ended before the last one did, and collectives
  that began and ended while kernels ran. So both slowings are measured.
- CPU (`LostTime`): the same cores compute and move data, and what is beside what cannot be told from their times. Some
  collectives are started, kernels run beside them for twice as long, then all is waited for. What that lasts longer
  than the kernels alone, over what the collectives last alone, is the part of their time in which kernels stood still:
  nothing where other hardware moves the data, all of it where the same cores do both. The simulator slows kernels by a
  part p while a collective lasts, and so loses p / (1 + p) of its time; this p is solved for. That the collective lasts
  longer too, in which time kernels lose less, is in the same sum, so collectives have no slowing of their own.

Both take the same alone and together, all ranks as many times; how often they work out of the slowest rank's times, and
what is noted is the slowest rank's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Final, Protocol

import torch
import torch.distributed as dist

from calibrate.collectives.process_groups import largest, least
from calibrate.collectives.timing import Lap
from calibrate.devices.device import TorchDevice
from calibrate.devices.stopwatch import Action
from calibrate.kernels.timing import spread
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

_CALLS: Final = 3  # at least, one after the other
_LASTING: Final = 0.02  # seconds that they last alone, at least (on a CPU fewer calls, if one lasts as long)
_BESIDE: Final = 2.0  # times as long as they last alone that kernels run
_KERNELS: Final = 4  # at least
_GROUP: Final = 2e-4  # seconds of kernels between two events, at least: an event costs a microsecond
_QUEUED: Final = 4096  # launches of kernels in a round, at most: the host keeps ahead of them
_MOST: Final = 0.99  # part of their time that kernels stand still, so that p is finite
_CLOCK: Final = 2e9  # cycles per second, at least what GPUs run at; a lower clock waits longer
_AHEAD: Final = 1.5  # times what queuing took last
_FIRST: Final = 5e-3  # seconds that it may take, before it was seen
_LONGEST: Final = 0.5  # seconds that the GPU is kept waiting, at most


@dataclass(frozen=True, slots=True)
class Together:
    """A kernel and a collective alone and beside each other: one run, one call; None: was not measured."""

    alone: TimeStatistics
    together: TimeStatistics
    call_alone: TimeStatistics
    call_together: TimeStatistics | None


@dataclass(frozen=True, slots=True)
class Work:
    """What runs a kernel once, and how many launches that is."""

    run: Action
    launches: int = 1


class Sides(Protocol):
    """Runs a kernel and a collective side by side on one rank; all ranks call it alike."""

    def together(self, work: Work, lap: Lap) -> Together | None:
        """What both take; None where they did not overlap."""


@dataclass(frozen=True, slots=True)
class LostTime:
    """On a CPU, by the time that kernels lose."""

    device: TorchDevice
    rounds: int

    def together(self, work: Work, lap: Lap) -> Together:
        """So many rounds of kernels alone and beside collectives, which are timed alone before each."""
        self._spent(lap.run)
        calls = math.ceil(min(_CALLS, _LASTING / self._spent(lap.run)))
        rounds = [self._round(work.run, lap, calls) for _ in range(self.rounds)]
        once = median(alone for alone, _, _ in rounds)
        together = [once / (1.0 - lost) for _, lost, _ in rounds]  # 1 + p = 1 / (1 - lost)
        alone = spread([moving / (calls * lap.trips) for _, _, moving in rounds])
        return Together(spread([once]), spread(together), alone, None)

    def _round(self, run: Action, lap: Lap, calls: int) -> tuple[Seconds, float, Seconds]:
        """Seconds of a kernel alone, the part of the collectives' time that kernels lose, and this time alone."""
        moving = self._spent(lambda: _repeat(lap.run, calls))
        once = self._spent(lambda: _repeat(run, _CALLS)) / _CALLS
        count = max(1, round(_BESIDE * moving / once))
        alone = self._spent(lambda: _repeat(run, count))
        together = self._spent(lambda: _beside(lambda: _repeat(lap.run, calls), lambda: _repeat(run, count)))
        return alone / count, min(max(0.0, (together - alone) / moving), _MOST), moving

    def _spent(self, work: Callable[[], object]) -> Seconds:
        """Seconds of the slowest rank, so that all ranks decide alike."""
        dist.barrier()
        began = perf_counter()
        work()
        return float(largest(torch.tensor([perf_counter() - began], dtype=torch.float64), self.device.torch)[0])


def _beside(move: Action, compute: Action) -> None:
    """Compute here, while another thread waits for collectives."""
    with ThreadPoolExecutor(1) as thread:
        moved = thread.submit(move)
        compute()
        moved.result()


def _repeat(run: Callable[[], object], count: int) -> None:
    for _ in range(count):
        run()


@dataclass(slots=True)
class SideBySide:
    """On a GPU, by the events of two streams. queuing: seconds that queuing a round took last."""

    device: TorchDevice
    rounds: int
    queuing: Seconds = _FIRST
    stream: torch.cuda.Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device.torch)  # type: ignore[no-untyped-call]

    def together(self, work: Work, lap: Lap) -> Together | None:
        """Rounds of kernels alone, of collectives alone, and of both."""
        least_of = _Turn(work.run, _KERNELS, 1), _Calls(lap, _CALLS)
        self._round(*least_of)  # warm
        once, call = self._known(self._alone(*least_of))
        calls = max(_CALLS, math.ceil(max(_LASTING, _KERNELS * once) / call))
        group = max(1, math.ceil(_GROUP / once))
        groups = math.ceil(_BESIDE * calls * call / (group * once))
        most = max(_KERNELS, _QUEUED // (group * work.launches))
        turn, moving = _Turn(work.run, min(max(groups, _KERNELS), most), group), _Calls(lap, calls)
        alone = [self._known(self._alone(turn, moving)) for _ in range(self.rounds)]
        both = [self._both(turn, moving) for _ in range(self.rounds)]
        (kernels, moves), (slowed, hindered) = zip(*alone, strict=True), zip(*both, strict=True)
        together, call_together = _spread(slowed), _spread(hindered)
        return None if together is None else Together(spread(kernels), together, spread(moves), call_together)

    def _alone(self, turn: "_Turn", calls: "_Calls") -> tuple[Seconds, Seconds]:
        """Medians of kernels and of calls, each without the other."""
        kernels, _ = self._round(turn, replace(calls, count=0))
        _, moved = self._round(replace(turn, groups=0), calls)
        return _median(kernels) / turn.runs, _median(moved) / calls.lap.trips

    def _both(self, turn: "_Turn", calls: "_Calls") -> tuple[Seconds | None, Seconds | None]:
        """Medians of kernels beside calls and of calls beside kernels; None where there were none on some rank."""
        kernels, moved = self._round(turn, calls)
        inside, covered = within(kernels, moved[1:]), within(moved, kernels)
        first, second = self._known((median(inside or [0.0]) / turn.runs, median(covered or [0.0]) / calls.lap.trips))
        return first if self._everywhere(inside) else None, second if self._everywhere(covered) else None

    def _everywhere(self, found: Sequence[Seconds]) -> bool:
        return least(float(bool(found)), self.device.torch) == 1.0

    def _known(self, mine: tuple[Seconds, Seconds]) -> tuple[Seconds, Seconds]:
        """The slowest rank's, so that all ranks decide alike."""
        first, second = largest(torch.tensor(mine, dtype=torch.float64), self.device.torch).tolist()
        return first, second

    def _round(self, turn: "_Turn", calls: "_Calls") -> tuple[list[Seconds], list[Seconds]]:
        """When groups of kernels, and calls, ended, from when the kernels began; the first is when they began.

        All is queued behind a pause, and behind an all-reduce of one number that holds the GPUs together.
        """
        device = self.device.torch
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(_CLOCK * min(_LONGEST, _AHEAD * self.queuing)))  # type: ignore[no-untyped-call]
        began = perf_counter()
        dist.all_reduce(torch.zeros(1, device=device))
        origin = _marked()
        kernels = [origin, *turn.queue(min(turn.groups, 1))]
        self.stream.wait_event(kernels[-1])  # kernels run before
        with torch.cuda.stream(self.stream):
            moved = [_marked(), *calls.queue()]
        kernels += turn.queue(turn.groups - 1)
        torch.cuda.current_stream(device).wait_event(moved[-1])
        self.queuing = perf_counter() - began
        torch.cuda.synchronize(device)
        return _since(origin, kernels), _since(origin, moved)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Groups of so many runs of a kernel, with an event after each."""

    run: Action
    groups: int
    runs: int

    def queue(self, groups: int) -> Iterator[torch.cuda.Event]:
        """Queue so many groups on the current stream."""
        for _ in range(groups):
            _repeat(self.run, self.runs)
            yield _marked()


@dataclass(frozen=True, slots=True)
class _Calls:
    """So many calls of a collective, with an event after each."""

    lap: Lap
    count: int

    def queue(self) -> Iterator[torch.cuda.Event]:
        """Queue them on the current stream."""
        for _ in range(self.count):
            self.lap.run()
            yield _marked()


def within(marks: Sequence[Seconds], others: Sequence[Seconds]) -> list[Seconds]:
    """What lasts from each mark to the next, where that is while others last."""
    return [end - begin for begin, end in pairwise(marks) if others[0] <= begin and end <= others[-1]]


def _spread(samples: Sequence[Seconds | None]) -> TimeStatistics | None:
    """Of all samples; None where one is missing."""
    found = [sample for sample in samples if sample is not None]
    return spread(found) if len(found) == len(samples) else None


def _median(marks: Sequence[Seconds]) -> Seconds:
    return median(end - begin for begin, end in pairwise(marks))


def _since(origin: torch.cuda.Event, events: Sequence[torch.cuda.Event]) -> list[Seconds]:
    return [1e-3 * origin.elapsed_time(event) for event in events]


def _marked() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
