"""How does a scenario become an answer? Assemble it, run it; what happened is folded when it is asked for."""

from time import perf_counter

from clustersim.answer import Answer
from clustersim.assembly import Assembly, assemble
from clustersim.engine.engine import run, uncollected
from clustersim.engine.inside import Inside
from clustersim.fitting import footprint_of
from clustersim.memory.timed import timed_ledgers
from clustersim.scenario import Scenario


def simulate(scenario: Scenario) -> Answer:
    """Simulate training steps."""
    with uncollected():
        return _simulated(scenario)


def _simulated(scenario: Scenario) -> Answer:
    started = perf_counter()
    made = assemble(scenario)
    inside = _run(scenario, made)
    program, trace = made.program, inside.trace
    return Answer(
        scenario=scenario,
        program=program,
        trace=trace,
        cost=made.cost,
        inside=inside,
        ledgers=tuple(timed_ledgers(footprint_of(scenario, made.plan), program, trace)),
        wall=perf_counter() - started,
    )


def _run(scenario: Scenario, made: Assembly) -> Inside:
    """Run one rank of each class."""
    coalesce, jitter = scenario.cost.coalesce, scenario.jitter
    trace, written = run(made.program, made.classes, made.cost, coalesce=coalesce, sharing=made.shares, jitter=jitter)
    return Inside(made.program, made.classes, made.cost, jitter, trace, written)
