"""What do a kernel and a collective take when they overlap? Two methods, and what each assumes.

- GPU (`GpuContentionBenchmark`): collectives run back to back on their own stream, while kernels run from
  before the first until after the last one. Events between them show what really overlapped: kernels count
  that began after the first collective had ended (so they do not prevent collectives from starting) and ended
  before the last one did, and collectives that began and ended while kernels ran. So both slowdowns are
  measured.
- CPU (`CpuContentionBenchmark`): the same cores compute and move data, and times do not show what
  overlaps. Some collectives are started, kernels run concurrently for twice as long, then all is waited for. The
  extra time over the isolated kernels, relative to the isolated collectives' time, is the fraction of their
  time in which kernels stall: 0 where other hardware moves the data, 1 where the same cores do both. The
  simulator slows kernels by a fraction p while a collective runs, and so loses p / (1 + p) of its time; this p
  is solved for. The collective's own slowdown, during which kernels lose less, is in the same sum, so
  collectives get no separate slowdown.

Both measure isolated and overlapped runs alternately, all ranks as often as each other; counts are derived
from the slowest rank's times, and the slowest rank's times are recorded.
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

from calibrate.collectives.process_groups import max_over_ranks, min_over_ranks
from calibrate.collectives.timing import CollectiveIteration
from calibrate.devices.device import TorchDevice
from calibrate.devices.load_generator import record_timed_event
from calibrate.devices.stopwatch import Action
from calibrate.kernels.timing import time_statistics
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

_MIN_CALLS: Final = 3  # minimum number of calls, back to back
_MIN_CALLS_SECONDS: Final = 0.02  # minimum isolated seconds of them (on a CPU fewer calls, if one lasts as long)
_KERNEL_TIME_RATIO: Final = 2.0  # kernel time over the isolated time of the calls
_MIN_KERNELS: Final = 4  # minimum number of kernels
_MIN_GROUP_SECONDS: Final = 2e-4  # minimum seconds of kernels between two events: an event costs a microsecond
_MAX_QUEUED_LAUNCHES: Final = 4096  # maximum kernel launches in a round, so that the host stays ahead
_MAX_STALL_FRACTION: Final = 0.99  # maximum stalled fraction, so that p is finite
_MIN_CLOCK_HZ: Final = 2e9  # cycles per second, a lower bound of GPU clocks; at a lower clock the pause is longer
_PAUSE_RATIO: Final = 1.5  # pause over the last queuing time
_INITIAL_QUEUING_SECONDS: Final = 5e-3  # estimated queuing seconds, before the first
_MAX_PAUSE_SECONDS: Final = 0.5  # longest pause of the GPU


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Times of a kernel run and of a call, isolated and overlapped; None: not measured."""

    kernel_isolated: TimeStatistics
    kernel_overlapped: TimeStatistics
    call_isolated: TimeStatistics
    call_overlapped: TimeStatistics | None


@dataclass(frozen=True, slots=True)
class KernelAction:
    """The action that runs a kernel once, and its number of launches."""

    run: Action
    launches: int = 1


class ContentionBenchmark(Protocol):
    """Measures a kernel overlapped with a collective on one rank; all ranks call it with the same arguments."""

    def measure(self, kernel: KernelAction, iteration: CollectiveIteration) -> OverlapTimes | None:
        """The times of both; None where they did not overlap."""


