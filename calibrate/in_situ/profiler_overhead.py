"""What does the profiler add to the times that it records?

On a CPU it takes time for every operator (0.7 us) and every label (15 us, recorded through Python), which is
noticeable for small operators. Assumed: each costs the same everywhere; an operator's overhead is part of the
enclosing operator's time, and a label's of the label's. Both are measured here on operators that do next to
nothing.

On a GPU durations are the device's own (CUPTI), and exclude the gap between two queued kernels, about 1 us,
which single-kernel times include: `median_kernel_gap` is the median gap before kernels that were launched
before the previous one ended, and is added to each kernel.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from calibrate.check.operator_labels import MATMUL, parse_label, record_label
from calibrate.check.profile_attribution import HostTimer, of_runtime
from clustersim.common.units import Seconds

_REPEATS: Final = 3
_LOOP_COUNT: Final = 300
_SECONDS_PER_US: Final = 1e-6


@dataclass(frozen=True, slots=True)
class ProfilerOverhead:
    """Profiler overhead on a CPU in seconds: per operator, within a label, and of a label in total."""

    event_seconds: Seconds = 0.0
    label_inner_seconds: Seconds = 0.0
    label_total_seconds: Seconds = 0.0

    @property
    def host_times(self) -> HostTimer:
        """Rules that subtract the overhead from operator times."""
        return HostTimer(self.event_seconds, self.label_inner_seconds)

    def total_overhead(self, events: Any) -> Seconds:
        """Total overhead of these profiler events."""
        label_count = sum(parse_label(event.name) is not None for event in events)
        return self.event_seconds * (len(events) - label_count) + self.label_total_seconds * label_count


def profiler(device: torch.device) -> AbstractContextManager[Any]:
    """A profiler of the device's kernels and of the operators that launch them."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return torch.profiler.profile(activities=activities, acc_events=True)


def measure_profiler_overhead() -> ProfilerOverhead:
    """The profiler's overhead on this host: the minimum of several repeats, since other work only adds to it."""
    operand = torch.zeros(1)
    unprofiled_seconds = min(_seconds_per_run(lambda: operand.add_(1.0)) for _ in range(_REPEATS))
    profiled = [_profiled_seconds_per_run(lambda: operand.add_(1.0)) for _ in range(_REPEATS)]
    event_seconds = max(0.0, min(seconds for seconds, _ in profiled) - unprofiled_seconds)
    labelled_runs = [_profiled_seconds_per_run(_empty_label) for _ in range(_REPEATS)]
    inner_seconds = min(
        median(_self_seconds(event) for event in events if parse_label(event.name)) for _, events in labelled_runs
    )
    return ProfilerOverhead(event_seconds, inner_seconds, min(seconds for seconds, _ in labelled_runs))


def median_kernel_gap(events: Any) -> Seconds:
    """Median seconds between two kernels that are both queued; 0 where the host was late for all of them."""
    launch_ends = {event.id: event.time_range.end for event in events if of_runtime(event)}
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    kernels.sort(key=lambda event: event.time_range.start)
    gaps = [
        next_kernel.time_range.start - kernel.time_range.end
        for kernel, next_kernel in pairwise(kernels)
        if launch_ends.get(next_kernel.id, math.inf) <= kernel.time_range.end
    ]
    return max(0.0, median(gaps)) * _SECONDS_PER_US if gaps else 0.0


def _empty_label() -> None:
    with record_label(MATMUL):
        pass


def _self_seconds(event: Any) -> Seconds:
    return float(event.self_cpu_time_total) * _SECONDS_PER_US


def _seconds_per_run(action: Callable[[], object]) -> Seconds:
    start_time = perf_counter()
    for _ in range(_LOOP_COUNT):
        action()
    return (perf_counter() - start_time) / _LOOP_COUNT


def _profiled_seconds_per_run(action: Callable[[], object]) -> tuple[Seconds, Any]:
    with profiler(torch.device("cpu")) as profile:
        seconds = _seconds_per_run(action)
    return seconds, profile.events()
