"""How can a step be executed? All execution strategies give the spans of rank by rank, the specification.

    rank by rank   one simpy process for every stream of every simulated rank (`scalar.rank_process`)
    vectorized     all ranks that run the same program as arrays (`vectorized.engine`)

A strategy says for which steps it gives these spans, and sooner; a law of `tests/laws` holds it to them, and a
benchmark justifies it (DESIGN.md). Strategies for parts of a step (segments as one event, jointly in a group, on
reserved links; periods that repeat) are choices of rank by rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from clustersim.common.errors import ClusterSimError
from clustersim.cost.contention import ContentionMap
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.fast_forward.steady_state import watch_steady_state
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.recording.recorder import Recorder
from clustersim.engine.scalar.rank_process import RankProcess, ignore_mark
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.engine.task_progress import ProgressWatcher, TaskProgress, ignore_progress
from clustersim.program.program import Program
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import Trace

SCALAR_RANKS_PER_PROGRAM: Final = 2
"""Mean number of simulated ranks per program up to which rank by rank is faster (measured, CPython 3.11)."""


@dataclass(frozen=True, slots=True, eq=False)
class ExecutableStep:
    """A step to be executed; one rank of every symmetry class is.

    coalesce: segments in which no other simulated rank takes part are one event each where links allow; if false,
    every operation is one. contention_map: which comm ops share links (with the link colours in `classes`);
    without it each takes its uncontended duration. jitter: random variation of kernel durations; then every rank
    must be in a symmetry class of its own. watch: is given the progress when the step begins.
    """

    program: Program
    classes: SymmetryClasses
    cost: SegmentCost
    coalesce: bool = True
    contention_map: ContentionMap | None = None
    jitter: Jitter | None = None
    watch: ProgressWatcher = ignore_progress


class ExecutionStrategy(Protocol):
    """One way to execute steps."""

    def can_execute(self, step: ExecutableStep) -> bool:
        """Whether the strategy gives this step's spans, and is expected to be the fastest that does."""

    def execute(self, step: ExecutableStep) -> tuple[Trace, OperationSpanLog] | None:
        """The trace and the operation spans recorded; None: the step has turned out to be none that it can execute."""


class Vectorized:
    """For steps with many simulated ranks of few programs, on uncontended links."""

    def can_execute(self, step: ExecutableStep) -> bool:
        """Whether the ranks can be batched, and are so many that this pays."""
        may_pay = (
            step.coalesce
            and step.contention_map is None
            and not step.cost.compute_slows_comm
            and step.classes.count > SCALAR_RANKS_PER_PROGRAM * len(step.program.programs)
        )
        if not may_pay:
            return False
        from clustersim.engine.vectorized.engine import can_vectorize

        return can_vectorize(step.program)

    def execute(self, step: ExecutableStep) -> tuple[Trace, OperationSpanLog] | None:
        """The trace, without operation spans, which follow from costs; None where programs wait for each other."""
        from clustersim.engine.vectorized.engine import VectorizedEngine

        engine = VectorizedEngine(step.program, step.classes, step.cost, step.jitter)
        step.watch(engine.progress)
        trace = engine.simulate_all()
        return None if trace is None else (trace, Recorder().operation_log())


class DeadlockError(ClusterSimError):
    """Tasks wait for each other in a cycle: the program is wrong, not the user's input."""


class RankByRank:
    """The execution strategy that is the specification of all others."""

    def can_execute(self, step: ExecutableStep) -> bool:  # noqa: ARG002 - it executes all
        """It executes any step."""
        return True

    def execute(self, step: ExecutableStep) -> tuple[Trace, OperationSpanLog]:
        """The trace, and the spans of operations in segments that ran by sub-segments; the others follow from costs."""
        shared = SharedState(step.program, step.classes, step.cost, step.coalesce, step.contention_map, step.jitter)
        ranks = create_ranks(shared)
        step.watch(rank_progress(ranks))
        for rank in ranks:
            rank.start()
        watch_steady_state(shared, ranks)
        shared.environment.run()
        return collect_results(shared, ranks)


STRATEGIES: Final[tuple[ExecutionStrategy, ...]] = (Vectorized(), RankByRank())
"""In order of preference; the last executes any step."""


def create_ranks(shared: SharedState) -> list[RankProcess]:
    """The simulated ranks of a simulation, not yet started."""
    ranks = [RankProcess(int(rank_id), shared) for rank_id in sorted(set(shared.classes.representative.tolist()))]
    shared.ranks.update({rank.rank_id: rank for rank in ranks})
    return ranks


def rank_progress(ranks: Iterable[RankProcess]) -> TaskProgress:
    """The progress of ranks that are simulated one by one."""
    return TaskProgress(tuple(rank.done for rank in ranks))


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
