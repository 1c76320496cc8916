"""When does everything happen?

A simpy environment runs every stream of every simulated rank as a process. Time is in seconds as float64, without any
absolute epsilon, so scaling all durations by a power of two scales every timestamp exactly. Events at equal times are
processed in the order in which they were scheduled, and streams are started in order of rank, then stream; no duration
depends on that order, so the trace is the same on every run.
"""

from clustersim.cost.block import BlockCost
from clustersim.cost.timing import DemandCost
from clustersim.engine.rank import Rank
from clustersim.engine.world import World
from clustersim.errors import ClusterSimError
from clustersim.program.program import Program
from clustersim.program.symmetry import Classes
from clustersim.trace.store import OperationSpans, Trace


class DeadlockError(ClusterSimError):
    """Tasks wait for each other in a circle: the program is wrong, not the user's input."""


def run(
    program: Program, classes: Classes, cost: BlockCost, *, coalesce: bool = True, demands: DemandCost | None = None
) -> tuple[Trace, OperationSpans]:
    """Run one rank of every class; return its spans, and those of operations run one by one.

    coalesce: blocks that no other simulated rank can observe are one event each. demands: what collectives and messages
    outside blocks ask of a network that they share (of links with colours in `classes`); without it they do not share.
    """
    world = World(program, classes, cost, coalesce, demands)
    ranks = [Rank(int(number), world) for number in sorted(set(classes.representative.tolist()))]
    world.ranks.update({rank.number: rank for rank in ranks})
    for rank in ranks:
        rank.start()
    world.environment.run()
    _check_finished(world, ranks)
    return world.recorder.trace(classes.representative), world.recorder.operation_spans()


def _check_finished(world: World, ranks: list[Rank]) -> None:
    for rank in ranks:
        left = [number for number, row in enumerate(rank.rows) if row < 0]
        if left:
            task = world.program_of(rank.number).tasks[left[0]]
            raise DeadlockError(f"rank {rank.number} never finished task {left[0]} of {len(rank.rows)}: {task}")
