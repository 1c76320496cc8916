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

from calibrate.check.context import CheckContext
from calibrate.collectives.operations import GroupMember, prepare_collective
from calibrate.collectives.process_groups import max_over_ranks
from calibrate.collectives.timing import CollectiveIteration
from calibrate.kernels.pytorch_ops import prepare_kernel
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample, KernelSample, TimeStatistics

ITERATIONS: Final = 24
WARM_UP: Final = 3


def measure_after_kernels(
    calls: Sequence[CollectiveCall], kernels: Sequence[KernelSample], context: CheckContext
) -> list[CollectiveSample]:
    """Calls of all processes, each behind the longest kernel; those of fewer ranks are left out."""
    timed_samples = [sample for sample in kernels if sample.time is not None]
    longest_kernel = max(timed_samples, key=lambda sample: sample.kernel.flops)
    run_kernel = prepare_kernel(longest_kernel.kernel, context.device.torch)
    ranks = tuple(range(context.world.world_size))
    member = GroupMember(_world_group(), ranks, context.world.rank, context.device.torch)
    full_group_calls = [call for call in calls if call.ranks == context.world.world_size]
    return [
        CollectiveSample(
            call,
            _time_iterations(
                prepare_collective(call.collective, member.with_format(call.format), call.payload).iteration, run_kernel
            ),
        )
        for call in full_group_calls
    ]


def _world_group() -> Any:
    return dist.group.WORLD


def _time_iterations(iteration: CollectiveIteration, run_kernel: Callable[[], object]) -> TimeStatistics:
    starts, ends = torch.zeros(2, ITERATIONS + WARM_UP, dtype=torch.float64)
    for index in range(ITERATIONS + WARM_UP):
        iteration.prepare()
        run_kernel()
        starts[index] = perf_counter()
        iteration.run()
        ends[index] = perf_counter()
    cpu = torch.device("cpu")
    seconds = ((max_over_ranks(ends, cpu) - max_over_ranks(starts, cpu)) / iteration.transfer_count).numpy()[WARM_UP:]
    low, high = (float(value) for value in np.percentile(seconds, (5, 95)))
    return TimeStatistics(max(float(seconds.mean()), 1e-9), low, high, ITERATIONS)
