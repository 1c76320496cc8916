"""Duration of gloo collectives between kernels, on a CPU.

After a barrier and called back to back, gloo's collectives take less time than in a training step, where
they find sleeping threads and cores busy with kernels. So a kernel runs before each call here, as in a step,
and a call counts from the arrival of its last member to the end of its last member. The times are far from
normally distributed (a thread that waits to be scheduled waits for a scheduler tick), and a step sums many
of them: the mean is used, not the median. On GPUs a queue hides all that, and calls are measured as
`calibrate.collectives.command` does.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

import numpy as np
import torch

from calibrate.check.context import CheckContext
from calibrate.collectives.operations import GroupMember, prepare_collective
from calibrate.collectives.process_groups import max_over_ranks, world_group
from calibrate.collectives.timing import CollectiveIteration
from calibrate.kernels.pytorch_ops import prepare_kernel
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample, KernelSample, TimeStatistics

ITERATIONS: Final = 24
WARM_UP: Final = 3


def measure_after_kernels(
    calls: Sequence[CollectiveCall], kernels: Sequence[KernelSample], context: CheckContext
) -> list[CollectiveSample]:
    """Calls of all processes, each after the longest kernel; calls of fewer ranks are skipped."""
    timed_samples = [sample for sample in kernels if sample.time is not None]
    longest_kernel = max(timed_samples, key=lambda sample: sample.kernel.flops)
    run_kernel = prepare_kernel(longest_kernel.kernel, context.device.torch)
    ranks = tuple(range(context.world.world_size))
    member = GroupMember(world_group(), ranks, context.world.rank, context.device.torch)
    full_group_calls = [call for call in calls if call.ranks == context.world.world_size]
    return [
        CollectiveSample(
            call,
            _time_iterations(
                prepare_collective(call.collective, member.with_format(call.dtype), call.payload).iteration, run_kernel
            ),
        )
        for call in full_group_calls
    ]


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
