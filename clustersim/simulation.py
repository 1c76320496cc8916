"""How does a scenario become an answer? Assemble it, run it, fold what happened."""

from time import perf_counter

from clustersim.analysis.breakdown import breakdown
from clustersim.analysis.critical_path import critical_path, path_summary
from clustersim.analysis.provenance import items
from clustersim.analysis.rows import Rows, read_rows
from clustersim.analysis.steps import step_times
from clustersim.analysis.utilization import recomputed_flops
from clustersim.answer import Flops
from clustersim.assembly import Assembly, assemble
from clustersim.engine.engine import run
from clustersim.engine.inside import Inside
from clustersim.fitting import capacities_of, footprint_of, host_use_of, suggestions
from clustersim.memory.timed import timed_ledgers
from clustersim.result import Result
from clustersim.scenario import Scenario
from clustersim.workload.flops import Keys, model_flops


def simulate(scenario: Scenario) -> Result:
    """Simulate training steps."""
    started = perf_counter()
    made = assemble(scenario)
    inside = _run(scenario, made)
    program, cost, trace = made.program, made.cost, inside.trace
    rows = read_rows(trace, program, scenario.steps)
    ledgers = tuple(timed_ledgers(footprint_of(scenario, made.plan), program, trace))
    capacities = capacities_of(scenario)
    fits = all(each.peak <= capacity for each, capacity in zip(ledgers, capacities, strict=True))
    return Result(
        scenario=scenario,
        program=program,
        trace=trace,
        cost=cost,
        inside=inside,
        step_times=step_times(rows),
        breakdown=breakdown(rows, cost.block),
        ledgers=ledgers,
        capacities=capacities,
        path=critical_path(trace),
        path_parts=path_summary(rows, cost.block),
        items=items(rows, cost.block, cost.exchange_timing),
        flops=_flops(scenario, rows),
        suggestions=() if fits else suggestions(scenario),
        host=host_use_of(scenario),
        wall=perf_counter() - started,
    )


def _flops(scenario: Scenario, rows: Rows) -> Flops:
    """FLOP of a step, by the convention and with causal attention."""
    model, training = scenario.model, scenario.training
    causal = model_flops(model, training, Keys.SEEN)
    return Flops(model_flops(model, training), causal, recomputed_flops(rows) / scenario.steps)


def _run(scenario: Scenario, made: Assembly) -> Inside:
    """Run one rank of each class."""
    coalesce, jitter = scenario.cost.coalesce, scenario.jitter
    trace, written = run(made.program, made.classes, made.cost, coalesce=coalesce, sharing=made.shares, jitter=jitter)
    return Inside(made.program, made.classes, made.cost, jitter, trace, written)