@dataclass(frozen=True, slots=True)
class CpuContentionBenchmark:
    """On a CPU, by the time in which kernels stall."""

    device: TorchDevice
    rounds: int

    def measure(self, kernel: KernelAction, iteration: CollectiveIteration) -> OverlapTimes:
        """Rounds of kernels isolated and overlapped with collectives, which are timed in isolation before each."""
        self._slowest_rank_seconds(iteration.run)
        calls = math.ceil(min(_MIN_CALLS, _MIN_CALLS_SECONDS / self._slowest_rank_seconds(iteration.run)))
        rounds = [self._round(kernel.run, iteration, calls) for _ in range(self.rounds)]
        kernel_seconds = median(call_isolated for call_isolated, _, _ in rounds)
        overlapped = [kernel_seconds / (1.0 - stall) for _, stall, _ in rounds]  # 1 + p = 1 / (1 - lost)
        call_isolated = time_statistics(
            [calls_seconds / (calls * iteration.transfer_count) for _, _, calls_seconds in rounds]
        )
        return OverlapTimes(time_statistics([kernel_seconds]), time_statistics(overlapped), call_isolated, None)

    def _round(self, run: Action, iteration: CollectiveIteration, calls: int) -> tuple[Seconds, float, Seconds]:
        """Seconds of an isolated kernel, fraction of the collectives' time in which kernels stall, and that time."""
        calls_seconds = self._slowest_rank_seconds(lambda: _repeat(iteration.run, calls))
        kernel_seconds = self._slowest_rank_seconds(lambda: _repeat(run, _MIN_CALLS)) / _MIN_CALLS
        count = max(1, round(_KERNEL_TIME_RATIO * calls_seconds / kernel_seconds))
        isolated = self._slowest_rank_seconds(lambda: _repeat(run, count))
        overlapped = self._slowest_rank_seconds(
            lambda: _run_concurrently(lambda: _repeat(iteration.run, calls), lambda: _repeat(run, count))
        )
        return (
            isolated / count,
            min(max(0.0, (overlapped - isolated) / calls_seconds), _MAX_STALL_FRACTION),
            calls_seconds,
        )

    def _slowest_rank_seconds(self, action: Callable[[], object]) -> Seconds:
        """Seconds of the slowest rank, so that all ranks derive the same counts."""
        dist.barrier()
        start_time = perf_counter()
        action()
        return float(
            max_over_ranks(torch.tensor([perf_counter() - start_time], dtype=torch.float64), self.device.torch)[0]
        )


def _run_concurrently(run_comm: Action, compute: Action) -> None:
    """Compute in this thread, while another one waits for collectives."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(run_comm)
        compute()
        future.result()


def _repeat(run: Callable[[], object], count: int) -> None:
    for _ in range(count):
        run()


@dataclass(slots=True)
class GpuContentionBenchmark:
    """On a GPU, by the events of two streams. queuing_seconds: last host time of enqueuing a round."""

    device: TorchDevice
    rounds: int
    queuing_seconds: Seconds = _INITIAL_QUEUING_SECONDS
    stream: torch.cuda.Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device.torch)  # type: ignore[no-untyped-call]

    def measure(self, kernel: KernelAction, iteration: CollectiveIteration) -> OverlapTimes | None:
        """Rounds of isolated kernels, of isolated collectives, and of both overlapped."""
        shortest_round = _KernelGroups(kernel.run, _MIN_KERNELS, 1), _CallSequence(iteration, _MIN_CALLS)
        self._round(*shortest_round)  # warm
        kernel_seconds, call_seconds = self._slowest_rank(self._measure_isolated(*shortest_round))
        call_count = max(_MIN_CALLS, math.ceil(max(_MIN_CALLS_SECONDS, _MIN_KERNELS * kernel_seconds) / call_seconds))
        group_size = max(1, math.ceil(_MIN_GROUP_SECONDS / kernel_seconds))
        group_count = math.ceil(_KERNEL_TIME_RATIO * call_count * call_seconds / (group_size * kernel_seconds))
        max_groups = max(_MIN_KERNELS, _MAX_QUEUED_LAUNCHES // (group_size * kernel.launches))
        kernel_groups, call_sequence = (
            _KernelGroups(kernel.run, min(max(group_count, _MIN_KERNELS), max_groups), group_size),
            _CallSequence(iteration, call_count),
        )
        isolated = [
            self._slowest_rank(self._measure_isolated(kernel_groups, call_sequence)) for _ in range(self.rounds)
        ]
        overlapped = [self._measure_overlapped(kernel_groups, call_sequence) for _ in range(self.rounds)]
        (kernels_isolated, calls_isolated), (kernels_overlapped, calls_overlapped) = (
            zip(*isolated, strict=True),
            zip(*overlapped, strict=True),
        )
        kernel_overlapped, call_overlapped = (
            _statistics_or_none(kernels_overlapped),
            _statistics_or_none(calls_overlapped),
        )
        return (
            None
            if kernel_overlapped is None
            else OverlapTimes(
                time_statistics(kernels_isolated), kernel_overlapped, time_statistics(calls_isolated), call_overlapped
            )
        )

    def _measure_isolated(self, kernel_groups: "_KernelGroups", calls: "_CallSequence") -> tuple[Seconds, Seconds]:
        """Median seconds of a kernel and of a call, each isolated."""
        kernel_ends, _ = self._round(kernel_groups, replace(calls, count=0))
        _, call_ends = self._round(replace(kernel_groups, group_count=0), calls)
        return _median_duration(kernel_ends) / kernel_groups.runs_per_group, _median_duration(
            call_ends
        ) / calls.iteration.transfer_count

    def _measure_overlapped(
        self, kernel_groups: "_KernelGroups", calls: "_CallSequence"
    ) -> tuple[Seconds | None, Seconds | None]:
        """Median seconds of overlapped kernels and calls; None where some rank had none."""
        kernel_ends, call_ends = self._round(kernel_groups, calls)
        overlapped_kernels, overlapped_calls = (
            durations_within(kernel_ends, call_ends[1:]),
            durations_within(call_ends, kernel_ends),
        )
        kernel_seconds, call_seconds = self._slowest_rank(
            (
                median(overlapped_kernels or [0.0]) / kernel_groups.runs_per_group,
                median(overlapped_calls or [0.0]) / calls.iteration.transfer_count,
            )
        )
        return kernel_seconds if self._is_nonempty_on_all_ranks(
            overlapped_kernels
        ) else None, call_seconds if self._is_nonempty_on_all_ranks(overlapped_calls) else None

    def _is_nonempty_on_all_ranks(self, durations: Sequence[Seconds]) -> bool:
        return min_over_ranks(float(bool(durations)), self.device.torch) == 1.0

    def _slowest_rank(self, durations: tuple[Seconds, Seconds]) -> tuple[Seconds, Seconds]:
        """The slowest rank's times, so that all ranks derive the same counts."""
        first, second = max_over_ranks(torch.tensor(durations, dtype=torch.float64), self.device.torch).tolist()
        return first, second

    def _round(self, kernel_groups: "_KernelGroups", calls: "_CallSequence") -> tuple[list[Seconds], list[Seconds]]:
        """End times of kernel groups and of calls, relative to the start of the kernels.

        The first entry is the start.

        All is enqueued behind a pause, and behind an all-reduce of one number that synchronizes the GPUs.
        """
        device = self.device.torch
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(_MIN_CLOCK_HZ * min(_MAX_PAUSE_SECONDS, _PAUSE_RATIO * self.queuing_seconds)))  # type: ignore[no-untyped-call]
        start_time = perf_counter()
        dist.all_reduce(torch.zeros(1, device=device))
        origin = record_timed_event()
        kernel_events = [origin, *kernel_groups.enqueue(min(kernel_groups.group_count, 1))]
        self.stream.wait_event(kernel_events[-1])  # calls start after the first kernels
        with torch.cuda.stream(self.stream):
            call_events = [record_timed_event(), *calls.enqueue()]
        kernel_events += kernel_groups.enqueue(kernel_groups.group_count - 1)
        torch.cuda.current_stream(device).wait_event(call_events[-1])
        self.queuing_seconds = perf_counter() - start_time
        torch.cuda.synchronize(device)
        return _seconds_since(origin, kernel_events), _seconds_since(origin, call_events)


