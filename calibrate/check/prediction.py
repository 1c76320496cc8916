"""What does the simulator say of a step, in the terms in which a real one is measured?

Forward and backward last while their passes run, collectives inside included; where there are no other stages to wait
for, also what the rank waits before a pass, and before the optimizer for its gradients, as `backward()` returns when
all are there. The optimizer begins with the norm of the gradients and ends with the step. Means over the ranks. Memory
is what torch's allocator holds: the ledger without driver, communicators and fragmentation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from calibrate.check.module_activations import Held
from calibrate.check.phase_timer import TIMED, Part
from clustersim.build import build_plan
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import ledger_from_order, pass_order
from clustersim.model.framework import Framework
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.program.action import ActionKind
from clustersim.program.task import ComputeTask, Stream
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.expected_error import Expectation


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step: seconds, its parts and kinds of kernels (means over ranks), peak memory of the fullest rank.

    expectation: what the sources of durations say of themselves; kernels: each kernel's seconds, means over ranks.
    """

    seconds: Seconds
    parts: Mapping[Part, Seconds]
    kinds: Mapping[KernelKind, Seconds]
    peak: Bytes
    provenance: Mapping[str, float]
    expectation: Expectation
    kernels: Mapping[Kernel, Seconds]


def predict(scenario: Scenario, record: CalibrationRecord | None) -> Prediction:
    """Simulate one step with what was measured; None: with what the scenario says."""
    cost = scenario.cost if record is None else replace(scenario.cost, record=record)
    result = simulate(replace(scenario, cost=cost, steps=1))
    ranks = range(result.rank_count)
    parts = [_parts(result, rank) for rank in ranks]
    kernels = _kernels(result)
    kinds: dict[KernelKind, Seconds] = {}
    for kernel, seconds in kernels.items():
        kinds[kernel.kind] = kinds.get(kernel.kind, 0.0) + seconds
    return Prediction(
        seconds=result.step_time,
        parts={part: float(np.mean([item[part] for item in parts])) for part in Part},
        kinds=kinds,
        peak=peak_allocated(scenario),
        provenance=dict(result.provenance_shares),
        expectation=result.kernel_time_uncertainty,
        kernels=kernels,
    )


def as_trained(scenario: Scenario, *, on_cpu: bool) -> Scenario:
    """The scenario as it is trained here: gradients are zeroed in place, on a CPU FSDP2 waits for each reduction."""
    overheads = replace(scenario.training.overheads, zeroing=True)
    changed = replace(scenario, training=replace(scenario.training, overheads=overheads))
    match scenario.layout.data:
        case FullyShard() as strategy if on_cpu:
            return replace(changed, layout=replace(scenario.layout, data=replace(strategy, waits_for_reduction=True)))
    return changed


def peak_allocated(scenario: Scenario) -> Bytes:
    """Bytes that the fullest rank's tensors take."""
    plan = build_plan(scenario)
    footprint = Footprint(plan, Framework(fragmentation=1.0, communicator_bytes=0.0), context_bytes=0.0)
    order = scenario.effective_schedule.order(plan.layout.pp, plan.microbatches)
    activations = Held(plan)
    return max(
        ledger_from_order(footprint, activations, rank, pass_order(item)).peak for rank, item in enumerate(order)
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A compute task of a rank."""

    task: ComputeTask
    start: Seconds
    end: Seconds


def _runs(result: SimulationResult, rank: int) -> Iterator[_Run]:
    trace = result.trace
    tasks = result.program.programs[int(result.program.program_index[rank])].tasks
    for row in trace.rank_events(int(trace.representative[rank]), Stream.COMPUTE).tolist():
        task = tasks[int(trace.task[row])]
        if isinstance(task, ComputeTask):
            yield _Run(task, float(trace.start[row]), float(trace.end[row]))


def _parts(result: SimulationResult, rank: int) -> dict[Part, Seconds]:
    """What precedes the first pass (zeroing gradients) is `OTHER`, what follows the last one the optimizer's."""
    seconds, runs = dict.fromkeys(TIMED, 0.0), list(_runs(result, rank))
    waits = result.scenario.layout.pp > 1
    first = next(place for place, run in enumerate(runs) if run.task.action is not None)
    before, begun = runs[first - 1].end if first else 0.0, None
    for run in runs[first:]:
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


def _kernels(result: SimulationResult) -> dict[Kernel, Seconds]:
    """Seconds of each kernel in a step, means over ranks."""
    seconds: dict[Kernel, Seconds] = {}
    for rank in range(result.rank_count):
        for run in _runs(result, rank):
            timing = result.cost.time_segment(int(result.trace.representative[rank]), run.task.segment)
            running = (timing.kernel_seconds - timing.launch_stalls).tolist()
            for operation, duration in zip(run.task.segment.operations, running, strict=True):
                if operation.kernel is not None:
                    part = duration / result.rank_count
                    seconds[operation.kernel] = seconds.get(operation.kernel, 0.0) + part
    return seconds
