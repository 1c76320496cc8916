"""When does everything happen?

A simpy environment runs every stream of every simulated rank as a process. Time is in seconds as float64, without any
absolute epsilon, so scaling all durations by a power of two scales every timestamp exactly. Events at equal times are
processed in the order in which they were scheduled, and streams are started in order of rank, then stream; no duration
depends on that order, so the trace is the same on every run.
"""

from typing import Final

from clustersim.common.errors import ClusterSimError
from clustersim.cost.contention import Sharing
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost
from clustersim.engine.fast_forward.steady_state import watch
from clustersim.engine.recording.operation_log import Written
from clustersim.engine.recording.recorder import Recorder
from clustersim.engine.scalar.rank_process import Rank, unheard
from clustersim.engine.scalar.shared_state import World
from clustersim.engine.vectorized.engine import Cohorts, able
from clustersim.program.program import Program
from clustersim.symmetry.refinement import Classes
from clustersim.trace.trace import Trace

FEW: Final = 2
"""Simulated ranks of a kind, on average, up to which one by one is faster than as arrays (measured, CPython 3.11)."""


class DeadlockError(ClusterSimError):
    """Tasks wait for each other in a circle: the program is wrong, not the user's input."""


def run(
    program: Program,
    classes: Classes,
    cost: BlockCost,
    *,
    coalesce: bool = True,
    sharing: Sharing | None = None,
    jitter: Jitter | None = None,
) -> tuple[Trace, Written]:
    """Run one rank of every class; return its spans, and those of operations run one by one.

    coalesce: blocks that no other simulated rank can observe are one event each. sharing: what exchanges ask of a
    network whose links (with colours in `classes`) they share; without it each takes its own time.
    jitter: by which kernels vary; then no two ranks may be of one class.
    """
    if coalesce and sharing is None and not cost.hinders and _worthwhile(program, classes) and able(program):
        trace = Cohorts(program, classes, cost, jitter).run()
        if trace is not None:
            return trace, Recorder().written()
    return run_ranks(program, classes, cost, coalesce=coalesce, sharing=sharing, jitter=jitter)


def _worthwhile(program: Program, classes: Classes) -> bool:
    """Whether so many ranks of a kind are simulated, on average, that arrays over them pay."""
    return classes.count > FEW * len(program.programs)


def run_ranks(
    program: Program,
    classes: Classes,
    cost: BlockCost,
    *,
    coalesce: bool = True,
    sharing: Sharing | None = None,
    jitter: Jitter | None = None,
) -> tuple[Trace, Written]:
    """`run`, rank by rank in a simpy environment."""
    world = World(program, classes, cost, coalesce, sharing, jitter)
    ranks = ranks_of(world)
    for rank in ranks:
        rank.start()
    watch(world, ranks)
    world.environment.happen()
    return finished(world, ranks)


def ranks_of(world: World) -> list[Rank]:
    """The simulated ranks of a world, which are yet to start."""
    ranks = [Rank(int(number), world) for number in sorted(set(world.classes.representative.tolist()))]
    world.ranks.update({rank.number: rank for rank in ranks})
    return ranks


def finished(world: World, ranks: list[Rank]) -> tuple[Trace, Written]:
    """What has happened in a world; raise DeadlockError if not all ranks are done."""
    _check_finished(world, ranks)
    world.ranks.clear()  # they know the world, and who watches them: only a collector would find what it holds
    for rank in ranks:
        rank.told = unheard
    return world.recorder.trace(world.classes.representative), world.recorder.written()


def _check_finished(world: World, ranks: list[Rank]) -> None:
    for rank in ranks:
        left = rank.done.find(0)
        if left >= 0:
            task = world.program_of(rank.number).tasks[left]
            raise DeadlockError(f"rank {rank.number} never finished task {left} of {len(rank.done)}: {task}")