@dataclass(frozen=True, slots=True)
class _KernelGroups:
    """Groups of runs of a kernel, with an event after each group."""

    run: Action
    group_count: int
    runs_per_group: int

    def enqueue(self, count: int) -> Iterator[torch.cuda.Event]:
        """Enqueue `count` groups on the current stream."""
        for _ in range(count):
            _repeat(self.run, self.runs_per_group)
            yield record_timed_event()


@dataclass(frozen=True, slots=True)
class _CallSequence:
    """Calls of a collective, with an event after each."""

    iteration: CollectiveIteration
    count: int

    def enqueue(self) -> Iterator[torch.cuda.Event]:
        """Enqueue them on the current stream."""
        for _ in range(self.count):
            self.iteration.run()
            yield record_timed_event()


def durations_within(marks: Sequence[Seconds], window_marks: Sequence[Seconds]) -> list[Seconds]:
    """Durations between successive marks that lie entirely within the window from its first to its last mark."""
    return [end - begin for begin, end in pairwise(marks) if window_marks[0] <= begin and end <= window_marks[-1]]


def _statistics_or_none(samples: Sequence[Seconds | None]) -> TimeStatistics | None:
    """Statistics of all samples; None where one is missing."""
    present = [sample for sample in samples if sample is not None]
    return time_statistics(present) if len(present) == len(samples) else None


def _median_duration(marks: Sequence[Seconds]) -> Seconds:
    return median(end - begin for begin, end in pairwise(marks))


def _seconds_since(origin: torch.cuda.Event, events: Sequence[torch.cuda.Event]) -> list[Seconds]:
    return [1e-3 * origin.elapsed_time(event) for event in events]
