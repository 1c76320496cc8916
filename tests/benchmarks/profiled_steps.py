"""Train small steps of a scenario on CPUs, alternately profiled and timed: a process of `tests.benchmarks.records`.

    python -m tests.benchmarks.profiled_steps FOLDER SCENARIO ROUND BACKEND RANKS CHANGES [CHANGES ...]

CHANGES: overrides as a JSON list; steps with all of them are timed, in an order that differs by ROUND, and then those
with the first ones are profiled: a profiler's buffers slow the allocations of whatever follows it in its process.
BACKEND: gloo under torchrun, or fake, of which this process is the only rank.

Each profiled step is a trace of its own (FOLDER/CYCLE/rank-RANK.json), in a heap that has grown before
(`calibrate.devices.glibc_heap`): a profiler keeps its records until its cycle ends, and with five steps a cycle the
heap grew by 170 MB in each of FSDP2's steps, which took up to twice as long as without a profiler.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from calibrate.check.context import CheckContext, exit_immediately, join_processes, resolve_world
from calibrate.check.phase_timer import PhaseTimer
from calibrate.check.prediction import adapt_scenario
from calibrate.check.trainer import training_step
from calibrate.check.training_setup import training_setup
from calibrate.collectives.process_groups import World
from calibrate.devices.device import find_device
from calibrate.devices.glibc_heap import grow_heap
from clustersim.interop.kineto import FAKE_BACKEND
from clustersim.scenario import Scenario

_WARM_UP: Final = 2  # steps, also of each cycle of the profiler
_STEPS: Final = 5  # timed, or profiled, in a round
_HEAP: Final = 2.0**30  # bytes, which the heap grows by under a profiler at most


@contextmanager
def _context(scenario: Scenario, backend: str, ranks: int) -> Iterator[CheckContext]:
    if backend != FAKE_BACKEND:
        with join_processes(resolve_world(scenario), "cpu") as context:
            yield context
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE_BACKEND, rank=0, world_size=ranks, store=FakeStore())
    yield CheckContext(find_device("cpu"), World(0, ranks, ranks))


def run_steps(scenario: Scenario, context: CheckContext) -> float:
    """Median seconds of some steps."""
    seconds = []
    with training_setup(adapt_scenario(scenario, on_cpu=True), context) as (trainer, batch):
        timer = PhaseTimer(torch.device("cpu"))
        for step in range(_WARM_UP + _STEPS):
            context.barrier()
            begin = time.perf_counter()
            training_step(trainer, batch, timer)
            timer.read_step()
            if step >= _WARM_UP:
                seconds.append(time.perf_counter() - begin)
    return median(seconds)


def profile_steps(scenario: Scenario, context: CheckContext, folder: Path) -> None:
    """Profile some steps, each as a trace in a folder of its own."""

    def write(profiler: profile) -> None:
        trace = folder / f"cycle-{profiler.step_num}" / f"rank-{context.world.rank}.json"
        trace.parent.mkdir(exist_ok=True, parents=True)
        profiler.export_chrome_trace(str(trace))

    grow_heap(_HEAP)
    cycles = schedule(wait=0, warmup=_WARM_UP, active=1, repeat=_STEPS)
    activities = [ProfilerActivity.CPU]
    with (
        training_setup(adapt_scenario(scenario, on_cpu=True), context) as (trainer, batch),
        profile(activities=activities, schedule=cycles, record_shapes=True, on_trace_ready=write) as profiler,
    ):
        timer = PhaseTimer(torch.device("cpu"))
        for _ in range((_WARM_UP + 1) * _STEPS):
            context.barrier()
            training_step(trainer, batch, timer)
            timer.read_step()
            profiler.step()


def main() -> None:
    """Print the seconds of each case as JSON, on the first rank."""
    folder, path, number, backend, ranks, *changes = sys.argv[1:]
    torch.set_num_threads(1)
    scenarios = [Scenario.load(path, json.loads(overrides)) for overrides in changes]
    first = int(number) % len(scenarios)
    seconds = dict.fromkeys(range(len(scenarios)), 0.0)
    with _context(scenarios[0], backend, int(ranks)) as context:
        for index in (*range(first, len(scenarios)), *range(first)):
            seconds[index] = run_steps(scenarios[index], context)
        profile_steps(scenarios[0], context, Path(folder))
        if context.is_first_rank:
            print(json.dumps([*seconds.values()]))
    exit_immediately()


if __name__ == "__main__":
    main()
