"""What does the profiler do to what it writes down?

On a CPU it takes time for every operator (0.7 us) and every label (15 us, by way of Python), which small operators
feel. Assumed: each costs the same wherever it comes, an operator's lies in the operator around it, and a label's in the
label. Both are measured here, on operators that do next to nothing.

On a GPU durations are the device's own (CUPTI), and exclude what lies between two kernels of a queue, about 1 us, which
the times of single kernels include: `turnover` is the median gap before kernels that had been launched before the one
ahead of them ended, and is given to each kernel.
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

from calibrate.check.operator_labels import PRODUCT, labelled, named
from calibrate.check.profile_attribution import OnHost, of_runtime
from clustersim.common.units import Seconds

_TURNS: Final = 3
_MANY: Final = 300
_MICRO: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Writing:
    """Seconds that it takes on a CPU to write down an operator, what lies in a label by itself, and a whole label."""

    event: Seconds = 0.0
    label: Seconds = 0.0
    labelling: Seconds = 0.0

    @property
    def times(self) -> OnHost:
        """Times of operators without that."""
        return OnHost(self.event, self.label)

    def of(self, events: Any) -> Seconds:
        """Of all these operators."""
        labels = sum(named(event.name) is not None for event in events)
        return self.event * (len(events) - labels) + self.labelling * labels


def profiler(device: torch.device) -> AbstractContextManager[Any]:
    """A profiler of the device's kernels and of the operators that launch them."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return torch.profiler.profile(activities=activities, acc_events=True)


def host_writing() -> Writing:
    """What writing takes on this host: the least of some turns, since other work only ever adds to it."""
    one = torch.zeros(1)
    plain = min(_spent(lambda: one.add_(1.0)) for _ in range(_TURNS))
    made = [_profiled(lambda: one.add_(1.0)) for _ in range(_TURNS)]
    event = max(0.0, min(seconds for seconds, _ in made) - plain)
    empty = [_profiled(_empty) for _ in range(_TURNS)]
    inside = min(median(_own(item) for item in events if named(item.name)) for _, events in empty)
    return Writing(event, inside, min(seconds for seconds, _ in empty))


def turnover(events: Any) -> Seconds:
    """Seconds from a kernel to the next one, if that is in the queue; 0 where the host was late for all of them."""
    launched = {event.id: event.time_range.end for event in events if of_runtime(event)}
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    kernels.sort(key=lambda event: event.time_range.start)
    gaps = [
        later.time_range.start - earlier.time_range.end
        for earlier, later in pairwise(kernels)
        if launched.get(later.id, math.inf) <= earlier.time_range.end
    ]
    return max(0.0, median(gaps)) * _MICRO if gaps else 0.0


def _empty() -> None:
    with labelled(PRODUCT):
        pass


def _own(event: Any) -> Seconds:
    return float(event.self_cpu_time_total) * _MICRO


def _spent(action: Callable[[], object]) -> Seconds:
    began = perf_counter()
    for _ in range(_MANY):
        action()
    return (perf_counter() - began) / _MANY


def _profiled(action: Callable[[], object]) -> tuple[Seconds, Any]:
    with profiler(torch.device("cpu")) as found:
        seconds = _spent(action)
    return seconds, found.events()
