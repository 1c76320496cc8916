"""When does everything happen where several jobs are on one machine?

Each job is a world of its own, with its own ranks, meetings and mail; the clock and the links are the same for all. So
jobs slow each other where they are on the same links at the same time, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clustersim.common.units import Seconds
from clustersim.cost.contention import ContentionMap
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import collect_results, create_ranks
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.fluid_network import FluidNetwork
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.scalar.rank_process import RankProcess
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class CoScheduledJob:
    """What one job runs. cost: knows its program, too; classes: its own, of links that are all jobs'; start: when."""

    cost: SegmentCost
    classes: SymmetryClasses
    contention_map: ContentionMap | None
    coalesce: bool = True
    jitter: Jitter | None = None
    start: Seconds = 0.0


def simulate_co_scheduled(jobs: Sequence[CoScheduledJob]) -> tuple[tuple[Trace, OperationSpanLog], ...]:
    """Run one rank of every class of each job; return of each its spans, and those of operations run one by one.

    Times are those of one clock.
    """
    environment = SimEnvironment(min(job.start for job in jobs))
    network = FluidNetwork(environment, len(jobs[0].classes.link_colours))
    states = [_shared_state(job, environment, network) for job in jobs]
    ranks = [create_ranks(shared) for shared in states]
    for job, job_ranks in zip(jobs, ranks, strict=True):
        _start_ranks(environment, job.start, job_ranks)
    environment.run_all()
    return tuple(collect_results(shared, job_ranks) for shared, job_ranks in zip(states, ranks, strict=True))


def _shared_state(job: CoScheduledJob, environment: SimEnvironment, network: FluidNetwork) -> SharedState:
    return SharedState(
        job.cost.program, job.classes, job.cost, job.coalesce, job.contention_map, job.jitter,
        environment=environment, network=network,
    )  # fmt: skip


def _start_ranks(environment: SimEnvironment, time: Seconds, ranks: Sequence[RankProcess]) -> None:
    """Let a job's ranks begin at a time."""
    if time == environment.now:
        for rank in ranks:
            rank.start()
    else:
        environment.event_at(time).callbacks.append(lambda _: _start_ranks(environment, time, ranks))
