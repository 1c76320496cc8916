"""Entry points of the engine: when does each task of each rank run?

A simulated rank stands for all ranks of its symmetry class; the others are not run. Of the execution strategies the
first that can execute a step does.

Time is in seconds as float64, without any absolute epsilon, so scaling all durations by a power of two scales
every timestamp exactly. Events at equal times are processed in the order in which they were scheduled, and
streams are started in order of rank, then stream; no duration depends on that order, so the trace is
reproducible.
"""

from clustersim.cost.contention import ContentionMap
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.execution_strategies import STRATEGIES, ExecutableStep, RankByRank
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.program.program import Program
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import Trace


def simulate_program(
    program: Program,
    classes: SymmetryClasses,
    cost: SegmentCost,
    *,
    coalesce: bool = True,
    contention_map: ContentionMap | None = None,
    jitter: Jitter | None = None,
) -> tuple[Trace, OperationSpanLog]:
    """`simulate_step` of the step with these fields."""
    return simulate_step(ExecutableStep(program, classes, cost, coalesce, contention_map, jitter))


def simulate_step(step: ExecutableStep) -> tuple[Trace, OperationSpanLog]:
    """Simulate one rank of every symmetry class; return the trace and the recorded operation spans.

    Operation spans are recorded only where segments run by sub-segments; the others follow from the step's cost.
    """
    executed = (strategy.execute(step) for strategy in STRATEGIES if strategy.can_execute(step))
    return next(result for result in executed if result is not None)


def simulate_scalar(
    program: Program,
    classes: SymmetryClasses,
    cost: SegmentCost,
    *,
    coalesce: bool = True,
    contention_map: ContentionMap | None = None,
    jitter: Jitter | None = None,
) -> tuple[Trace, OperationSpanLog]:
    """`simulate_program` rank by rank, the specification."""
    return RankByRank().execute(ExecutableStep(program, classes, cost, coalesce, contention_map, jitter))
