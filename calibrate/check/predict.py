"""What does the simulator say of a step, in the terms in which a real one is measured?

Forward and backward last while their passes run, collectives inside included; where there are no other stages to wait
for, also what the rank waits before a pass, and before the optimizer for its gradients, as `backward()` returns when
all are there. The optimizer begins with the norm of the gradients and ends with the step. Means over the ranks. Memory
is what torch's allocator holds: the ledger without driver, communicators and fragmentation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from calibrate.check.timeline import TIMED, Part
from clustersim.analysis.provenance import Expectation
from clustersim.assembly import plan_of
from clustersim.cost.record import Record
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import in_order, ledger
from clustersim.program.action import ActionKind
from clustersim.program.task import Compute, Stream
from clustersim.result import Result
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.units import Bytes, Seconds
from clustersim.workload.framework import Framework
from clustersim.workload.kernels import KernelKind


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step: seconds, its parts and kinds of kernels (means over ranks), peak memory of the fullest rank.

    expectation: what the sources of durations say of themselves.
    """

    seconds: Seconds
    parts: Mapping[Part, Seconds]
    kinds: Mapping[KernelKind, Seconds]
    peak: Bytes
    provenance: Mapping[str, float]
    expectation: Expectation


def predict(scenario: Scenario, record: Record | None) -> Prediction:
    """Simulate one step with what was measured; None: with what the scenario says."""
    cost = scenario.cost if record is None else replace(scenario.cost, record=record)
    result = simulate(replace(scenario, cost=cost, steps=1))
    ranks = range(result.ranks)
    parts = [_parts(result, rank) for rank in ranks]
    kinds = [_kinds(result, rank) for rank in ranks]
    found = dict.fromkeys(kind for each in kinds for kind in each)
    return Prediction(
        seconds=result.step_time,
        parts={part: float(np.mean([each[part] for each in parts])) for part in Part},
        kinds={kind: float(np.mean([each.get(kind, 0.0) for each in kinds])) for kind in found},
        peak=peak_allocated(scenario),
        provenance=dict(result.provenance),
        expectation=result.expectation,
    )


def peak_allocated(scenario: Scenario) -> Bytes:
    """Bytes that the fullest rank's tensors take."""
    plan = plan_of(scenario)
    footprint = Footprint(plan, Framework(fragmentation=1.0, communicator=0.0), context=0.0)
    order = scenario.schedule.order(plan.layout.pp, plan.microbatches)
    activations = Activations(plan)
    return max(ledger(footprint, activations, rank, in_order(each)).peak for rank, each in enumerate(order))


@dataclass(frozen=True, slots=True)
class _Run:
    """A compute task of a rank."""

    task: Compute
    start: Seconds
    end: Seconds


def _runs(result: Result, rank: int) -> Iterator[_Run]:
    trace = result.trace
    tasks = result.program.programs[int(result.program.kind[rank])].tasks
    for row in trace.rows(int(trace.representative[rank]), Stream.COMPUTE).tolist():
        task = tasks[int(trace.task[row])]
        if isinstance(task, Compute):
            yield _Run(task, float(trace.start[row]), float(trace.end[row]))


def _parts(result: Result, rank: int) -> dict[Part, Seconds]:
    seconds, before = dict.fromkeys(TIMED, 0.0), 0.0
    waits = result.scenario.layout.pp > 1
    begun = None
    for run in _runs(result, rank):
        if run.task.action is None:
            begun = run.start if begun is None else begun
            continue
        part = Part.FORWARD if run.task.action.kind is ActionKind.FORWARD else Part.BACKWARD
        seconds[part] += run.end - (run.start if waits else before)
        before = run.end
    begun = before if begun is None else begun
    seconds[Part.BACKWARD] += 0.0 if waits else begun - before
    seconds[Part.OPTIMIZER] = result.step_time - begun
    return {**seconds, Part.OTHER: result.step_time - sum(seconds.values())}


def _kinds(result: Result, rank: int) -> dict[KernelKind, Seconds]:
    seconds: dict[KernelKind, Seconds] = {}
    for run in _runs(result, rank):
        timing = result.cost.block(int(result.trace.representative[rank]), run.task.block)
        for operation, duration in zip(run.task.block.operations, timing.kernels.tolist(), strict=True):
            if operation.kernel is not None:
                seconds[operation.kernel.kind] = seconds.get(operation.kernel.kind, 0.0) + duration
    return seconds
