"""How long does a collective take, from when its last member comes until its last member is done?

Before each lap all ranks meet, so that they come together; a lap's time is the slowest rank's. Laps go on until the
median is known well enough or the time is up; what the ranks decide about that they decide from the same numbers.
Laps far from all others are dropped, as `calibrate.kernels.timing` does.

- CPU (`HostClock`): a barrier, then the collective between two readings of the host's clock. Processes of one node
  read the same clock, so a lap lasts from the last member's start to the last member's end; those of several nodes
  count from their own start, which includes how unequally they left the barrier.
- GPU (`DeviceClock`): laps are queued behind a pause, each behind an all-reduce of one number that holds the GPUs
  together, between two device events. Launching is hidden, as it is in a training step and in nccl-tests.

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

from calibrate.collectives.process_groups import largest
from calibrate.kernels.timing import spread
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

WARM_UP: Final = 3
BATCH: Final = 16  # laps between two decisions, at most
LEAST: Final = 5  # laps, however long they take
MOST: Final = 400  # laps, however short they are
CERTAIN: Final = 0.01  # half-interval of the median at which it is known well enough
_CLOCK: Final = 2e9  # cycles per second, at least what GPUs run at; a lower clock waits longer
_AHEAD: Final = 1.5  # times what queuing a lap took last
_FIRST: Final = 3e-4  # seconds that it may take, before one was seen
_LONGEST: Final = 0.5  # seconds that the GPU is kept waiting, at most

METHOD: Final = (
    "FP32 numbers, or those of the call; all groups of a shape at once; before each call all ranks meet; from the last "
    "member's start (on "
    "GPUs and between nodes each rank's own) until the slowest is done; send_recv: half of there and back; "
    f"{WARM_UP} calls to warm up, then {LEAST} to {MOST} until the median is known to {CERTAIN:.0%} or the time is up; "
    "median, 5th and 95th percentile; calls far from all others dropped"
)


@dataclass(frozen=True, slots=True)
class Lap:
    """One call of a collective: what is to be done before it, and itself; trips: how often a call does it."""

    prepare: Callable[[], object]
    run: Callable[[], object]
    trips: int = 1


class Clock(Protocol):
    """Times laps on one rank."""

    @property
    def shared(self) -> bool:
        """Whether all ranks read the same clock."""

    def laps(self, lap: Lap, count: int) -> tuple[Tensor, Tensor]:
        """When each lap started and ended, [count] seconds in FP64 on the host."""


@dataclass(frozen=True, slots=True)
class HostClock:
    """The host's monotonic clock."""

    shared: bool

    def laps(self, lap: Lap, count: int) -> tuple[Tensor, Tensor]:
        """Each lap after a barrier."""
        starts, ends = torch.zeros(2, count, dtype=torch.float64)
        for turn in range(count):
            lap.prepare()
            dist.barrier()
            starts[turn] = perf_counter()
            lap.run()
            ends[turn] = perf_counter()
        return starts, ends


@dataclass(slots=True)
class DeviceClock:
    """Events in the GPU's queue. queuing: seconds that queuing one lap took last."""

    device: torch.device
    queuing: Seconds = _FIRST

    @property
    def shared(self) -> bool:
        """Each GPU has its own clock."""
        return False

    def laps(self, lap: Lap, count: int) -> tuple[Tensor, Tensor]:
        """Each lap behind an all-reduce, all queued before the first one runs."""
        together = torch.zeros(1, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(_CLOCK * min(_LONGEST, _AHEAD * self.queuing * count)))  # type: ignore[no-untyped-call]
        began = perf_counter()
        for start, end in events:
            lap.prepare()
            dist.all_reduce(together)
            start.record()
            lap.run()
            end.record()
        self.queuing = (perf_counter() - began) / count
        torch.cuda.synchronize(self.device)
        elapsed = [start.elapsed_time(end) * 1e-3 for start, end in events]
        return torch.zeros(count, dtype=torch.float64), torch.tensor(elapsed, dtype=torch.float64)


def timed(lap: Lap, clock: Clock, device: torch.device, patience: Seconds) -> TimeStatistics:
    """Repeat a lap until its median is known or `min_gap` seconds are over; the same on all ranks."""
    began, spent = perf_counter(), 0.0
    samples, _ = _batch(lap, clock, device, began, WARM_UP)
    kept: list[float] = []
    while len(kept) < LEAST or not (spent > patience or len(kept) >= MOST or _known(kept)):
        share = patience / 4 / max(float(np.median(samples)) * lap.trips, 1e-9)
        samples, spent = _batch(lap, clock, device, began, int(np.clip(share, 1, BATCH)))
        kept += samples
    return spread(kept)


def _batch(lap: Lap, clock: Clock, device: torch.device, began: float, count: int) -> tuple[list[float], Seconds]:
    """Seconds of each lap, and since measuring began, as the slowest rank has them."""
    starts, ends = clock.laps(lap, count)
    if clock.shared:
        starts = largest(starts, device)
    slowest = largest(torch.cat([ends - starts, torch.tensor([perf_counter() - began])]), device)
    return (slowest[:-1] / lap.trips).tolist(), float(slowest[-1])


def _known(samples: list[float]) -> bool:
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return bool(len(samples) >= BATCH and 1.57 * (high - low) / len(samples) ** 0.5 <= CERTAIN * middle)
