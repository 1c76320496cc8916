"""Entry points of the engine: when does each task of each rank run?

A program is simulated in one of two ways that give the same spans:

    scalar       one simpy process for every stream of every simulated rank (`scalar.rank_process`)
    vectorized   all ranks that run the same task list as arrays (`vectorized.engine`): for programs with many
        simulated ranks and uncontended links

A simulated rank stands for all ranks of its symmetry class; the others are not run.

Time is in seconds as float64, without any absolute epsilon, so scaling all durations by a power of two scales
every timestamp exactly. Events at equal times are processed in the order in which they were scheduled, and
streams are started in order of rank, then stream; no duration depends on that order, so the trace is
reproducible.
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
"""Mean number of simulated ranks per task list up to which the scalar engine is faster (measured, CPython 3.11)."""


class DeadlockError(ClusterSimError):
    """Tasks wait for each other in a cycle: the program is wrong, not the user's input."""


def simulate_program(
    program: Program,
    classes: SymmetryClasses,
    cost: SegmentCost,
    *,
    coalesce: bool = True,
    contention_map: ContentionMap | None = None,
    jitter: Jitter | None = None,
) -> tuple[Trace, OperationSpanLog]:
    """Simulate one rank of every symmetry class; return the trace and the recorded operation spans.

    Operation spans are recorded only where segments run by sub-segments; the others follow from `cost`.
    coalesce: segments in which no other simulated rank takes part are one event each where links allow; if false,
    every operation is one. contention_map: which comm ops share links (with the link colours in `classes`);
    without it each takes its uncontended duration.
    jitter: random variation of kernel durations; then every rank must be in a symmetry class of its own.
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
    """Whether enough simulated ranks run each distinct task list (`RankProgram`) for the vectorized engine."""
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
    """`simulate_program` with the scalar engine: one simpy process per stream."""
    shared = SharedState(program, classes, cost, coalesce, contention_map, jitter)
    ranks = create_ranks(shared)
    for rank in ranks:
        rank.start()
    watch_steady_state(shared, ranks)
    shared.environment.run()
    return collect_results(shared, ranks)


def create_ranks(shared: SharedState) -> list[RankProcess]:
    """The simulated ranks of a simulation, not yet started."""
    ranks = [RankProcess(int(rank_id), shared) for rank_id in sorted(set(shared.classes.representative.tolist()))]
    shared.ranks.update({rank.rank_id: rank for rank in ranks})
    return ranks


def collect_results(shared: SharedState, ranks: list[RankProcess]) -> tuple[Trace, OperationSpanLog]:
    """The trace and the recorded operation spans; raise DeadlockError if a rank is not done."""
    _check_deadlock(shared, ranks)
    # ranks refer to the shared state and to the detector: break the cycles, so that no garbage collection is needed
    shared.ranks.clear()
    for rank in ranks:
        rank.on_mark = ignore_mark
    return shared.recorder.build_trace(shared.classes.representative), shared.recorder.operation_log()


def _check_deadlock(shared: SharedState, ranks: list[RankProcess]) -> None:
    for rank in ranks:
        task_id = rank.done.find(0)
        if task_id >= 0:
            task = shared.rank_program(rank.rank_id).tasks[task_id]
            raise DeadlockError(f"rank {rank.rank_id} never finished task {task_id} of {len(rank.done)}: {task}")
