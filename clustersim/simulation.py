"""How does a scenario become an answer? Assemble it, run it; what happened is folded when it is asked for.

Where other jobs are on the machine, all run together, each of the others as many steps as this one lasts. How many
those are shows only when they have run: they are counted from what all take alone, and run again with more where they
were too few.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from clustersim.build import Assembly, assemble, assemble_together, library_of
from clustersim.common.arrays import FloatArray
from clustersim.common.errors import InputError
from clustersim.common.gc_control import uncollected
from clustersim.common.units import Seconds
from clustersim.engine.co_scheduled import CoScheduledJob, simulate_co_scheduled
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.memory.timeline import timed_ledgers
from clustersim.results.co_located_jobs import ROUNDING, Neighbour, lasts
from clustersim.results.link_volumes import Metered
from clustersim.results.memory_check import footprint_of
from clustersim.results.simulation_result import Answer
from clustersim.results.step_times import step_times
from clustersim.results.trace_table import Rows, read_rows
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import MOST_STEPS
from clustersim.trace.trace import Trace


def simulate(scenario: Scenario) -> Answer:
    """Simulate training steps."""
    with uncollected():
        return _simulated(scenario)


def _simulated(scenario: Scenario) -> Answer:
    started = perf_counter()
    made = assemble(scenario)
    alone = _answer(scenario, made, _run(scenario, made), started)
    return _together(scenario, alone, started) if scenario.jobs else alone


def _answer(
    scenario: Scenario, made: Assembly, inside: OperationTraceReader, started: Seconds, **beside: Any
) -> Answer:
    program, trace = made.program, inside.trace
    return Answer(
        scenario=scenario,
        program=program,
        trace=trace,
        cost=made.cost,
        inside=inside,
        ledgers=tuple(timed_ledgers(footprint_of(scenario, made.plan), program, trace)),
        wall=perf_counter() - started,
        **beside,
    )


def _run(scenario: Scenario, made: Assembly) -> OperationTraceReader:
    """Run one rank of each class."""
    coalesce, jitter = scenario.cost.coalesce, scenario.jitter
    trace, written = simulate_program(
        made.program, made.classes, made.cost, coalesce=coalesce, contention_map=made.shares, jitter=jitter
    )
    return _inside(scenario, made, trace, written)


def _inside(scenario: Scenario, made: Assembly, trace: Trace, written: OperationSpanLog) -> OperationTraceReader:
    return OperationTraceReader(made.program, made.classes, made.cost, scenario.jitter, trace, written)


@dataclass(frozen=True, slots=True, eq=False)
class _Ran:
    """A job that ran, maybe beside others. start: when it began."""

    scenario: Scenario
    made: Assembly
    inside: OperationTraceReader
    start: Seconds

    @property
    def step_times(self) -> FloatArray:
        """Seconds of each of its steps."""
        return step_times(self.rows, self.start)

    @property
    def rows(self) -> Rows:
        """Its trace and program."""
        return read_rows(self.inside.trace, self.inside.program, self.scenario.steps)

    def enough(self, until: Seconds) -> int:
        """How many steps it needs to last until then: as many as it has, if it did."""
        lasted, steps = lasts(self.inside.trace, self.inside.program), self.scenario.steps
        if lasted >= until * (1.0 - ROUNDING):
            return steps
        return max(steps + 1, ceil(steps * (until - self.start) / (lasted - self.start)))

    def neighbour(self, until: Seconds) -> Neighbour:
        """It, as it went beside the first job, which was done then."""
        volumes = Metered(self.scenario.cluster.fabric, library_of(self.scenario), self.inside.program.groups)
        found = Neighbour(
            self.scenario.name, self.start, until, self.rows, self.inside.rank_spans, volumes, np.zeros(0)
        )
        alone = _ran([replace(self.scenario, steps=len(found.step_times))], [self.start])[0]
        return replace(found, alone=alone.step_times)


def _together(scenario: Scenario, alone: Answer, started: Seconds) -> Answer:
    """The answer where other jobs are on the machine; alone: that without them."""
    jobs = zip(scenario.others, scenario.jobs, strict=True)
    steps = [_guess(other, job.start, alone.trace.makespan) for other, job in jobs]
    mine, *others = _beside(scenario, steps)
    while (enough := [ran.enough(mine.inside.trace.makespan) for ran in others]) != steps:
        steps = enough
        mine, *others = _beside(scenario, steps)
    neighbours = tuple(item.neighbour(mine.inside.trace.makespan) for item in others)
    return _answer(scenario, mine.made, mine.inside, started, neighbours=neighbours, alone=alone.step_time)


def _guess(other: Scenario, start: Seconds, until: Seconds) -> int:
    """How many steps of another job last until then, if nobody slows it."""
    (alone,) = _ran([other], [start])
    return max(ceil((until - start) / float(alone.step_times.sum()) * (1.0 - ROUNDING)), 1)


def _beside(scenario: Scenario, steps: Sequence[int]) -> list[_Ran]:
    """A job beside others that take so many steps; raise InputError for more than can be."""
    for entry, count in enumerate(steps):
        if count > MOST_STEPS:
            raise InputError(
                f"{scenario.path or scenario.name}: disturbances.jobs.{entry}: {count:,} of its steps pass while this "
                f"job runs; {MOST_STEPS:,} are the most"
            )
    others = (replace(other, steps=count) for other, count in zip(scenario.others, steps, strict=True))
    return _ran([scenario, *others], [0.0, *(job.start for job in scenario.jobs)])


def _ran(scenarios: Sequence[Scenario], starts: Sequence[Seconds]) -> list[_Ran]:
    """Jobs that run together, one rank of each class of each."""
    every = [*zip(scenarios, assemble_together(scenarios), starts, strict=True)]
    ran = simulate_co_scheduled([_job(*item) for item in every])
    return [
        _Ran(job, made, _inside(job, made, *spans), start) for (job, made, start), spans in zip(every, ran, strict=True)
    ]


def _job(scenario: Scenario, made: Assembly, start: Seconds) -> CoScheduledJob:
    return CoScheduledJob(made.cost, made.classes, made.shares, scenario.cost.coalesce, scenario.jitter, start)
