"""How long do collectives take between kernels, on a CPU?

After a barrier, and called one after the other, gloo's collectives take less than in a training step, where each finds
threads asleep and cores busy with kernels. So a kernel runs before each call here, as in a step, and
a call counts from when its last member comes until its last member is done. Its times are far from normal (a thread
that waits for its turn waits for a tick of the scheduler), and a step adds up many: the mean counts, not the median.
On GPUs a queue keeps all that away, and calls are measured as `calibrate.collectives.command` does.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from calibrate.check.context import Here
from calibrate.collectives.operations import Member, prepared
from calibrate.collectives.process_groups import largest
from calibrate.collectives.timing import Lap
from calibrate.kernels.pytorch_ops import prepare
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample, KernelSample, TimeStatistics

LAPS: Final = 24
WARM_UP: Final = 3


def measure_between(
    calls: Sequence[CollectiveCall], kernels: Sequence[KernelSample], here: Here
) -> list[CollectiveSample]:
    """Calls of all processes, each behind the longest kernel; those of fewer ranks are left out."""
    timed = [row for row in kernels if row.time is not None]
    longest = max(timed, key=lambda row: row.kernel.flops)
    run = prepare(longest.kernel, here.device.torch)
    ranks = tuple(range(here.world.ranks))
    member = Member(_world(), ranks, here.world.rank, here.device.torch)
    whole = [call for call in calls if call.ranks == here.world.ranks]
    return [
        CollectiveSample(call, _timed(prepared(call.collective, member.of(call.format), call.payload).lap, run))
        for call in whole
    ]


def _world() -> Any:
    return dist.group.WORLD


def _timed(lap: Lap, run: Callable[[], object]) -> TimeStatistics:
    starts, ends = torch.zeros(2, LAPS + WARM_UP, dtype=torch.float64)
    for turn in range(LAPS + WARM_UP):
        lap.prepare()
        run()
        starts[turn] = perf_counter()
        lap.run()
        ends[turn] = perf_counter()
    cpu = torch.device("cpu")
    seconds = ((largest(ends, cpu) - largest(starts, cpu)) / lap.trips).numpy()[WARM_UP:]
    low, high = (float(value) for value in np.percentile(seconds, (5, 95)))
    return TimeStatistics(max(float(seconds.mean()), 1e-9), low, high, LAPS)
