"""Co-scheduled jobs: several jobs on one cluster, in one simulation.

Each job has its own shared state, ranks, collectives and messages; event loop and links are common to all. So
jobs slow each other where they load the same links at the same time, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import simpy

from clustersim.common.units import Seconds
from clustersim.cost.contention import ContentionMap
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.execution_strategies import collect_results, create_ranks, rank_progress
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.network.fluid_network import FluidNetwork
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.scalar.rank_process import RankProcess
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.engine.task_progress import ProgressWatcher
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class CoScheduledJob:
    """One job. cost: of its program; classes: of its ranks and of the links of all jobs; start: in seconds."""

    cost: SegmentCost
    classes: SymmetryClasses
    contention_map: ContentionMap | None
    coalesce: bool = True
    jitter: Jitter | None = None
    start: Seconds = 0.0


def simulate_co_scheduled(
    jobs: Sequence[CoScheduledJob], watch: ProgressWatcher
) -> tuple[tuple[Trace, OperationSpanLog], ...]:
    """Simulate one rank of every symmetry class of each job; return trace and recorded operation spans of each.

    All times are of the common clock. watch: is given the progress of all jobs.
    """
    environment = SimEnvironment(min(job.start for job in jobs))
    network = FluidNetwork(environment, jobs[0].classes.link_class_count)
    states = [_shared_state(job, environment, network) for job in jobs]
    ranks = [create_ranks(shared) for shared in states]
    watch(rank_progress(chain.from_iterable(ranks)))
    for job, job_ranks in zip(jobs, ranks, strict=True):
        _start_ranks(environment, job.start, job_ranks)
    environment.run()
    return tuple(collect_results(shared, job_ranks) for shared, job_ranks in zip(states, ranks, strict=True))


def _shared_state(job: CoScheduledJob, environment: SimEnvironment, network: FluidNetwork) -> SharedState:
    return SharedState(
        job.cost.program, job.classes, job.cost, job.coalesce, job.contention_map, job.jitter,
        environment=environment, network=network,
    )  # fmt: skip


def _start_ranks(environment: SimEnvironment, time: Seconds, ranks: Sequence[RankProcess]) -> None:
    """Start the ranks of a job at a time."""

    def start(_: simpy.Event) -> None:
        for rank in ranks:
            rank.start()

    environment.event_at(time).callbacks.append(start)
