"""How long does a collective take, from its last member's arrival until its last member has finished?

All ranks synchronize before each iteration, so that they arrive at the same time; an iteration's time is the
slowest rank's. Iterations continue until the median is precise enough or the time is up; the ranks decide
that from the same numbers. Outliers are dropped as in kernel measurements.

- CPU (`HostIterationTimer`): a barrier, then the collective between two readings of the host's clock.
  Processes of one node read the same clock, so an iteration lasts from the last member's start to the last
  member's end; those of several nodes count from their own start, which includes unequal exits from the
  barrier.
- GPU (`DeviceIterationTimer`): iterations are enqueued behind a pause, each behind an all-reduce of one
  number that synchronizes the GPUs, between two device events. Launch time is hidden, as in a training step
  and in nccl-tests.

The median's 95 % interval is +-1.57 IQR / sqrt(n) (McGill, Tukey and Larsen 1978, Variations of box plots).
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.collectives.process_groups import max_over_ranks
from calibrate.kernels.timing import time_statistics
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

WARM_UP_ITERATIONS: Final = 3
MAX_BATCH_ITERATIONS: Final = 16  # maximum iterations between two decisions
MIN_ITERATIONS: Final = 5  # however long they take
MAX_ITERATIONS: Final = 400  # however short they are
TARGET_HALF_INTERVAL: Final = 0.01  # relative half-interval of the median at which it is precise enough
_MIN_CLOCK_HZ: Final = 2e9  # cycles per second, a lower bound of GPU clocks; at a lower clock the pause is longer
_PAUSE_RATIO: Final = 1.5  # pause over the last queuing time of an iteration
_INITIAL_QUEUING_SECONDS: Final = 3e-4  # estimated queuing seconds, before the first
_MAX_PAUSE_SECONDS: Final = 0.5  # longest pause of the GPU

METHOD: Final = (
    "FP32 numbers, or those of the call; all groups of a shape at once; before each call all ranks meet; from the last "
    "member's start (on "
    "GPUs and between nodes each rank's own) until the slowest is done; send_recv: half of there and back; "
    f"{WARM_UP_ITERATIONS} calls to warm up, then {MIN_ITERATIONS} to {MAX_ITERATIONS} until the median is known to "
    f"{TARGET_HALF_INTERVAL:.0%} or the time is up; "
    "median, 5th and 95th percentile; calls far from all others dropped"
)


@dataclass(frozen=True, slots=True)
class CollectiveIteration:
    """One call of a collective: its untimed preparation, the call, and the transfers in a call (2 for a ping-pong)."""

    prepare: Callable[[], object]
    run: Callable[[], object]
    transfer_count: int = 1


class IterationTimer(Protocol):
    """Times iterations on one rank."""

    @property
    def has_shared_clock(self) -> bool:
        """Whether all ranks read the same clock."""

    def time_iterations(self, iteration: CollectiveIteration, count: int) -> tuple[Tensor, Tensor]:
        """Start and end of each iteration, two [count] FP64 tensors of seconds on the host."""


@dataclass(frozen=True, slots=True)
class HostIterationTimer:
    """The host's monotonic clock."""

    has_shared_clock: bool

    def time_iterations(self, iteration: CollectiveIteration, count: int) -> tuple[Tensor, Tensor]:
        """Start and end of each iteration, after a barrier."""
        starts, ends = torch.zeros(2, count, dtype=torch.float64)
        for index in range(count):
            iteration.prepare()
            dist.barrier()
            starts[index] = perf_counter()
            iteration.run()
            ends[index] = perf_counter()
        return starts, ends


@dataclass(slots=True)
class DeviceIterationTimer:
    """Events in the GPU's queue. queuing_seconds: last host time of enqueuing an iteration."""

    device: torch.device
    queuing_seconds: Seconds = _INITIAL_QUEUING_SECONDS

    @property
    def has_shared_clock(self) -> bool:
        """False: each GPU has its own clock."""
        return False

    def time_iterations(self, iteration: CollectiveIteration, count: int) -> tuple[Tensor, Tensor]:
        """Zeros and durations of iterations, each behind an all-reduce, all enqueued before the first one runs."""
        sync_buffer = torch.zeros(1, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(_MIN_CLOCK_HZ * min(_MAX_PAUSE_SECONDS, _PAUSE_RATIO * self.queuing_seconds * count)))  # type: ignore[no-untyped-call]
        start_time = perf_counter()
        for start, end in events:
            iteration.prepare()
            dist.all_reduce(sync_buffer)
            start.record()
            iteration.run()
            end.record()
        self.queuing_seconds = (perf_counter() - start_time) / count
        torch.cuda.synchronize(self.device)
        elapsed = [start.elapsed_time(end) * 1e-3 for start, end in events]
        return torch.zeros(count, dtype=torch.float64), torch.tensor(elapsed, dtype=torch.float64)


def time_collective(
    iteration: CollectiveIteration, timer: IterationTimer, device: torch.device, max_seconds: Seconds
) -> TimeStatistics:
    """Repeat an iteration until its median is precise or `max_seconds` are over; all ranks return the same."""
    start_time, elapsed = perf_counter(), 0.0
    samples, _ = _time_batch(iteration, timer, device, start_time, WARM_UP_ITERATIONS)
    all_samples: list[float] = []
    while len(all_samples) < MIN_ITERATIONS or not (
        elapsed > max_seconds or len(all_samples) >= MAX_ITERATIONS or _is_precise_enough(all_samples)
    ):
        batch_size = max_seconds / 4 / max(float(np.median(samples)) * iteration.transfer_count, 1e-9)
        samples, elapsed = _time_batch(
            iteration, timer, device, start_time, int(np.clip(batch_size, 1, MAX_BATCH_ITERATIONS))
        )
        all_samples += samples
    return time_statistics(all_samples)


def _time_batch(
    iteration: CollectiveIteration, timer: IterationTimer, device: torch.device, start_time: float, count: int
) -> tuple[list[float], Seconds]:
    """Seconds of each iteration, and since measuring began: the slowest rank's."""
    starts, ends = timer.time_iterations(iteration, count)
    if timer.has_shared_clock:
        starts = max_over_ranks(starts, device)
    slowest = max_over_ranks(torch.cat([ends - starts, torch.tensor([perf_counter() - start_time])]), device)
    return (slowest[:-1] / iteration.transfer_count).tolist(), float(slowest[-1])


def _is_precise_enough(samples: list[float]) -> bool:
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return bool(
        len(samples) >= MAX_BATCH_ITERATIONS
        and 1.57 * (high - low) / len(samples) ** 0.5 <= TARGET_HALF_INTERVAL * middle
    )
