"""Profile training steps of a scenario on CPUs, one process for each rank: `FOLDER SCENARIO [KEY=VALUE ...]`."""

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from calibrate.check.context import exit_immediately, join_processes, resolve_world
from calibrate.check.phase_timer import PhaseTimer
from calibrate.check.prediction import adapt_scenario
from calibrate.check.trainer import training_step
from calibrate.check.training_setup import training_setup
from clustersim.scenario import Scenario

ACTIVE_STEPS = 3


def profile_steps(folder: Path, scenario: Scenario) -> None:
    """Write the trace of this process's rank."""
    torch.set_num_threads(1)
    world = resolve_world(scenario)
    with join_processes(world, "cpu") as context:
        trained = adapt_scenario(scenario, on_cpu=True)
        with training_setup(trained, context) as (trainer, batch):
            timer = PhaseTimer(torch.device("cpu"))
            steps = schedule(wait=1, warmup=1, active=ACTIVE_STEPS, repeat=1)
            with profile(activities=[ProfilerActivity.CPU], schedule=steps, record_shapes=True) as profiler:
                for _ in range(2 + ACTIVE_STEPS):
                    context.barrier()
                    training_step(trainer, batch, timer)
                    timer.read_step()
                    profiler.step()
            folder.mkdir(exist_ok=True, parents=True)
            profiler.export_chrome_trace(str(folder / f"rank-{world.rank}.json"))
    if world.world_size > 1:
        exit_immediately()


if __name__ == "__main__":
    profile_steps(Path(sys.argv[1]), Scenario.load(sys.argv[2], sys.argv[3:]))
