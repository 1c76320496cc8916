"""How is a scenario simulated? Build it, run it; results are derived from the trace on demand.

Co-scheduled jobs run in the same simulation, each for as many steps as needed to outlast this job. The step
counts are estimated from isolated runs; where they prove too small, the simulation is repeated with more
steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from clustersim.build import PreparedSimulation, build_co_scheduled, build_simulation, resolved_library
from clustersim.common.arrays import FloatArray
from clustersim.common.errors import InputError
from clustersim.common.gc_control import gc_disabled
from clustersim.common.units import Seconds
from clustersim.engine.co_scheduled import CoScheduledJob, simulate_co_scheduled
from clustersim.engine.engine import simulate_step
from clustersim.engine.execution_strategies import ExecutableStep
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.engine.task_progress import ProgressWatcher, ignore_progress
from clustersim.hardware.degradation import SlowGpus
from clustersim.memory.timeline import ledgers_from_trace
from clustersim.results.co_scheduled_jobs import TIME_TOLERANCE, CoScheduledJobResult, last_full_load_time
from clustersim.results.link_volumes import MeteredCollectiveCost
from clustersim.results.memory_check import build_footprint
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.step_times import step_times
from clustersim.results.timing_sensitivity import PERTURBATION, RUN_COUNT, may_be_chaotic
from clustersim.results.trace_table import TraceTable, build_trace_table
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import MAX_STEPS
from clustersim.trace.trace import Trace


def simulate(scenario: Scenario, watch: ProgressWatcher = ignore_progress) -> SimulationResult:
    """Simulate training steps. watch: is given the progress of each simulation when it begins."""
    with gc_disabled():
        return _simulate(scenario, watch)


def simulate_with_spread(scenario: Scenario, watch: ProgressWatcher = ignore_progress) -> SimulationResult:
    """Simulate training steps, and the others that say how far their time spreads.

    As many with other documents as the scenario draws, and perturbed ones where the step may be chaotic.
    """
    result = simulate(scenario, watch)
    drawn = tuple(simulate(other, watch).step_time for other in _other_draws(scenario))
    perturbed = tuple(simulate(slowed, watch).step_time for slowed in _perturbed(result))
    return replace(result, drawn_step_times=(result.step_time, *drawn) if drawn else (), perturbed_step_times=perturbed)


def _other_draws(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with other documents."""
    documents = scenario.training.documents
    if documents is not None and documents.draws > 1:
        for other in documents.other_draws:
            yield replace(scenario, training=replace(scenario.training, documents=other))


def _perturbed(result: SimulationResult) -> Iterator[Scenario]:
    """A step that may be chaotic with kernels of all GPUs slower by a few parts in 10^12 (`timing_sensitivity`)."""
    scenario, degradations = result.scenario, result.scenario.degradations
    for run in range(1, RUN_COUNT + 1 if may_be_chaotic(result) else 1):
        slow_gpus = SlowGpus(tuple(scenario.cluster.machine_gpu_ids.tolist()), 1.0 - run * PERTURBATION)
        yield replace(scenario, degradations=replace(degradations, slow_gpus=(*degradations.slow_gpus, slow_gpus)))


def _simulate(scenario: Scenario, watch: ProgressWatcher) -> SimulationResult:
    started = perf_counter()
    prepared = build_simulation(scenario)
    isolated = _result(scenario, prepared, _run_isolated(scenario, prepared, watch), started)
    return _simulate_co_scheduled(scenario, isolated, started, watch) if scenario.co_scheduled_jobs else isolated


def _result(
    scenario: Scenario,
    prepared: PreparedSimulation,
    operation_trace: OperationTraceReader,
    started: Seconds,
    **co_scheduled: Any,
) -> SimulationResult:
    program, trace = prepared.program, operation_trace.trace
    return SimulationResult(
        scenario=scenario,
        program=program,
        trace=trace,
        cost=prepared.cost,
        operation_trace=operation_trace,
        ledgers=tuple(ledgers_from_trace(build_footprint(scenario, prepared.plan), program, trace)),
        wall_seconds=perf_counter() - started,
        **co_scheduled,
    )


def _run_isolated(scenario: Scenario, prepared: PreparedSimulation, watch: ProgressWatcher) -> OperationTraceReader:
    """Simulate one rank of each equivalence class, without other jobs."""
    coalesce, jitter = scenario.cost.coalesce, scenario.jitter
    step = ExecutableStep(
        prepared.program, prepared.classes, prepared.cost, coalesce, prepared.contention, jitter, watch
    )
    trace, span_log = simulate_step(step)
    return _operation_trace(scenario, prepared, trace, span_log)


def _operation_trace(
    scenario: Scenario, prepared: PreparedSimulation, trace: Trace, span_log: OperationSpanLog
) -> OperationTraceReader:
    return OperationTraceReader(prepared.program, prepared.classes, prepared.cost, scenario.jitter, trace, span_log)


