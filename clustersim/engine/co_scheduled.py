"""When does everything happen where several jobs are on one machine?

Each job is a world of its own, with its own ranks, meetings and mail; the clock and the links are the same for all. So
jobs slow each other where they are on the same links at the same time, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clustersim.common.units import Seconds
from clustersim.cost.contention import Sharing
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost
from clustersim.engine.engine import finished, ranks_of
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.kernel.network.fluid_network import Network
from clustersim.engine.recording.operation_log import Written
from clustersim.engine.scalar.rank_process import Rank
from clustersim.engine.scalar.shared_state import World
from clustersim.symmetry.refinement import Classes
from clustersim.trace.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What one job runs. cost: knows its program, too; classes: its own, of links that are all jobs'; start: when."""

    cost: BlockCost
    classes: Classes
    sharing: Sharing | None
    coalesce: bool = True
    jitter: Jitter | None = None
    start: Seconds = 0.0


def run_together(jobs: Sequence[Job]) -> tuple[tuple[Trace, Written], ...]:
    """Run one rank of every class of each job; return of each its spans, and those of operations run one by one.

    Times are those of one clock.
    """
    clock = Clock(min(job.start for job in jobs))
    network = Network(clock, len(jobs[0].classes.links))
    worlds = [_world(job, clock, network) for job in jobs]
    ranks = [ranks_of(world) for world in worlds]
    for job, own in zip(jobs, ranks, strict=True):
        _start(clock, job.start, own)
    clock.happen()
    return tuple(finished(world, own) for world, own in zip(worlds, ranks, strict=True))


def _world(job: Job, clock: Clock, network: Network) -> World:
    return World(
        job.cost.program, job.classes, job.cost, job.coalesce, job.sharing, job.jitter,
        environment=clock, network=network,
    )  # fmt: skip


def _start(clock: Clock, time: Seconds, ranks: Sequence[Rank]) -> None:
    """Let a job's ranks begin at a time."""
    if time == clock.now:
        for rank in ranks:
            rank.start()
    else:
        clock.at(time).callbacks.append(lambda _: _start(clock, time, ranks))
