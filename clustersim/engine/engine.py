"""When does everything happen?

A simpy environment runs every stream of every simulated rank as a process. Time is in seconds as float64, without any
absolute epsilon, so scaling all durations by a power of two scales every timestamp exactly. Events at equal times are
processed in the order in which they were scheduled, and streams are started in order of rank, then stream; no duration
depends on that order, so the trace is the same on every run.
"""

from typing import Final

from clustersim.common.errors import ClusterSimError
from clustersim.cost.contention import ContentionMap
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.fast_forward.steady_state import watch_steady_state
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.recording.recorder import Recorder
from clustersim.engine.scalar.rank_process import RankProcess, ignore_mark
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.engine.vectorized.engine import VectorizedEngine, can_vectorize
from clustersim.program.program import Program
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import Trace

SCALAR_RANKS_PER_PROGRAM: Final = 2
"""Simulated ranks of a kind, on average, up to which one by one is faster than as arrays (measured, CPython 3.11)."""


class DeadlockError(ClusterSimError):
    """Tasks wait for each other in a circle: the program is wrong, not the user's input."""


def simulate_program(
    program: Program,
    classes: SymmetryClasses,
    cost: SegmentCost,
    *,
    coalesce: bool = True,
    contention_map: ContentionMap | None = None,
    jitter: Jitter | None = None,
) -> tuple[Trace, OperationSpanLog]:
    """Run one rank of every class; return its spans, and those of operations run one by one.

    coalesce: blocks that no other simulated rank can observe are one event each. sharing: what exchanges ask of a
    network whose links (with colours in `classes`) they share; without it each takes its own time.
    jitter: by which kernels vary; then no two ranks may be of one class.
    """
    if (
        coalesce
        and contention_map is None
        and not cost.compute_slows_comm
        and _vectorizing_pays(program, classes)
        and can_vectorize(program)
    ):
        trace = VectorizedEngine(program, classes, cost, jitter).simulate_all()
        if trace is not None:
            return trace, Recorder().operation_log()
    return simulate_scalar(program, classes, cost, coalesce=coalesce, contention_map=contention_map, jitter=jitter)


def _vectorizing_pays(program: Program, classes: SymmetryClasses) -> bool:
    """Whether so many ranks of a kind are simulated, on average, that arrays over them pay."""
    return classes.count > SCALAR_RANKS_PER_PROGRAM * len(program.programs)


def simulate_scalar(
    program: Program,
    classes: SymmetryClasses,
    cost: SegmentCost,
    *,
    coalesce: bool = True,
    contention_map: ContentionMap | None = None,
    jitter: Jitter | None = None,
) -> tuple[Trace, OperationSpanLog]:
    """`simulate_program`, rank by rank in a simpy environment."""
    shared = SharedState(program, classes, cost, coalesce, contention_map, jitter)
    ranks = create_ranks(shared)
    for rank in ranks:
        rank.start()
    watch_steady_state(shared, ranks)
    shared.environment.run_all()
    return collect_results(shared, ranks)


def create_ranks(shared: SharedState) -> list[RankProcess]:
    """The simulated ranks of a world, which are yet to start."""
    ranks = [RankProcess(int(rank_id), shared) for rank_id in sorted(set(shared.classes.representative.tolist()))]
    shared.ranks.update({rank.rank_id: rank for rank in ranks})
    return ranks


def collect_results(shared: SharedState, ranks: list[RankProcess]) -> tuple[Trace, OperationSpanLog]:
    """What has happened in a world; raise DeadlockError if not all ranks are done."""
    _check_deadlock(shared, ranks)
    shared.ranks.clear()  # they know the world, and who watches them: only a collector would find what it holds
    for rank in ranks:
        rank.on_mark = ignore_mark
    return shared.recorder.build_trace(shared.classes.representative), shared.recorder.operation_log()


def _check_deadlock(shared: SharedState, ranks: list[RankProcess]) -> None:
    for rank in ranks:
        task_id = rank.done.find(0)
        if task_id >= 0:
            task = shared.rank_program(rank.rank_id).tasks[task_id]
            raise DeadlockError(f"rank {rank.rank_id} never finished task {task_id} of {len(rank.done)}: {task}")