@dataclass(frozen=True, slots=True, eq=False)
class _JobRun:
    """A completed run of a job, possibly with co-scheduled ones. start: simulated time at which it began, seconds."""

    scenario: Scenario
    prepared: PreparedSimulation
    operation_trace: OperationTraceReader
    start: Seconds

    @property
    def step_times(self) -> FloatArray:
        """Seconds of each of its steps."""
        return step_times(self.trace_table, self.start)

    @property
    def trace_table(self) -> TraceTable:
        """Its trace joined with its program."""
        return build_trace_table(self.operation_trace.trace, self.operation_trace.program, self.scenario.steps)

    def steps_needed(self, until: Seconds) -> int:
        """Steps that the job must run to outlast time `until`; the current count if it already does."""
        busy_until, steps = (
            last_full_load_time(self.operation_trace.trace, self.operation_trace.program),
            self.scenario.steps,
        )
        if busy_until >= until * (1.0 - TIME_TOLERANCE):
            return steps
        return max(steps + 1, ceil(steps * (until - self.start) / (busy_until - self.start)))

    def co_scheduled_job(self, until: Seconds) -> CoScheduledJobResult:
        """Its results as a co-scheduled job of the first job, which ended at `until`."""
        volumes = MeteredCollectiveCost(
            self.scenario.cluster.fabric, resolved_library(self.scenario), self.operation_trace.program.groups
        )
        job = CoScheduledJobResult(
            self.scenario.name,
            self.start,
            until,
            self.trace_table,
            self.operation_trace.rank_spans,
            volumes,
            np.zeros(0),
        )
        isolated = _run_jobs([replace(self.scenario, steps=len(job.step_times))], [self.start])[0]
        return replace(job, isolated_step_times=isolated.step_times)


def _simulate_co_scheduled(
    scenario: Scenario, isolated: SimulationResult, started: Seconds, watch: ProgressWatcher
) -> SimulationResult:
    """The result with co-scheduled jobs; isolated: the result without them."""
    jobs = zip(scenario.co_scheduled_scenarios, scenario.co_scheduled_jobs, strict=True)
    step_counts = [_estimate_steps(other, job.start_offset, isolated.trace.makespan) for other, job in jobs]
    main_run, *other_runs = _run_with_co_scheduled(scenario, step_counts, watch)
    while (
        needed := [other_run.steps_needed(main_run.operation_trace.trace.makespan) for other_run in other_runs]
    ) != step_counts:
        step_counts = needed
        main_run, *other_runs = _run_with_co_scheduled(scenario, step_counts, watch)
    co_scheduled_jobs = tuple(
        job_run.co_scheduled_job(main_run.operation_trace.trace.makespan) for job_run in other_runs
    )
    return _result(
        scenario,
        main_run.prepared,
        main_run.operation_trace,
        started,
        co_scheduled_jobs=co_scheduled_jobs,
        isolated_step_time=isolated.step_time,
    )


def _estimate_steps(other: Scenario, start: Seconds, until: Seconds) -> int:
    """Estimated steps that another job takes until time `until`, from an isolated run."""
    (isolated,) = _run_jobs([other], [start])
    return max(ceil((until - start) / float(isolated.step_times.sum()) * (1.0 - TIME_TOLERANCE)), 1)


def _run_with_co_scheduled(scenario: Scenario, step_counts: Sequence[int], watch: ProgressWatcher) -> list[_JobRun]:
    """Run a job and its co-scheduled jobs for their `step_counts`; raise InputError above the limit."""
    for job_index, count in enumerate(step_counts):
        if count > MAX_STEPS:
            raise InputError(
                f"{scenario.path or scenario.name}: degradations.jobs.{job_index}: {count:,} of its steps pass while "
                "this "
                f"job runs; {MAX_STEPS:,} are the most"
            )
    co_scheduled = (
        replace(job_scenario, steps=count)
        for job_scenario, count in zip(scenario.co_scheduled_scenarios, step_counts, strict=True)
    )
    starts = [0.0, *(job.start_offset for job in scenario.co_scheduled_jobs)]
    return _run_jobs([scenario, *co_scheduled], starts, watch)


def _run_jobs(
    scenarios: Sequence[Scenario], starts: Sequence[Seconds], watch: ProgressWatcher = ignore_progress
) -> list[_JobRun]:
    """Run co-scheduled jobs, one rank of each equivalence class of each job."""
    jobs = [*zip(scenarios, build_co_scheduled(scenarios), starts, strict=True)]
    traces = simulate_co_scheduled([_engine_job(*job) for job in jobs], watch)
    return [
        _JobRun(job, prepared, _operation_trace(job, prepared, *spans), start)
        for (job, prepared, start), spans in zip(jobs, traces, strict=True)
    ]


def _engine_job(scenario: Scenario, prepared: PreparedSimulation, start: Seconds) -> CoScheduledJob:
    return CoScheduledJob(
        prepared.cost, prepared.classes, prepared.contention, scenario.cost.coalesce, scenario.jitter, start
    )
